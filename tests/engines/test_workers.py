# SPDX-License-Identifier: Apache-2.0
"""Workers do what they are told, die alone, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core.trees import Tree
from fedloom.engines import workers
from fedloom.engines.workers import Lost, Workers, cores, possible

pytestmark = pytest.mark.skipif(not possible(), reason="needs fork")


def work(note: Any, tree: Tree) -> tuple[Any, Tree]:
    match note:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "leave":
            sys.exit(3)
    return (note, os.getpid(), torch.get_num_threads()), {"twice": tree["x"] * 2, "same": tree}


def prepare(job: Any) -> tuple[Any, Tree]:
    return job, {"x": torch.arange(6.0).reshape(2, 3), "flag": torch.tensor(True), "none": torch.empty(0, 4), "e": {}}


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


def test_trees_go_there_and_back_and_processes_have_one_thread() -> None:
    before = children()
    crew = Workers(2, work)
    results = dict(crew.run(range(5), prepare))
    assert sorted(results) == [0, 1, 2, 3, 4]
    for job, ((note, process, threads), tree) in results.items():
        assert note == job and process != os.getpid() and threads == 1
        assert torch.equal(tree["twice"], torch.arange(6.0).reshape(2, 3) * 2)
        assert tree["same"]["flag"].dtype == torch.bool and tree["same"]["flag"].item() is True
        assert tree["same"]["none"].shape == (0, 4) and tree["same"]["e"] == {}
    assert len(children() - before) == 2
    crew.close()
    assert children() == before and crew.closed


def test_the_next_job_is_given_before_a_result_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Workers(1, work)
    events: list[Any] = []
    begin, read = workers._Worker.begin, workers._Region.read
    monkeypatch.setattr(workers._Worker, "begin", lambda s, job, p: events.append(job) or begin(s, job, p))
    monkeypatch.setattr(workers._Region, "read", lambda s, places: events.append("read") or read(s, places))
    trees = [tree for _, (_, tree) in crew.run(range(4), lambda job: (job, {"x": torch.full((3,), float(job))}))]
    assert events == [0, 1, "read", 2, "read", 3, "read", "read"]
    assert [tree["twice"].tolist() for tree in trees] == [[2.0 * job] * 3 for job in range(4)]
    crew.close()


def test_a_larger_tree_makes_room_for_itself() -> None:
    crew = Workers(1, work)
    for size in (10, 100_000, 1000):
        ((_, (_, tree)),) = crew.run(["x"], lambda job, size=size: (job, {"x": torch.ones(size)}))
        assert torch.equal(tree["twice"], torch.full((size,), 2.0))
    crew.close()


@pytest.mark.parametrize(("note", "why"), [("die", "was ended by signal 9"), ("leave", "its process ended")])
def test_a_worker_that_dies_loses_its_job_only(note: str, why: str) -> None:
    before = children()
    crew = Workers(2, work)
    results = dict(crew.run(["a", note, "b", "c"], prepare))
    assert isinstance(results[note], Lost) and why in results[note].why
    assert [results[job][0][0] for job in ("a", "b", "c")] == ["a", "b", "c"]
    assert len(children() - before) == 2  # another one took its place
    crew.close()
    assert children() == before


def test_a_worker_that_stands_still_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "STILL_SECONDS", 2)
    crew = Workers(2, work)
    results = dict(crew.run(["a", "stop", "b"], prepare))
    assert results["stop"] == Lost("its process stood still for 2 seconds")
    assert results["a"][0][0] == "a" and results["b"][0][0] == "b"
    crew.close()


def test_an_exception_in_between_ends_all_workers() -> None:
    before = children()
    crew = Workers(2, work)
    with pytest.raises(KeyboardInterrupt):
        for _ in crew.run(range(4), prepare):
            raise KeyboardInterrupt
    assert children() == before and crew.closed


def test_workers_that_are_forgotten_end() -> None:
    before = children()
    crew = Workers(2, work)
    assert len(children() - before) == 2
    del crew
    assert children() == before


def test_a_process_that_cannot_work_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    monkeypatch.setattr(workers, "_ailment", lambda: "no threads")
    with pytest.raises(OSError, match="a forked process cannot work: no threads"):
        Workers(2, work)
    assert children() == before


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_parent(ended_by: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, time, torch\n"
        "from fedloom.engines.workers import Workers\n"
        "def work(note, tree):\n"
        "    open(f'{note}', 'w').write(str(os.getpid()))\n"
        "    while True: time.sleep(0.01)\n"
        "for _ in Workers(2, work).run(['one', 'two'], lambda job: (job, {})): pass\n"
    )
    source = str(Path(workers.__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, str(script)], cwd=tmp_path, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": source}
    )
    pids = [tmp_path / "one", tmp_path / "two"]
    deadline = time.monotonic() + 60
    while not all(p.exists() and p.read_text() for p in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = [int(p.read_text()) for p in pids]
    parent.send_signal(ended_by)
    parent.wait(30)
    while any(Path(f"/proc/{pid}").exists() for pid in found) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in found if Path(f"/proc/{pid}").exists()]


def test_cores_are_those_we_may_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    for text, expected in (("max 100000\n", 12), ("250000 100000\n", 3), ("50000 100000\n", 1), ("nonsense", 12)):
        monkeypatch.setattr(Path, "read_text", lambda self, text=text: text)
        assert cores() == expected
