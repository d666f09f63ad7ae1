# SPDX-License-Identifier: Apache-2.0
"""``fedloom run``: one sub-command per method, with the flags of its config."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom import algorithms
from fedloom.cli.options import flags, given, with_flags
from fedloom.cli.output import friendly, stoppable
from fedloom.cli.results import AUTO, JSON, QUIET, comparison, finished
from fedloom.core.config import by_preset, instead
from fedloom.core.errors import ConfigError
from fedloom.core.trust import check as check_trust
from fedloom.core.trust import outside
from fedloom.runs.files import from_yaml, read_file
from fedloom.runs.options import RunOptions

COMMANDS = ("run", "tune")
"""Those that are followed by a METHOD, whose flags they have."""
OTHERS = {"config", "out", "seeds", "json", "quiet", "trust", "try", "budget", "help"}
"""Flags of these commands that are no options of a run."""

HELP = """Train a method. `fedloom run METHOD --help` shows its flags.

Example: fedloom run pfedhn --dataset digits --clients 10 --rounds 20

To repeat a run: fedloom run --config runs/pfedhn-digits-seed0/config.yaml
"""


def with_method(words: Sequence[str]) -> list[str]:
    """The command line with its METHOD: the one in ``--config FILE`` where ``run`` is not followed by one."""
    if not words or words[0] not in COMMANDS:
        return list(words)
    rest = list(words[1:])
    if rest and not rest[0].startswith("-"):
        algorithms.place(rest[0])
        _check_whose(words[0], rest[0], rest[1:])
        return list(words)
    file = _config_file(rest)
    if file is None:
        return list(words)
    content = read(file)
    method = content.get("method")
    if "rows" in content:
        raise ConfigError(f"{file} is the recipe of a table; run it with `fedloom table {file}`.")
    if method is None:
        raise ConfigError(f"{file} names no method; write `fedloom {words[0]} METHOD --config {file}`.")
    algorithms.place(str(method), f"method in {file}")
    return [words[0], str(method), *rest]


def _check_whose(command: str, method: str, words: Sequence[str]) -> None:
    """Refuse an option that only other methods have: a parser would take it for a slip of the pen."""
    known = {field.name for config in (RunOptions, algorithms.get(method).config) for field in fields(config)} | OTHERS
    for word in words:
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if not word.startswith("--") or name in known:
            continue
        others = [other for other in algorithms.names() if name in _own_options(other)]  # this imports them all
        if others:
            raise ConfigError(
                f"{flag} is an option of {', '.join(others)}, not of {method}. "
                f"`fedloom {command} {method} --help` lists those it has."
            )


def _own_options(method: str) -> set[str]:
    try:
        return {field.name for field in fields(algorithms.get(method).config)}
    except ConfigError:  # a file that somebody works on
        return set()


def application(words: Sequence[str]) -> typer.Typer:
    """The methods as sub-commands."""
    return methods(words, "run", HELP, _command)


def methods(words: Sequence[str], name: str, help: str, made: Callable[[str], Callable[..., None]]) -> typer.Typer:
    """The methods as sub-commands of ``name``. The one in ``words`` is imported for its flags, the others are not."""
    app = typer.Typer(help=help, no_args_is_help=True, subcommand_metavar="METHOD [FLAGS]...")
    named = words[1] if words[:1] == [name] and len(words) > 1 else None
    for method in algorithms.names():
        about = first_line(method)
        command = made(method) if method == named else _listed
        example = f"{about}\n\nExample: fedloom {name} {method} --dataset digits --clients 10"
        app.command(method, help=example, short_help=about)(command)
    return app


def first_line(method: str) -> str:
    """What a method is in one line, read from its file without importing it; of a package's, once it is imported."""
    module, where = algorithms.place(method)
    if isinstance(where, str):
        text = sys.modules[module].__doc__ if module in sys.modules else f"(a method of {where})"
        return (text or "").partition("\n")[0]
    try:
        text = ast.get_docstring(ast.parse(where.read_bytes()))
    except SyntaxError as error:  # a file that somebody works on must not take the other commands with it
        return f"(line {error.lineno} of its file is not Python)"
    except ValueError:
        return "(its file is not Python)"
    return (text or "").partition("\n")[0]


def read(file: Path | str) -> dict[str, Any]:
    """A YAML file of options, flat; dashes in keys are underscores."""
    try:
        content = from_yaml(read_file(Path(file)))
    except OSError as error:
        raise ConfigError(f"Cannot read --config {file}: {error.strerror or error}; give a YAML file.") from error
    except ValueError as error:
        raise ConfigError(f"--config {file} is not YAML: {error}; write one `option: value` per line.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {file} holds no mapping; write one `option: value` per line.")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def _config_file(words: Sequence[str]) -> str | None:
    for word, following in zip(words, [*words[1:], None]):
        if word.startswith("--config="):
            return word.removeprefix("--config=")
        if word == "--config":
            return following
    return None


def _listed() -> None:
    """A method in the list of methods."""


def _command(method: str) -> Callable[..., None]:
    def command(
        *,
        config: Annotated[
            Path | None, typer.Option(metavar="FILE", help="YAML file of options; flags win over it.")
        ] = None,
        out: Annotated[
            Path | None,
            typer.Option(metavar="DIR", help="The run directory; without it, a new one in runs/."),
        ] = None,
        seeds: Annotated[
            int | None,
            typer.Option(min=1, metavar="N", help="Train with N seeds from --seed on, in DIR/seed-K, and compare."),
        ] = None,
        json: Annotated[bool, typer.Option("--json", help="Print JSON lines: the rounds, then the summary.")] = False,
        quiet: Annotated[bool, typer.Option("--quiet", help="Print the run directory and nothing else.")] = False,
        trust: Annotated[
            bool, typer.Option("--trust", help="Run code outside of fedloom that the --config FILE names.")
        ] = False,
        **values: Any,
    ) -> None:
        options = options_of(method, config, given(values), trust)
        train(method, options, out, seeds, JSON if json else QUIET if quiet else AUTO)

    return friendly(with_options_of(method, command))


def with_options_of(method: str, command: Callable[..., None]) -> Callable[..., None]:
    """``command``, which takes ``**flags``, with those of the method and of every run."""
    own = flags(algorithms.get(method).config, f"Options of {method}")
    return with_flags(command, [*own, *flags(RunOptions, "Options of every method")])


def options_of(method: str, config: Path | None, from_flags: dict[str, Any], trust: bool) -> dict[str, Any]:
    """The options of a run, from its flags and the file that they win over."""
    from_file = read(config) if config else {}
    other = from_file.pop("method", method)
    if other != method:
        raise ConfigError(f"{config} is for the method {other!r}, not {method!r}; write `fedloom run {other}`.")
    kind = algorithms.get(method).config
    kept = {name: value for name, value in from_file.items() if name not in from_flags}
    check_trust(str(config), kept, RunOptions, kind, trust=trust)
    if from_flags.get("preset", from_file.get("preset")) != from_file.get("preset"):
        # the config of a run has every value of the preset that it was trained with
        from_file = {n: value for n, value in from_file.items() if n.replace("-", "_") not in by_preset(kind)}
    return {**from_file, **instead(kind, from_flags), **from_flags}


def train(method: str, options: dict[str, Any], out: Path | None, seeds: int | None, progress: str) -> None:
    """Train with one seed or several, and print what came of it."""
    from fedloom import api
    from fedloom.training.config import parse_options
    from fedloom.training.rates import AUTO

    automatic = {"local_lr": AUTO} if options.get("local_lr") == AUTO else {}
    shared, own = parse_options(method, {name: value for name, value in options.items() if name not in automatic})
    resolved = {**asdict(shared), **asdict(own), **automatic}
    done = []
    for seed in range(shared.seed, shared.seed + (seeds or 1)):
        resolved["seed"] = seed
        # chosen here and not by api.run, so that Ctrl-C can say where the run is
        path = out / f"seed-{seed}" if out and seeds else out or api.new_path(method, resolved)
        with stoppable(path, " --trust" * bool(outside(resolved, RunOptions, type(own)))):
            done.append(api.run(method, out=path, progress=progress, **resolved))
        finished(done[-1], progress)
    if seeds:
        comparison([run.path for run in done], progress)
