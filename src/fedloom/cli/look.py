# SPDX-License-Identifier: Apache-2.0
"""Commands to look at runs: report, watch, privacy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.output import json_line, printable, table, tell
from fedloom.core.errors import ConfigError

RunPaths = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, or directories of runs.")]
Baseline = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The method that the others are compared with; without it, the first one."),
]


def report(
    runs: RunPaths,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write; without it, report.html in RUN or where all runs lie."),
    ] = None,
    baseline: Baseline = None,
    figure: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="One figure instead, e.g. curves, as the .pdf or .svg of --out."),
    ] = None,
    choose: Annotated[
        list[str] | None, typer.Option(metavar="OPTION", help="With --figure: a choice of it, e.g. seconds.")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="For --figure mix or admission: run code outside of fedloom that RUN names.")
    ] = False,
) -> None:
    """Write one run, or several side by side, as one HTML file that opens anywhere and loads nothing.

    Example: fedloom report runs/pfedhn-digits-seed0

    A figure for a paper: fedloom report runs/pfedhn-digits-seed0 --figure embeddings --out map.pdf
    """
    from fedloom.reports import figures
    from fedloom.reports.compare import find_runs
    from fedloom.reports.report import ON_DEMAND, chart, write

    if figure is None:
        if choose:
            raise ConfigError("--choose is about a figure; give --figure too.")
        typer.echo(write(runs, out, baseline))
        return
    found = find_runs(runs)
    if figure in ON_DEMAND and len(found) == 1 and found[0].extra(ON_DEMAND[figure]) is None:
        from fedloom import api  # needs torch and the data

        loaded = api.load(found[0].path, trust=trust)
        loaded.mix() if figure == "mix" else loaded.admission_curve()
    typer.echo(figures.save(chart(runs, figure, baseline), out or Path(f"{figure}.pdf"), choices=choose or ()))


def watch(
    runs: RunPaths,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The port; 0: any that is free.")] = 0,
) -> None:
    """Show runs live in a browser, deployments too. The page is read-only.

    Example: fedloom watch runs/pfedhn-digits-seed0
    """
    from fedloom.reports.watch import Watch

    with Watch(runs, port) as served:
        tell(f"watching {', '.join(map(str, runs))}; end with Ctrl-C. Open:")
        typer.echo(served.url)
        try:
            served.serve()
        except KeyboardInterrupt:
            tell("stopped; the runs go on.")


def privacy(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    delta: Annotated[
        float | None, typer.Option(min=0, max=0.1, metavar="DELTA", help="Another delta than the run's --dp-delta.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Say what a run guarantees its clients: what it has made public, with which epsilon, and what is not covered.

    Example: fedloom privacy runs/fedavg-digits-seed0
    """
    from fedloom.reports.privacy import statement
    from fedloom.runs.directory import PRIVACY, RunDirectory

    directory = RunDirectory.open(run)
    prepared = directory.has_roster() and directory.roster().preparation is not None
    found = statement(directory.config, directory.lines(PRIVACY), delta, prepared=prepared)
    if json:
        json_line({**found._asdict(), "releases": [kind._asdict() for kind in found.releases]})
        return
    if found.releases:
        rows = [(kind.what, kind.times, kind.noise, kind.drawn) for kind in found.releases]
        table(["made public", "times", "noise", "drawn"], rows)
    for title, sentences in (("Covered", found.covered), ("Not covered", found.not_covered)):
        if sentences:
            typer.echo(f"{title}:")
        for sentence in sentences:
            typer.echo(printable(f"- {sentence}"))
