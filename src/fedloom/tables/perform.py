# SPDX-License-Identifier: Apache-2.0
"""Run a recipe: every row with every seed, each written down when it is done.

    OUT/results.json        all that was measured so far (``reports.measured``)
    OUT/table.md            the table made from it
    OUT/runs/RUN/           one for each trained row, choice and seed: its run, without checkpoints in the end,
                            and ``measured.json``, its share of the results

What is measured is not measured again. Several processes can work on one folder: each takes what no other works on.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

import fedloom
from fedloom.core.errors import FedloomError, NeedsError, RunError
from fedloom.data.arrays import Arrays
from fedloom.data.registry import load as load_data
from fedloom.reports.measured import Line, Made, Measured, markdown
from fedloom.runs.files import from_json, read_file, to_json, write_file, writing
from fedloom.runs.lock import locked
from fedloom.tables.recipe import COLUMNS, Recipe, Row
from fedloom.training.machine import device_of

MEASURED, RUNS, RESULTS, TABLE = "measured.json", "runs", "results.json", "table.md"
MEASUREMENT = {"row", "seed", "chosen", "made"}
"""What every measurement has."""
PAUSE = 1.0
"""Seconds between looks at what other processes do."""


@dataclass(frozen=True)
class Task:
    """One training run of a table, and the rows that are about it."""

    row: Row
    views: Sequence[Row]
    seed: int
    chosen: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Of its folder."""
        return folder_name(self.row.name, self.chosen, f"seed{self.seed}")


def folder_name(first: str, chosen: Mapping[str, Any], *last: str) -> str:
    """A folder's name that says what was chosen."""
    name = "-".join([first, *(f"{k}={v}" for k, v in chosen.items()), *last])
    return "".join(c if c.isalnum() or c in ".=-" else "_" for c in name)


class Performance:
    """A recipe being run in a folder."""

    def __init__(
        self,
        recipe: Recipe,
        file: Path,
        out: Path,
        *,
        seeds: Sequence[int] = (),
        only: Sequence[str] = (),
        rounds: int | None = None,
        device: str = "auto",
        data_root: str | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        device_of(device)  # before a run fails for it, which would be written down
        self.recipe, self.file, self.out, self.say = recipe, file, out, say
        self.seeds, self.rounds, self.device, self.data_root = tuple(seeds or recipe.seeds), rounds, device, data_root
        self.wanted = [recipe.row(name) for name in only] or list(recipe.rows)
        with writing(out):
            (out / RUNS).mkdir(parents=True, exist_ok=True)
        self._check_same(out / "recipe.json")

    def _check_same(self, path: Path) -> None:
        """Refuse a folder with results of another number of rounds: they would stand in one table."""
        now = {"recipe": self.file.name, "rounds": self.rounds}
        if not path.exists():
            write_file(path, to_json(now))
        elif (before := _kept(path)) != now:
            raise RunError(
                f"{self.out} has results of {before.get('recipe')} with --rounds {before.get('rounds')}, not of "
                f"{now['recipe']} with --rounds {now['rounds']}; give another --out."
            )

    def run(self) -> Measured:
        """Whatever is missing; gives all that is there then."""
        while missing := [task for task in self._tasks() if self._missing(task)]:
            if not any(self._take(task) for task in missing if self._missing(task)):
                time.sleep(PAUSE)  # others work on all that is left
        return self.collect()

    def _tasks(self) -> Iterator[Task]:
        """What is to be trained, as far as it is known; choices become known when their runs are done."""
        trained = {self.recipe.trained(row).name: self.recipe.trained(row) for row in self.wanted}
        choosing = self.recipe.choose_seeds
        for seed in dict.fromkeys([*(choosing or ()), *self.seeds]):
            for row in trained.values():
                views = [one for one in self.wanted if self.recipe.trained(one) is row]
                variants = list(row.variants())
                if choosing is not None and len(variants) > 1:
                    variants = variants if seed in choosing else self._choices(row, views)
                elif seed not in self.seeds:
                    continue
                for chosen in variants:
                    yield Task(row, views, seed, chosen)

    def _choices(self, row: Row, views: Sequence[Row]) -> list[dict[str, Any]]:
        """The variants that the row or a view of it has chosen; none while that is open."""
        assert self.recipe.choose_seeds is not None
        tasks = [Task(row, views, s, chosen) for s in self.recipe.choose_seeds for chosen in row.variants()]
        if any(self._missing(task) for task in tasks):
            return []
        found, choices = self._found(), []
        for view in views:
            chosen = found.choice(view.name)
            if chosen not in choices:
                choices.append(chosen)
        return choices

    def _missing(self, task: Task) -> list[Row]:
        there = {run["row"] for run in self._runs_of(task)}
        return [view for view in task.views if view.name not in there]

    def _options(self, task: Task) -> dict[str, Any]:
        """What a task is trained with, as it is read from a file."""
        options = {**self.recipe.settings(task.row, self.rounds), **task.chosen}
        return from_json(to_json({"method": task.row.method, **options}))

    def _runs_of(self, task: Task) -> list[dict[str, Any]]:
        path = self.out / RUNS / task.name / MEASURED
        if not path.exists():
            return []
        runs = _runs_in(path)
        if _kept(path).get("options") != self._options(task):
            raise RunError(
                f"{path.parent} was trained with other options than {self.file} says now; give another --out."
            )
        return runs

    def _take(self, task: Task) -> bool:
        """Do a task, unless another process has it; whether it was done."""
        folder = self.out / RUNS / task.name
        with writing(folder):
            folder.mkdir(exist_ok=True)
        try:
            with locked(folder):
                missing = self._missing(task)
                if missing:
                    self._train_and_try(replace(task, views=missing), folder)
        except RunError as error:
            if "is in use by" not in str(error):
                raise
            return False
        release()
        self.collect()
        return True

    def _train_and_try(self, task: Task, folder: Path) -> None:
        """Train one row, try it in each of the ways that its views want, and write down what came of it."""
        row, path = task.row, folder / "run"
        options = {**self.recipe.settings(row, self.rounds), **task.chosen}
        data = _arrays(options.pop("dataset"), self.data_root)
        shutil.rmtree(path, ignore_errors=True)  # a run that was stopped before it was written down
        done, start = self._runs_of(task), time.perf_counter()
        common = {"seed": task.seed, "chosen": dict(task.chosen)}
        try:
            run = fedloom.run(
                row.method, dataset=data, out=path, seed=task.seed, device=self.device, progress="quiet", keep=1,
                **options,
            )  # fmt: skip
            made, seconds = _made(run), round(time.perf_counter() - start, 1)
            load = _loader(run.path, data)
            for view in task.views:
                found = {name: round(number, 6) for name, number in _tried(self.recipe, run, view, load).items()}
                done.append({"row": view.name, **common, "made": made, "seconds": seconds, "metrics": found})
                shown = ", ".join(f"{c} {100 * found[c]:.2f}" for c in self.recipe.columns if c in found)
                self.say(f"{view.name} {dict(task.chosen) or ''} seed {task.seed}: {shown} ({seconds:.0f} s)")
        except FedloomError as error:
            there = {one["row"] for one in done}
            made = _made(None, self.device)
            done += [{"row": view.name, **common, "made": made, "failed": str(error)}
                     for view in task.views if view.name not in there]  # fmt: skip
            self.say(f"{row.name} {dict(task.chosen) or ''} seed {task.seed} failed: {error}")
        finally:
            shutil.rmtree(path / "checkpoints", ignore_errors=True)
        write_file(folder / MEASURED, to_json({"options": self._options(task), "runs": done}))

    def collect(self) -> Measured:
        """All that was measured in the folder, also written there as one file and as a table."""
        while True:
            try:
                with locked(self.out):  # by one process at a time: all write by way of one temporary file
                    found = self._found()
                    found.write(self.out / RESULTS)
                    write_file(self.out / TABLE, (markdown(found.cells()) + "\n").encode())
                    return found
            except RunError as error:
                if "is in use by" not in str(error):
                    raise
                time.sleep(PAUSE / 10)

    def _found(self) -> Measured:
        """All that was measured in the folder."""
        made: dict[Made, int] = {}
        runs = []
        order = {row.name: place for place, row in enumerate(self.recipe.rows)}
        for path in sorted((self.out / RUNS).glob(f"*/{MEASURED}")):
            for run in _runs_in(path):
                if run["row"] in order:
                    entry = made.setdefault(Made(**run["made"]), len(made))
                    runs.append({**run, "made": entry})
        runs.sort(key=lambda run: (order[run["row"]], json.dumps(run["chosen"], sort_keys=True), run["seed"]))
        full = self.recipe.settings(self.recipe.rows[0], None)["rounds"]
        shortened = self.rounds if self.rounds != full else None
        return Measured(
            self.file.name, self.recipe.title, self.recipe.columns,
            [Line(row.name, row.paper, row.board) for row in self.recipe.rows],
            self.recipe.setting, self.recipe.source, self.recipe.note,
            f"fedloom table {_shown(self.file)}" + (f" --rounds {shortened}" if shortened else ""),
            f"{shortened} of {full} rounds" if shortened else "", list(made), runs,
        )  # fmt: skip


def release() -> None:
    """Give back what a run that is done held of the GPU."""
    gc.collect()  # recorded graphs hold memory, and are in cycles
    torch.cuda.empty_cache()


def _kept(path: Path) -> dict[str, Any]:
    """What an earlier call wrote down."""
    try:
        return from_json(read_file(path))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} is damaged or not readable; remove it, and what it was of is measured again."
        ) from error


def _runs_in(path: Path) -> list[dict[str, Any]]:
    """The measurements of a row, as far as they are some."""
    runs = _kept(path).get("runs")
    if not isinstance(runs, list) or not all(isinstance(run, dict) and set(run) >= MEASUREMENT for run in runs):
        raise RunError(f"{path} holds no measurements; remove it, and they are made again.")
    return runs


def _shown(file: Path) -> str:
    """The recipe's path as it is typed in the repository's folder."""
    return f"recipes/{file.name}" if file.parent.name == "recipes" else str(file)


@cache
def _arrays(name: str, data_root: str | None) -> Arrays:
    """A dataset, read once for all runs."""
    return load_data(name, data_root)


def _made(run: fedloom.Run | None, device: str = "") -> dict[str, str]:
    environment = (run.directory.environment() if run else None) or {}
    hardware = str(environment.get("device", device))
    if hardware == "cpu":
        threads = torch.get_num_threads()
        hardware = f"CPU, {threads} thread{'s' * (threads > 1)} of {environment.get('cpus')} cores"
    return {"commit": commit(), "date": datetime.now(UTC).date().isoformat(), "hardware": hardware,
            "torch": torch.__version__}  # fmt: skip


@cache
def commit() -> str:
    """Of the source that runs, if it lies in a git repository; else the version."""
    here = Path(__file__).parent
    try:
        told = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=7"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        return told.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return fedloom.__version__


Load = Callable[[Literal["best", "last"], Row], "fedloom.Run"]


def _loader(path: Path, data: Arrays) -> Load:
    """Loads a run as a view wants it; what was loaded last is kept, as views often differ in what costs nothing."""
    last: dict[Any, fedloom.Run] = {}

    def load(which: Literal["best", "last"], view: Row) -> fedloom.Run:
        changed = dict(view.options) if view.of else {}  # the options of a row that is trained are in its config
        key = (which, view.adapt, json.dumps(changed, sort_keys=True))
        if key not in last:
            last.clear()
            last[key] = fedloom.load(path, dataset=data, which=which, adapt=view.adapt, trust=True, **changed)
        return last[key]

    return load


def _tried(recipe: Recipe, run: fedloom.Run, view: Row, load: Load) -> dict[str, float]:
    """Every column's number for a view of a run, and ``val``, which chooses."""
    known = {which: run.summary.get(which) or {} for which in ("best", "last")}
    known["last"] |= run.summary.get("unseen", {})
    found: dict[str, float] = {}
    for column in dict.fromkeys(["val", *recipe.columns]):
        which, subject, metric = COLUMNS[column]
        clients, split = subject.split("/")
        name = f"deployed/{subject}/{metric}"
        # views that are about newcomers change nothing for participants
        metrics = known[which] if not view.of or (clients == "participants" and not view.adapt) else {}
        if name not in metrics:
            loaded = load(which, view)
            try:
                if clients == "participants":
                    metrics = loaded.simulation.evaluation().metrics
                else:
                    metrics = loaded.evaluate_unseen(split, view.mode, view.samples)
            except NeedsError:  # newcomers that the method cannot serve, or not without labels: no number here
                continue
        if name in metrics:
            found[column] = metrics[name]
    return found
