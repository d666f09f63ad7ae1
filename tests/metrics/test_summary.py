# SPDX-License-Identifier: Apache-2.0
"""Named numbers of many clients' scores, by hand."""

from __future__ import annotations

import pytest

from fedloom.core.task import CLASSIFICATION, REGRESSION
from fedloom.metrics.summary import Group, summarise
from fedloom.programs.evaluation import Score


def test_means_over_clients_and_over_samples_differ() -> None:
    """Accuracies 1 and 0.5 on 1 and 3 samples: mean 0.75, pooled 2.5 / 4, spread 0.25; losses 2 and 4."""
    found = summarise(
        {"a": Score(2.0, 1.0, 1), "b": Score(4.0, 0.5, 3)}, CLASSIFICATION, Group("deployed", "participants", "test")
    )
    assert found == {
        "deployed/participants/test/accuracy": 0.75,
        "deployed/participants/test/accuracy_pooled": 0.625,
        "deployed/participants/test/accuracy_std": 0.25,
        "deployed/participants/test/accuracy_worst10": 0.5,
        "deployed/participants/test/accuracy_best10": 1.0,
        "deployed/participants/test/loss": 3.0,
    }


@pytest.mark.parametrize(
    ("number", "lowest", "highest"), [(1, 0.0, 0.0), (9, 0.0, 8.0), (10, 0.0, 9.0), (19, 0.0, 18.0), (20, 0.5, 18.5)]
)
def test_the_worst_and_best_tenth_is_rounded_down_to_one_client_at_least(
    number: int, lowest: float, highest: float
) -> None:
    """Of 20 clients with 0, 1, ..., 19 the tenth is two: 0 and 1, or 18 and 19."""
    order = [(7 * i) % number for i in range(number)] if number % 7 else list(range(number))
    scores = {str(i): Score(0.0, float(i), 1) for i in order}
    accuracy = summarise(scores, CLASSIFICATION, Group("deployed", "unseen", "val"))
    error = summarise(scores, REGRESSION, Group("deployed", "unseen", "val"))
    stem = "deployed/unseen/val"
    assert accuracy[f"{stem}/accuracy_worst10"] == lowest
    assert accuracy[f"{stem}/accuracy_best10"] == highest
    assert error[f"{stem}/absolute_error_worst10"] == highest
    assert error[f"{stem}/absolute_error_best10"] == lowest


def test_no_scores_are_no_numbers() -> None:
    assert summarise({}, CLASSIFICATION, Group("deployed", "participants", "test")) == {}
