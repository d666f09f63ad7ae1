# SPDX-License-Identifier: Apache-2.0
"""A round begun before the checks of the one before are read: it must never be seen in what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from conftest import models_for, needed
from fedloom import algorithms
from fedloom.core.errors import RoundError
from fedloom.core.trees import flatten
from fedloom.data.arrays import Arrays
from fedloom.data.own import from_arrays
from fedloom.engines import graphs
from fedloom.engines.engine import Session
from fedloom.engines.graphs import Replayer
from fedloom.engines.job import Job, Outcome
from fedloom.engines.vectorised import Vectorised
from fedloom.runs.checkpoint import Checkpoint
from fedloom.training.config import parse_options
from fedloom.training.rounds import LookAhead
from fedloom.training.simulation import Simulation
from tiny import Replayed

SMALL = {"clients": 4, "rounds": 6, "local_steps": 2, "model": "mlp:hidden=4", "batch_size": 8, "cohort": 2,
         "eval_every": 4, "engine": "vectorised"}  # fmt: skip


def data() -> Arrays:
    rng = np.random.default_rng(0)
    y = np.arange(160) % 4
    x = (rng.standard_normal((160, 4, 4, 1)) + y[:, None, None, None]).astype(np.float32)
    return from_arrays(x.transpose(0, 3, 1, 2), y)


def simulation(method: str, *, ahead: bool, **options: Any) -> Simulation:
    given = {**SMALL, **needed(algorithms.get(method)), **options}
    built = Simulation(method, *parse_options(method, given), data())
    if ahead:  # as on a GPU
        built._ahead = LookAhead(built)
    return built


def looks_ahead(built: Simulation) -> bool:
    return built._ahead is not None and not built._ahead.why_not


def everything(built: Simulation) -> dict[str, torch.Tensor]:
    return flatten({"state": built.now.state._asdict(), **dict(sorted(built.now.memory.items()))})


def without_seconds(record: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in record.items() if name != "seconds"}


def assert_same(one: Simulation, other: Simulation) -> None:
    here, there = everything(one), everything(other)
    assert list(here) == list(there)
    assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.parametrize("method", algorithms.names())
def test_looking_ahead_changes_nothing(method: str) -> None:
    usual, ahead = simulation(method, ahead=False), simulation(method, ahead=True)
    for _ in range(6):
        assert without_seconds(usual.train_round()) == without_seconds(ahead.train_round())
        assert usual.server.round == ahead.server.round
        assert_same(usual, ahead)
        if usual.server.round % 4 == 0:
            assert usual.evaluation().metrics == ahead.evaluation().metrics
    assert looks_ahead(ahead)


ALONE: list[dict[str, Any]] = [
    {"dp_clip": 1.0, "dp_noise": 0.5},
    {"aggregate": "median"},
    {"malicious": 0.5, "attack": "scale"},
    {"max_weight": 1.5},
    {"async_": 2},
]
"""What looks at single replies."""


@pytest.mark.parametrize("options", ALONE, ids=lambda options: next(iter(options)))
def test_whoever_looks_at_single_replies_gets_them(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may add replies up for the method alone; if it did here, the bits would be others."""
    usual, added = (simulation("fedavg", ahead=False, **options) for _ in range(2))
    records = [without_seconds(usual.train_round()) for _ in range(3)]
    monkeypatch.setattr(Vectorised, "adds_up", True)
    assert records == [without_seconds(added.train_round()) for _ in range(3)]
    assert_same(usual, added)


@pytest.mark.parametrize(("ahead", "adapt"), [(False, "none"), (True, "none"), (False, "prior"), (False, "tune")])
def test_a_method_that_needs_only_means_gets_one(ahead: bool, adapt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, added = (simulation("fedavg", ahead=ahead, adapt=adapt) for _ in range(2))
    for _ in range(3):
        usual.train_round()
    original, heard = Session.ask, []

    def ask(self: Session, *asked: Any, **how: Any) -> Any:
        heard.append(original(self, *asked, **how))
        return heard[-1]

    monkeypatch.setattr(Session, "ask", ask)
    monkeypatch.setattr(Vectorised, "adds_up", True)
    for _ in range(3):
        added.train_round()
    assert {len(replies) for replies in heard} == {1}
    for name, leaf in everything(usual).items():
        torch.testing.assert_close(everything(added)[name], leaf, rtol=0, atol=1e-6)


def test_the_next_round_is_begun_but_not_past_an_evaluation_or_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    built = simulation("fedavg", ahead=True)
    begun: list[Any] = []
    session = built.engine.session

    def noted(stage: Any, *given: Any, **more: Any) -> Session:
        begun.append(stage)
        return session(stage, *given, **more)

    monkeypatch.setattr(built.engine, "session", noted)
    seen = []
    for _ in range(6):
        built.train_round()
        seen.append(begun[-1])
    assert begun == [1, 2, 3, 4, 5, 6]
    assert seen == [2, 3, 4, 4, 6, 6]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "pfedhn"])
def test_a_client_with_bad_numbers_is_found_a_round_late_and_left_out(method: str) -> None:
    usual, ahead = (simulation(method, ahead=flag, rounds=5, eval_every=10) for flag in (False, True))
    for built in (usual, ahead):
        built.federation.x[built.federation.roster["1"].rows["train"]] = float("nan")
    dropped, told = [], []
    for _ in range(5):
        record, other = without_seconds(usual.train_round()), without_seconds(ahead.train_round())
        told += other.pop("notes")
        assert record.pop("notes") == [] and record == other
        assert_same(usual, ahead)
        dropped += record["dropped"]
    assert dropped
    assert told == ["rounds are no longer begun ahead of the checks: a reply or the state was not finite"]
    assert not looks_ahead(ahead)


@pytest.mark.parametrize("first_bad", [1, 2])
def test_what_the_engine_notes_in_a_round_that_is_given_up_is_told_with_that_round(
    first_bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, ahead = (simulation("fedavg", ahead=flag, cohort=4, rounds=3, eval_every=10) for flag in (False, True))
    notes = []
    for built in (usual, ahead):
        engine, run = built.engine, built.engine.run_group

        def run_group(job: Job, run: Any = run) -> Outcome:
            if job.moment.stage >= first_bad:
                job.federation.x[job.federation.roster["1"].rows["train"]] = float("nan")
            if job.moment.stage == 2 and len(job.clients) > 1:
                raise ValueError("too many")
            return run(job)

        monkeypatch.setattr(engine, "run_group", run_group)
        notes.append([built.train_round()["notes"] for _ in range(3)])
    assert [len(told) for told in notes[0]] == [0, 1, 0]
    notes[1][first_bad - 1].remove(
        "rounds are no longer begun ahead of the checks: a reply or the state was not finite"
    )
    assert notes[0] == notes[1]
    assert not looks_ahead(ahead)


def test_a_round_that_fails_leaves_the_run_where_it_was() -> None:
    built = simulation("pfedhn", ahead=True, server_lr=1e30, server_clip=0, eval_every=10, cohort=1, val_share=0)
    with pytest.raises(RoundError, match="NaN or Inf"):
        for _ in range(6):
            before = built.mark()
            built.train_round()
    assert built.mark() == before


def test_a_failure_of_the_round_ahead_is_told_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    built = simulation("fedavg", ahead=True)
    ask = Session.ask
    calls: list[int] = []

    def failing(*given: Any, **how: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise RoundError("nobody is there")
        return ask(*given, **how)

    monkeypatch.setattr(Session, "ask", failing)
    assert built.train_round()["round"] == 1
    with pytest.raises(RoundError, match="nobody is there"):
        built.train_round()
    assert built.server.round == 1


@pytest.mark.parametrize("change", ["go back", "restore", "settle", "evaluate"])
def test_a_round_ahead_is_forgotten_when_the_run_changes(change: str) -> None:
    usual, ahead = (simulation("scaffold", ahead=flag, eval_every=10) for flag in (False, True))
    for built in (usual, ahead):
        mark = built.mark()
        built.train_round()
        if change == "go back":
            built.go_back(mark)
        elif change == "restore":
            now = built.now
            built.server.restore(Checkpoint(1, now.state._asdict(), dict(now.memory), {}))
        elif change == "evaluate":
            built.evaluation()  # clients begin to remember when they are asked for the first time
        else:
            params = {name: value + 1 for name, value in built.now.state.params.items()}
            built.server.now = built.now._replace(state=built.now.state._replace(params=params))
        built.train_round()
    assert usual.server.round == ahead.server.round
    assert_same(usual, ahead)


def test_seconds_of_overlapping_rounds_do_not_count_twice() -> None:
    built = simulation("fedavg", ahead=True, eval_every=10)
    records = [built.train_round() for _ in range(6)]
    assert all(set(record["seconds"]) == {"round"} for record in records)
    assert all(record["seconds"]["round"] > 0 for record in records)


@pytest.mark.parametrize("kept", [True, False])
def test_a_server_that_runs_out_of_memory_gives_back_what_was_kept_for_speed(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, short = (simulation("scaffold", ahead=False) for _ in range(2))
    ask, freed, asked = Session.ask, [], []

    def failing(self: Session, *given: Any, **how: Any) -> Any:
        replies = ask(self, *given, **how)
        if self.engine is not short.engine:
            return replies
        asked.append(1)
        if len(asked) == 2 or not kept:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 120.00 MiB.")
        return replies

    monkeypatch.setattr(Session, "ask", failing)
    monkeypatch.setattr(short.engine, "free_memory", lambda: freed.append(1) or (kept and len(freed) == 1))
    if kept:
        for _ in range(3):
            assert without_seconds(usual.train_round()) == without_seconds(short.train_round())
            assert_same(usual, short)
        assert freed == [1]
    else:
        with pytest.raises(RoundError, match="Round 1 does not fit into memory: CUDA out of memory"):
            short.train_round()


def test_a_server_that_runs_out_of_memory_again_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    short = simulation("scaffold", ahead=False)
    asked: list[int] = []

    def failing(*_: Any, **how: Any) -> Any:
        asked.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 120.00 MiB.")

    monkeypatch.setattr(Session, "ask", failing)
    monkeypatch.setattr(short.engine, "free_memory", lambda: True)
    with pytest.raises(RoundError, match="Round 1 does not fit into memory"):
        short.train_round()
    assert asked == [1, 1]


def test_what_the_engine_notes_in_an_evaluation_is_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_group = Vectorised.run_group

    def cramped(self: Vectorised, job: Job) -> Outcome:
        if len(job.clients) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.")
        return run_group(self, job)

    monkeypatch.setattr(Vectorised, "run_group", cramped)
    given = {"model": "mlp:hidden=3", "clients": 4, "cohort": 2, "rounds": 2, "local_steps": 1, "eval_every": 1}
    run = fedloom.run("fedavg", **given, engine="vectorised", out=tmp_path / "run", progress="quiet")
    note = "evaluate.{} runs at most 2 clients at a time: memory has no room for 4"
    assert [record["notes"] for record in run.records] == [[note.format("val"), note.format("test")], []]


@pytest.mark.parametrize("method", algorithms.names())
def test_what_is_recorded_is_fixed_by_its_name_and_its_shapes(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording does again what it did at first, to other numbers: nothing else may have changed."""
    mixed = {"model": ",".join(models_for(algorithms.get(method), "mlp:hidden=4", "mlp:hidden=3"))}
    given = {"clients": 6, "cohort": 3, "rounds": 5, "unseen": 2, **mixed}
    ends = []
    for replayed in (False, True):
        if replayed:
            monkeypatch.setattr(Replayer, "pays", lambda self, leaves: bool(leaves))
            monkeypatch.setattr(graphs, "Recording", Replayed)
        built = simulation(method, ahead=True, **given)
        for _ in range(5):
            built.train_round()
        assert looks_ahead(built)
        unseen = built.evaluation_of_unseen().metrics if built.server.algorithm.admit else {}
        metrics = built.evaluation().metrics | unseen
        ends.append({**everything(built), **{k: torch.tensor(v) for k, v in metrics.items()}})
        made = built.engine._replayer._recordings.kept.values()
        assert bool(made) == replayed and None not in made
    assert ends[0].keys() == ends[1].keys()
    for path, value in ends[0].items():
        torch.testing.assert_close(ends[1][path], value, rtol=0, atol=1e-6)
