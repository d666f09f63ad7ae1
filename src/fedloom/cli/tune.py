# SPDX-License-Identifier: Apache-2.0
"""``fedloom tune``: one sub-command per method, with the flags of ``fedloom run``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.options import given
from fedloom.cli.output import INTERRUPTED, friendly, json_line, table, tell
from fedloom.cli.run import methods, options_of, with_options_of
from fedloom.core.errors import ConfigError

HELP = """Find options of a method on validation data. `fedloom tune METHOD --help` shows its flags.

Many values are tried for a few rounds each, and the better half goes on, until one is left. Test data choose nothing.

Example: fedloom tune fedavg --dataset digits --clients 10 --try local_lr=0.003,0.01,0.03,0.1 --budget 60
"""


def application(words: Sequence[str]) -> typer.Typer:
    """The methods as sub-commands."""
    return methods(words, "tune", HELP, _command)


def _command(method: str) -> Callable[..., None]:
    def command(
        *,
        tries: Annotated[
            list[str] | None,
            typer.Option(
                "--try",
                metavar="OPTION=VALUE,...",
                help="Values of an option; repeated, all combinations. Without it, rates around those of the options.",
            ),
        ] = None,
        budget: Annotated[
            int | None,
            typer.Option(min=1, metavar="N", help="Rounds of all trials together; without it, those of four runs."),
        ] = None,
        config: Annotated[
            Path | None, typer.Option(metavar="FILE", help="YAML file of options; flags win over it.")
        ] = None,
        out: Annotated[
            Path | None, typer.Option(metavar="DIR", help="Where the trials are kept; without it, a folder of runs/.")
        ] = None,
        json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
        trust: Annotated[
            bool, typer.Option("--trust", help="Run code outside of fedloom that the --config FILE names.")
        ] = False,
        **values: Any,
    ) -> None:
        _tune(method, options_of(method, config, given(values), trust), values_of(tries or ()), budget, out, json)

    return friendly(with_options_of(method, command))


def values_of(tries: Sequence[str]) -> dict[str, list[str]]:
    """The values of each ``OPTION=VALUE,VALUE``."""
    found: dict[str, list[str]] = {}
    for text in tries:
        name, equals, values = text.partition("=")
        several = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not several:
            raise ConfigError(f"--try is {text!r}; expected OPTION=VALUE,VALUE, e.g. local_lr=0.01,0.03.")
        found.setdefault(name.strip().lstrip("-").replace("-", "_"), []).extend(several)
    return found


def _tune(
    method: str, options: dict[str, Any], tries: dict[str, list[str]], budget: int | None, out: Path | None, json: bool
) -> None:
    import logging

    from fedloom.tables.tune import Tuning, words_of

    logging.basicConfig(level=logging.ERROR)
    tuning = Tuning(method, options, tries, budget, out, tell)
    try:
        found = tuning.run()
    except KeyboardInterrupt:
        tell(f"stopped; the trials are in {tuning.out}. The same command goes on.")
        raise typer.Exit(INTERRUPTED) from None
    if json:
        json_line(found.as_dict())
        return
    names = list(found.best.chosen)
    table(
        [*(name.replace("_", " ") for name in names), "rounds", f"val {found.metric}", "run"],
        [[*(f"{v:g}" if isinstance(v, float) else v for v in map(one.chosen.get, names)), one.rounds, one.score,
          one.path.name + " (failed)" * bool(one.failed)] for one in found.trials],
    )  # fmt: skip
    typer.echo(f"chosen: {words_of(found.best.chosen)}")
    typer.echo(f"config: {found.config}")
    if found.best.rounds < tuning.shared.rounds:
        typer.echo(f"to train it to its full length, from where it was paused: {found.going_on}")
    typer.echo(f"to train it anew, with several seeds: {found.command} --seeds 3")
    typer.echo(f"all trials as a page: fedloom report {tuning.out}")
