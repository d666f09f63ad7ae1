# SPDX-License-Identifier: Apache-2.0
"""``fedloom run``: one sub-command per method, with the flags of its config."""

from __future__ import annotations

import ast
import importlib.util
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
from fedloom.core.errors import ConfigError, unknown
from fedloom.runs.options import RunOptions

HELP = """Train a method. `fedloom run METHOD --help` shows its flags.

Example: fedloom run pfedhn --dataset digits --clients 10 --rounds 20

To repeat a run: fedloom run --config runs/pfedhn-digits-seed0/config.yaml
"""


def with_method(words: Sequence[str]) -> list[str]:
    """The command line with its METHOD: the one in ``--config FILE`` where ``run`` is not followed by one."""
    if not words or words[0] != "run":
        return list(words)
    rest = list(words[1:])
    if rest and not rest[0].startswith("-"):
        if rest[0] not in algorithms.names():
            raise unknown("method", rest[0], algorithms.names())
        _check_whose(rest[0], rest[1:])
        return list(words)
    file = _config_file(rest)
    if file is None:
        return list(words)
    content = read(file)
    method = content.get("method")
    if "rows" in content:
        raise ConfigError(f"{file} is the recipe of a table; run it with `python benchmarks/recipes.py {file}`.")
    if method is None:
        raise ConfigError(f"{file} names no method; write `fedloom run METHOD --config {file}`.")
    if method not in algorithms.names():
        raise unknown(f"method in {file}", str(method), algorithms.names())
    return ["run", str(method), *rest]


def _check_whose(method: str, words: Sequence[str]) -> None:
    """Refuse an option that only other methods have: a parser would take it for a slip of the pen."""
    known = _options_of(method)
    for word in words:
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if not word.startswith("--") or name in known:
            continue
        others = [other for other in algorithms.names() if name in _options_of(other)]
        if others:
            raise ConfigError(
                f"{flag} is an option of {', '.join(others)}, not of {method}. "
                f"`fedloom run {method} --help` lists those it has."
            )


def _options_of(method: str) -> set[str]:
    return {field.name for kind in (algorithms.get(method).config, RunOptions) for field in fields(kind)}


def application(words: Sequence[str]) -> typer.Typer:
    """The methods as sub-commands. The one in ``words`` is imported for its flags, the others are not."""
    app = typer.Typer(help=HELP, no_args_is_help=True, subcommand_metavar="METHOD [FLAGS]...")
    named = words[1] if words[:1] == ["run"] and len(words) > 1 else None
    for method in algorithms.names():
        about = first_line(method)
        command = _command(method) if method == named else _listed
        example = f"{about}\n\nExample: fedloom run {method} --dataset digits --clients 10"
        app.command(method, help=example, short_help=about)(command)
    return app


def first_line(method: str) -> str:
    """What a method is in one line, read from its file without importing it."""
    found = importlib.util.find_spec(f"{algorithms.__name__}.{method}")
    assert found and found.origin
    try:
        text = ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8")))
    except SyntaxError as error:  # a file that somebody works on must not take the other commands with it
        return f"(line {error.lineno} of its file is not Python)"
    return (text or "").partition("\n")[0]


def read(file: Path | str) -> dict[str, Any]:
    """A YAML file of options, flat; dashes in keys are underscores."""
    import yaml

    try:
        content = yaml.safe_load(Path(file).read_bytes())
    except OSError as error:
        raise ConfigError(f"Cannot read --config {file}: {error.strerror or error}; give a YAML file.") from error
    except (ValueError, yaml.YAMLError) as error:
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
    own = flags(algorithms.get(method).config, f"Options of {method}")
    shared = flags(RunOptions, "Options of every method")

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
        **values: Any,
    ) -> None:
        options = _options(method, config, given(values))
        train(method, options, out, seeds, JSON if json else QUIET if quiet else AUTO)

    return friendly(with_flags(command, [*own, *shared]))


def _options(method: str, config: Path | None, from_flags: dict[str, Any]) -> dict[str, Any]:
    from_file = read(config) if config else {}
    other = from_file.pop("method", method)
    if other != method:
        raise ConfigError(f"{config} is for the method {other!r}, not {method!r}; write `fedloom run {other}`.")
    kind = algorithms.get(method).config
    if from_flags.get("preset", from_file.get("preset")) != from_file.get("preset"):
        # the config of a run has every value of the preset that it was trained with
        from_file = {n: value for n, value in from_file.items() if n.replace("-", "_") not in by_preset(kind)}
    return {**from_file, **instead(kind, from_flags), **from_flags}


def train(method: str, options: dict[str, Any], out: Path | None, seeds: int | None, progress: str) -> None:
    """Train with one seed or several, and print what came of it."""
    from fedloom import api

    shared, own = api.parse_options(method, options)
    resolved = {**asdict(shared), **asdict(own)}
    done = []
    for seed in range(shared.seed, shared.seed + (seeds or 1)):
        resolved["seed"] = seed
        # chosen here and not by api.run, so that Ctrl-C can say where the run is
        path = out / f"seed-{seed}" if out and seeds else out or api.new_path(method, resolved)
        with stoppable(path):
            if shared.engine == "flower-sim":
                done.append(_on_ray(method, resolved, path, progress))
            else:
                done.append(api.run(method, out=path, progress=progress, **resolved))
        finished(done[-1], progress)
    if seeds:
        comparison([run.path for run in done], progress)


def _on_ray(method: str, options: dict[str, Any], out: Path, progress: str) -> Any:
    from fedloom import api
    from fedloom.cli.deploy import need_flower
    from fedloom.progress import display

    need_flower()
    from fedloom.deploy.ray import run_on_ray

    return api.load(run_on_ray(method, *api.parse_options(method, options), out, display(progress)).path)
