# SPDX-License-Identifier: Apache-2.0
"""One round of training as a function of a moment, and the look ahead that keeps a GPU busy.

A round begins from a ``Mark`` (number, state, memories) and gives another one; nothing else changes. That is what makes
looking ahead safe: a round that was begun in vain is dropped, and nobody has seen it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedloom.core.contract import Cohort, Diagnostics, Table
from fedloom.core.errors import DivergedError
from fedloom.core.noised import hides_samples
from fedloom.core.trees import ClientId
from fedloom.engines.engine import Session, Stats
from fedloom.engines.graphs import Reading
from fedloom.engines.job import Dropped
from fedloom.runs.records import by_client, seconds_by_client, table_record
from fedloom.training import asynchronous
from fedloom.training.clock import Turn
from fedloom.training.server import Mark, Server

LARGE = 1 << 24
"""Numbers of a tensor that is not looked through: a table of a million clients, which is stepped on with the rest."""


class PendingRound(NamedTuple):
    """A round that was computed; its checks and numbers may still be on their way from the device."""

    start: Mark
    end: Mark
    cohort: tuple[ClientId, ...]
    stats: Stats
    since: float  # ``time.perf_counter``
    seconds: dict[str, float]  # of its parts, where they were waited for
    diagnostics: Diagnostics
    reading: Reading  # the checks, then those diagnostics that are tensors
    checks: int

    def is_sound(self) -> bool:
        """Whether replies, memories and state are finite."""
        return all(self.reading.wait()[: self.checks])

    def record(self, seconds: float) -> dict[str, Any]:
        """The record of a round that took so long."""
        read, stats = iter(self.reading.wait()[self.checks :]), self.stats
        tables = {name: value for name, value in self.diagnostics.items() if isinstance(value, Table)}
        numbers = {
            name: next(read) if isinstance(n, Tensor) else n
            for name, n in self.diagnostics.items()
            if name not in tables
        }
        return {
            "round": self.end.round,
            "clients": len(self.cohort),
            "dropped": [one._asdict() for one in stats.dropped],
            "bytes": {"down": stats.bytes_down, "up": stats.bytes_up},
            "seconds": {"round": seconds, **self.seconds, **seconds_by_client(self.cohort, stats.seconds)},
            "diagnostics": numbers,
            "cohort": by_client(self.cohort, stats.down, stats.up),
            "told": stats.told,
            **({"tables": {name: table_record(*table) for name, table in tables.items()}} if tables else {}),
        }


def run_round(
    server: Server, session: Session, start: Mark, cohort: tuple[ClientId, ...], turn: Turn | None = None
) -> PendingRound:
    """The round after ``start``, in its session; of a trusting one no check is read yet. Nothing else is changed.

    A state that is not finite is a ``DivergedError``; of a trusting session it is one of the ``checks``. Only what the
    round has changed is looked through.

    ``turn`` is the round on the clock, where there is one.
    """
    number, setup = start.round + 1, server.setup
    since = time.perf_counter()
    size = float(server.options.cohort) if server.options.sampling == "poisson" else 0.0
    play, means = server.algorithm.round, server.means
    if turn and turn.staleness:  # by which each reply counts
        play, means = partial(asynchronous.play, server.algorithm, turn, session), None
    ask = partial(session.ask, means=means)
    state, diagnostics = play(setup, start.state, Cohort(number, cohort, size), ask)
    if turn:
        diagnostics = {**diagnostics, "clock": turn.time}
        session.stats.dropped += [Dropped(client, "a round", "went away before it was done") for client in turn.left]
    if hides_samples(setup.config):  # of which losses are not told
        diagnostics = {name: value for name, value in diagnostics.items() if name != "local_loss"}
    changed = dict(enumerate(_changed(start.state._asdict(), state._asdict())))
    finite = setup.replay("finite state", partial(_finite, setup.device), changed)
    if not session.trusting and not bool(finite):
        raise DivergedError(
            f"Round {number} would leave the server with NaN or Inf: training diverged, or a client's reply was "
            "absurd. The last checkpoint is intact: resume if a client was the cause; if training diverged, start a "
            "new run with lower rates."
        )
    stats = session.stats
    seconds = {
        "generate": (stats.first_ask or since) - since,
        "local_training": stats.asking,
        "server_step": time.perf_counter() - (stats.last_answer or since),
    }
    checks = [finite, *session.checks]
    reading = Reading([*checks, *(n for n in diagnostics.values() if isinstance(n, Tensor))])
    end = Mark(number, state, session.memory)
    parts = {} if session.trusting else seconds
    return PendingRound(start, end, cohort, stats, since, parts, diagnostics, reading, len(checks))


class Rounds(Protocol):
    """Where rounds come from: straight from a trainer, or by way of ``LookAhead``."""

    @property
    def now(self) -> Mark:
        """The present moment."""

    def computed(self, start: Mark, *, trusting: bool = False) -> PendingRound:
        """The round after ``start``."""

    def is_evaluated(self, round: int) -> bool:
        """Whether an evaluation follows on that round."""


class LookAhead:
    """Begins a round before the checks of the one before are read, so that a GPU never waits for the host.

    If they turn out badly both are forgotten, the first is done again with every reply looked at, and so are all to
    come: ``why_not`` then says so.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._next: PendingRound | None = None
        self.why_not = ""

    def round(self) -> PendingRound:
        """The next round, sound."""
        now, pending, self._next = self._rounds.now, self._next, None
        if self.why_not:
            return self._rounds.computed(now)
        if pending is None or pending.start is not now:  # others were asked since
            pending = self._attempt(now)
        if pending and not self._rounds.is_evaluated(pending.end.round):
            self._next = self._attempt(pending.end)
        if pending and pending.is_sound():
            return pending
        self._next = None
        self.why_not = "rounds are no longer begun ahead of the checks: a reply or the state was not finite"
        return self._rounds.computed(now)

    def _attempt(self, start: Mark) -> PendingRound | None:
        try:
            return self._rounds.computed(start, trusting=True)
        except Exception:  # whatever it is, the round is done again with care, which says what it is
            return None


def _changed(before: Any, after: Any) -> Iterator[Tensor]:
    """The leaves of a tree that are others than before: in a large federation most are the same."""
    if after is before:
        return
    if isinstance(after, Mapping):
        known = before if isinstance(before, Mapping) else {}
        for name, branch in after.items():
            yield from _changed(known.get(name), branch)
    else:
        yield after


def _finite(device: torch.device, leaves: Mapping[int, Tensor]) -> Tensor:
    """() bool: whether all numbers are finite; the largest of a tensor is not where one of them is not."""
    numbers = [leaf for leaf in leaves.values() if leaf.is_floating_point() and 0 < leaf.numel() < LARGE]
    largest = torch._foreach_norm(numbers, math.inf) if numbers else [torch.zeros((), device=device)]
    return torch.stack([norm.double() for norm in largest]).isfinite().all()
