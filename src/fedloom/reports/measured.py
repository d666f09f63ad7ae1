# SPDX-License-Identifier: Apache-2.0
"""What was measured for a published table: a small JSON file of numbers, and the tables that are made from it.

``fedloom table`` writes such a file, ``results/`` in the repository holds those that the documents are made from::

    format, recipe, title, setting, source, note, command, columns
    length    what part of the recipe's training this is, e.g. "60 of 500 rounds"; all of it, where it is missing
    rows      name, the paper's figure, the name on the board ("" : not on it)
    made      commit, date, hardware and torch of the runs
    runs      row, seed, what was chosen, which entry of ``made``, seconds, metrics (shares, not per cent), or why not
    means     for older rows whose runs were not kept: means, standard deviations and number of seeds

A mean over seeds has Student's 95% interval. Where a row was tried with several values of an option, the table has the
one with the best validation score over the seeds that all of them were tried with.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.core.errors import RunError
from fedloom.reports.statistics import LEVEL, Interval, over_seeds
from fedloom.reports.tables import Cells, as_markdown
from fedloom.runs.files import from_json, read_file, to_json, write_file

FORMAT = 1
FIRST = ("Local", "FedAvg", "FedAvg + prior")
"""The controls of every setting: they lead the board, measured or not."""


class Made(NamedTuple):
    """What runs were made with."""

    commit: str
    date: str
    hardware: str
    torch: str


def in_words(made: Iterable[Made]) -> str:
    """What runs were made with, in one line; those of one machine and one torch together."""
    together: dict[tuple[str, str], list[Made]] = {}
    for one in dict.fromkeys(made):
        together.setdefault((one.hardware, one.torch), []).append(one)
    texts = []
    for (hardware, torch), some in together.items():
        dates = sorted({one.date for one in some})
        commits = dict.fromkeys(one.commit for one in some)
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        texts.append(f"{hardware}, torch {torch}, {when}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}")
    return "; ".join(texts)


class Line(NamedTuple):
    """A row of a table."""

    name: str
    paper: float | str | None = None
    board: str | None = None
    """Its name on the board; None: its own, "": it is not there."""


class Cell(NamedTuple):
    """A number of a table."""

    interval: Interval
    seeds: int
    chosen: Mapping[str, Any]

    def __str__(self) -> str:
        mean = f"{100 * self.interval.mean:.1f}"
        half = None if self.interval.high is None else 100 * (self.interval.high - self.interval.mean)
        return mean if half is None else f"{mean} ± {half:.1f}"


@dataclass(frozen=True)
class Measured:
    """The file, read."""

    recipe: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Line]
    setting: str = ""
    source: str = ""
    note: str = ""
    command: str = ""
    length: str = ""
    made: Sequence[Made] = ()
    runs: Sequence[Mapping[str, Any]] = ()
    means: Sequence[Mapping[str, Any]] = field(default=())

    @classmethod
    def read(cls, path: Path) -> Measured:
        """The results at ``path``."""
        try:
            data = read_file(path)
        except OSError as error:
            raise RunError(f"Cannot read {path}: {error.strerror}; give a file that `fedloom table` wrote.") from error
        try:
            content = from_json(data)
            if content.pop("format", None) != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            content["rows"] = [Line(**row) for row in content["rows"]]
            content["made"] = [Made(**one) for one in content.get("made", ())]
            found = cls(**{one.name: content.pop(one.name) for one in fields(cls) if one.name in content})
            if content:
                raise ValueError(f"it has {', '.join(map(repr, content))}")
            assert found.columns and all(
                isinstance(one, str) for one in [*found.columns, *(r.name for r in found.rows)]
            )
            for run in (*found.runs, *found.means):
                assert isinstance(run["row"], str) and isinstance(run["chosen"], dict) and found.made[run["made"]]
            for run in found.runs:
                numbers = [run["seed"], *run.get("metrics", {}).values()]
                assert all(isinstance(one, int | float) for one in numbers)
            for run in found.means:
                assert isinstance(run["seeds"], int) and all(len(pair) == 2 for pair in run["metrics"].values())
        except (ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            raise RunError(
                f"{path} is no file of results ({type(error).__name__}: {error}); give one that `fedloom table` wrote."
            ) from error
        return found

    def write(self, path: Path) -> None:
        """Put the results at ``path``."""
        content = {one.name: getattr(self, one.name) for one in fields(self)}
        content["rows"] = [{k: v for k, v in row._asdict().items() if v is not None} for row in self.rows]
        content["made"] = [one._asdict() for one in self.made]
        kept = {name: value for name, value in content.items() if value or name in ("runs", "rows", "columns")}
        write_file(path, to_json({"format": FORMAT, **kept}, indent=1))

    def choice(self, row: str) -> dict[str, Any]:
        """What was chosen for a row, by validation."""
        runs = [run for run in self.runs if run["row"] == row]
        tried: dict[str, list[Mapping[str, Any]]] = {}
        for run in runs:
            tried.setdefault(repr(sorted(run["chosen"].items())), []).append(run)
        if not tried:
            return {}
        common = set.intersection(*({run["seed"] for run in some} for some in tried.values()))

        def reached(some: Sequence[Mapping[str, Any]]) -> float:
            scores = [run.get("metrics", {}).get("val", -math.inf) for run in some if run["seed"] in common]
            return statistics.fmean(scores) if scores else -math.inf

        return dict(max(tried.values(), key=reached)[0]["chosen"])

    def cell(self, row: str, column: str) -> Cell | None:
        """A number of the table, if it was measured."""
        chosen = self.choice(row)
        numbers = [
            run["metrics"][column]
            for run in self.runs
            if run["row"] == row and run["chosen"] == chosen and column in run.get("metrics", {})
        ]
        if numbers:
            return Cell(over_seeds(numbers), len(numbers), chosen)
        for one in self.means:
            if one["row"] == row and column in one["metrics"]:
                (mean, std), seeds = one["metrics"][column], one["seeds"]
                return Cell(interval(mean, std, seeds), seeds, one["chosen"])
        return None

    def failure(self, row: str) -> str | None:
        """Why a row that was run has no number; None if it has one, or was not run."""
        runs = [run for run in self.runs if run["row"] == row]
        return None if any("metrics" in run for run in runs) else next((str(run["failed"]) for run in runs), None)

    def of(self, row: str) -> list[Made]:
        """What a row was made with."""
        used = [run["made"] for run in (*self.runs, *self.means) if run["row"] == row]
        return [self.made[i] for i in dict.fromkeys(used)]

    def cells(self, rows: Sequence[str] = ()) -> Cells:
        """The table as texts, in per cent; rows that were not measured are left out."""
        body = []
        for line in self.rows:
            found = [self.cell(line.name, column) for column in self.columns]
            known = [cell for cell in found if cell is not None]
            if not known or (rows and line.name not in rows):
                continue
            shown = {key: f"{value:g}" if isinstance(value, float) else value for key, value in known[0].chosen.items()}
            chosen = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shown.items())
            name = f"{line.name} ({chosen})" if chosen else line.name
            paper = "" if line.paper is None else str(line.paper)
            body.append([name, *("–" if c is None else str(c) for c in found), paper, str(known[0].seeds)])
        return Cells(["", *self.columns, "the paper", "seeds"], body, "")

    def provenance(self, rows: Sequence[str] = ()) -> str:
        """One line: how the table is made, how much of it, and what it was made with."""
        names = [line.name for line in self.rows if not rows or line.name in rows]
        made = in_words(one for name in names for one in self.of(name))
        return f"`{self.command or f'fedloom table {self.recipe}'}`: {f'{self.length}; ' if self.length else ''}{made}."


def interval(mean: float, std: float | None, seeds: int) -> Interval:
    """Student's interval of a mean and a standard deviation."""
    if std is None or seeds < 2:
        return Interval(mean, None, None)
    from scipy import stats

    half = float(stats.t.ppf((1 + LEVEL) / 2, seeds - 1)) * std / math.sqrt(seeds)
    return Interval(mean, mean - half, mean + half)


def board(found: Sequence[Measured]) -> Cells:
    """Methods by settings: the first column of each table, of each method the first row that was measured."""
    settings = [one for one in found if one.setting]
    rows: dict[str, dict[str, str]] = {name: {} for name in FIRST}
    published: dict[str, str] = {}
    for one in settings:
        best = [float(line.paper) for line in one.rows if isinstance(line.paper, int | float)]
        published[one.setting] = f"{max(best):.1f}" if best else "–"
        for line in one.rows:
            label = line.name if line.board is None else line.board
            cell = one.cell(line.name, one.columns[0])
            if label and cell is not None:
                rows.setdefault(label, {}).setdefault(one.setting, str(cell))
    columns = [one.setting for one in settings]
    body = [[label, *(cells.get(c, "–") for c in columns)] for label, cells in rows.items()]
    head = [
        ["of the training", *(one.length or "all" for one in settings)],
        ["best of the papers", *(published[c] for c in columns)],
    ]
    return Cells(["", *columns], [*head, *body], "")


def markdown(cells: Cells) -> str:
    """A table as Markdown, without a note."""
    return as_markdown(cells).rstrip("\n")
