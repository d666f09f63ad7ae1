# SPDX-License-Identifier: Apache-2.0
"""``fedloom data``: fetch published files, look at a split."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.catalogue import DataRoot
from fedloom.cli.options import flags, given, with_flags
from fedloom.cli.output import friendly, table, tell
from fedloom.runs.options import RunOptions

SPLIT_OPTIONS = (
    *(
        "dataset",
        "task",
        "target",
        "groups",
        "data_root",
        "partition",
        "clients",
        "unseen",
        "unseen_partition",
        "unseen_groups",
        "split_by",
    ),
    *("val_share", "test_share", "server_data", "seed"),
)


def application() -> typer.Typer:
    """The two commands."""
    app = typer.Typer(help="Fetch datasets, and look at how they are split over clients.", no_args_is_help=True)
    app.command()(friendly(fetch))
    app.command()(friendly(with_flags(show, flags(RunOptions, "Options", SPLIT_OPTIONS))))
    return app


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `fedloom datasets`.")],
    data_root: DataRoot = None,
) -> None:
    """Download the published files of a dataset and check them; resumes where it stopped.

    Example: fedloom data fetch mnist --data-root ~/data
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from fedloom.data.fetch import fetch
    from fedloom.data.registry import dataset, resolve_root

    if not dataset(name).files:
        tell(f"{name} comes with an installed package; there is nothing to fetch.")
        return
    root = resolve_root(data_root)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def update(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file)
            bars.update(tasks[file], completed=done, total=total)

        paths = fetch(name, root, update)
    for path in paths:
        typer.echo(path)


def show(
    *,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save a picture, e.g. split.png, of clients by classes."),
    ] = None,
    **values: Any,
) -> None:
    """Show a split: each client's samples and classes, and how far its mix of classes is from that of all (skew).

    Example: fedloom data show --dataset digits --partition dirichlet:0.3 --clients 10 --out split.png
    """
    from fedloom.core.config import build
    from fedloom.data import load
    from fedloom.training.simulation import notes_of, split

    options = build(RunOptions, given(values))
    arrays = load(options.dataset, options.data_root, options.roles)
    parts = split(options, arrays)
    rows = [
        (
            row["id"],
            "unseen" if row["unseen"] else "",
            *(row[name] for name in COUNTS),
            row["largest"],
            row["skew"],
        )
        for row in parts.summary(arrays.labels)
    ]
    table(["client", "", *COUNTS, "largest class", "skew"], rows)
    for note in notes_of(arrays, parts):
        typer.echo(f"note: {note}")
    if out:
        from fedloom.reports.split import picture

        typer.echo(picture(parts, arrays, out))


COUNTS = ("train", "val", "test", "classes")
