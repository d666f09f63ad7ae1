# SPDX-License-Identifier: Apache-2.0
"""``fedloom deploy``: a federation of machines, on Flower."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.output import INTERRUPTED, friendly, tell
from fedloom.cli.results import AUTO, JSON, QUIET, finished
from fedloom.core.errors import ConfigError, NeedsError

if TYPE_CHECKING:
    from fedloom.deploy.local import App
    from fedloom.progress import Display
    from fedloom.runs.directory import RunDirectory

HELP = """Run a federation of machines, on Flower (the extra "flower").

Example: fedloom deploy init ward --method pfedhn --dataset digits && fedloom deploy local ward --nodes 4
"""

AppPath = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an app.")]
Nodes = Annotated[int, typer.Option(min=1, metavar="N", help="Clients that take part.")]
Newcomers = Annotated[
    int, typer.Option(min=0, metavar="N", help="More clients, without labels, that get a model at the end.")
]
Tls = Annotated[bool, typer.Option("--tls", help="With the keys in DIR/keys: encrypted, and nodes prove who they are.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines: the rounds, then the summary.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the run directory and nothing else.")]


def application() -> typer.Typer:
    """The commands."""
    app = typer.Typer(help=HELP, no_args_is_help=True)
    for command in (init, local, resume, keys):
        app.command()(friendly(command))
    return app


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    method: Annotated[str, typer.Option(metavar="METHOD", help="A name from `fedloom methods`.")],
    dataset: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Data for a trial on one machine, dealt over its nodes.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Of a table: the column that is predicted; without it, y.")
    ] = None,
    groups: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Of a table: columns that are no features.")
    ] = None,
    partition: Annotated[str, typer.Option(metavar="TEXT", help="How they are dealt.")] = "auto",
    model: Annotated[str, typer.Option(metavar="TEXT", help="The nodes' networks, separated by commas.")] = "auto",
    set: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A setting of the app; may be repeated.")
    ] = None,
) -> None:
    """Write a Flower app for a method; in its federation/client.py you fill two functions.

    Example: fedloom deploy init ward --method pfedhn --dataset digits --set rounds=20
    """
    from fedloom.deploy.template import write_app
    from fedloom.deploy.trial import Trial, about, check

    given = dict(_pair(word) for word in set or ())
    own = {"dataset": dataset, "target": target, "groups": groups}
    trial = {**{name: value for name, value in own.items() if value}, "partition": partition, "model": model}
    check(Trial(**trial))
    if dataset is not None:
        given = {**about(Trial(**trial)), **given}
    typer.echo(write_app(folder, method, given, trial))


def local(
    folder: AppPath,
    nodes: Nodes = 2,
    newcomers: Newcomers = 0,
    tls: Tls = False,
    json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run an app on this machine: link, nodes and server as processes on loopback, all of which are stopped at the end.

    Example: fedloom deploy local ward --nodes 4
    """
    need_flower()
    from fedloom.deploy import local as trial

    _show(folder, json, quiet, lambda app, shown: trial.local(app, nodes, newcomers, shown, tls=tls))


def resume(folder: AppPath, json: AsJson = False, quiet: Quiet = False) -> None:
    """Continue a trial on this machine that was stopped or killed, from its last round, with the same clients.

    Example: fedloom deploy resume ward
    """
    need_flower()
    from fedloom.deploy import local as trial

    _show(folder, json, quiet, trial.resume)


def keys(
    folder: AppPath,
    nodes: Annotated[
        list[str] | None, typer.Option("--node", metavar="NAME", help="A client's name; may be repeated.")
    ] = None,
    count: Annotated[int, typer.Option("--nodes", min=0, metavar="N", help="N more clients, named 0, 1, ...")] = 0,
    host: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="The link's name or address; without it, loopback.")
    ] = None,
) -> None:
    """Make the keys of a federation in DIR/keys: an authority, the link's certificate, a key pair for every node.

    Beside them lies nginx.conf, for a proxy that lets only nodes through to the link.

    Example: fedloom deploy keys ward --nodes 4 --host link.example.org
    """
    need_flower()
    from fedloom.deploy.keys import make_keys
    from fedloom.deploy.proxy import write_nginx_config

    if not (folder / "pyproject.toml").is_file():
        raise ConfigError(f"{folder} holds no app; give an app's folder, or make one with `fedloom deploy init`.")

    names = [*map(str, range(count)), *(nodes or ())]
    if not names:
        raise ConfigError("Say whose keys to make: give --nodes N, or --node NAME once or more.")
    made = make_keys(folder / "keys", names, [*(host or ()), "127.0.0.1", "localhost"])
    write_nginx_config(made)
    typer.echo(made)


def _show(folder: Path, json: bool, quiet: bool, run: Callable[[App, Display], RunDirectory]) -> None:
    """Run the app in a folder; Ctrl-C stops it."""
    from fedloom import api
    from fedloom.deploy.local import app_in
    from fedloom.progress import display

    progress = JSON if json else QUIET if quiet else AUTO
    app = app_in(folder)
    try:
        directory = run(app, display(progress))
    except KeyboardInterrupt:
        tell(f"stopped; go on with `fedloom deploy resume {folder}`.")
        raise typer.Exit(INTERRUPTED) from None
    finished(api.load(directory.path), progress)


def need_flower() -> None:
    """Refuse to go on without Flower."""
    import importlib.util

    if importlib.util.find_spec("flwr") is None:
        raise NeedsError("This needs Flower; install it: pip install 'fedloom[flower]'.")


def _pair(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not equals:
        raise ConfigError(f"--set {word} is not of the form NAME=VALUE; write e.g. --set rounds=20.")
    return name.replace("-", "_"), value
