# SPDX-License-Identifier: Apache-2.0
"""A published table, run again: every row of a recipe with every seed, in one process, beside the paper's figures.

    python benchmarks/recipes.py recipes/hypergenfl-table3.yaml [--seeds 0 1 2] [--only ROW ...] [--rounds R]
        [--device cuda] [--data-root DIR] [--out DIR] [--trust]

A recipe is a YAML file: ``title``, ``source`` (the citation), ``note``, ``seeds``, ``columns``, ``evaluations`` (how
many in a run), ``options`` (what all rows share and what differs from the defaults) and ``rows``. A row has a ``name``,
the ``paper``'s figure, if it has one, and either a ``method`` with ``options`` of its own, which is trained; or ``of``,
the name of a row that is trained and tried here in another way: with ``adapt: prior``, with participants' models for
newcomers (``mode``), with few ``samples`` of each newcomer, with other ``options``. ``choose: {option: [values]}``
trains a row with each value; the table has the one with the best validation accuracy of the participants, averaged over
seeds. ``each: {what: [values]}`` makes a row for every combination of values, of options or of what a row can have. A
file without rows is a config of ``fedloom run``: one row.

``--rounds R`` has the first row take R rounds and all others in proportion, ``finetune_after`` included.

Every seed goes through all rows before the next one starts. ``results.json`` and ``table.md`` in the output folder are
written after each run; runs that are in ``results.json`` are not repeated. Checkpoints are removed when a row is done.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

import fedloom
from fedloom import algorithms
from fedloom.core.errors import ConfigError, FedloomError
from fedloom.core.trust import check as check_trust
from fedloom.data.arrays import Arrays
from fedloom.data.registry import load as load_data
from fedloom.runs.options import RunOptions

COLUMNS: Mapping[str, tuple[str, str, str]] = {
    # the checkpoint, the clients' data, the metric
    "best": ("best", "participants/test", "accuracy"),
    "last": ("last", "participants/test", "accuracy"),
    "pooled best": ("best", "participants/test", "accuracy_pooled"),
    "pooled last": ("last", "participants/test", "accuracy_pooled"),
    "val": ("best", "participants/val", "accuracy"),
    "unseen": ("last", "unseen/test", "accuracy"),
    "zACC": ("last", "unseen/all", "accuracy"),
    "zACC best": ("best", "unseen/all", "accuracy"),
}
"""What a column of a table shows, in per cent. Participants' validation data choose the best checkpoint."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    paper: float | str | None = None
    method: str = ""
    of: str = ""
    adapt: str | None = None
    mode: str = "admit"
    samples: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    choose: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def variants(self) -> Iterator[dict[str, Any]]:
        """The options of each run of this row, for one seed."""
        if not self.choose:
            yield {}
        for name, values in self.choose.items():
            yield from ({name: value} for value in values)


@dataclass(frozen=True)
class Recipe:
    """A table."""

    title: str
    rows: tuple[Row, ...]
    source: str = ""
    note: str = ""
    seeds: tuple[int, ...] = (0, 1, 2)
    columns: tuple[str, ...] = ("best", "last")
    evaluations: int = 10
    options: Mapping[str, Any] = field(default_factory=dict)

    def trained(self, row: Row) -> Row:
        """The row whose run this row is about."""
        return next(one for one in self.rows if one.name == row.of) if row.of else row

    def settings(self, row: Row, rounds: int | None) -> dict[str, Any]:
        """The options that a row is trained with; with ``rounds``, shortened or prolonged in proportion."""
        given = {**self.options, **row.options}
        if rounds is not None:
            first = {**self.options, **self.rows[0].options}["rounds"]
            for name in ("rounds", "finetune_after"):
                if name in given:
                    given[name] = max(1, round(given[name] * rounds / first))
        return {"eval_every": max(1, given["rounds"] // self.evaluations), **given}


def read(path: Path, trust: bool = False) -> Recipe:
    """A recipe from its file, checked; it names no code outside of fedloom without the user's trust."""
    recipe = _read(path)
    for row in recipe.rows:
        config = algorithms.get(recipe.trained(row).method).config
        for chosen in row.variants():
            check_trust(path, {**recipe.options, **row.options, **chosen}, RunOptions, config, trust=trust)
    return recipe


def _read(path: Path) -> Recipe:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "rows" not in content:
        options = {name: value for name, value in content.items() if name != "method"}
        row = Row(name=content["method"], method=content["method"])
        return Recipe(path.stem, (row,), options=options)
    rows = tuple(row for described in content.pop("rows") for row in expanded(described))
    recipe = Recipe(rows=rows, **{k: tuple(v) if isinstance(v, list) else v for k, v in content.items()})
    names = [row.name for row in rows]
    for row in rows:
        if names.count(row.name) > 1:
            raise ConfigError(f"{path} has two rows called {row.name!r}; give each a name of its own.")
        if bool(row.method) == bool(row.of) or (row.of and row.of not in names):
            raise ConfigError(f"{path}: the row {row.name!r} needs either a method or, in `of`, another row's name.")
    unknown = [column for column in recipe.columns if column not in COLUMNS]
    if unknown:
        raise ConfigError(f"{path} has the column {unknown[0]!r}; choose from {', '.join(COLUMNS)}.")
    return recipe


def expanded(described: dict[str, Any]) -> Iterator[Row]:
    """The rows that an entry stands for: one, or one for every combination of what is in ``each``."""
    each = described.pop("each", {})
    own = {one.name for one in fields(Row)}
    for values in itertools.product(*each.values()):
        changed = dict(zip(each, values))
        name = ", ".join(
            [described["name"], *(str(v) if k not in SHOWN else SHOWN[k].format(v) for k, v in changed.items())]
        )
        options = {**described.get("options", {}), **{k: v for k, v in changed.items() if k not in own}}
        yield Row(**{**described, **{k: v for k, v in changed.items() if k in own}, "name": name, "options": options})


SHOWN = {"samples": "n = {}", "descriptor_epsilon": "epsilon = {}", "local_lr": "rate {}"}
"""How values are written in the name of a row; others are written as they are."""


@cache
def arrays(name: str, data_root: str | None) -> Arrays:
    """A dataset, read once for all runs."""
    return load_data(name, data_root)


class Results:
    """What was measured, on disk after each run."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.folder, self.recipe = folder, recipe
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "results.json"
        self.runs: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def has(self, row: Row, seed: int, chosen: Mapping[str, Any]) -> bool:
        return any((r["row"], r["seed"], r["chosen"]) == (row.name, seed, dict(chosen)) for r in self.runs)

    def add(self, **run: Any) -> None:
        self.runs.append(run)
        _write(self.folder / "results.json", json.dumps(self.runs, indent=1))
        _write(self.folder / "table.md", table(self.recipe, self.runs))


def perform(
    recipe: Recipe,
    results: Results,
    seeds: Sequence[int],
    given: argparse.Namespace,
    say: Callable[[str], None] = print,
) -> None:
    """Every row that is wanted, with every seed; what has been measured already is left alone."""
    wanted = [row for row in recipe.rows if not given.only or row.name in given.only]
    for seed in seeds:
        for row in {recipe.trained(row).name: recipe.trained(row) for row in wanted}.values():
            views = [one for one in wanted if recipe.trained(one) is row]
            for chosen in row.variants():
                missing = [view for view in views if not results.has(view, seed, chosen)]
                if missing:
                    _train_and_try(recipe, results, row, missing, seed, chosen, given, say)
                    gc.collect()  # recorded graphs hold memory, and are in cycles
                    torch.cuda.empty_cache()


def _train_and_try(
    recipe: Recipe,
    results: Results,
    row: Row,
    views: Sequence[Row],
    seed: int,
    chosen: Mapping[str, Any],
    given: argparse.Namespace,
    say: Callable[[str], None],
) -> None:
    """Train one row, try it in each of the ways that the views of it want, and write down what came of it."""
    options = {**recipe.settings(row, given.rounds), **chosen}
    data = arrays(options.pop("dataset"), given.data_root)
    name = "-".join([row.name, *map(str, chosen.values()), f"seed{seed}"])
    path = results.folder / "runs" / "".join(c if c.isalnum() or c in ".-" else "_" for c in name)
    if path.exists():
        shutil.rmtree(path)  # a run that was stopped before it was written down
    start = time.perf_counter()
    try:
        run = fedloom.run(
            row.method, dataset=data, out=path, seed=seed, device=given.device, progress="quiet", keep=1, **options
        )
        seconds = time.perf_counter() - start
        load = _loader(run.path, data)
        for view in views:
            found = _tried(recipe, run, view, load)
            told = run.records[-1]["diagnostics"]
            results.add(row=view.name, seed=seed, chosen=dict(chosen), seconds=seconds, metrics=found, diagnostics=told)
            shown = ", ".join(f"{c} {100 * found[c]:.2f}" for c in recipe.columns if found.get(c) is not None)
            say(f"{view.name} {dict(chosen) or ''} seed {seed}: {shown} ({seconds:.0f} s)")
    except FedloomError as error:
        for view in views:
            if not results.has(view, seed, chosen):
                results.add(row=view.name, seed=seed, chosen=dict(chosen), failed=str(error), metrics={})
        say(f"{row.name} seed {seed} failed: {error}")
    finally:
        shutil.rmtree(path / "checkpoints", ignore_errors=True)


def _loader(path: Path, data: Arrays) -> Callable[[str, Row], fedloom.Run]:
    """Loads a run as a view wants it; what was loaded last is kept, as views often differ in what costs nothing."""
    last: dict[Any, fedloom.Run] = {}

    def load(which: str, view: Row) -> fedloom.Run:
        changed = dict(view.options) if view.of else {}  # the options of a row that is trained are in its config
        key = (which, view.adapt, json.dumps(changed, sort_keys=True))
        if key not in last:
            last.clear()
            last[key] = fedloom.load(path, dataset=data, which=which, adapt=view.adapt, trust=True, **changed)
        return last[key]

    return load


def _tried(recipe: Recipe, run: fedloom.Run, view: Row, load: Callable[[str, Row], fedloom.Run]) -> dict[str, float]:
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
            if clients == "participants":
                metrics = loaded.simulation.evaluation().metrics
            else:
                metrics = loaded.evaluate_unseen(split, view.mode, view.samples)
        if name in metrics:
            found[column] = metrics[name]
    return found


def table(recipe: Recipe, runs: Sequence[Mapping[str, Any]]) -> str:
    """The table in Markdown: means over seeds, with the standard deviation of the sample."""
    heads = ["", *recipe.columns, "the paper", "seeds", "seconds a run"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in recipe.rows:
        of_row = [run for run in runs if run["row"] == row.name and "failed" not in run]
        chosen = _best_choice(of_row)
        mine = [run for run in of_row if run["chosen"] == chosen]
        if not mine:
            continue
        cells = [_spread([run["metrics"][c] for run in mine if c in run["metrics"]]) for c in recipe.columns]
        what = ", ".join(f"{option} {value}" for option, value in chosen.items())
        name = f"{row.name} ({what})" if what else row.name
        seconds = statistics.fmean(run["seconds"] for run in mine)
        paper = "" if row.paper is None else str(row.paper)
        lines.append(f"| {name} | {' | '.join(cells)} | {paper} | {len(mine)} | {seconds:.0f} |")
    return "\n".join(lines) + "\n"


def _best_choice(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The option's value with the best mean validation accuracy of the participants, among those that failed least."""
    choices: list[dict[str, Any]] = []
    for run in runs:
        if run["chosen"] not in choices:
            choices.append(run["chosen"])
    reached = [[run["metrics"].get("val", 0.0) for run in runs if run["chosen"] == choice] for choice in choices]
    best = max(zip(choices, reached), key=lambda pair: (len(pair[1]), statistics.fmean(pair[1])), default=({}, []))
    return best[0]


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = f"{100 * statistics.fmean(values):.2f}"
    return f"{mean} ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else mean


def _write(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", help="without it, those of the recipe")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows, by name")
    parser.add_argument("--rounds", type=int, help="rounds of the first row; the others in proportion")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-root")
    parser.add_argument("--out", type=Path, help="without it, runs/ and the recipe's name")
    parser.add_argument("--trust", action="store_true", help="let the recipe name code outside of fedloom")
    given = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    try:
        recipe = read(given.recipe, given.trust)
        names = [row.name for row in recipe.rows]
        strangers = [name for name in given.only if name not in names]
        if strangers:
            raise ConfigError(f"--only names {strangers[0]!r}; the rows are {', '.join(map(repr, names))}.")
        results = Results(given.out or Path("runs") / given.recipe.stem, recipe)
        perform(recipe, results, given.seeds or recipe.seeds, given)
    except FedloomError as error:
        raise SystemExit(str(error)) from None
    print(f"\n{recipe.title}\n{recipe.source}\n\n{table(recipe, results.runs)}\n{recipe.note}")


if __name__ == "__main__":
    main()
