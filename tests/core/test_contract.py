# SPDX-License-Identifier: Apache-2.0
"""What methods and engines agree on: masked batches, the setup, declared needs."""

from __future__ import annotations

import pytest
import torch

from conftest import setup_of, small_federation
from fedloom.core.contract import Batch, Needs
from fedloom.core.task import REGRESSION

ZERO = torch.tensor(0)


def batch_of(mask: list[bool]) -> Batch:
    size = len(mask)
    return Batch(torch.zeros(size, 1), torch.zeros(size), torch.tensor(mask), ZERO, ZERO, ZERO)


def test_padding_does_not_count() -> None:
    """Of 1, 2, 4 the last is padding: sum 3, mean 1.5; infinity there changes nothing."""
    batch = batch_of([True, True, False])
    for padding in (4.0, float("inf"), float("nan")):
        values = torch.tensor([1.0, 2.0, padding])
        assert batch.sum(values) == 3
        assert batch.mean(values) == 1.5


def test_the_mean_over_no_samples_is_zero() -> None:
    assert batch_of([False, False]).mean(torch.tensor([1.0, 2.0])) == 0


def test_the_setup_knows_rows_and_architectures() -> None:
    setup = setup_of(small_federation(("mlp:hidden=5", "mlp:hidden=4"), unseen=1), None)
    assert setup.clients == ("0", "1", "2", "3")
    assert setup.rows(["3", "0"]) == [3, 0]
    assert {str(spec): members for spec, members in setup.by_model(["3", "0", "2"]).items()} == {
        "mlp:hidden=4": ["3"],
        "mlp:hidden=5": ["0", "2"],
    }
    assert [str(spec) for spec in setup.architectures] == ["mlp:hidden=5", "mlp:hidden=4"]


def test_equal_names_are_one_architecture() -> None:
    setup = setup_of(small_federation(("mlp:hidden=5", "mlp:hidden=5")), None)
    assert list(map(str, setup.architectures)) == ["mlp:hidden=5"]


@pytest.mark.parametrize(
    ("models", "needs", "sentence"),
    [
        (
            ("mlp:hidden=5", "mlp:hidden=4"),
            Needs(same_model=True),
            "M needs one architecture for all clients; got 2 (mlp:hidden=5, mlp:hidden=4). Give one --model.",
        ),
        (
            ("mlp:hidden=x",),
            Needs(head=True),
            "M keeps the output layer apart from the body; mlp:hidden=x has nothing but its output layer. "
            "Choose a --model with a body.",
        ),
    ],
)
def test_what_a_federation_lacks_is_said(models: tuple[str, ...], needs: Needs, sentence: str) -> None:
    setup = setup_of(small_federation(models), None)
    assert needs.violations(setup, "M") == [sentence]
    assert Needs().violations(setup, "M") == []


def test_a_method_of_class_labels_refuses_regression() -> None:
    federation = small_federation()
    setup = setup_of(federation, None)
    assert Needs(class_labels=True).violations(setup, "M") == []
    object.__setattr__(setup, "task", REGRESSION)
    assert Needs(class_labels=True).violations(setup, "M") == [
        "M needs class labels; the task is regression. Choose another method."
    ]
