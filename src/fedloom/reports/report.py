# SPDX-License-Identifier: Apache-2.0
"""Reports and figures of runs, as ``fedloom report`` and ``Run.report`` give them. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.core.errors import ConfigError, RunError, unknown
from fedloom.reports import figures, one, several, single
from fedloom.reports.charts import Chart
from fedloom.reports.compare import find_runs
from fedloom.reports.facts import Facts, facts_of, readable
from fedloom.reports.page import Page, html, plain
from fedloom.runs.directory import RunDirectory
from fedloom.runs.files import write_file
from fedloom.runs.records import ADMISSION, MIX

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE = "report.html"
ON_DEMAND = {"mix": MIX, "admission": ADMISSION}
"""Figures of what has to be found out first, and the file that then has it."""


@readable()
def page(paths: Iterable[Path | str], baseline: str | None = None) -> Page:
    """The page of the run at ``paths``, or of several."""
    runs = find_runs(paths)
    if len(runs) == 1:
        if baseline is not None:
            raise ConfigError("--baseline is for several runs; there is one. Leave it out, or give more runs.")
        return single.page_of(facts_of(runs[0]))
    return several.page_of(several.several([run.path for run in runs], baseline))


def write(paths: Sequence[Path | str], out: Path | None = None, baseline: str | None = None) -> Path:
    """Write the report; without ``out`` as report.html into the run, or the folder that all the runs lie in."""
    text = html(page(paths, baseline))
    if out is None:
        folders = [run.path.absolute() for run in find_runs(paths)]
        common = Path(os.path.commonpath(folders)) if len(folders) > 1 else folders[0]
        here = Path.cwd()
        out = (common.relative_to(here) if common.is_relative_to(here) else common) / FILE
    if out.is_dir():
        out = out / FILE
    write_file(out, text.encode())
    return out


@readable()
def chart(paths: Sequence[Path | str], name: str, baseline: str | None = None) -> Chart:
    """The chart of that name."""
    runs = find_runs(paths)
    if len(runs) == 1:
        return chart_of(runs[0], name)
    if name not in several.CHARTS:
        _check_number(name, one.CHARTS, "one run; give that run alone")
        raise unknown("figure of several runs", name, several.CHARTS)
    made = several.CHARTS[name](several.several([run.path for run in runs], baseline))
    if made is None or not made.rows:
        raise RunError(f"These runs have nothing for the figure {name}: {WHY.get(name, 'they have no such records')}.")
    return made


@readable()
def chart_of(run: RunDirectory, name: str) -> Chart:
    """The chart of that name of one run."""
    if name not in one.CHARTS:
        _check_number(name, several.CHARTS, "several runs; give more than one")
        raise unknown("figure of a run", name, one.CHARTS)
    facts = facts_of(run)
    made = one.CHARTS[name](facts)
    if made is None or not made.rows:
        known = ", ".join(single.charts_of(facts))
        why = f" ({WHY[name]})" if name in WHY else ""
        raise RunError(f"{run.path} has nothing for the figure {name}{why}; it has: {known}.")
    return made


def _check_number(name: str, charts: Iterable[str], of: str) -> None:
    if name in charts:
        raise ConfigError(f"The figure {name} is of {of}.")


WHY = {
    "means": "their metrics differ",
    "curves": "nothing was evaluated, or metrics differ",
    "histogram": "it is for ten clients or more",
    "embeddings": "it is of methods with an embedding for each client, and for three clients or more",
    "networks": "it is for runs with several networks",
    "newcomers": "it is for runs with unseen clients, in simulations of classification",
    "weights": "it is of methods whose server weighs clients, e.g. hypergenfl",
    "effective": "it is of methods whose server weighs clients, e.g. hypergenfl",
    "estimates": "it is for runs with unseen clients and --adapt prior",
    "sweep": "it is for three runs or more that differ in one option with numbers, or in two",
    "differences": "it needs runs of one federation with a seed in common",
    "winners": "it needs runs of one federation with a seed in common",
}
"""What a figure needs."""


def figure(run: RunDirectory, name: str, choices: Sequence[str] = ()) -> Figure:
    """The chart of that name as a figure of matplotlib."""
    return figures.figure(chart_of(run, name), choices=choices)


@readable()
def snippet(facts: Facts) -> str:
    """A run in short, for a notebook: no script, nothing that is loaded, every text escaped."""
    made = single.page_of(facts, quick=True)
    tiles = "".join(
        f"<td style='padding:2px 18px 2px 0;text-align:left'><div style='opacity:.7;font-size:85%'>{plain(tile.label)}"
        f"</div><b style='font-size:135%'>{plain(tile.value)}</b></td>"
        for tile in made.tiles
    )
    warned = "".join(f"<div style='opacity:.75'>{plain(text)}</div>" for text in made.warnings)
    return (
        f"<div style='font-family:system-ui,sans-serif;max-width:60em'><div><b>{plain(made.verdict[0])}</b></div>"
        f"<table style='border:0;margin:.4em 0'><tr>{tiles}</tr></table>{warned}"
        f"<div style='opacity:.7;font-size:85%'>{plain(str(facts.path))}</div></div>"
    )
