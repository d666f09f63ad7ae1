# SPDX-License-Identifier: Apache-2.0
"""A run directory keeps what was saved, says what is wrong with it, and survives kill -9 and full disks."""

import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.errors import RunError
from fedloom.runs import directory
from fedloom.runs.directory import RunDirectory

CONFIG = {
    "method": "fedavg",
    "lr": 1e-5,
    "out": "a: b",
    "layers": (1, 2),
    "text": "1e-3",
    "none": None,
    "on": "no",
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", CONFIG)


def save(run: RunDirectory, round: int, *, best: bool = False, keep: int = 2) -> Path:
    run.append({"round": round})
    tree = {"n": torch.full((10,), round)}
    return run.save(round, tree, {"a/b": tree, "ü": tree}, {"note": "x"}, best=best, keep=keep)


def refused(action: Callable[[], Any]) -> str:
    with pytest.raises(RunError) as caught:
        action()
    return str(caught.value)


# Creating and opening


def test_the_config_comes_back(run: RunDirectory) -> None:
    expected = {**CONFIG, "layers": [1, 2]}
    assert run.config == RunDirectory.open(run.path).config == expected
    assert list(run.config) == list(CONFIG)
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "lock"]


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.text(), PLAIN | st.lists(PLAIN)))
def test_any_plain_config_comes_back(tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]) -> None:
    assert RunDirectory.create(tmp_path_factory.mktemp("run"), config).config == config


def test_an_empty_directory_and_what_a_killed_start_left_are_taken(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / ".tmp-config.yaml").write_text("meth")
    assert RunDirectory.create(str(tmp_path), CONFIG).path == tmp_path


def test_a_directory_with_a_run_is_refused(run: RunDirectory) -> None:
    message = refused(lambda: RunDirectory.create(run.path, {}))
    assert message == (
        f"{run.path} already holds a run; give another --out, or go on with it: `fedloom resume {run.path}`."
    )
    assert RunDirectory.open(run.path).config == run.config


def test_a_directory_with_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    message = refused(lambda: RunDirectory.create(tmp_path, CONFIG))
    assert message == (
        f"{tmp_path} is not empty (it holds 'thesis.tex'); give another --out: a new or empty directory."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_place_that_cannot_be_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory; make it writable or give another --out" in refused(
        lambda: RunDirectory.create(tmp_path / "file" / "run", CONFIG)
    )
    assert "File exists; make it writable" in refused(lambda: RunDirectory.create(tmp_path / "file", CONFIG))

    def mkdir(*args: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    path = tmp_path / "new"
    assert refused(lambda: RunDirectory.create(path, CONFIG)).startswith(f"Cannot write {path}: Permission denied; ")


def test_a_disk_that_is_too_small_is_found_before_anything_is_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    message = refused(lambda: RunDirectory.create(path, CONFIG, need_bytes=10**18))
    assert message.startswith(f"The disk of {path} has ")
    assert message.endswith(
        " MB left, and the run needs about 1,000,000,000,000 MB; free some space or give another --out."
    )
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_create_one_directory_one_wins(tmp_path: Path) -> None:
    def create(number: int) -> int | None:
        try:
            return RunDirectory.create(tmp_path / "run", {"n": number}).config["n"]
        except RunError:
            return None

    with ThreadPoolExecutor(8) as pool:
        winners = [number for number in pool.map(create, range(8)) if number is not None]
    assert winners == [RunDirectory.open(tmp_path / "run").config["n"]]


def test_a_process_that_was_quicker_keeps_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = directory.locked

    def late(path: Path) -> Any:
        (path / "config.yaml").write_text("theirs: 1")
        return real(path)

    monkeypatch.setattr(directory, "locked", late)
    assert "already holds a run" in refused(lambda: RunDirectory.create(tmp_path, CONFIG))
    assert RunDirectory.open(tmp_path).config == {"theirs": 1}


def test_what_is_not_a_run_directory(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        message = refused(lambda path=path: RunDirectory.open(path))
        assert message == f"{path} is not a run directory: it has no config.yaml; give the --out of a run."
    for seed in range(4):
        RunDirectory.create(tmp_path / f"seed-{seed}", CONFIG)
    message = refused(lambda: RunDirectory.open(tmp_path))
    held = "it holds the runs seed-0, seed-1, seed-2 ...; give one of them."
    assert message == f"{tmp_path} is not a run directory: {held}"


@pytest.mark.parametrize("text", ["{", "a: [", "\x00", "!!python/object:os.system x"])
def test_a_damaged_config(run: RunDirectory, text: str) -> None:
    (run.path / "config.yaml").write_text(text)
    message = refused(lambda: RunDirectory.open(run.path))
    assert message == f"Cannot read {run.path / 'config.yaml'}: it is damaged or not readable; restore it."


@pytest.mark.parametrize("text", ["", "3", "- a"])
def test_a_config_that_is_not_a_mapping(run: RunDirectory, text: str) -> None:
    (run.path / "config.yaml").write_text(text)
    message = refused(lambda: RunDirectory.open(run.path))
    assert message == f"{run.path / 'config.yaml'} holds no mapping of options to values; restore it."


# The lock


def test_one_holder_at_a_time(run: RunDirectory) -> None:
    with run.lock():
        message = refused(lambda: RunDirectory.open(run.path).lock().__enter__())
    assert message.startswith(f"{run.path} is in use by process {os.getpid()} on ")
    with run.lock():
        pass


def test_leftovers_are_removed_by_the_holder_and_by_nobody_else(run: RunDirectory) -> None:
    save(run, 1)
    left = [run.path / ".tmp-summary.json", run.path / "checkpoints" / ".tmp-round-000002"]
    left[0].write_text("{")
    left[1].mkdir()
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "acc')
    assert RunDirectory.open(run.path).load().round == 1 and run.records() == [{"round": 1}]
    assert all(path.exists() for path in left)
    with run.lock():
        assert not any(path.exists() for path in left)
        run.append({"round": 2})
    assert run.records() == [{"round": 1}, {"round": 2}]


# Records


def test_records(run: RunDirectory) -> None:
    assert run.records() == []
    run.append({"round": 1, "loss": math.nan, "text": "a\nb"})
    run.append({"round": 2, "loss": torch.tensor(0.5), "seconds": {"round": 0.1}})
    assert run.records() == [
        {"round": 1, "loss": None, "text": "a\nb"},
        {"round": 2, "loss": 0.5, "seconds": {"round": 0.1}},
    ]


def test_a_torn_last_line_is_dropped_at_any_place(run: RunDirectory) -> None:
    run.append({"round": 1})
    run.append({"round": 2, "text": "ü"})
    data = (run.path / "metrics.jsonl").read_bytes()
    first = data.index(b"\n") + 1
    for size in range(first, len(data)):
        (run.path / "metrics.jsonl").write_bytes(data[:size])
        assert run.records() == [{"round": 1}]


def test_a_damaged_line_in_the_middle(run: RunDirectory) -> None:
    path = run.path / "metrics.jsonl"
    path.write_text('{"round": 1}\n{"rou\n{"round": 3}\n')
    assert refused(run.records) == f"Line 2 of {path} is not a JSON object; remove that line to use the others."


def test_rewinding_drops_later_records_and_checkpoints(run: RunDirectory) -> None:
    for round in range(1, 7):
        save(run, round, best=round == 2, keep=10)
    run.rewind(4)
    assert [record["round"] for record in run.records()] == [1, 2, 3, 4]
    assert run.checkpoints() == [1, 2, 3, 4]
    assert run.load("best").round == 2
    run.rewind(0)
    assert run.records() == [] and run.checkpoints() == []


def test_a_rewind_that_fails_keeps_the_records(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for round in (1, 2):
        run.append({"round": round})
    full_disk(monkeypatch, os, "fsync", 1)
    assert "No space left" in refused(lambda: run.rewind(1))
    assert [record["round"] for record in run.records()] == [1, 2]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_rewind_that_stops_half_way_leaves_a_usable_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    for round in range(1, 7):
        save(run, round, best=round in (2, 5), keep=10)
    with monkeypatch.context() as patch:
        full_disk(patch, Path, "rename", call)
        refused(lambda: run.rewind(3))
    last = run.load().round
    assert last == 7 - call and run.load("best").round == (5 if last >= 5 else 2)
    assert len(run.records()) >= last


# Checkpoints


def test_a_checkpoint_comes_back(run: RunDirectory) -> None:
    folder = save(run, 12, best=True)
    assert folder == run.path / "checkpoints" / "round-000012"
    names = ["memory.safetensors", "meta.json", "state.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    for which in ("last", "best", 12):
        loaded = RunDirectory.open(run.path).load(which)  # type: ignore[arg-type]
        assert loaded.round == 12 and list(loaded.memory) == ["a/b", "ü"]
        assert torch.equal(loaded.state["n"], torch.full((10,), 12))
        assert torch.equal(loaded.memory["a/b"]["n"], torch.full((10,), 12))
        assert {k: loaded.meta[k] for k in ("round", "best", "format", "method", "note")} == {
            "round": 12,
            "best": 12,
            "format": 2,
            "method": "fedavg",
            "note": "x",
        }


def test_the_newest_and_the_best_are_kept(run: RunDirectory) -> None:
    kept = []
    for round in range(1, 8):
        save(run, round, best=round in (2, 5))
        kept.append(run.checkpoints())
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 7]]
    assert run.load("best").round == 5 and run.load().round == 7
    save(run, 8, keep=1)
    assert run.checkpoints() == [5, 8]


def test_rounds_beyond_a_million_are_in_order(run: RunDirectory) -> None:
    for round in (999_999, 1_000_000):
        save(run, round)
    assert run.load().round == 1_000_000


def test_a_round_may_be_saved_again(run: RunDirectory) -> None:
    save(run, 1, best=True)
    run.save(1, {"n": torch.tensor(5)}, {}, {}, best=False)
    assert run.checkpoints() == [1]
    assert run.load("best").state["n"] == 5


def test_no_checkpoint(run: RunDirectory) -> None:
    message = refused(run.load)
    assert message == f"{run.path} has no checkpoint; start the run again from its config.yaml with another --out."


def test_no_best_checkpoint(run: RunDirectory) -> None:
    save(run, 1)
    message = refused(lambda: run.load("best"))
    assert message == f"{run.path} has no best checkpoint, as nothing was evaluated; use the last one."


def test_no_checkpoint_of_that_round(run: RunDirectory) -> None:
    save(run, 1)
    save(run, 2)
    assert refused(lambda: run.load(7)) == f"{run.path} has no checkpoint of round 7; choose from: 1, 2."


OLDER = "remove the folder round-000002 to go on from round-000001."
NONE_OLDER = "there is no older one, so start the run again from its config.yaml with another --out."


@pytest.mark.parametrize("name", ["state.safetensors", "memory.safetensors"])
@pytest.mark.parametrize(("rounds", "advice"), [((1, 2), OLDER), ((2,), NONE_OLDER)])
def test_damaged_and_missing_files(run: RunDirectory, name: str, rounds: tuple[int, ...], advice: str) -> None:
    for round in rounds:
        save(run, round)
    file = run.path / "checkpoints" / "round-000002" / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    damaged = f"Checkpoint file {file} is damaged (its SHA-256 is not the one in meta.json); {advice}"
    assert refused(run.load) == damaged
    file.write_bytes(data[:20])
    assert refused(run.load) == damaged
    file.unlink()
    assert refused(run.load) == f"Checkpoint file {file} is missing or not readable; {advice}"


def test_the_advice_to_remove_a_damaged_checkpoint_works(run: RunDirectory) -> None:
    save(run, 1)
    shutil.rmtree(save(run, 2))
    assert run.load().round == 1


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"format": 3}, "has format 3 where this fedloom knows 2"),
        ({"format": 1}, "has format 1 where this fedloom knows 2 (it was written by an earlier version)"),
        ({"round": 3}, "is of round 3"),
        ({"digests": 5}, "has digests of another type than it is written with"),
        ({"best": "x"}, "has best of another type than it is written with"),
        ({"method": "pfedhn"}, "is of the method 'pfedhn' in a run of 'fedavg'"),
        (
            {"layout": {"state": ["other"], "clients": [], "groups": []}},
            "does not describe the files beside it",
        ),
        ({"layout": 3}, "does not describe the files beside it"),
        (
            {"layout": {"state": ["n"], "clients": ["a/b", "ü"], "groups": []}},
            "does not describe the files beside it",
        ),
        (None, "is damaged"),
        ("less", "is not of a fedloom checkpoint"),
    ],
)
def test_a_foreign_checkpoint(run: RunDirectory, change: Any, fault: str) -> None:
    save(run, 1)
    file = save(run, 2) / "meta.json"
    meta = json.loads(file.read_text())
    if isinstance(change, dict):
        file.write_text(json.dumps({**meta, **change}))
    else:
        file.write_text("{" if change is None else json.dumps({"round": 2}))
    assert refused(run.load) == f"Checkpoint file {file} {fault}; {OLDER}"


def test_other_folders_are_not_checkpoints(run: RunDirectory) -> None:
    save(run, 1)
    for name in ("round-000009", "backup", ".tmp-round-000010"):
        (run.path / "checkpoints" / name).mkdir()
    for name in ("backup", ".tmp-round-000010"):
        (run.path / "checkpoints" / name / "meta.json").write_text("{}")
    assert run.checkpoints() == [1]


# Environment and summary


def test_summary_and_environment(run: RunDirectory) -> None:
    assert run.summary() is None and run.environment() is None
    run.write_summary({"finished": False, "accuracy": math.inf})
    run.write_summary({"finished": True})
    run.write_environment({"seed": 3})
    assert run.summary() == {"finished": True} and run.environment() == {"seed": 3}


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_summary(run: RunDirectory, text: str) -> None:
    path = run.path / "summary.json"
    path.write_text(text)
    assert refused(run.summary) == f"Cannot read {path}: it is damaged or not readable; restore or remove it."


# Full disks and killed processes


def full_disk(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """The ``call``-th call of a function finds the disk full."""
    real, calls = getattr(owner, name), iter(range(1, 1000))

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **options)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        *((os, "fsync", call) for call in range(1, 7)),
        (Path, "mkdir", 1),
        (Path, "rename", 1),
        (Path, "rename", 2),
    ],
)
def test_a_full_disk_harms_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int
) -> None:
    for round in (1, 2):
        save(run, round, best=round == 1)
    run.append({"round": 3})
    tree = {"n": torch.full((10,), 3)}
    with monkeypatch.context() as patch:
        full_disk(patch, owner, name, call)
        message = refused(lambda: run.save(3, tree, {}, {}, best=True))
    assert message.startswith("Cannot write ")
    assert message.endswith(
        ": No space left on device; free some space and try again, what was saved before is intact."
    )
    assert not list(run.path.glob("**/.*"))
    last = run.load()
    assert last.round in (2, 3) and (last.state["n"] == last.round).all()
    assert {1, 2} <= set(run.checkpoints()) and run.load("best").round in (1, 3)
    run.save(3, tree, {}, {}, best=True)  # some space was freed
    assert run.checkpoints() == [2, 3]


# Imports torch once, then forks a process for every line that it reads; says its pid, and when it is dead.
NURSERY = """
import os, sys
import torch
from fedloom.runs.directory import RunDirectory

def work(path):
    run = RunDirectory.open(path)
    with run.lock():
        round = run.load().round if run.checkpoints() else 0
        run.rewind(round)
        while True:
            round += 1
            run.append({"round": round, "padding": "x" * 200})
            tree = {"n": torch.full((5000,), round), "buffers": {}}
            for again in range(1 + (round > 2)):
                run.save(round, tree, {"a": tree, "b": tree}, {}, best=round % 5 == 1)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        work(line.strip())
    sys.stdout.write(f"{child}\\n")
    sys.stdout.flush()
    os.waitpid(child, 0)
    sys.stdout.write("dead\\n")
    sys.stdout.flush()
"""


def consistent(run: RunDirectory, which: Any) -> int:
    loaded = run.load(which)
    trees = [loaded.state, *loaded.memory.values()]
    assert list(loaded.memory) == ["a", "b"]
    assert all((tree["n"] == loaded.round).all() and tree["buffers"] == {} for tree in trees)
    return loaded.round


@pytest.mark.slow
def test_kill_9_at_any_moment(run: RunDirectory) -> None:
    draw, reached = random.Random(0), [0]
    command = [sys.executable, "-c", NURSERY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        assert nursery.stdin is not None and nursery.stdout is not None
        for _ in range(20):
            nursery.stdin.write(f"{run.path}\n")
            nursery.stdin.flush()
            worker = int(nursery.stdout.readline())
            deadline = time.monotonic() + 60
            while not run.checkpoints() or run.checkpoints()[-1] <= reached[-1]:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            seen = run.checkpoints()[-1]
            time.sleep(draw.uniform(0, 0.05))
            os.kill(worker, signal.SIGKILL)
            assert nursery.stdout.readline() == "dead\n"

            last = consistent(run, "last")  # as a reader, beside whatever was left
            assert last >= seen  # what was there before the kill is there after it
            with run.lock():
                last = consistent(run, "last")
                assert last >= seen
                assert consistent(run, "best") == last - (last - 1) % 5
            assert [record["round"] for record in run.records()][:last] == list(range(1, last + 1))
            assert not list(run.path.glob("**/.*"))
            reached.append(last)
        nursery.stdin.close()
    assert len(set(reached)) == 21  # each worker went on from where the one before it was killed


def test_nothing_here_imports_torch() -> None:
    modules = ("files", "lock", "checkpoint", "directory", "environment", "trackers")
    code = f"import sys, {', '.join(f'fedloom.runs.{m}' for m in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("value", ["2020-01-01", "!!set {a}", "[[1]]", "{a: 1}", "!!binary YQ=="])
def test_a_config_with_what_is_no_option(run: RunDirectory, value: str) -> None:
    with (run.path / "config.yaml").open("a") as file:
        file.write(f"rounds: {value}\n")
    with pytest.raises(RunError, match="has 'rounds', which is no option with text, numbers or a list"):
        RunDirectory.open(run.path)


def test_a_line_of_no_round(run: RunDirectory) -> None:
    (run.path / "scores.jsonl").write_text('{"round": "one"}\n')
    with pytest.raises(RunError, match=r"Line 1 of .*scores\.jsonl is of no round"):
        run.scores()
