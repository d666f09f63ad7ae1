# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped, wherever and however, ends as one that was not: bit for bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom import api
from fedloom.algorithms import pfedhn_pc, scaffold
from fedloom.cli.main import main
from fedloom.core.errors import ConfigError, RunError
from fedloom.core.trees import Tree, leaves
from fedloom.engines import engine as engines
from fedloom.engines.job import Job
from fedloom.progress import Quiet
from fedloom.runs import files
from fedloom.runs.directory import RunDirectory
from fedloom.training.simulation import Simulation

ROUNDS = 40
FLAGS = "--clients 6 --rounds 40 --eval-every 2 --local-steps 2 --cohort 3 --model mlp:hidden=8 --engine sequential"
TINY = {"clients": 4, "cohort": 3, "rounds": 6, "eval_every": 3, "local_steps": 2, "model": "mlp:hidden=8"}

ON_POSIX = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


def bits(path: Path, which: Any = "last") -> dict[str, bytes]:
    """Every tensor of a checkpoint: the server's state and the clients' memory."""
    saved = RunDirectory.open(path).load(which)
    tree: Tree = {"state": saved.state, "memory": saved.memory}
    return {name: leaf.numpy().tobytes() for name, leaf in leaves(tree)}


def records(path: Path) -> list[dict[str, Any]]:
    """The records without their times."""
    found = RunDirectory.open(path).records()
    return [{name: value for name, value in record.items() if name != "seconds"} for record in found]


def numbers(path: Path) -> dict[str, Any]:
    """The summary without its times, and without the reason for its engine: a resumed run has it from its config."""
    found = RunDirectory.open(path).summary()
    assert found is not None
    return {name: value for name, value in found.items() if "seconds" not in name and name != "engine_reason"}


def assert_same(path: Path, straight: Path) -> None:
    """Checkpoints, records and summary of two finished runs are equal."""
    assert bits(path) == bits(straight)
    assert RunDirectory.open(path).best_round() == RunDirectory.open(straight).best_round()
    assert bits(path, "best") == bits(straight, "best")
    assert records(path) == records(straight)
    assert numbers(path) == numbers(straight)
    assert numbers(path)["finished"]


# Killed


@pytest.fixture(scope="module")
def process() -> Callable[..., ForkServerProcess]:
    """``process("run", ...)`` starts the command line in a process of its own.

    It is forked from a server that has imported everything, so that most of its life is not the imports.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedloom.api", "fedloom.cli.main", "sklearn.datasets", "torch._dynamo", "sympy"])

    def start(*words: object) -> ForkServerProcess:
        started = context.Process(target=main, args=([str(word) for word in words],))
        started.start()
        return started

    return start


def when_to_kill(draw: random.Random, path: Path) -> Callable[[float], bool]:
    """A random moment: while it starts, so many rounds later, while a checkpoint is written, or while it ends."""
    metrics, checkpoints = path / "metrics.jsonl", path / "checkpoints"

    def lines() -> int:
        try:
            return metrics.read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    kind = draw.choice(["start", "round", "round", "checkpoint", "end"])
    if kind == "start":
        seconds = draw.uniform(0, 0.7)
        return lambda age: age > seconds
    if kind == "checkpoint":
        after = lines() + draw.randint(0, 4)
        return lambda age: lines() > after and any(checkpoints.glob(".tmp-*"))
    rounds = lines() + draw.randint(1, 5) if kind == "round" else ROUNDS - 1
    pause = draw.uniform(0, 0.03) if kind == "round" else draw.uniform(0, 0.06)
    reached: list[float] = []

    def due(age: float) -> bool:
        if not reached and lines() > rounds:
            reached.append(age)
        return bool(reached) and age > reached[0] + pause

    return due


def kill_and_go_on(
    process: Callable[..., ForkServerProcess], draw: random.Random, words: list[str], path: Path, most: int
) -> int:
    """Start, kill, resume and kill, until the run has finished; gives the number of kills."""
    kills = 0
    while True:
        command = ["resume", path, "--quiet"] if (path / "config.yaml").exists() else [*words, "--out", path, "--quiet"]
        due = when_to_kill(draw, path) if kills < most else lambda age: False
        worker = process(*command)
        start = time.monotonic()
        while worker.is_alive():
            if due(time.monotonic() - start):
                worker.kill()
                break
            time.sleep(0.0005)
        worker.join()
        code = worker.exitcode
        worker.close()
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            return kills
        kills += 1


def torture(process: Callable[..., ForkServerProcess], folder: Path, method: str, kills: int, at_once: int) -> None:
    words = ["run", method, *FLAGS.split()]
    worker = process(*words, "--out", folder / "straight", "--quiet")
    worker.join()
    assert worker.exitcode == 0
    assert [record["round"] for record in records(folder / "straight")] == list(range(1, ROUNDS + 1))
    draw = random.Random(f"{method}: when to kill")
    done, run = 0, 0
    while done < kills:
        path = folder / f"killed-{run}"
        done += kill_and_go_on(process, draw, words, path, at_once)
        assert_same(path, folder / "straight")
        left = [file.name for file in path.rglob("*") if file.name.startswith((files.TEMPORARY, files.ASIDE))]
        assert left == []
        assert (path / "environment.json").is_file()
        run += 1


@ON_POSIX
@pytest.mark.slow
@pytest.mark.parametrize("method", ["scaffold", "pfedhn_pc"])
def test_a_run_killed_twenty_times_ends_as_one_that_was_not(
    process: Callable[..., ForkServerProcess], tmp_path: Path, method: str
) -> None:
    torture(process, tmp_path, method, kills=20, at_once=40)


@ON_POSIX
@pytest.mark.slow
def test_a_run_killed_twice_ends_as_one_that_was_not(process: Callable[..., ForkServerProcess], tmp_path: Path) -> None:
    torture(process, tmp_path, "scaffold", kills=2, at_once=2)


@pytest.mark.parametrize("left", [[], ["lock"], ["lock", ".tmp-config.yaml"]], ids=["empty", "lock", "half a config"])
def test_what_a_run_killed_before_its_config_left_is_no_obstacle(tmp_path: Path, left: list[str]) -> None:
    path = tmp_path / "run"
    path.mkdir()
    for name in left:
        (path / name).write_text("half")
    api.run("scaffold", out=path, progress="quiet", **TINY)
    assert len(records(path)) == TINY["rounds"]


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    straight = api.run("scaffold", out=tmp_path / "straight", progress="quiet", **TINY)
    config = RunDirectory.open(straight.path).config
    killed = RunDirectory.create(tmp_path / "killed", config)
    killed.append(straight.records[0])  # of a round that no checkpoint knows of
    api.resume(killed.path, progress="quiet")
    assert_same(killed.path, straight.path)
    assert (killed.path / "environment.json").is_file()


# Interrupted


class Stop(Quiet):
    """Ctrl-C when the record of a round is shown."""

    def __init__(self, round: int) -> None:
        self.at = round

    def update(self, record: dict[str, Any]) -> None:
        if record["round"] == self.at:
            raise KeyboardInterrupt


@pytest.fixture(scope="module", params=["scaffold", "pfedhn_pc"])
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    out = tmp_path_factory.mktemp("straight") / request.param
    return api.run(request.param, out=out, progress="quiet", **TINY).path


def interrupted(straight: Path, path: Path, progress: Any = "quiet") -> dict[str, Any]:
    """The same run until the interruption; its summary."""
    with pytest.raises(KeyboardInterrupt):
        api.run(straight.name, out=path, progress=progress, **TINY)
    return numbers(path)


def assert_prefix(path: Path, straight: Path, rounds: int) -> None:
    """What is on disk is the first ``rounds`` of the run that was not stopped, and going on gives the rest."""
    assert [record["round"] for record in records(path)] == list(range(1, rounds + 1))
    assert records(path) == records(straight)[:rounds]
    assert RunDirectory.open(path).checkpoints()[-1] == rounds
    summary = numbers(path)
    assert (summary["finished"], summary["rounds"]) == (False, rounds)
    api.resume(path, progress="quiet")
    assert_same(path, straight)


@pytest.mark.parametrize("round", [1, 2, 3, 6])
def test_an_interrupt_between_rounds_keeps_the_last_round(straight: Path, tmp_path: Path, round: int) -> None:
    summary = interrupted(straight, tmp_path / "run", Stop(round))
    assert (summary["best"] or {}).get("round") in (None, 3, 6)
    assert_prefix(tmp_path / "run", straight, round)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("call", [3, 8, 13])
def test_an_interrupt_within_a_round_leaves_no_memory_of_half_a_round(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, engine: str
) -> None:
    """Clients run one after another, so that the first ones' memory is new when a later one is stopped."""
    module = {"scaffold": scaffold, "pfedhn_pc": pfedhn_pc}[straight.name]
    final, groups, calls = module.client_final, engines.groups, []

    def stopped(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return final(*arguments)

    def one_by_one(job: Job) -> list[Job]:
        """Groups of one client each: every one is remembered before the next one begins."""
        return [group.of([client]) for group in groups(job) for client in group.clients]

    options = {**TINY, "engine": engine, "rounds": 5}
    monkeypatch.setattr(engines, "groups", one_by_one)
    whole = api.run(straight.name, out=tmp_path / "whole", progress="quiet", **options).path
    monkeypatch.setattr(module, "client_final", stopped)
    with pytest.raises(KeyboardInterrupt):
        api.run(straight.name, out=tmp_path / "run", progress="quiet", **options)
    monkeypatch.setattr(module, "client_final", final)
    rounds = (call - 1) // 3
    assert numbers(tmp_path / "run")["rounds"] == rounds
    until = api.run(straight.name, out=tmp_path / "until", progress="quiet", **{**options, "rounds": rounds}).path
    # evaluations begin the memory of clients that were not asked, so only those that were are compared
    there, expected = bits(tmp_path / "run"), bits(until)
    assert {name: expected[name] for name in there} == there
    api.resume(tmp_path / "run", progress="quiet")
    assert_same(tmp_path / "run", whole)


PLACES = {
    "in an evaluation": (Simulation, "evaluation", 2, 5),
    "before a record is written": (RunDirectory, "append", 4, 3),
    "after a record was written": (Simulation, "mark", 4, 2),
    "before a checkpoint is written": (RunDirectory, "save", 2, 6),
    "while a file of a checkpoint is written": (files, "_move_in", 2, 6),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_after_training_and_before_the_checkpoint(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner, name, call, kept = PLACES[place]
    whole, calls = getattr(owner, name), []

    def stopped(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return whole(*arguments, **options)

    monkeypatch.setattr(owner, name, stopped)
    interrupted(straight, tmp_path / "run")
    assert_prefix(tmp_path / "run", straight, kept)


def test_a_best_round_whose_checkpoint_was_interrupted_stays_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**TINY, "eval_every": 1, "rounds": 3, "local_lr": 0.1, "local_steps": 20}
    straight = api.run("scaffold", out=tmp_path / "straight", progress="quiet", **options)
    best = straight.summary["best"]["round"]
    assert best > 1
    save = RunDirectory.save

    def stopped(self: RunDirectory, round: int, *arguments: Any, **others: Any) -> Path:
        if round == best:
            monkeypatch.setattr(RunDirectory, "save", save)
            raise KeyboardInterrupt
        return save(self, round, *arguments, **others)

    monkeypatch.setattr(RunDirectory, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        api.run("scaffold", out=tmp_path / "run", progress="quiet", **options)
    assert RunDirectory.open(tmp_path / "run").best_round() == numbers(tmp_path / "run")["best"]["round"] == best
    api.resume(tmp_path / "run", progress="quiet")
    assert_same(tmp_path / "run", straight.path)


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that trains, past its first rounds."""
    path = tmp_path / "running"
    words = ["run", "scaffold", "--clients", "4", "--rounds", "100000", "--eval-every", "3", "--model", "mlp:hidden=8"]
    words += ["--local-steps", "2", "--cohort", "3", "--json", "--out", str(path)]
    env = {**os.environ, "PYTHONPATH": str(Path(fedloom.__file__).absolute().parents[1])}
    program = "from fedloom.cli.main import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout
        for _ in range(4):
            assert running.stdout.readline()
        yield running, path
        if running.poll() is None:
            running.kill()
            running.communicate()


@ON_POSIX
def test_ctrl_c_and_a_second_process(endless: tuple[subprocess.Popen[str], Path], capsys: Any, tmp_path: Path) -> None:
    running, path = endless
    for command in (["resume", str(path)], ["run", "scaffold", "--out", str(path), "--clients", "4"]):
        with pytest.raises(SystemExit) as end:
            main(command)
        told = capsys.readouterr()
        assert (end.value.code, told.out, told.err.count("\n")) == (2, "", 1)
        why = f"in use by process {running.pid} on " if command[0] == "resume" else "already holds a run"
        assert why in told.err
    running.send_signal(signal.SIGINT)
    _, told_there = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in told_there
    done = json.loads((path / "summary.json").read_text())
    assert not done["finished"]
    rounds = done["rounds"]
    assert rounds >= 4
    assert [record["round"] for record in records(path)] == list(range(1, rounds + 1))
    assert RunDirectory.open(path).checkpoints()[-1] == rounds
    options = {**TINY, "eval_every": 3, "rounds": rounds + 1}
    straight = api.run("scaffold", out=tmp_path / "straight", progress="quiet", **options).path
    api.resume(path, rounds=rounds + 1, progress="quiet")
    assert bits(path) == bits(straight)
    assert records(path) == records(straight)


# Further


def test_a_run_that_goes_further_is_as_long_a_run(straight: Path, tmp_path: Path) -> None:
    short = api.run(straight.name, out=tmp_path / "run", progress="quiet", **{**TINY, "rounds": 3})
    assert short.summary["rounds"] == 3
    longer = api.resume(short.path, rounds=6, progress="quiet")
    assert_same(longer.path, straight)
    assert longer.config == RunDirectory.open(straight).config


def test_a_finished_run_that_is_resumed_stays_as_it_was(straight: Path, tmp_path: Path) -> None:
    path = api.run(straight.name, out=tmp_path / "run", progress="quiet", **TINY).path
    api.resume(path, progress="quiet")
    assert_same(path, straight)


def test_a_longer_run_that_is_killed_does_not_pass_for_the_finished_shorter_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = api.run("scaffold", out=tmp_path / "run", progress="quiet", **{**TINY, "rounds": 2})

    def killed(self: Simulation) -> None:
        raise SystemExit(9)

    monkeypatch.setattr(Simulation, "train_round", killed)
    with pytest.raises(SystemExit):
        api.resume(done.path, rounds=4, progress="quiet")
    with pytest.raises(RunError, match="has no summary yet: the run was stopped"):
        _ = api.load(done.path).summary


def test_fewer_rounds_than_were_done_are_refused(tmp_path: Path) -> None:
    done = api.run("scaffold", out=tmp_path / "run", progress="quiet", **{**TINY, "rounds": 2})
    with pytest.raises(ConfigError) as caught:
        api.resume(done.path, rounds=1, progress="quiet")
    assert str(caught.value) == (
        f"--rounds is 1, but {done.path} has done 2 rounds; give a greater number, or leave it out."
    )
    assert RunDirectory.open(done.path).config["rounds"] == 2
    assert done.summary["finished"]


@pytest.mark.parametrize("unready", ["no such folder", "a folder without a run"])
def test_there_must_be_a_run_to_resume(tmp_path: Path, unready: str) -> None:
    path = tmp_path if unready == "a folder without a run" else tmp_path / "nothing"
    with pytest.raises(RunError, match=r"is not a run directory: it has no config\.yaml"):
        api.resume(path, progress="quiet")


def test_resuming_does_not_touch_torch_s_generator(tmp_path: Path) -> None:
    done = api.run("scaffold", out=tmp_path / "run", progress="quiet", **{**TINY, "rounds": 1})
    before = torch.get_rng_state()
    api.resume(done.path, rounds=2, progress="quiet")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("large", [(0, 1 << 62), (1 << 62, 0)], ids=["to a GPU", "from a GPU"])
@pytest.mark.parametrize("method", ["pfedhn", "pfedhn_pc", "it_pfl_hn"])
def test_a_large_table_goes_on_where_its_recent_rows_are_kept_otherwise(
    method: str, large: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU they lie beside the table, on a GPU in it (``looms.outer``)."""
    straight = fedloom.run(method, out=str(tmp_path / "straight"), progress="quiet", **TINY)
    monkeypatch.setattr("fedloom.looms.outer.LARGE", large[0])
    moved = fedloom.run(method, out=str(tmp_path / "moved"), progress="quiet", **{**TINY, "rounds": 3})
    before = bits(moved.path)
    monkeypatch.setattr("fedloom.looms.outer.LARGE", large[1])
    api.resume(moved.path, rounds=6, progress="quiet")
    assert records(moved.path) == records(straight.path)
    after, expected = bits(moved.path), bits(straight.path)
    assert [any("recent" in name for name in found) for found in (before, after)] == [limit == 0 for limit in large]
    same = [name for name in expected if large[1] or name.startswith("state/loom/")]
    assert same and [after[name] for name in same] == [expected[name] for name in same]
