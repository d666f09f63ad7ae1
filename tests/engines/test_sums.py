# SPDX-License-Identifier: Apache-2.0
"""Replies that are added up where clients run: by every method that declares a mean, the mean of single replies."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from conftest import Played, models_for, play, small_federation
from fedloom import algorithms
from fedloom.core.aggregate import weighted_sum
from fedloom.core.errors import RoundError
from fedloom.core.trees import flatten
from fedloom.engines.engine import groups, joined
from fedloom.engines.job import Job, Means, Outcome
from fedloom.engines.sequential import Sequential
from fedloom.engines.sums import added_up, can_be_added
from fedloom.programs.local import local_training

METHODS = [name for name in algorithms.names() if algorithms.get(name).means]
FEDAVG = algorithms.get("fedavg")


class Adding(Sequential):
    """Two clients and two clients, and what is left, added up."""

    adds_up = True
    came: list[Outcome]

    def answer(self, job: Job) -> Iterable[Outcome]:
        parts = [g.of(g.clients[at : at + 2]) for g in groups(job) for at in range(0, len(g.clients), 2)]
        self.came = [added_up(part, joined(list(self.attempt(part)), part.federation)) for part in parts]
        return self.came


def everything(played: Played) -> dict[str, torch.Tensor]:
    return flatten({"state": played.state._asdict(), "memory": dict(played.memory)})


@pytest.mark.parametrize("method", METHODS)
def test_a_method_of_means_gets_what_single_replies_would_give(method: str) -> None:
    algorithm = algorithms.get(method)
    federation = small_federation(models_for(algorithm, "lenet:kernels=2"))
    one, other = (play(algorithm, federation, engine, added_up=True) for engine in ("sequential", Adding))
    assert any(outcome.total for outcome in other.engine.came)
    torch.testing.assert_close(everything(other), everything(one), rtol=0, atol=1e-12)
    assert [float(d["local_loss"]) for d in one.diagnostics] == pytest.approx(
        [float(d["local_loss"]) for d in other.diagnostics], rel=1e-12
    )
    for name in ("up", "down", "told", "dropped"):  # what clients tell is the same, wherever it is added up
        assert getattr(one.stats, name) == getattr(other.stats, name)


def test_a_reply_that_cannot_be_used_is_dropped_and_the_others_of_its_block_are_added_up() -> None:
    federation = small_federation()
    federation.x[federation.roster["1"].rows["train"]] = float("nan")
    one, other = (play(FEDAVG, federation, e, rounds=1, added_up=True) for e in ("sequential", Adding))
    assert [outcome.total is not None for outcome in other.engine.came] == [False, True, False]
    assert one.stats.dropped == other.stats.dropped and one.stats.up == other.stats.up
    torch.testing.assert_close(everything(other), everything(one), rtol=0, atol=1e-12)
    federation.x[:] = float("nan")
    with pytest.raises(RoundError, match="No client of 5 gave a usable reply"):
        play(FEDAVG, federation, Adding, rounds=1, added_up=True)


def test_whatever_has_more_than_a_mean_is_not_added_up() -> None:
    delta = {"delta": {"w": torch.zeros(2)}}
    report = {"num_samples": torch.zeros(()), "loss": torch.zeros(())}
    means = Means(("delta",), "num_samples")
    assert can_be_added(means, {**delta, **report})
    assert not can_be_added(means, {**delta, **report, "buffers": {}})
    assert not can_be_added(means, report)
    played = play(FEDAVG, small_federation(), rounds=1)  # an engine that adds nothing up
    sent = FEDAVG.send(played.setup, played.state, played.setup.clients)
    assert len(played.session(2).ask(local_training(played.setup.config), *sent, means=means)) == 5


def test_no_bit_of_a_sum_depends_on_where_rows_lie() -> None:
    rows, weights = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)), torch.arange(7.0)
    apart = torch.zeros(7, 40)[:, 5:38]
    apart.copy_(rows)
    assert torch.equal(weighted_sum({"a": rows}, weights)["a"], weighted_sum({"a": apart}, weights)["a"])
    by_hand = weighted_sum({"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, torch.tensor([2.0, 10.0]))
    assert by_hand["a"].tolist() == [32.0, 44.0]
