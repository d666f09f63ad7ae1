# SPDX-License-Identifier: Apache-2.0
"""``fedloom new``: the file of a method to start from."""

from __future__ import annotations

import keyword
import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedloom import algorithms
from fedloom.cli.output import tell
from fedloom.core.errors import ConfigError

EXAMPLE = "fedavg", "FedAvg"
"""The method that is copied: its file and its name."""


def new(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="Its name on the command line, e.g. fedmine.")],
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where to write METHOD.py.")] = Path(),
) -> None:
    """Write METHOD.py, a copy of FedAvg under that name, to turn into your own.

    Example: fedloom new fedmine && fedloom --methods . run fedmine --clients 5 --rounds 2
    """
    path = folder / f"{method}.py"
    if not (method.isidentifier() and method.islower()) or keyword.iskeyword(method) or method.startswith("_"):
        raise ConfigError(f"{method!r} is no name for a method; use lowercase letters, digits and _, as in 'fedmine'.")
    if method in algorithms.names():
        raise ConfigError(f"There is a method {method!r}, {algorithms.place(method).where}; choose another name.")
    if not folder.is_dir():
        raise ConfigError(f"--folder {folder} is not a folder; make it first or give another.")
    source, name = EXAMPLE
    text = (Path(algorithms.__path__[0]) / f"{source}.py").read_text(encoding="utf-8")
    text = text.replace(f'"""{name}:', f'"""{method.title()}:', 1).replace(f'name="{name}"', f'name="{method.title()}"')
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already; choose another name or --folder.") from None
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror or error}; give another --folder.") from error
    typer.echo(path)
    given = "" if method in algorithms.names() else f"--methods {shlex.quote(str(folder))} "
    tell(f"run it with `fedloom {given}run {method}`.")
