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
from fedloom import algorithms
from fedloom.cli import audit, catalogue, data, deploy, look, new, run, runs, serving, tables, tune
from fedloom.cli.output import INTERRUPTED, USER_ERROR, friendly, sentence_of, tell
from fedloom.core.interrupts import ignore, is_of_one, take_as_one

METHODS = "--methods"
EPILOG = "Start with: fedloom run pfedhn --dataset digits --clients 10 --rounds 20"


class RunFirst(TyperGroup):
    """Typer lists sub-commands with commands of their own last; the first one that users need is one of them."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return sorted(super().list_commands(ctx), key=lambda name: name != "run")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with its exit code."""
    # `--model nets:Net` means nets.py here. Last, so that a file here never stands in for one of the packages that
    # fedloom itself imports: the folder may be somebody else's, with a run to look at.
    sys.path.append(str(Path.cwd()))
    take_as_one()
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        words = run.with_method(_after_folders(given))
        commands = application(words)
    except Exception as error:  # before typer is there to turn typer.Exit into an exit code
        sentence = sentence_of(error)
        if sentence is None and is_of_one(error):
            ignore()
            sys.exit(INTERRUPTED)
        if sentence is None:
            raise
        tell(sentence)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        ignore()
        sys.exit(INTERRUPTED)
    commands(args=words, prog_name="fedloom")


def _after_folders(words: list[str]) -> list[str]:
    """The command line without the ``--methods DIR`` in front, which must be known before there are commands."""
    while words and words[0].partition("=")[0] == METHODS:
        _, equals, folder = words[0].partition("=")
        if not equals and len(words) == 1:
            break  # typer says what is missing
        algorithms.add_folder(folder if equals else words[1])
        words = words[1:] if equals else words[2:]
    return words


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
    app.add_typer(tune.application(words), name="tune")
    commands: tuple[Callable[..., None], ...] = (
        *(runs.resume, runs.evaluate, runs.export, runs.admit, runs.compare),
        *(serving.bundle, serving.serve, serving.token, serving.join),
        *(look.report, look.watch, look.privacy, audit.audit),
        *(tables.table, tables.board),
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
    methods: Annotated[
        Path | None,
        typer.Option(METHODS, metavar="DIR", help="A folder with methods of your own; may be repeated, comes first."),
    ] = None,
) -> None:
    """The options of `fedloom` itself; the folder is taken by ``main``."""
