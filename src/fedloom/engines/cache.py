# SPDX-License-Identifier: Apache-2.0
"""Fast forms of work that comes again and again: traces of steps, CUDA graphs, compiled graphs.

They have one rule: when a kind of work has come often enough, its fast form is built; if that fails, the next best one
is, down to none, with a note; the forms used longest ago are dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

from fedloom.core.memory import is_full

F = TypeVar("F")


class Way(NamedTuple):
    """How a fast form is built."""

    name: str
    """In a note it follows on "cannot be": recorded, compiled."""
    build: Callable[[], object]


class FastForms(Generic[F]):
    """Fast forms by kind of work. ``notes`` is told what cannot be built; at most ``kept`` forms are kept."""

    def __init__(self, notes: list[str], kept: int) -> None:
        self.notes, self._most = notes, kept
        self.kept: dict[Hashable, F | None] = {}
        """None: nothing can be built. The one used last is last."""
        self._seen: Counter[Hashable] = Counter()

    def seen(self, kind: Hashable) -> int:
        """Count one more use of a kind; how often it has come, this time included."""
        self._seen[kind] += 1
        return self._seen[kind]

    def get(self, kind: Hashable, label: str, ways: Callable[[], Iterable[Way]]) -> F | None:
        """The fast form of a kind, built by the first of ``ways`` that works; None if none does.

        ``label`` is the work's name for people.
        """
        if kind not in self.kept:
            self.kept[kind] = self._build(label, ways())
            for oldest in list(self.kept)[: -self._most]:
                del self.kept[oldest]
        found = self.kept[kind] = self.kept.pop(kind)
        return found

    def forget(self, kind: Hashable) -> None:
        """Have a kind built anew when it comes again."""
        self.kept.pop(kind, None)

    def clear(self) -> None:
        """Drop all forms, and the memory that they hold."""
        self.kept.clear()

    def _build(self, label: str, ways: Iterable[Way]) -> F | None:
        """The first form that can be built. Full memory is no reason for a slower one: the caller makes room."""
        for way in ways:
            try:
                return way.build()  # type: ignore[return-value]
            except Exception as error:
                if is_full(error):
                    raise
                note = f"{label} cannot be {way.name}: {reason_of(error)}"
                if note not in self.notes:
                    self.notes.append(note)
        return None


def reason_of(error: Exception) -> str:
    """In one line. The compiler's first line names no cause: it comes last, before its advice on variables to set."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("Set TORCH")]
    return " ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or type(error).__name__
