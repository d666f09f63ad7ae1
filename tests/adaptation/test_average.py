# SPDX-License-Identifier: Apache-2.0
"""Averaged states: by hand, on every engine, with BatchNorm, with other wrappers, over a stop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from conftest import models_for, play, small_federation
from fedloom import algorithms
from fedloom.adaptation.average import SETTLED, State, used, with_average
from fedloom.adaptation.prior import with_prior
from fedloom.core.contract import Algorithm
from fedloom.core.errors import ConfigError, NeedsError
from fedloom.core.trees import flatten
from fedloom.programs.evaluation import evaluate
from tiny import HAND, lines

FEDAVG = algorithms.get("fedavg")
CAN = [name for name in algorithms.names() if algorithms.get(name).averaged]


def test_the_mean_on_paper() -> None:
    """w is 1, then 0.95, then 0.91: client A's gradient at .95 is -4.1, B's 1.8, .95 + .1 (4.1 / 4 - 1.8 * 3 / 4).

    That is .95 + .1025 - .135 = .9175. Weights of the past: 2/11, then 3/12. Means: 2/11 + 9/11 .95 = 10.55/11, then
    1/4 of that + 3/4 .9175.
    """
    played = play(with_average(FEDAVG, 0.9), lines(), rounds=2, **HAND)
    assert abs(float(played.state.last["params"]["line.weight"]) - 0.9175) < 1e-12
    first = (2 + 9 * 0.95) / 11
    assert abs(float(played.state.mean["params"]["line.weight"]) - (first / 4 + 0.75 * 0.9175)) < 1e-12


def test_fields_that_a_state_does_not_have_are_said_by_name() -> None:
    """A method made of FedAvg's, with a state of its own, takes over what FedAvg declares."""
    mine = replace(FEDAVG, name="Mine", averaged=("params", "buffers", "head"))
    with pytest.raises(
        ConfigError, match="Mine declares head as averaged, which its State does not have; it has param"
    ):
        play(with_average(mine, 0.9), lines(), rounds=0, **HAND)


def test_a_small_weight_bounds_the_past() -> None:
    played = play(with_average(FEDAVG, 0.1), lines(), rounds=1, **HAND)
    assert abs(float(played.state.mean["params"]["line.weight"]) - (0.1 + 0.9 * 0.95)) < 1e-12


@pytest.mark.parametrize("name", CAN)
def test_training_goes_on_from_the_last_state(name: str) -> None:
    method = algorithms.get(name)
    federation = small_federation(models_for(method, "mlp:hidden=5", "mlp:hidden=6"))
    plain, averaged = (play(one, federation, rounds=2) for one in (method, with_average(method, 0.9)))
    one, other = flatten(plain.state._asdict()), flatten(averaged.state.last)
    assert one.keys() == other.keys() and all(torch.equal(one[path], other[path]) for path in one)
    mean = flatten(averaged.state.mean)
    assert any(not torch.equal(value, other[path]) for path, value in mean.items())


@pytest.mark.parametrize("name", CAN)
def test_it_is_used_at_the_mean(name: str) -> None:
    method = algorithms.get(name)
    averaged = with_average(method, 0.9)
    played = play(averaged, small_federation(models_for(method, "mlp:hidden=5"), unseen=1), rounds=2)
    at_mean = used(method, played.state)
    sent, expected = (
        one.send(played.setup, state, ["0", "1"]) for one, state in ((averaged, played.state), (method, at_mean))
    )
    assert _equal(sent.shared, expected.shared) and all(_equal(sent.mine[c], expected.mine[c]) for c in ("0", "1"))


def _equal(one: Any, other: Any) -> bool:
    a, b = flatten(one), flatten(other)
    return a.keys() == b.keys() and all(torch.equal(a[path], b[path]) for path in a)


@pytest.mark.parametrize("batchnorm", ["local", "averaged"])
def test_running_statistics_are_those_of_the_mean(batchnorm: str) -> None:
    """Settled by each participant beside its own, or averaged like parameters."""
    averaged = with_average(FEDAVG, 0.9)
    federation = small_federation(("testnets:Normed",))
    played = play(averaged, federation, rounds=2, batchnorm=batchnorm)
    before = {c: {n: v.clone() for n, v in played.recall(c)["buffers"].items()} for c in federation.participants}
    session = played.session("settling")
    state = averaged.settle(played.setup, played.state, session.ask)
    played.memory = session.memory
    for client in federation.participants:
        memory = played.recall(client)
        assert _equal(memory["buffers"], before[client])  # training goes on with these
        sent = averaged.send(played.setup, state, [client])
        made = averaged.client_deploy(played.home(client), sent.shared, sent.mine[client], memory)
        wanted = state.mean["buffers"] if batchnorm == "averaged" else memory[SETTLED]
        assert _equal(made["buffers"], wanted)
        assert not _equal(made["buffers"], before[client])


def test_counters_of_averaged_statistics_stay_whole() -> None:
    played = play(with_average(FEDAVG, 0.9), small_federation(("testnets:Normed",)), rounds=3, batchnorm="averaged")
    assert played.state.mean["buffers"]["norm.num_batches_tracked"].dtype == torch.int64


def test_a_method_with_nothing_to_average_is_refused() -> None:
    with pytest.raises(NeedsError, match="Local has no model on the server that could be averaged"):
        with_average(algorithms.get("local"), 0.9)


@pytest.mark.parametrize("engine", ["vectorised", "loopback"])
def test_with_the_prior_on_top_the_mean_is_calibrated(engine: str) -> None:
    both: Algorithm = with_prior(with_average(FEDAVG, 0.9))
    federation = small_federation(unseen=1)
    found = []
    for name in ("sequential", engine):
        played = play(both, federation, name, rounds=3)
        session = played.session("settling")
        state = both.settle(played.setup, played.state, session.ask)
        assert isinstance(algorithms.get("fedavg").state(**State(**state.base).last), tuple)
        send = partial(both.send, played.setup, state)
        scores = evaluate(both, send, federation.participants, "test", session.ask)
        found.append((state.bias, [score.loss for score in scores.values()]))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-8, rtol=0)
    assert max(abs(a - b) for a, b in zip(found[0][1], found[1][1])) < 1e-8


def test_an_averaged_run_can_be_adapted_afterwards(tmp_path: Path) -> None:
    """It has settled as what it was; adapted, it settles anew."""
    options = {"clients": 8, "rounds": 8, "local_steps": 10, "local_lr": 0.05, "model": "mlp:hidden=16", "average": 0.5}
    path = fedloom.run("fedavg", out=tmp_path / "run", progress="quiet", **options).path
    found = {adapt: fedloom.load(path, which="last", adapt=adapt) for adapt in (None, "prior", "tune")}
    pooled = {adapt: run.simulation.evaluation().metrics for adapt, run in found.items()}
    accuracy = {adapt: metrics["deployed/participants/test/accuracy"] for adapt, metrics in pooled.items()}
    assert accuracy["prior"] > accuracy[None] + 0.1
    assert found["prior"].server.state.bias.any() and "tuned" in found["tune"].server.recall("0")
