# SPDX-License-Identifier: Apache-2.0
"""A run between two rounds, and a round that has begun."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fedloom.core.contract import Diagnostics
from fedloom.core.recording import Reading
from fedloom.engines.engine import Books
from fedloom.engines.memories import Memories


class Mark(NamedTuple):
    """A run at a moment: all that changes."""

    round: int
    state: Any
    memory: Memories


class Begun(NamedTuple):
    """A round whose numbers may still be on their way from the device."""

    start: Mark
    end: Mark
    since: float  # ``time.perf_counter``
    told: dict[str, Any]
    seconds: dict[str, float]  # of its parts, where they were waited for
    diagnostics: Diagnostics
    reading: Reading  # the checks, then those diagnostics that are tensors
    checks: int
    books: Books  # the engine's, until it begins something else

    def is_sound(self) -> bool:
        """Whether replies, memories and state are finite."""
        return all(self.reading.wait()[: self.checks])

    def record(self, seconds: float) -> dict[str, Any]:
        """The record of a round that took so long."""
        read = iter(self.reading.wait()[self.checks :])
        numbers = {name: next(read) if isinstance(n, Tensor) else n for name, n in self.diagnostics.items()}
        return {**self.told, "seconds": {"round": seconds, **self.seconds}, "diagnostics": numbers}
