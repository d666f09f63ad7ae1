# SPDX-License-Identifier: Apache-2.0
"""Losses and metrics: one number per sample, by hand."""

from __future__ import annotations

import math

import torch

from fedloom.core.task import CLASSIFICATION, MULTILABEL, REGRESSION


def test_classification_scores_each_sample() -> None:
    """Scores (0, log 3): shares 1/4 and 3/4, so losses log 4 and log 4/3; the second class is predicted."""
    outputs = torch.tensor([[0.0, math.log(3)]]).repeat(2, 1)
    y = torch.tensor([0, 1])
    torch.testing.assert_close(CLASSIFICATION.loss(outputs, y), torch.tensor([math.log(4), math.log(4 / 3)]))
    assert CLASSIFICATION.metric(outputs, y).tolist() == [0.0, 1.0]
    assert CLASSIFICATION.metric(outputs.double(), y).dtype == torch.float64


def test_regression_takes_means_over_targets() -> None:
    """Errors (1, 3) and (0, -2): squares 5 and 2, absolutes 2 and 1."""
    outputs, y = torch.tensor([[1.0, 3.0], [1.0, 0.0]]), torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    assert REGRESSION.loss(outputs, y).tolist() == [5.0, 2.0]
    assert REGRESSION.metric(outputs, y).tolist() == [2.0, 1.0]


def test_regression_takes_single_targets_without_a_dimension() -> None:
    """Not broadcast to (2, 2), which would mix the samples."""
    outputs, y = torch.tensor([[1.0], [5.0]]), torch.tensor([0.0, 2.0])
    assert REGRESSION.loss(outputs, y).tolist() == [1.0, 9.0]
    assert REGRESSION.metric(outputs, y).tolist() == [1.0, 3.0]


def test_labels_of_which_several_may_hold_are_scored_each() -> None:
    """Outputs 0 have the loss log 2. First: two said, two hold, one of them both: F1 is 2/4. Last: none and none: 1."""
    outputs = torch.tensor([[9.0, 9.0, -9.0], [-9.0, -9.0, 9.0], [-9.0, -9.0, -9.0]])
    y = torch.tensor([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert MULTILABEL.metric(outputs, y).tolist() == [0.5, 0.0, 1.0]
    torch.testing.assert_close(MULTILABEL.loss(torch.zeros(2, 3), y[:2]), torch.full((2,), math.log(2)))
    assert MULTILABEL.higher_is_better
    assert not MULTILABEL.class_scores


def test_the_tasks_say_which_way_is_better() -> None:
    assert CLASSIFICATION.higher_is_better
    assert CLASSIFICATION.class_scores
    assert not REGRESSION.higher_is_better
    assert not REGRESSION.class_scores
