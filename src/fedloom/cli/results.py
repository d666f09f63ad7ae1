# SPDX-License-Identifier: Apache-2.0
"""What came of runs, as tables or JSON, in the manner that their progress was shown in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedloom.cli.output import json_line, printable, table, tell

if TYPE_CHECKING:
    from fedloom.api import Run
    from fedloom.reports.compare import Row
    from fedloom.reports.several import Several

AUTO, JSON, QUIET = "auto", "json", "quiet"
"""Names of progress displays."""


def finished(run: Run, progress: str) -> None:
    """Print a finished run: its JSON lines are out already."""
    if progress == QUIET:
        typer.echo(run.path)
    elif progress == AUTO:
        _result(run.summary)


def comparison(paths: Sequence[Path], progress: str, baseline: str | None = None) -> None:
    """Print the comparison of runs, as a table or as JSON, and what it tells apart."""
    runs = side_by_side(paths, baseline)
    found = runs.comparison
    if progress == JSON:
        json_line({"comparison": [_plain(row) for row in found.rows], "verdicts": runs.verdicts()})
    elif progress == AUTO:
        metrics = dict.fromkeys(row.metric for row in found.rows)
        numbers = ("best test", "last test", "worst 10%", "unseen", "seconds", "MB sent")
        rows = [(*_who(row), *_numbers(row)) for row in found.rows]
        spread = ", mean ± standard deviation over seeds" * any(len(row.seeds) > 1 for row in found.rows)
        table(["method", "options", "seeds", *numbers], rows, title=f"test {' or '.join(metrics)}{spread}")
        for sentence in runs.verdicts():
            typer.echo(printable(sentence))


def side_by_side(paths: Sequence[Path], baseline: str | None = None) -> Several:
    """The runs; told at once is which are left out, and what keeps the others from being compared."""
    from fedloom.reports.several import caveats, several

    runs = several(paths, baseline)
    for sentence in (*runs.comparison.left_out, *filter(None, [runs.comparison.unlike]), *caveats(runs)):
        tell(sentence)
    return runs


def _who(row: Row) -> tuple[object, ...]:
    return row.method, " ".join(f"{name}={value}" for name, value in row.options.items()), len(row.seeds)


def _numbers(row: Row) -> tuple[object, ...]:
    seconds, megabytes = f"{row.seconds.mean:.1f}", f"{row.megabytes.mean:.1f}"
    return row.best, row.last, row.worst10, row.unseen, seconds, megabytes


def _plain(row: Row) -> dict[str, Any]:
    return {name: value._asdict() if hasattr(value, "_asdict") else value for name, value in asdict(row).items()}


def _result(summary: Mapping[str, Any]) -> None:
    """Print a run in numbers: at its best and last round, and for unseen clients."""
    metric, unseen = summary["metric"], summary.get("unseen") or {}
    rows = [_at_round(name, summary.get(name) or {}, "participants", metric) for name in ("best", "last")]
    if unseen:
        rows.append(_at_round("unseen", {"round": summary["rounds"], **unseen}, "unseen", metric))
    table(["", "round", f"val {metric}", f"test {metric}", "worst 10%"], rows)
    if "reason" in unseen:
        typer.echo(printable(str(unseen["reason"])))


def _at_round(label: str, found: Mapping[str, Any], clients: str, metric: str) -> tuple[object, ...]:
    names = (f"val/{metric}", f"test/{metric}", f"test/{metric}_worst10")
    return label, found.get("round"), *(found.get(f"deployed/{clients}/{name}") for name in names)
