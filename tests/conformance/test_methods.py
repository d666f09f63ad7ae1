# SPDX-License-Identifier: Apache-2.0
"""What holds for every method on every engine. Methods are found by scanning: a new file is tested at once."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from pathlib import Path

import pytest
import torch

from conftest import Played, models_for, play, small_federation
from fedloom import algorithms
from fedloom.clients.federation import Federation
from fedloom.core.config import fields
from fedloom.core.contract import Algorithm, Cohort
from fedloom.core.errors import NeedsError, RoundError
from fedloom.core.trees import PerClient, Tree, faults, flatten, leaves, num_bytes
from fedloom.core.wire import decode, encode
from fedloom.engines.auto import ENGINES as KNOWN
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
def test_vectorised_gives_what_sequential_gives(
    algorithm: Algorithm, models: tuple[str, ...], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParallelVectorised, "part_size", lambda *_: 2)
    federation = small_federation(models_for(algorithm, *models))
    cohorts = [["0", "1", "2"], ["1", "3", "4"]]
    one, other = (play(algorithm, federation, name, cohorts=cohorts) for name in ("sequential", engine))
    assert gap(everything(one), everything(other)) < 1e-9


@pytest.mark.parametrize("batch_size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 99))])
@pytest.mark.parametrize("engine", ["loopback", pytest.param("parallel", marks=pytest.mark.slow)])
def test_the_bits_are_those_of_sequential(algorithm: Algorithm, batch_size: int, engine: str) -> None:
    federation = small_federation(models_for(algorithm, *SMALL))
    cohorts = [["0", "1", "2"], ["1", "3", "4"], ["0", "2", "4"]]
    one, other = (
        play(algorithm, federation, name, rounds=3, cohorts=cohorts, batch_size=batch_size, local_epochs=1)
        for name in ("sequential", engine)
    )
    assert gap(everything(one), everything(other)) == 0.0


@pytest.mark.parametrize("engine", ENGINES)
def test_resuming_from_bytes_gives_the_bits_of_never_stopping(algorithm: Algorithm, engine: str) -> None:
    federation = small_federation(models_for(algorithm, *SMALL))
    cohorts = [["0", "1", "2"], ["1", "3", "4"], ["0", "2", "4"]]  # most were away for a round
    straight = play(algorithm, federation, engine, rounds=3, cohorts=cohorts)
    half = play(algorithm, federation, engine, rounds=1, cohorts=cohorts)
    state = algorithm.state(**decode(encode(half.state._asdict())))
    memory = Memories({c: decode(encode(tree)) for c, tree in half.memory.items()})
    for number in (2, 3):
        session = half.engine.session(number, memory)
        # the run was to have three rounds from the start
        state, _ = algorithm.round(straight.setup, state, Cohort(number, tuple(cohorts[number - 1])), session.ask)
        memory = session.memory
    half.state, half.memory = state, memory
    assert gap(everything(straight), everything(half)) == 0.0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_leaves_the_state_it_was_given(algorithm: Algorithm, engine: str) -> None:
    played = play(algorithm, small_federation(models_for(algorithm, *SMALL)), engine, rounds=1)
    before = fingerprint(played.state._asdict())
    remembered = fingerprint(played.memory)
    algorithm.round(played.setup, played.state, Cohort(2, played.setup.clients), played.session(2).ask)
    assert fingerprint(played.memory) == remembered
    assert fingerprint(played.state._asdict()) == before


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
    start, one = algorithm.init(played.setup), play(algorithm, federation, engine, rounds=1, **rates).state
    after, before, once = (flatten(state._asdict()) for state in (played.state, start, one))
    # counters go on, and what an optimiser remembers may fade; what is 0 may become known in the first round
    values = [path for path, leaf in before.items() if leaf.is_floating_point() and not path.startswith("optimiser/")]
    known = {path: before[path] if before[path].any() else once[path] for path in values}
    assert gap({path: after[path] for path in values}, known) < 1e-13


@pytest.mark.parametrize("engine", ENGINES)
def test_only_trees_travel_and_their_bytes_are_counted(algorithm: Algorithm, engine: str) -> None:
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

    played = play(algorithm, small_federation(models_for(algorithm, *SMALL)), engine, rounds=1, wrap=listening)
    assert seen == {"down": played.stats.bytes_down, "up": played.stats.bytes_up}


def test_the_loss_falls(algorithm: Algorithm) -> None:
    played = play(algorithm, small_federation(models_for(algorithm, *SMALL)), rounds=12, local_lr=0.01)
    losses = [d["local_loss"] for d in played.diagnostics]
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize("engine", ENGINES)
def test_every_client_can_be_evaluated_and_each_sample_counts_once(algorithm: Algorithm, engine: str) -> None:
    federation = small_federation(models_for(algorithm, *SMALL))
    played = play(algorithm, federation, engine, rounds=1)
    scores = evaluate(
        algorithm,
        lambda clients: algorithm.send(played.setup, played.state, clients),
        federation.participants,
        "test",
        played.session("evaluation").ask,
        batch_size=2,
        at_once=2,
    )
    assert list(scores) == list(federation.participants)
    assert all(score.samples == 5 and 0 <= score.metric <= 1 for score in scores.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_newcomers_are_admitted_alike_on_every_engine(algorithm: Algorithm, engine: str) -> None:
    if algorithm.admit is None:
        pytest.skip(f"{algorithm.name} does not admit newcomers")
    federation = small_federation(models_for(algorithm, *SMALL), unseen=2)
    woven = []
    for name in ("sequential", engine):
        config = {"admit_rounds": 2} if hasattr(algorithm.config, "admit_rounds") else {}
        played = play(algorithm, federation, name, rounds=1, **config)
        before = fingerprint(played.state._asdict())
        setup = played.setup.joined_by(federation.models)
        sent = algorithm.admit(setup, played.state, Cohort(1, federation.unseen), played.session("admission").ask)
        assert set(sent.mine) == set(federation.unseen)
        assert fingerprint(played.state._asdict()) == before
        woven.append({"shared": sent.shared, "mine": dict(sent.mine)})
    assert gap(*woven) < 1e-9


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


def test_an_evaluation_tells_the_same_of_every_method(algorithm: Algorithm) -> None:
    federation = small_federation(models_for(algorithm, *SMALL))
    played = play(algorithm, federation, "sequential", rounds=1)
    session, told = played.session("evaluation"), []

    def ask(program, shared, mine):
        replies = session.ask(program, shared, mine)
        told.extend(set(flatten(tree)) for _, tree in replies.groups)
        return replies

    evaluate(algorithm, lambda some: algorithm.send(played.setup, played.state, some), ["0", "1"], "test", ask)
    assert told and all(names == {"loss", "metric", "samples"} for names in told)


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
