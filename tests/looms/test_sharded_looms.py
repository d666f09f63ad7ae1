# SPDX-License-Identifier: Apache-2.0
"""Looms whose heads are elsewhere learn what they learn here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from conftest import Played, play, setup_of, small_federation
from fedloom import algorithms
from fedloom.adaptation.average import with_average
from fedloom.core.contract import Algorithm, Cohort
from fedloom.core.sharded import Shards, gathered, is_sharded
from fedloom.core.trees import flatten
from fedloom.training.rounds import _finite
from inside import Inside

COHORTS = [["0", "1", "2"], ["1", "3", "4"], ["0", "2", "4"]]
SMALL = {
    "mh_pfedhn": {"chunk": 64, "embed_dim": 4, "hidden": 6},
    "pfedhn": {"embed_dim": 4, "hidden": 6},
    "it_pfl_hn": {"embed_dim": 4, "hidden": 6},
    "pefll": {"embed_dim": 4, "hidden": 6},
}
METHODS = ["mh_pfedhn", "mh_pfedhn_gd", "pfedhn", "pfedhn_pc", "it_pfl_hn", "pefll"]


def small(method: str) -> dict[str, Any]:
    return next(options for name, options in SMALL.items() if method.startswith(name))


def played(algorithm: Algorithm, shards: Shards | None, **config: Any) -> Played:
    """Three rounds of clients with two architectures, in float64."""
    federation = small_federation(("mlp:hidden=5", "mlp:hidden=9"))
    return play(algorithm, federation, rounds=3, cohorts=COHORTS, shards=shards, **config)


def state_of(run: Played) -> dict[str, torch.Tensor]:
    return flatten(gathered(run.state._asdict()))


def is_same(one: Played, other: Played) -> bool:
    first, second = state_of(one), state_of(other)
    return first.keys() == second.keys() and all(torch.equal(leaf, second[path]) for path, leaf in first.items())


@pytest.mark.parametrize("step", ["per_client", "cohort_mean", "in_turn"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_mh_pfedhn_has_the_same_bits_for_any_number_of_shards(number: int, step: str) -> None:
    method, config = algorithms.get("mh_pfedhn"), {**SMALL["mh_pfedhn"], "server_step": step}
    there = played(method, Inside(number), **config)
    assert is_sharded(there.state._asdict())
    assert is_same(there, played(method, None, **config))


@pytest.mark.parametrize("clip", [0.0, 1e-3])
@pytest.mark.parametrize("method", METHODS)
def test_every_loom_with_heads_has_the_same_numbers(method: str, clip: float) -> None:
    """A clipped norm is a sum over shards, and so is what pFedHN's trunk learns from."""
    algorithm, config = algorithms.get(method), {**small(method), "server_clip": clip}
    here, there = played(algorithm, None, **config), played(algorithm, Inside(2), **config)
    assert is_sharded(there.state._asdict())
    assert_close(state_of(there), state_of(here), rtol=1e-12, atol=1e-14)
    for run in (here, there):
        sent = flatten(dict(algorithm.send(run.setup, run.state, run.setup.clients).mine))
        run.diagnostics.append(sent)
    assert_close(there.diagnostics, here.diagnostics, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", METHODS)
def test_first_heads_are_drawn_where_they_live(method: str) -> None:
    algorithm = algorithms.get(method)
    few = {"local_epochs": 1, **small(method)}
    setup = setup_of(small_federation(("mlp:hidden=5", "mlp:hidden=9"), dtype=torch.float32), algorithm.config(**few))
    here = flatten(algorithm.init(setup)._asdict())
    there = flatten(gathered(algorithm.init(replace(setup, shards=Inside(3)))._asdict()))
    assert here.keys() == there.keys() and all(torch.equal(leaf, there[path]) for path, leaf in here.items())


@pytest.mark.parametrize("method", ["mh_pfedhn", "pfedhn"])
def test_newcomers_are_admitted_by_it(method: str) -> None:
    algorithm, found = algorithms.get(method), []
    federation = small_federation(("mlp:hidden=5", "mlp:hidden=5", "mlp:hidden=9"), unseen=2)
    for shards in (None, Inside(2)):
        run = play(algorithm, federation, shards=shards, admit_rounds=3, **small(method))
        setup = run.setup.joined_by({c: federation.roster[c].model for c in federation.unseen})
        ask = run.engine.session("admission", run.memory).ask
        assert algorithm.admit is not None
        sent = algorithm.admit(setup, run.state, Cohort(2, federation.unseen), ask)
        found.append(flatten(dict(sent.mine)))
    assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


def test_heads_of_newcomers_with_another_number_of_chunks_live_there_too() -> None:
    method = algorithms.get("mh_pfedhn")
    federation = small_federation(("mlp:hidden=5", "mlp:hidden=5", "mlp:hidden=5", "mlp:hidden=19"), unseen=2)
    found = []
    for shards in (None, Inside(2)):
        run = play(method, federation, shards=shards, admit_rounds=3, **SMALL["mh_pfedhn"])
        setup = run.setup.joined_by({c: federation.roster[c].model for c in federation.unseen})
        assert method.admit is not None
        sent = method.admit(
            setup, run.state, Cohort(2, federation.unseen), run.engine.session("admission", run.memory).ask
        )
        found.append(flatten(dict(sent.mine)))
    assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", ["mh_pfedhn", "pfedhn"])
def test_it_can_be_averaged_and_is_found_finite(method: str) -> None:
    algorithm = with_average(algorithms.get(method), 0.9)
    here, there = (played(algorithm, shards, **small(method)) for shards in (None, Inside(2)))
    assert_close(state_of(there), state_of(here), rtol=1e-12, atol=1e-14)
    leaves = dict(enumerate(flatten(there.state._asdict()).values()))
    cpu = torch.device("cpu")
    assert _finite(cpu, leaves)
    sharded = next(at for at, leaf in leaves.items() if is_sharded({"": leaf}))
    assert not _finite(cpu, {**leaves, sharded: leaves[sharded] / 0})


@pytest.mark.parametrize(
    ("method", "config"), [("mh_pfedhn", {"heads": "single"}), ("mh_pfedhn", {"heads": "none"}), ("fedavg", {})]
)
def test_without_heads_nothing_is_sharded(method: str, config: dict[str, Any]) -> None:
    options = small(method) if method in SMALL else {}
    run = played(algorithms.get(method), Inside(2), **options, **config)
    assert not is_sharded(run.state._asdict())
