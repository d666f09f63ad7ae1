# SPDX-License-Identifier: Apache-2.0
"""Side by side: the bits do not depend on how many work, and a client takes nobody down with it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from conftest import play, setup_of, small_federation
from fedloom import algorithms
from fedloom.clients.batching import Schedule
from fedloom.core.contract import Cohort
from fedloom.core.trees import flatten
from fedloom.engines import parallel, workers
from fedloom.engines.auto import ENGINES
from fedloom.engines.job import Job, Outcome
from fedloom.engines.machine import Machine
from fedloom.engines.memories import Memories
from fedloom.engines.parallel import ParallelVectorised
from fedloom.engines.vectorised import Vectorised
from fedloom.engines.workers import possible

pytestmark = pytest.mark.skipif(not possible(), reason="needs fork")

FEDAVG = algorithms.get("fedavg")
PARALLEL = ["parallel", "parallel_vectorised"]


def children() -> list[str]:
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


def doomed(monkeypatch: pytest.MonkeyPatch, client: str, end: signal.Signals = signal.SIGKILL) -> None:
    """A client that takes its process down, wherever that is not this one."""
    parent, original = os.getpid(), Job.schedule

    def schedule(self: Job, asked: str) -> Schedule:
        if asked == client and os.getpid() != parent:
            os.kill(os.getpid(), end)
        return original(self, asked)

    monkeypatch.setattr(Job, "schedule", schedule)


@pytest.mark.parametrize("engine", PARALLEL)
@pytest.mark.parametrize("model", ["lenet:kernels=2", "mlp:hidden=5"])
def test_bits_do_not_depend_on_the_number_of_processes(engine: str, model: str, monkeypatch) -> None:
    monkeypatch.setattr(ParallelVectorised, "part_size", lambda *_: 2)
    federation = small_federation((model,), dtype=torch.float32)
    states = []
    for number in (1, 2, 3):
        monkeypatch.setattr(parallel, "cores", lambda number=number: number)
        states.append(flatten(play(FEDAVG, federation, engine, rounds=2).state._asdict()))
    if engine == "parallel":
        states.append(flatten(play(FEDAVG, federation, "sequential", rounds=2).state._asdict()))
    for other in states[1:]:
        assert all(torch.equal(value, other[path]) for path, value in states[0].items())


@pytest.mark.parametrize(
    "room, clients, sizes",
    [  # a model has room beside 9, 1 or 9,999 others
        (10, 5, [5]),
        (10, 20, [7, 7, 6]),
        (10, 33, [9, 8, 8, 8]),
        (10, 100, [9] * 4 + [8] * 8),
        (1, 9, [3, 3, 3]),
        (1, 17, [3] + [2] * 7),
        (9999, 100, [25] * 4),
        (9999, 129, [17] + [16] * 7),
    ],
)
def test_parts_have_room_in_a_cache_are_not_too_small_and_come_out_even(
    room: int, clients: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = small_federation(sizes=(2,) * clients)
    bytes_of_one = federation.roster["0"].model.size * federation.dtype.itemsize
    monkeypatch.setattr(parallel, "PART_BYTES", room * bytes_of_one)
    monkeypatch.setattr(parallel, "cores", lambda: 1)
    run, found = Vectorised.run_group, []
    monkeypatch.setattr(Vectorised, "run_group", lambda s, job: found.append(len(job.clients)) or run(s, job))
    play(FEDAVG, federation, "parallel_vectorised", rounds=1)
    assert found == sizes


def test_a_worker_does_not_divide_its_part_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """50 clients are parts of 13, where 13 clients alone would be two parts."""
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    original = Vectorised.run_group

    def run_group(self: Vectorised, job: Job) -> Outcome:
        assert len(job.clients) in (12, 13)
        return original(self, job)

    monkeypatch.setattr(Vectorised, "run_group", run_group)
    played = play(FEDAVG, small_federation(sizes=(2,) * 50), "parallel_vectorised", rounds=1)
    assert not played.stats.dropped and not played.engine.notes


def test_bits_do_not_depend_on_the_number_of_processes_where_a_client_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the part that it is in runs one by one, here too."""
    original = Job.schedule

    def schedule(self: Job, client: str) -> Schedule:
        if client == "3":
            raise ValueError("no data today")
        return original(self, client)

    monkeypatch.setattr(Job, "schedule", schedule)
    run, ran, found = Vectorised.run_group, [], []
    monkeypatch.setattr(Vectorised, "run_group", lambda s, job: ran.append(len(job.clients)) or run(s, job))
    for processes in (1, 2):
        monkeypatch.setattr(parallel, "cores", lambda processes=processes: processes)
        played = play(FEDAVG, small_federation(sizes=(5,) * 40), "parallel_vectorised", rounds=2)
        found.append(flatten(played.state._asdict()))
        assert [dropped.client for dropped in played.stats.dropped] == ["3"]
    assert ran == 2 * [10, *[1] * 10, 10, 10, 10]  # in this process; the workers' are theirs
    assert all(torch.equal(value, found[1][path]) for path, value in found[0].items())


@pytest.mark.parametrize("engine", PARALLEL)
def test_a_client_that_kills_its_process_is_dropped_alone(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelVectorised, "part_size", lambda *_: 2)
    federation = small_federation()
    doomed(monkeypatch, "3")
    played = play(FEDAVG, federation, engine, rounds=2)
    (dropped,) = played.stats.dropped
    assert (dropped.client, dropped.reason) == ("3", "its process was ended by signal 9")
    without = play(FEDAVG, federation, "sequential", rounds=2, cohorts=[["0", "1", "2", "4"]] * 2)
    for name, value in without.state.params.items():
        torch.testing.assert_close(played.state.params[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", PARALLEL)
def test_a_client_whose_worker_was_killed_is_asked_again(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """By whoever killed it: a client that is not at fault gives what it would have given."""
    monkeypatch.setattr(ParallelVectorised, "part_size", lambda *_: 2)
    federation, parent, original = small_federation(), os.getpid(), Job.schedule
    straight = play(FEDAVG, federation, engine, rounds=2)

    def schedule(self: Job, asked: str) -> Schedule:
        if asked == "3" and os.getpid() != parent and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, asked)

    monkeypatch.setattr(Job, "schedule", schedule)
    played = play(FEDAVG, federation, engine, rounds=2)
    assert (tmp_path / "killed").exists()
    assert not played.stats.dropped
    for name, value in straight.state.params.items():
        torch.testing.assert_close(played.state.params[name], value, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_a_client_that_stands_still_does_not_hang_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "STILL_SECONDS", 2)
    doomed(monkeypatch, "1", signal.SIGSTOP)
    played = play(FEDAVG, small_federation(), "parallel", rounds=1)
    (dropped,) = played.stats.dropped
    assert (dropped.client, dropped.reason) == ("1", "its process stood still for 2 seconds")


@pytest.mark.parametrize("engine", PARALLEL)
def test_processes_are_kept_from_round_to_round_and_end_with_the_engine(engine: str, monkeypatch) -> None:
    monkeypatch.setattr(ParallelVectorised, "part_size", lambda *_: 2)
    before = children()
    played = play(FEDAVG, small_federation(), engine, rounds=1)
    at_work = children()
    assert len(at_work) == len(before) + parallel.cores() or parallel.cores() == 1
    for number in (2, 3):
        session = played.session(number)
        FEDAVG.round(played.setup, played.state, Cohort(number, played.setup.clients), session.ask)
    assert children() == at_work
    del played, session
    assert children() == before


def test_a_simulation_can_be_used_from_one_thread_after_another() -> None:
    """A process ends with the thread that made it; clients must not be lost with it."""
    played = play(FEDAVG, small_federation(), "parallel", rounds=0)
    dropped, asked = [], []

    def one_round(number: int) -> None:
        session = played.session(number)
        FEDAVG.round(played.setup, played.state, Cohort(number, played.setup.clients), session.ask)
        dropped.extend(session.stats.dropped)
        asked.append(session.stats.asked)

    for number in (1, 2, 3):
        thread = threading.Thread(target=one_round, args=(number,))
        thread.start()
        thread.join()
    assert not dropped and asked == [len(played.setup.clients)] * 3


def test_machine_says_how_many_processes() -> None:
    federation = small_federation()
    engine = ENGINES["parallel"](federation, FEDAVG, FEDAVG.config(), 0, Machine(workers=3))
    before, cohort = children(), Cohort(1, federation.participants)
    setup = setup_of(federation, FEDAVG.config())
    FEDAVG.round(setup, FEDAVG.init(setup), cohort, engine.session(1, Memories()).ask)
    assert len(children()) == len(before) + 3


def test_where_no_process_can_work_clients_run_here_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_ailment", lambda: "no threads")
    monkeypatch.setattr(parallel, "cores", lambda: 2)
    federation = small_federation()
    played = play(FEDAVG, federation, "parallel", rounds=2)
    note = "clients run one after another, in this process: a forked process cannot work: no threads"
    assert played.engine.notes == [note]
    expected = play(FEDAVG, federation, "sequential", rounds=2)
    assert all(torch.equal(value, played.state.params[name]) for name, value in expected.state.params.items())


def test_operator_threads_of_this_process_are_left_as_they_were() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        play(FEDAVG, small_federation(), "parallel", rounds=1, cohorts=[["0"]])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
