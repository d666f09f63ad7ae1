# SPDX-License-Identifier: Apache-2.0
"""What holds for every method on every engine. Methods are found by scanning: a new file is tested at once."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from conftest import Played, models_for, play, small_federation
from fedloom import algorithms
from fedloom.clients.federation import Federation
from fedloom.core.config import fields
from fedloom.core.contract import Algorithm, Cohort, Setup
from fedloom.core.errors import NeedsError, RoundError
from fedloom.core.trees import PerClient, Tree, faults, flatten, leaves, num_bytes
from fedloom.core.wire import decode, encode
from fedloom.engines.auto import ENGINES as KNOWN
from fedloom.engines.engine import AbstractEngine, Stats
from fedloom.engines.memories import Memories
from fedloom.engines.parallel import ParallelVectorised
from fedloom.programs.evaluation import evaluate
from fedloom.runs.options import RunOptions

METHODS = algorithms.names()
DOCS = Path(__file__).parents[2] / "docs"
SMALL = ("lenet:kernels=2", "mlp:hidden=5")
FAST = ("vectorised", "loopback")
"""The engines that differ most from ``sequential``; the others are left to the slow tests."""
ENGINES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in KNOWN]
ALIKE = ("lenet:kernels=2", "mlp:hidden=84")
"""Their features have one shape."""


@pytest.fixture(params=METHODS)
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    return algorithms.get(request.param)


@pytest.fixture(autouse=True)
def in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of one architecture go to processes two at a time, so that small federations have several parts."""
    monkeypatch.setattr(ParallelVectorised, "part_size", lambda *_: 2)


COHORTS = [["0", "1", "2"], ["1", "3", "4"], ["0", "2", "4"]]
"""Most are away for a round."""


class Kept(NamedTuple):
    """What some rounds left, without their engine: processes would wait in it."""

    federation: Federation
    setup: Setup[Any]
    stats: Stats
    after: list[tuple[Any, Memories]]
    """State and memory after each round."""

    def engine(self, algorithm: Algorithm, name: str) -> AbstractEngine:
        """A new one, on the same federation."""
        return play(algorithm, self.federation, name, rounds=0).engine

    def everything(self) -> dict:
        state, memory = self.after[-1]
        return {"state": state._asdict(), "memory": memory}


def kept(played: Played) -> Kept:
    return Kept(played.engine.federation, played.setup, played.stats, played.after)


@cache
def straight(algorithm: Algorithm, engine: str, *models: str) -> Kept:
    """Three rounds with ``COHORTS``, played once for all tests that only look at them."""
    return kept(play(algorithm, small_federation(models_for(algorithm, *models)), engine, 3, COHORTS))


@cache
def first_round(algorithm: Algorithm, engine: str) -> tuple[Kept, dict[str, int]]:
    """One with everybody; and the bytes that went down and up, which have been seen to be trees."""
    seen = {"down": 0, "up": 0}

    def listening(ask):
        def heard(program, shared, mine):
            mine = PerClient.of(mine)
            assert not faults(shared) and not [f for c in mine for f in faults(mine[c])]
            replies = ask(program, shared, mine)
            assert not [f for c in replies for f in faults(replies[c])]
            seen["down"] += sum(num_bytes(shared) + num_bytes(mine[c]) for c in mine)
            seen["up"] += sum(num_bytes(replies[c]) for c in replies)
            return replies

        return heard

    federation = small_federation(models_for(algorithm, *SMALL))
    return kept(play(algorithm, federation, engine, rounds=1, wrap=listening)), seen


@cache
def admission(algorithm: Algorithm, engine: str) -> Tree:
    """What two newcomers are sent after a round of the others."""
    federation = small_federation(models_for(algorithm, *SMALL), unseen=2)
    config = {"admit_rounds": 2} if hasattr(algorithm.config, "admit_rounds") else {}
    played = play(algorithm, federation, engine, rounds=1, **config)
    before = fingerprint(played.state._asdict())
    setup = played.setup.joined_by(federation.models)
    sent = algorithm.admit(setup, played.state, Cohort(1, federation.unseen), played.session("admission").ask)
    assert set(sent.mine) == set(federation.unseen)
    assert fingerprint(played.state._asdict()) == before
    return {"shared": sent.shared, "mine": dict(sent.mine)}


def gap(one: Tree, other: Tree) -> float:
    """The largest difference between two trees of one structure."""
    a, b = flatten(one), flatten(other)
    assert a.keys() == b.keys()
    return max([float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel()], default=0.0)


def everything(played: Played) -> dict:
    return {"state": played.state._asdict(), "memory": played.memory}


def fingerprint(tree: Tree) -> str:
    return hashlib.sha256(b"".join(leaf.numpy().tobytes() for _, leaf in leaves(tree))).hexdigest()


@pytest.mark.parametrize(
    "models", [SMALL, ("testnets:Normed",), ("testnets:Dropping",)], ids=["plain", "batchnorm", "dropout"]
)
@pytest.mark.parametrize("engine", ["vectorised", pytest.param("parallel_vectorised", marks=pytest.mark.slow)])
def test_vectorised_gives_what_sequential_gives(algorithm: Algorithm, models: tuple[str, ...], engine: str) -> None:
    one, other = (straight(algorithm, name, *models).everything() for name in ("sequential", engine))
    assert gap(one, other) < 1e-9


@pytest.mark.parametrize("engine", ["loopback", pytest.param("parallel", marks=pytest.mark.slow)])
def test_the_bits_are_those_of_sequential(algorithm: Algorithm, engine: str) -> None:
    one, other = (straight(algorithm, name, *SMALL).everything() for name in ("sequential", engine))
    assert gap(one, other) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 99])
@pytest.mark.parametrize("engine", ["loopback", "parallel"])
def test_so_they_are_with_batches_of_one_and_of_all(algorithm: Algorithm, batch_size: int, engine: str) -> None:
    federation = small_federation(models_for(algorithm, *SMALL))
    one, other = (
        play(algorithm, federation, name, 2, COHORTS, batch_size=batch_size, local_epochs=1)
        for name in ("sequential", engine)
    )
    assert gap(everything(one), everything(other)) == 0.0


@pytest.mark.parametrize("engine", ENGINES)
def test_resuming_from_bytes_gives_the_bits_of_never_stopping(algorithm: Algorithm, engine: str) -> None:
    never = straight(algorithm, engine, *SMALL)
    at_first, remembered = never.after[0]
    state = algorithm.state(**decode(encode(at_first._asdict())))
    memory = Memories({c: decode(encode(tree)) for c, tree in remembered.items()})
    # in an engine of its own: what the other has built must not matter
    fresh = never.engine(algorithm, engine)
    for number in (2, 3):
        session = fresh.session(number, memory)
        state, _ = algorithm.round(never.setup, state, Cohort(number, tuple(COHORTS[number - 1])), session.ask)
        memory = session.memory
    assert gap(never.everything(), {"state": state._asdict(), "memory": memory}) == 0.0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_leaves_the_state_it_was_given(algorithm: Algorithm, engine: str) -> None:
    played, _ = first_round(algorithm, engine)
    state, memory = played.after[-1]
    before, remembered = fingerprint(state._asdict()), fingerprint(memory)
    session = played.engine(algorithm, engine).session(2, memory)
    algorithm.round(played.setup, state, Cohort(2, played.setup.clients), session.ask)
    assert fingerprint(memory) == remembered
    assert fingerprint(state._asdict()) == before


@pytest.mark.parametrize("engine", ENGINES)
def test_missing_replies_are_taken_in_stride(algorithm: Algorithm, engine: str) -> None:
    federation = small_federation(models_for(algorithm, *SMALL))

    def deaf(ask):
        def some(program, shared, mine):
            replies = ask(program, shared, mine)
            return PerClient.of({c: replies[c] for c in replies if c != "2"})

        return some

    heard = play(algorithm, federation, engine, wrap=deaf, rounds=1)
    without = play(algorithm, federation, engine, cohorts=[[c for c in federation.participants if c != "2"]], rounds=1)
    # for the server, a client that did not answer was not there
    assert gap(heard.state._asdict(), without.state._asdict()) < 1e-12


def test_the_order_of_the_cohort_does_not_matter(algorithm: Algorithm) -> None:
    federation = small_federation(models_for(algorithm, *SMALL))
    forth = play(algorithm, federation, cohorts=[federation.participants] * 2)
    back = play(algorithm, federation, cohorts=[federation.participants[::-1]] * 2)
    assert gap(everything(forth), everything(back)) < 1e-12


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rate_of_zero_changes_no_parameter(algorithm: Algorithm, engine: str) -> None:
    federation = small_federation(models_for(algorithm, *SMALL))
    # where the server learns from more than changes, from data of its own or from features, its rate is 0 too
    learns = algorithm.needs.server_data != "none" or algorithm.family == "prototypes"
    still = {"local_lr", "server_weight_decay", *(["server_lr"] if learns else [])}
    rates = {f.name: 0.0 for f, _ in fields(algorithm.config) if f.name in still}
    played = play(algorithm, federation, engine, rounds=2, **rates)
    start, (one, _) = algorithm.init(played.setup), played.after[0]
    after, before, once = (flatten(state._asdict()) for state in (played.state, start, one))
    # counters go on, and what an optimiser remembers may fade; what is 0 may become known in the first round
    values = [path for path, leaf in before.items() if leaf.is_floating_point() and not path.startswith("optimiser/")]
    known = {path: before[path] if before[path].any() else once[path] for path in values}
    assert gap({path: after[path] for path in values}, known) < 1e-13


@pytest.mark.parametrize("engine", ENGINES)
def test_only_trees_travel_and_their_bytes_are_counted(algorithm: Algorithm, engine: str) -> None:
    played, seen = first_round(algorithm, engine)
    assert seen == {"down": played.stats.bytes_down, "up": played.stats.bytes_up}


def test_the_loss_falls(algorithm: Algorithm) -> None:
    played = play(algorithm, small_federation(models_for(algorithm, *SMALL)), rounds=12, local_lr=0.01)
    losses = [d["local_loss"] for d in played.diagnostics]
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize("engine", ENGINES)
def test_every_client_can_be_evaluated_and_each_sample_counts_once(algorithm: Algorithm, engine: str) -> None:
    played, _ = first_round(algorithm, engine)
    (state, memory), clients, told = played.after[-1], played.setup.clients, []
    session = played.engine(algorithm, engine).session("evaluation", memory)

    def ask(program, shared, mine):
        replies = session.ask(program, shared, mine)
        told.extend(set(flatten(tree)) for _, tree in replies.groups)
        return replies

    scores = evaluate(
        algorithm,
        lambda clients: algorithm.send(played.setup, state, clients),
        clients,
        "test",
        ask,
        batch_size=2,
        at_once=2,
    )
    assert list(scores) == list(clients)
    assert told and all(names == {"loss", "metric", "samples"} for names in told)  # the same of every method
    assert all(score.samples == 5 and 0 <= score.metric <= 1 for score in scores.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_newcomers_are_admitted_alike_on_every_engine(algorithm: Algorithm, engine: str) -> None:
    if algorithm.admit is None:
        pytest.skip(f"{algorithm.name} does not admit newcomers")
    assert gap(*(admission(algorithm, name) for name in ("sequential", engine))) < 1e-9


def test_mixed_architectures_are_served_or_refused_by_name(algorithm: Algorithm) -> None:
    played_setup = play(algorithm, small_federation(models_for(algorithm, *SMALL)), rounds=0).setup

    def violations(federation: Federation) -> list[str]:
        mixed = dataclasses.replace(played_setup, clients=federation.participants, models=federation.models)
        return algorithm.needs.violations(mixed, algorithm.name)

    served = small_federation(SMALL)
    if algorithm.needs.same_model:
        (sentence,) = violations(served)
        assert "one architecture" in sentence and algorithm.name in sentence
        return
    if algorithm.needs.features == "same":
        (sentence,) = violations(served)
        assert "one shape" in sentence and algorithm.name in sentence
        served = small_federation(ALIKE)
    assert violations(served) == []
    play(algorithm, served, rounds=1)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_with_bad_data_is_dropped_by_name_and_the_round_goes_on(algorithm: Algorithm, engine: str) -> None:
    federation = small_federation(models_for(algorithm, *SMALL))
    federation.x[federation.roster["1"].rows["train"]] = float("nan")
    played = play(algorithm, federation, engine, rounds=1)
    dropped = played.stats.dropped
    if not dropped:
        pytest.fail("nobody was dropped")
    assert {d.client for d in dropped} == {"1"} and "NaN or Inf" in dropped[0].reason
    assert all(leaf.isfinite().all() for _, leaf in leaves(played.state._asdict()))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_in_which_all_fail_stops_the_run(algorithm: Algorithm, engine: str) -> None:
    federation = small_federation(models_for(algorithm, *SMALL))
    federation.x[:] = float("nan")
    with pytest.raises(RoundError, match="No client of 5 gave a usable reply"):
        play(algorithm, federation, engine, rounds=1)


def test_a_method_documents_itself(algorithm: Algorithm) -> None:
    module = inspect.getmodule(algorithm.round)
    text = inspect.getdoc(module) or ""
    for line in ("Sent down:", "Sent up:", "Kept by the client:", "Kept by the server:"):
        assert line in text, f"{module} says nothing of {line}"
    assert text.splitlines()[0].endswith(".")
    assert set(algorithm.averaged) <= set(algorithm.state._fields), "averaged names fields of the state"
    for field, _ in fields(algorithm.config):
        assert field.metadata.get("help"), f"{field.name} has no help text"


@pytest.mark.parametrize("name", algorithms.built_in())
def test_the_page_of_a_method_says_where_evaluations_are_described(name: str) -> None:
    """They tell the same of every method, so that the pages link to one place."""
    (row,) = (
        line for line in (DOCS / "methods" / f"{name}.md").read_text().splitlines() if line.startswith("| Sent up |")
    )
    assert "(../how-to-deploy.md#what-an-evaluation-tells)" in row
    section = (
        (DOCS / "how-to-deploy.md").read_text().partition("## What an evaluation tells\n")[2].partition("\n## ")[0]
    )
    assert all(word in section for word in ("losses", "metric", "number of samples"))
    head = inspect.getdoc(inspect.getmodule(algorithms.get(name).round)) or ""
    assert "valuations" in head.partition("Sent up:")[2].partition("Kept by the client:")[0]


def test_no_option_of_a_method_hides_one_of_the_run(algorithm: Algorithm) -> None:
    shared = {field.name for field, _ in fields(RunOptions)} | {
        "method", "config", "out", "seeds", "json", "quiet", "trust"
    }  # fmt: skip
    assert not shared & {field.name for field, _ in fields(algorithm.config)}


def test_needs_are_refused_before_round_one() -> None:
    from fedloom.data.own import from_arrays
    from fedloom.training.simulation import Simulation

    arrays = from_arrays(torch.randn(60, 4).numpy(), (torch.arange(60) % 3).numpy())
    options = RunOptions(dataset="x", partition="iid", clients=4, model="mlp:hidden=5,mlp:hidden=6")
    with pytest.raises(NeedsError, match="FedAvg needs one architecture for all clients; got 2"):
        Simulation("fedavg", options, algorithms.get("fedavg").config(), arrays)
