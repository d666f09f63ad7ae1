# SPDX-License-Identifier: Apache-2.0
"""What there is: methods, datasets and partitions, models."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.output import table
from fedloom.cli.run import first_line

if TYPE_CHECKING:
    from fedloom.core.contract import Algorithm
    from fedloom.data.files import Dataset

DataRoot = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Where published files lie; without it, the variable FEDLOOM_DATA."),
]


def methods(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WORD]...", help="List only methods whose line has all of these words."),
    ] = None,
) -> None:
    """List the methods by family: what they are, what they need, what newcomers get. Words narrow the list.

    Example: fedloom methods loom
    Example: fedloom methods personal "without labels"
    """
    from fedloom import algorithms
    from fedloom.core.errors import ConfigError

    rows: list[tuple[str, ...]] = []
    for name in algorithms.names():
        try:
            method = algorithms.get(name)
        except ConfigError as error:  # a file that somebody works on
            rows.append(("", name, "", f"({error})", "", ""))
            continue
        about = first_line(name).removeprefix(f"{method.name}: ")
        rows.append((method.family, name, method.name, about, _needs(method), _newcomers(method)))
    wanted = [word.lower() for word in words or ()]
    found = sorted(row for row in rows if all(word in " ".join(row).lower() for word in wanted))
    if not found:
        raise ConfigError(f"No method's line has all of {', '.join(map(repr, wanted))}; leave some out.")
    table(["family", "name", "method", "what it is", "needs", "newcomers"], found)


def datasets(data_root: DataRoot = None) -> None:
    """List the datasets, whether their files are here, and the ways to split them over clients.

    Example: fedloom datasets --data-root ~/data
    """
    from fedloom.clients.partition import schemes
    from fedloom.data import dataset, names

    root = _root(data_root)
    known = map(dataset, names())
    table(["--dataset", "what it is", "files"], [(one.name, one.about, _presence(one, root)) for one in known])
    typer.echo(
        "Your own data: an .npz file with x and y, LEAF's JSON, or a folder with one such file, or text, per client.\n"
    )
    table(["--partition", "how samples are split over clients"], [(one.usage, one.about) for one in schemes()])


def models() -> None:
    """List the networks that clients can train, and their options.

    Example: fedloom models
    """
    from fedloom.models.spec import networks

    rows = []
    for name, network in networks().items():
        rows.append((name, (inspect.getdoc(network) or "").partition("\n")[0], _model_options(network)))
    table(["--model", "what it is", "options"], rows)
    typer.echo("Options follow a colon, as in lenet:kernels=8; your own network is an import path, as in nets:Net.")


def _needs(method: Algorithm) -> str:
    """Needs that are there; those that have kinds with their kind."""
    wanted = {name: value for name, value in asdict(method.needs).items() if value and value != "none"}
    named = [(f"{value} " if isinstance(value, str) else "") + n.replace("_", " ") for n, value in wanted.items()]
    return ", ".join([*named, "only means" if method.means else "individual replies"])


def _newcomers(method: Algorithm) -> str:
    if method.admit is None:
        return "no"
    if callable(method.admit_labels):
        return "with or without labels"
    return "with labels" if method.admit_labels else "without labels"


def _root(data_root: Path | None) -> Path | None:
    from fedloom.core.errors import DataError
    from fedloom.data.registry import resolve_root

    try:
        return resolve_root(data_root)
    except DataError:  # a list needs no data
        return None


def _presence(dataset: Dataset, root: Path | None) -> str:
    if not dataset.files:
        return "installed"
    if root is None:
        return "no data root given"
    return "missing" if dataset.missing(root) else "present"


def _model_options(network: Any) -> str:
    parameters = inspect.signature(network).parameters.values()
    return ", ".join(f"{p.name}={p.default}" for p in parameters if p.default is not p.empty)
