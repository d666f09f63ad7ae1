# SPDX-License-Identifier: Apache-2.0
"""Captured steps give what plain steps give. Without a GPU the same code runs unrecorded; with one, as a graph."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import by_programs, models_for, play, small_federation
from fedloom import algorithms
from fedloom.clients.batching import PaddedSchedule, Schedule
from fedloom.core.contract import Batch, Program
from fedloom.core.trees import PerClient, flatten
from fedloom.engines import capture, vectorised
from fedloom.engines.capture import CapturedSteps, Recordings
from fedloom.engines.graphs import Pool
from fedloom.engines.job import Job, Moment
from tiny import lines

TEN_STEPS = PaddedSchedule.of([Schedule([np.array([0, 1])] * 10, [0] * 10)])
FEDERATION = lines()
FACTS = torch.ones(1), torch.ones(1, dtype=torch.int64)


def program(name: str = "p") -> Program:
    return Program(name, lambda *_: {}, lambda *_: {}, lambda *_: ({}, {}), None, lambda *_: {})


def job(of: Program, round: int, rounds_left: int = 10**6) -> Job:
    """An ask in that round."""
    return Job(of, ("0",), {}, PerClient.empty(("0",)), {}, FEDERATION, None, Moment(0, round, 1), rounds_left)


@pytest.mark.parametrize("method", by_programs())
@pytest.mark.parametrize("model", ["testnets:Normed", pytest.param("testnets:Dropping", marks=pytest.mark.slow)])
def test_steps_through_fixed_places_give_the_same(method: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = algorithms.get(method)
    federation = small_federation(models_for(algorithm, model))
    plain = play(algorithm, federation, "vectorised", rounds=2)
    kinds: dict[str, CapturedSteps] = {}

    def through_places(self: Any, job: Job, plan: PaddedSchedule, step: Any, facts: Any, carry: Any) -> Any:
        kind = f"{job.program.name}{len(facts[0])}"
        if kind not in kinds:
            data = (federation.x, federation.y)
            kinds[kind] = CapturedSteps(step, job.shared, facts, carry, data, Pool(), width=16, capacity=64)
        return kinds[kind].run(plan, job.shared, facts, carry)

    monkeypatch.setattr(vectorised.Vectorised, "_steps", through_places)
    places = play(algorithm, federation, "vectorised", rounds=2)
    assert kinds
    one, other = flatten(plain.state._asdict()), flatten(places.state._asdict())
    for path in one:
        torch.testing.assert_close(other[path], one[path], rtol=0, atol=1e-10)


def test_a_step_that_cannot_be_compiled_is_recorded_and_one_that_cannot_be_recorded_is_run_plainly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(times: int) -> tuple[list[str], list[Any]]:
        notes: list[str] = []
        recordings, asked = Recordings(notes, Pool()), program()
        carry = {"total": torch.zeros(1)}
        rounds = range(1, times + 1)
        return notes, [recordings.run(job(asked, r), TEN_STEPS, _count, FACTS, carry, False) for r in rounds]

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler here:\n\nlong story\nnone found\n\nSet TORCH_LOGS for more\n")

    monkeypatch.setattr(torch, "compile", refuse)
    notes, after = run(4)
    assert notes == ["p cannot be compiled: no compiler here: none found"]
    assert [carry["total"].tolist() for carry in after] == [[10.0]] * 4
    monkeypatch.setattr(CapturedSteps, "prepare", refuse)
    notes, after = run(2)
    assert notes == ["p cannot be recorded: no compiler here: none found"] and after == [None, None]


def test_a_step_that_our_kernels_fail_is_compiled_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recordings, "_has_kernels", lambda self, x: True)
    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    wanted: list[bool] = []

    def faster_for(clients: int, own_kernels: bool) -> AbstractContextManager[None]:
        wanted.append(own_kernels)
        if own_kernels:
            raise RuntimeError("no such kernel")
        return nullcontext()

    monkeypatch.setattr(capture, "faster_for", faster_for)
    notes: list[str] = []
    recordings, carry = Recordings(notes, Pool()), {"total": torch.zeros(1)}
    for own, tried in ((True, [True, False]), (False, [False])):
        wanted.clear()
        asked = program()
        for number in range(1, 5):
            recordings.run(job(asked, number), TEN_STEPS, _count, FACTS, carry, own)
        assert wanted == tried
    assert notes == ["p cannot be compiled with kernels of our own: no such kernel"]
    assert [made.compiled for made in kept(recordings)] == [True, True]


def test_what_a_mixed_federation_seldom_meets_is_not_compiled_nor_is_anything_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int] = []

    class Made:
        def __init__(self, step: Any, shared: Any, facts: Any, *_: Any, compiled: bool, **__: Any) -> None:
            self.clients, self.compiled = len(facts[0]), compiled
            if compiled:
                found.append(self.clients)

        def prepare(self, steps: int) -> None: ...

        def run(self, *_: Any) -> str:
            return "after"

    monkeypatch.setattr(capture, "CapturedSteps", Made)
    recordings, asked = Recordings([], Pool()), program()
    rounds, rng = 1000, np.random.default_rng(0)
    for number in range(1, rounds + 1):
        clients = 60 if number % 2 else int(rng.integers(1, 50))  # every other cohort is of a kind
        plan = PaddedSchedule.of([Schedule([np.array([0, 1])] * 20, [0] * 20) for _ in range(clients)])
        facts, carry = (torch.ones(clients), torch.ones(clients, dtype=torch.int64)), {"total": torch.zeros(clients)}
        after = recordings.run(job(asked, number, rounds - number), plan, _count, facts, carry, False)
        assert after == "after"
    assert found == [60]


def test_several_asks_of_a_round_are_all_counted_before_it_is_judged_whether_to_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", lambda traced, **_: traced)
    carry = {"total": torch.zeros(1)}
    for asks, compiled in ((1, False), (10, True)):
        recordings, asked = Recordings([], Pool()), program()
        for number in range(1, 5):
            for _ in range(asks):
                recordings.run(job(asked, number, 5000), TEN_STEPS, _count, FACTS, carry, False)
        assert [made.compiled for made in kept(recordings)] == [compiled]


@pytest.mark.parametrize("steps", [1, 3, 10, 11])
def test_a_step_may_hand_on_what_the_carry_had_in_another_place(steps: int) -> None:
    def step(shared: object, facts: object, carry: dict[str, torch.Tensor], batch: Batch) -> dict[str, torch.Tensor]:
        return {"params": carry["params"] + batch.x.sum(), "previous": carry["params"]}

    plan = PaddedSchedule.of([Schedule([np.array([i % 4]) for i in range(steps)], [0] * steps)] * 2)
    data = (torch.arange(4.0)[:, None], torch.zeros(4))
    facts, carry = (
        (torch.ones(2), torch.ones(2, dtype=torch.int64)),
        {k: torch.zeros(2) for k in ("params", "previous")},
    )
    captured = CapturedSteps(step, {}, facts, carry, data, Pool(), width=1, capacity=64, ragged=False)
    totals = [sum(i % 4 for i in range(number)) for number in (steps, steps - 1)]
    assert [leaf.tolist() for leaf in captured.run(plan, {}, facts, carry).values()] == [[t, t] for t in totals]


def test_a_carry_that_comes_back_in_another_order_is_not_recorded() -> None:
    def step(shared: object, facts: object, carry: dict[str, torch.Tensor], batch: Batch) -> dict[str, torch.Tensor]:
        return {"b": carry["b"] * 2, "a": carry["a"] + 1}

    notes: list[str] = []
    carry = {"a": torch.zeros(1), "b": torch.ones(1)}
    assert Recordings(notes, Pool()).run(job(program(), 1), TEN_STEPS, step, FACTS, carry, False) is None
    assert notes == ["p cannot be recorded: a step must leave the carry as it is built"]


def test_other_data_are_another_kind_of_ask() -> None:
    """A recorded step reads the data where they lie: it must not be replayed for those of an admission."""

    def step(shared: object, facts: object, carry: dict[str, torch.Tensor], batch: Batch) -> dict[str, torch.Tensor]:
        return {"total": carry["total"] + batch.y.sum()}

    recordings, asked, carry = Recordings([], Pool()), program(), {"total": torch.zeros(1)}
    usual = job(asked, 1)
    hidden = replace(usual, federation=replace(FEDERATION, y=torch.full_like(FEDERATION.y, -1)))
    found = [recordings.run(one, TEN_STEPS, step, FACTS, carry, False) for one in (usual, hidden, usual)]
    usual_sum = 10 * float(FEDERATION.y[:2].sum())
    assert [after["total"].item() for after in found] == [usual_sum, -20.0, usual_sum]
    assert len(kept(recordings)) == 2
    recordings.clear()
    assert not kept(recordings)


def kept(recordings: Recordings) -> list[Any]:
    return list(recordings._forms.kept.values())


def _count(shared: object, facts: object, carry: dict[str, torch.Tensor], batch: Batch) -> dict[str, torch.Tensor]:
    return {"total": carry["total"] + 1}


@pytest.mark.parametrize("ragged", [False, True])
def test_what_a_step_leaves_alone_is_not_copied_and_clients_that_are_done_keep_what_they_have(ragged: bool) -> None:
    def step(shared: object, facts: object, carry: dict[str, torch.Tensor], batch: Batch) -> dict[str, torch.Tensor]:
        return {"start": carry["start"], "total": carry["total"] + batch.x.sum()}

    steps = (3, 1) if ragged else (3, 3)
    plan = PaddedSchedule.of([Schedule([np.array([c])] * number, [0] * number) for c, number in enumerate(steps)])
    data = (torch.tensor([[1.0], [10.0]]), torch.zeros(2))
    facts, carry = (torch.ones(2), torch.ones(2, dtype=torch.int64)), {"start": torch.ones(2), "total": torch.zeros(2)}
    captured = CapturedSteps(step, {}, facts, carry, data, Pool(), width=1, capacity=4, ragged=ragged)
    assert len(captured._at) == 2  # total, and the counter
    assert captured.run(plan, {}, facts, carry)["total"].tolist() == [3.0, 10.0 * steps[1]]
