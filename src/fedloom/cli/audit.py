# SPDX-License-Identifier: Apache-2.0
"""The command that attacks a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.output import json_line, table
from fedloom.cli.runs import AsJson, Force, RunPath, Trust, Which, checkpoint

if TYPE_CHECKING:
    from fedloom.audit.finding import Measure, Side


def audit(
    run: RunPath,
    attack: Annotated[
        str,
        typer.Option(
            metavar="labels|idlg|invert|membership|canary",
            help="After label shares; a sample; several samples; who was trained on; planted clients or samples.",
        ),
    ],
    which: Which = None,
    force: Force = False,
    trust: Trust = False,
    json: AsJson = False,
) -> None:
    """Attack a simulated run, beside what guessing gives and a control in which the attack must succeed.

    Example: fedloom audit runs/fedavg-digits-seed0 --attack labels
    """
    from fedloom import api
    from fedloom.audit.perform import audit, picture_of

    loaded = api.load(run, which=checkpoint(which), force=force, trust=trust)
    found = audit(loaded, attack)
    if json:
        json_line({"run": str(run), **found.as_dict()})
        return
    columns = ["", "run", "95% interval", "chance", "control", "its chance"]
    table(columns, map(_row, found.measures), title=f"{attack}, after round {found.round}")
    for name, text in (("Sees", found.sees), ("Knows", found.knows), ("Control", found.control)):
        typer.echo(f"{name}: {text}.")
    typer.echo(found.verdict)
    if found.picture:
        typer.echo(picture_of(loaded, attack))


def _row(measure: Measure) -> tuple[object, ...]:
    return measure.name, measure.run.value, _interval(measure.run), measure.run.chance, *_control(measure.control)


def _control(side: Side) -> tuple[float, float]:
    return side.value, side.chance


def _interval(side: Side) -> str | None:
    return None if side.low is None or side.high is None else f"{side.low:.4f} to {side.high:.4f}"
