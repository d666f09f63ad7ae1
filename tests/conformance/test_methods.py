# SPDX-License-Identifier: Apache-2.0
"""What holds for every method on every engine. Methods are found by scanning: a new file is tested at once."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect

import pytest
import torch

from conftest import Played, models_for, play, small_federation
from fedloom import algorithms
from fedloom.core.config import fields
from fedloom.core.contract import Algorithm, Cohort
from fedloom.core.errors import NeedsError, RoundError
from fedloom.core.trees import PerClient, Tree, faults, flatten, leaves, num_bytes
from fedloom.core.wire import decode, encode
from fedloom.engines.auto import ENGINES
from fedloom.engines.parallel import ParallelVectorised
from fedloom.metrics.evaluation import evaluate
from fedloom.runs.options import RunOptions

METHODS = algorithms.names()
SMALL = ("lenet:kernels=2", "mlp:hidden=5")


@pytest.fixture(params=METHODS)
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    return algorithms.get(request.param)


def gap(one: Tree, other: Tree) -> float:
    """The largest difference between two trees of one structure."""
    a, b = flatten(one), flatten(other)
    assert a.keys() == b.keys()
    return max([float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel()], default=0.0)


def everything(played: Played) -> dict:
    return {"state": played.state._asdict(), "memory": played.engine.memory}


def fingerprint(tree: Tree) -> str:
    return hashlib.sha256(b"".join(leaf.numpy().tobytes() for _, leaf in leaves(tree))).hexdigest()


@pytest.mark.parametrize(
    "models", [SMALL, ("testnets:Normed",), ("testnets:Dropping",)], ids=["plain", "batchnorm", "dropout"]
)
@pytest.mark.parametrize("engine", ["vectorised", "parallel_vectorised"])
def test_vectorised_gives_what_sequential_gives(
    algorithm: Algorithm, models: tuple[str, ...], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ParallelVectorised, "part_size", lambda *_: 2)
    federation = small_federation(models_for(algorithm, *models))
    cohorts = [["0", "1", "2"], ["1", "3", "4"]]
    one, other = (play(algorithm, federation, name, cohorts=cohorts) for name in ("sequential", engine))
    assert gap(everything(one), everything(other)) < 1e-9


@pytest.mark.parametrize("batch_size", [1, 4, 99])
@pytest.mark.parametrize("engine", ["loopback", "parallel"])
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
    half.engine.memory = {c: decode(encode(tree)) for c, tree in half.engine.memory.items()}
    for number in (2, 3):
        half.engine.begin(number)
        state, _ = algorithm.round(half.setup, state, Cohort(number, tuple(cohorts[number - 1])), half.engine.ask)
    half.state = state
    assert gap(everything(straight), everything(half)) == 0.0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_leaves_the_state_it_was_given(algorithm: Algorithm, engine: str) -> None:
    played = play(algorithm, small_federation(models_for(algorithm, *SMALL)), engine, rounds=1)
    before = fingerprint(played.state._asdict())
    played.engine.begin(2)
    algorithm.round(played.setup, played.state, Cohort(2, played.setup.clients), played.engine.ask)
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
    rates = {f.name: 0.0 for f, _ in fields(algorithm.config) if f.name in ("local_lr", "server_weight_decay")}
    played = play(algorithm, federation, engine, rounds=2, **rates)
    start = algorithm.init(played.setup)
    after, before = flatten(played.state._asdict()), flatten(start._asdict())
    values = [path for path, leaf in before.items() if leaf.is_floating_point()]  # not counters
    assert gap({p: after[p] for p in values}, {p: before[p] for p in values}) < 1e-13


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
    assert seen == {"down": played.engine.books.bytes_down, "up": played.engine.books.bytes_up}


def test_the_loss_falls(algorithm: Algorithm) -> None:
    played = play(algorithm, small_federation(models_for(algorithm, *SMALL)), rounds=12, local_lr=0.01)
    losses = [d["local_loss"] for d in played.diagnostics]
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize("engine", ENGINES)
def test_every_client_can_be_evaluated_and_each_sample_counts_once(algorithm: Algorithm, engine: str) -> None:
    federation = small_federation(models_for(algorithm, *SMALL))
    played = play(algorithm, federation, engine, rounds=1)
    played.engine.begin("evaluation")
    scores = evaluate(
        algorithm,
        lambda clients: algorithm.personalise(played.setup, played.state, clients),
        federation.participants,
        "test",
        played.engine.ask,
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
        played.engine.begin("admission")
        sent = algorithm.admit(played.setup, played.state, Cohort(1, federation.unseen), played.engine.ask)
        assert set(sent.mine) == set(federation.unseen)
        assert fingerprint(played.state._asdict()) == before
        woven.append({"shared": sent.shared, "mine": dict(sent.mine)})
    assert gap(*woven) < 1e-9


def test_mixed_architectures_are_served_or_refused_by_name(algorithm: Algorithm) -> None:
    federation = small_federation(SMALL)
    played_setup = play(algorithm, small_federation(models_for(algorithm, *SMALL)), rounds=0).setup
    mixed = dataclasses.replace(played_setup, clients=federation.participants, models=federation.models)
    violations = algorithm.needs.violations(mixed, algorithm.name)
    if algorithm.needs.same_model:
        assert len(violations) == 1 and "one architecture" in violations[0] and algorithm.name in violations[0]
    else:
        assert violations == []
        play(algorithm, federation, rounds=1)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_with_bad_data_is_dropped_by_name_and_the_round_goes_on(algorithm: Algorithm, engine: str) -> None:
    federation = small_federation(models_for(algorithm, *SMALL))
    federation.x[federation.roster["1"].rows["train"]] = float("nan")
    played = play(algorithm, federation, engine, rounds=1)
    dropped = played.engine.books.dropped
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
    for field, _ in fields(algorithm.config):
        assert field.metadata.get("help"), f"{field.name} has no help text"


def test_no_option_of_a_method_hides_one_of_the_run(algorithm: Algorithm) -> None:
    shared = {field.name for field, _ in fields(RunOptions)} | {"method", "config", "out", "seeds", "json", "quiet"}
    assert not shared & {field.name for field, _ in fields(algorithm.config)}


def test_needs_are_refused_before_round_one() -> None:
    from fedloom.data.own import from_arrays
    from fedloom.runs.simulation import Simulation

    arrays = from_arrays(torch.randn(60, 4).numpy(), (torch.arange(60) % 3).numpy())
    options = RunOptions(dataset="x", partition="iid", clients=4, model="mlp:hidden=5,mlp:hidden=6")
    with pytest.raises(NeedsError, match="FedAvg needs one architecture for all clients; got 2"):
        Simulation("fedavg", options, algorithms.get("fedavg").config(), arrays)
