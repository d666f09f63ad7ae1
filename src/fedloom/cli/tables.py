# SPDX-License-Identifier: Apache-2.0
"""Published tables: run a recipe, and put results side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.output import tell


def table(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, e.g. one of the files in recipes/.")],
    only: Annotated[list[str] | None, typer.Option(metavar="ROW", help="This row, by name; may be repeated.")] = None,
    seed: Annotated[list[int] | None, typer.Option(min=0, metavar="N", help="This seed; may be repeated.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rounds of the first row; the others in proportion.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="TEXT", help="cpu, cuda, cuda:1, or auto: a GPU if there is one.")] = (
        "auto"
    ),
    data_root: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where published files lie; without it, FEDLOOM_DATA.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write; without it, runs/ and the recipe's name.")
    ] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run code outside of fedloom that RECIPE names.")] = False,
) -> None:
    """Run a published table: every row with every seed, and print it beside the paper's figures.

    What is measured is kept in --out and not measured again; started several times with one --out, the processes share
    the work.

    Example: fedloom table recipes/hypergenfl-table3-cifar10.yaml
    """
    import logging

    from fedloom.reports.measured import markdown
    from fedloom.tables.perform import RESULTS, Performance
    from fedloom.tables.recipe import read

    logging.basicConfig(level=logging.ERROR)
    found = read(recipe, trust)
    folder = out or Path("runs") / recipe.stem
    performance = Performance(
        found, recipe, folder, seeds=seed or (), only=only or (), rounds=rounds, device=device, data_root=data_root,
        say=tell,
    )  # fmt: skip
    try:
        measured = performance.run()
    except KeyboardInterrupt:
        tell(f"stopped; what was measured is in {folder}. The same command goes on.")
        raise typer.Exit(130) from None
    typer.echo(
        "\n\n".join(filter(None, [f"{found.title}\n{found.source}", markdown(measured.cells(only or ())), found.note]))
    )
    typer.echo(str(folder / RESULTS))
    if failed := [(row.name, why) for row in performance.wanted if (why := measured.failure(row.name))]:
        for name, why in failed:
            tell(f"{name} has no number: {why}")
        raise typer.Exit(1)


def board(
    results: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Results that `fedloom table` wrote.")],
) -> None:
    """Print methods by settings from the results of several tables, as Markdown.

    Example: fedloom board results/*.json
    """
    from fedloom.reports.measured import Measured, markdown
    from fedloom.reports.measured import board as side_by_side

    typer.echo(markdown(side_by_side([Measured.read(path) for path in results])))
