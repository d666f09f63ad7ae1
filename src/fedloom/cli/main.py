# SPDX-License-Identifier: Apache-2.0
"""``fedloom``: all commands put together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

import fedloom
from fedloom.cli import catalogue, data, deploy, new, run, runs
from fedloom.cli.output import USER_ERROR, friendly, tell
from fedloom.core.errors import FedloomError

EPILOG = "Start with: fedloom run pfedhn --dataset digits --clients 10 --rounds 20"


class RunFirst(TyperGroup):
    """Typer lists sub-commands with commands of their own last; the first one that users need is one of them."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return sorted(super().list_commands(ctx), key=lambda name: name != "run")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with its exit code."""
    # `--model nets:Net` means nets.py here; an entry point has its own folder there instead
    sys.path.insert(0, str(Path.cwd()))
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        words = run.with_method(given)
    except FedloomError as error:  # before typer is there to turn typer.Exit into an exit code
        tell(error)
        sys.exit(USER_ERROR)
    application(words)(args=words, prog_name="fedloom")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedloom {fedloom.__version__}")
        raise typer.Exit


def application(words: Sequence[str]) -> typer.Typer:
    """The commands; of all methods, only the one that ``words`` names gets its flags."""
    app = typer.Typer(
        cls=RunFirst,
        help="Federated learning with a model of its own for every client.",
        epilog=EPILOG,
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # a traceback is for a bug report
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_top)
    app.add_typer(run.application(words), name="run")
    commands: tuple[Callable[..., None], ...] = (
        *(runs.resume, runs.evaluate, runs.export, runs.admit, runs.compare),
        *(catalogue.methods, catalogue.datasets, catalogue.models, new.new),
    )
    for command in commands:
        app.command()(friendly(command))
    app.add_typer(data.application(), name="data")
    app.add_typer(deploy.application(), name="deploy")
    return app


def _top(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """The options of `fedloom` itself."""
