# SPDX-License-Identifier: Apache-2.0
"""The task of a label for each token, by hand."""

from __future__ import annotations

import math

import torch

from fedloom.core.task import SEQUENCE, labelled
from fedloom.core.tokens import Tokens
from fedloom.metrics.summary import Group, summarise
from fedloom.programs.evaluation import Score


def test_padding_counts_neither_in_the_loss_nor_in_the_metric() -> None:
    """Scores of log 3 and 0: probabilities 3/4 and 1/4. Two labelled tokens, one right: -(log 3/4 + log 1/4) / 2."""
    scores = torch.tensor([[math.log(3), 0.0]] * 3)
    outputs = torch.stack([scores, scores])
    y = torch.tensor([[0, 1, -1], [0, 0, 0]])
    loss = -(math.log(3 / 4) + math.log(1 / 4)) / 2
    torch.testing.assert_close(SEQUENCE.loss(outputs, y), torch.tensor([loss, -math.log(3 / 4)]))
    torch.testing.assert_close(SEQUENCE.metric(outputs, y), torch.tensor([0.5, 1.0]))
    assert labelled(y).tolist() == [2, 3]
    # what is predicted for padding changes nothing
    outputs[0, 2] = torch.tensor([-9.0, 9.0])
    torch.testing.assert_close(SEQUENCE.loss(outputs, y)[0], torch.tensor(loss))


def test_a_batch_of_padding_alone_has_a_loss_and_a_gradient_of_zero() -> None:
    outputs = torch.randn(1, 3, 2, requires_grad=True)
    loss = SEQUENCE.loss(outputs, torch.full((1, 3), -1)).sum()
    assert float(loss.detach()) == 0.0
    assert float(torch.autograd.grad(loss, outputs)[0].abs().sum()) == 0.0


def test_perplexity_is_e_to_the_loss() -> None:
    scores = {"a": Score(math.log(2), 0.5, 10), "b": Score(math.log(8), 0.5, 30)}
    found = summarise(scores, SEQUENCE, Group("deployed", "participants", "test"))
    assert math.isclose(found["deployed/participants/test/perplexity"], 4.0)  # the geometric mean of 2 and 8
    worst = summarise({"a": Score(1e30, 0.0, 1)}, SEQUENCE, Group("deployed", "participants", "test"))
    assert math.isfinite(worst["deployed/participants/test/perplexity"])


def test_tokens_out_of_range_are_told() -> None:
    assert not Tokens(5).fault(0, 4)
    assert Tokens(5).fault(0, 5) == "tokens from 0 to 5; expected 0 to 4"
    assert Tokens(5).fault(-1, 4)
    assert Tokens.of_json([5, True]) == Tokens(5, True)
    assert Tokens.of_json(None) is None
