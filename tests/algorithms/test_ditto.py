# SPDX-License-Identifier: Apache-2.0
"""Ditto: both models on paper, what each of them does not know of the other, and who is served with which."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg, local
from fedloom.algorithms.ditto import ALGORITHM
from fedloom.core.trees import Tree, flatten
from fedloom.programs.allowed import programs_of
from tiny import HAND, POINTS, Ears, lines


def same(one: Tree, other: Tree) -> bool:
    a, b = flatten(one), flatten(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_two_rounds_on_paper() -> None:
    """lambda = 2, rate 0.1. In round 1 v = w, so that both go where plain descent goes: 1.4 and 0.8; w is 0.95.

    Round 2. First client: 2 (1.4 - 3) + 2 (1.4 - 0.95) = -3.2 + 0.9 = -2.3 leads to 1.63. Second: 4 * 0.8 - 2 = 1.2
    and 2 (0.8 - 0.95) = -0.3 lead to 0.71. The anchor is w as it was sent, not the client's copy, which has moved on.
    """
    played = play(ALGORITHM, lines(), rounds=2, pull=2.0, **HAND)
    ends = [float(played.deployed(client)["params"]["line.weight"]) for client in ("0", "1")]
    assert ends == pytest.approx([1.63, 0.71], abs=1e-12)


def test_the_personal_models_rate_is_its_own() -> None:
    """At rate 0.05 the first client's model goes from 1 to 1.2; the global model is FedAvg's at rate 0.1."""
    played = play(ALGORITHM, lines(), rounds=1, personal_lr=0.05, **HAND)
    assert float(played.deployed("0")["params"]["line.weight"]) == pytest.approx(1.2, abs=1e-12)
    assert float(played.state.params["line.weight"]) == pytest.approx(0.95, abs=1e-12)


@pytest.mark.parametrize("batchnorm", ["local", "averaged"])
def test_the_global_model_is_fedavgs(batchnorm: str) -> None:
    federation = small_federation(("testnets:Normed",))
    one, other = (
        play(method, federation, rounds=3, batchnorm=batchnorm, keep_optimiser=True, **extra)
        for method, extra in ((ALGORITHM, {"pull": 0.7}), (fedavg.ALGORITHM, {}))
    )
    assert same(one.state._asdict(), other.state._asdict())
    for client in federation.participants:
        assert same(one.memory[client]["buffers"], other.memory[client]["buffers"])
        assert same(one.memory[client]["optimiser"], other.memory[client]["optimiser"])


@pytest.mark.parametrize("keep_optimiser", [False, True])
def test_without_pull_the_personal_models_are_those_of_local_training(keep_optimiser: bool) -> None:
    federation = small_federation(("testnets:Normed",))
    common = lambda model, config, seeds: {"own": model.init(seeds.common)}  # noqa: E731
    alone = replace(local.ALGORITHM, first_memory=common)
    cohorts = [["0", "1"], ["1", "2"], ["0", "1"]]
    one, other = (
        play(method, federation, rounds=3, cohorts=cohorts, keep_optimiser=keep_optimiser, **extra)
        for method, extra in ((ALGORITHM, {"pull": 0.0}), (alone, {}))
    )
    for client in ("0", "1", "2"):
        assert same(one.deployed(client), other.deployed(client))


def test_a_client_that_was_never_asked_deploys_the_global_model() -> None:
    played = play(ALGORITHM, small_federation(), rounds=2, cohorts=[["0"]] * 2)
    assert same(played.deployed("1")["params"], played.state.params)
    assert not same(played.deployed("0")["params"], played.state.params)


def test_the_personal_model_never_leaves_the_client() -> None:
    ears = Ears()
    played = play(ALGORITHM, small_federation(), rounds=2, wrap=ears)
    names = set(played.state.params)
    assert ears.down == {f"params/{name}" for name in names}
    assert ears.up == {f"delta/{name}" for name in names} | {"num_samples", "loss"}


def test_a_newcomer_trains_from_the_global_model() -> None:
    """lambda = 2, from w = 0.95 with the sample (1, 3). First round: -4.1, no pull: 1.36.

    Second: 2 (1.36 - 3) + 2 (1.36 - 0.95) = -3.28 + 0.82 = -2.46 leads to 1.606.
    """
    federation = lines((*POINTS, POINTS[0]), unseen=1)
    for rounds, end in ((0, 0.95), (1, 1.36), (2, 1.606)):
        played = play(ALGORITHM, federation, rounds=1, pull=2.0, admit_rounds=rounds, **HAND).admit()
        assert float(played.deployed("2")["params"]["line.weight"]) == pytest.approx(end, abs=1e-12)
        assert ALGORITHM.needs_labels(played.setup.config) == (rounds > 0)
        asked = programs_of(ALGORITHM, played.setup.config, federation.roster["2"].model, True)
        assert [program.name for program in asked] == ["ditto.admit"] * (rounds > 0) + ["statistics"]
