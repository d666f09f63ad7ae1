# SPDX-License-Identifier: Apache-2.0
"""Text for users: errors as one sentence on stderr; tables, paths and JSON on stdout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import typer

from fedloom.core.errors import FedloomError
from fedloom.core.interrupts import ignore, is_of_one
from fedloom.core.memory import is_full, why_full

P = ParamSpec("P")
T = TypeVar("T")

USER_ERROR, INTERRUPTED = 2, 130
PIPE_WIDTH = 200
"""Columns of a table that goes to a file or a program, where rich would take a terminal of 80."""


def friendly(command: Callable[P, T]) -> Callable[P, T]:
    """``command`` with errors that are the input's fault told in one sentence; others stay as they are."""

    @functools.wraps(command)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except Exception as error:
            sentence = sentence_of(error)
            if sentence is None and is_of_one(error):
                ignore()
                raise KeyboardInterrupt from None
            if sentence is None:
                raise
            tell(sentence)
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt:
            ignore()
            raise

    return call


def sentence_of(error: Exception) -> str | None:
    """What to tell of an error that is the input's or this machine's fault; None for any other."""
    if isinstance(error, FedloomError):
        return str(error)
    if is_full(error):
        return (
            f"This machine has too little memory ({why_full(error)}); take a smaller network, dataset or batch, or a "
            "machine with more."
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"Cannot use {error.filename}: {error.strerror or error}; give another, or see to its permissions."
    return None


def tell(message: object) -> None:
    """One line on stderr."""
    typer.echo(f"fedloom: {printable(' '.join(str(message).split()))}", err=True)


def printable(text: str) -> str:
    """``text`` without what a terminal would obey: names come from files by anybody."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


@contextmanager
def stoppable(path: Path, how: str = "") -> Iterator[None]:
    """Ctrl-C within ends the command, and says what is left of the run at ``path``; ``how`` are flags to go on with."""
    try:
        yield
    except KeyboardInterrupt:
        ignore()
        from fedloom.runs.directory import CONFIG

        if (path / CONFIG).is_file():
            tell(f"stopped; saved in {path}. Go on with `fedloom resume {path}{how}`.")
        else:
            tell("stopped before the first round; nothing was saved.")
        raise typer.Exit(INTERRUPTED) from None


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """Print a table; None is a dash, numbers go to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    heads, above = map(printable, columns), printable(title) if title else None
    printed = Table(*heads, title=above, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    body = [list(row) for row in rows]
    for number, column in enumerate(printed.columns):
        if body and all(isinstance(row[number], int | float | None) for row in body):
            column.justify = "right"
    for row in body:
        printed.add_row(*map(_cell, row))
    console.print(printed)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if isinstance(value, float) else printable(str(value))


def json_line(value: Any) -> None:
    """Print one line of JSON."""
    from fedloom.runs.files import to_json

    typer.echo(to_json(value), nl=False)
