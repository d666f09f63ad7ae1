# SPDX-License-Identifier: Apache-2.0
"""``fedloom new``: the file of a method to start from."""

from __future__ import annotations

import keyword
from pathlib import Path
from typing import Annotated

import typer

from fedloom import algorithms
from fedloom.core.errors import ConfigError

TEMPLATE = Path(__file__).with_name("template.py")
"""A method that works; only read here, never imported."""


def new(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="Its name on the command line, e.g. fedmine.")],
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Where to write METHOD.py.")] = Path(),
) -> None:
    """Write METHOD.py, a method that works, with every part explained, to turn into your own.

    Example: fedloom new fedmine --folder src/fedloom/algorithms
    """
    path = folder / f"{method}.py"
    if not (method.isidentifier() and method.islower()) or keyword.iskeyword(method) or method.startswith("_"):
        raise ConfigError(f"{method!r} is no name for a method; use lowercase letters, digits and _, as in 'fedmine'.")
    if not folder.is_dir():
        raise ConfigError(f"--folder {folder} is not a folder; make it first or give another.")
    text = TEMPLATE.read_text(encoding="utf-8").replace("template", method).replace("Template", method.title())
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} is there already; choose another name or --folder.") from None
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror or error}; give another --folder.") from error
    typer.echo(path)
    home = Path(algorithms.__path__[0])
    if path.parent.resolve() != home.resolve():
        typer.echo(f"`fedloom run {method}` finds it once it lies in {home}.", err=True)
