# SPDX-License-Identifier: Apache-2.0
"""Attack a run and keep what came of it beside its records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedloom.api import Run
from fedloom.audit import canary, idlg, invert, labels, membership
from fedloom.audit.finding import Finding
from fedloom.core.errors import unknown
from fedloom.runs.files import write_file
from fedloom.runs.records import AUDIT
from fedloom.training.simulation import Simulation

ATTACKS: dict[str, Callable[[Simulation], Finding]] = {
    "labels": labels.attack,
    "idlg": idlg.attack,
    "invert": invert.attack,
    "membership": membership.attack,
    "canary": canary.attack,
}


def audit(run: Run, attack: str) -> Finding:
    """The finding of one attack on a run with its data. Kept in the run directory, one of each attack."""
    if attack not in ATTACKS:
        raise unknown("attack", attack, ATTACKS)
    found = ATTACKS[attack](run.simulation)
    run.directory.write_extra(AUDIT, {**(run.directory.extra(AUDIT) or {}), attack: found.as_dict()})
    if found.picture:
        write_file(picture_of(run, attack), found.picture)
    return found


def picture_of(run: Run, attack: str) -> Path:
    """Where the picture of an attack lies, if it made one."""
    return run.path / f"audit-{attack}.png"
