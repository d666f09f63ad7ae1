# SPDX-License-Identifier: Apache-2.0
"""What an attack found: numbers with intervals, beside those of chance and of a control that must succeed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from fedloom.reports.statistics import over_clients


class Side(NamedTuple):
    """A number of an attack, in one setting. Intervals have 95%."""

    value: float
    low: float | None
    high: float | None
    chance: float
    """The same number of who guesses."""
    beats: bool
    """Whether it is surely better than chance."""


class Measure(NamedTuple):
    """A number by which an attack is judged: on the run, and on the control."""

    name: str
    run: Side
    control: Side


@dataclass(frozen=True)
class Finding:
    """An attack on a run: what the attacker has, what came of it, and what to make of it."""

    attack: str
    round: int
    sees: str
    """What the attacker sees."""
    knows: str
    """What the attacker knows besides."""
    control: str
    """The setting in which the attack must succeed."""
    measures: Sequence[Measure]
    """The first one decides."""
    verdict: str
    picture: bytes = b""
    """What was reconstructed, as a PNG."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        measures = [
            {"name": one.name, "run": one.run._asdict(), "control": one.control._asdict()} for one in self.measures
        ]
        rest = {name: value for name, value in asdict(self).items() if name not in ("measures", "picture")}
        return {**rest, "measures": measures}


def side(values: Sequence[float], chances: Sequence[float], *, higher: bool) -> Side:
    """The mean over clients beside that of guesses, client by client; ``higher`` is better for the attacker."""
    mean = over_clients(values)
    gain = over_clients(np.subtract(values, chances).tolist())
    bound = gain.low if higher else gain.high
    beats = bound is not None and (bound > 0 if higher else bound < 0)
    return Side(mean.mean, mean.low, mean.high, float(np.mean(chances)), bool(beats))


def judged(what: str, decisive: Measure) -> str:
    """The verdict in a sentence or two: ``what`` the attacker is after."""
    if not decisive.control.beats:
        return f"The control failed: the attack did not find {what} where it must, so that nothing follows for the run."
    if decisive.run.beats:
        return f"The attack succeeded: it finds {what} better than a guess does."
    return (
        f"This attack did not find {what} better than a guess does, though it did in the control. That does not prove "
        "that no other attack would."
    )
