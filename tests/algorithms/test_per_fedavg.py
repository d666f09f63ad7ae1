# SPDX-License-Identifier: Apache-2.0
"""Per-FedAvg: both meta-gradients on paper, the parts of a batch, the step before use."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.per_fedavg import ALGORITHM, dealt
from fedloom.core.contract import Batch
from fedloom.core.random import key
from tiny import HAND, Ears, lines

ROOT = math.sqrt(2)
ALIKE = (((1, 3),), ((ROOT, ROOT / 2),) * 6)
"""Gradients 2 (w - 3) and 4 w - 2, whichever samples they are taken on: the second client has copies of one sample.

Its residual is sqrt(2) w - sqrt(2) / 2, which times 2 sqrt(2) is 4 w - 2.
"""
PAPER = {**HAND, "inner_lr": 0.1}


def ends(played) -> list[float]:
    return [float(played.deployed(client)["params"]["line.weight"]) for client in ("0", "1")]


@pytest.mark.parametrize(("meta_gradient", "mean"), [("fo", 1.1), ("hf", 1.092)])
def test_one_round_on_paper(meta_gradient: str, mean: float) -> None:
    """alpha = beta = 0.1. First client: 1.4 after a step, -3.2 there. Second: 0.8 after a step, 1.2 there.

    Without the Hessian they go to 1.32 and 0.88, whose mean is 1.1. The Hessians are 2 and 4: -3.2 (1 - 0.2) = -2.56
    and 1.2 (1 - 0.4) = 0.72 lead to 1.256 and 0.928, mean 1.092. Differences of gradients are exact on parabolas.
    """
    for delta in (1e-3, 0.5):
        played = play(ALGORITHM, lines(ALIKE), rounds=1, meta_gradient=meta_gradient, hessian_step=delta, **PAPER)
        assert float(played.state.params["line.weight"]) == pytest.approx(mean, abs=1e-10)


def test_everybody_takes_one_step_before_use() -> None:
    """From 1.1: 1.1 + 0.38 = 1.48 and 1.1 - 0.24 = 0.86, at rate alpha; beta has no part in it."""
    played = play(ALGORITHM, lines(ALIKE), rounds=1, **PAPER)
    played.settle()
    assert ends(played) == pytest.approx([1.48, 0.86], abs=1e-12)
    halved = play(ALGORITHM, lines(ALIKE), rounds=0, **{**PAPER, "inner_lr": 0.05, "local_lr": 9.0})
    halved.settle()
    assert ends(halved) == pytest.approx([1.2, 0.9], abs=1e-12)


def test_newcomers_take_the_step_if_they_have_labels() -> None:
    federation = lines((*ALIKE, ((1, 3),)), unseen=1)
    for tunes, end in ((True, 1.48), (False, 1.1)):
        played = play(ALGORITHM, federation, rounds=1, tune_newcomers=tunes, **PAPER).admit()
        assert float(played.deployed("2")["params"]["line.weight"]) == pytest.approx(end, abs=1e-12)
        assert ALGORITHM.needs_labels(played.setup.config) == tunes


@pytest.mark.parametrize("meta_gradient", ["fo", "hf"])
def test_without_an_inner_step_it_is_fedavg_with_equal_weights(meta_gradient: str) -> None:
    """On clients whose samples are all alike, so that it does not matter which part of a batch is looked at."""
    federation = small_federation(sizes=(6, 6, 6))
    for client in federation.roster.values():
        rows = client.rows["train"]
        federation.x[rows], federation.y[rows] = federation.x[rows[0]].clone(), federation.y[rows[0]].clone()
    extra = {"inner_lr": 0.0, "meta_gradient": meta_gradient}
    one = play(ALGORITHM, federation, batch_size=99, momentum=0.9, weight_decay=0.01, **extra)
    other = play(fedavg.ALGORITHM, federation, batch_size=99, momentum=0.9, weight_decay=0.01)
    for name, value in other.state.params.items():
        torch.testing.assert_close(one.state.params[name], value, rtol=0, atol=1e-12)


def batch_of(real: int, width: int) -> Batch:
    x = torch.arange(width, dtype=torch.float64)[:, None]
    zero = torch.zeros((), dtype=torch.int64)
    return Batch(x, x[:, 0], torch.arange(width) < real, zero, zero, key("a batch"))


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("real", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("padding", [0, 1, 4])
def test_a_batch_is_dealt_out_whatever_stands_behind_it(parts: int, real: int, padding: int) -> None:
    found = [part.x[part.mask, 0].tolist() for part in dealt(batch_of(real, real + padding), parts)]
    hands = [[float(i) for i in range(number, real, parts)] for number in range(parts)]
    assert found == [hand or hands[0] for hand in hands]


def test_a_round_is_as_many_samples_as_in_fedavg() -> None:
    """One pass over 9 samples, 4 for each of two parts: batches of 8 and 1."""
    ears = Ears()
    play(ALGORITHM, small_federation(), rounds=1, wrap=ears, local_epochs=1)
    assert [len(rows) for rows in ears.plans[0]["0"].rows] == [8, 1]


def test_running_statistics_move_once_a_step() -> None:
    played = play(ALGORITHM, small_federation(("testnets:Normed",)), rounds=1, meta_gradient="hf", local_epochs=1)
    assert int(played.memory["0"]["buffers"]["norm.num_batches_tracked"]) == 1  # 9 samples, three times 4 at a time
