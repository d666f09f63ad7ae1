# SPDX-License-Identifier: Apache-2.0
"""Who answers when, on a clock that only counts: nobody waits, and the same seed gives the same moments.

A client takes as long as its steps of training at its speed (``availability``); what it is sent and the server's own
work take no time. A client that goes away before it is done does not answer.

Rounds are either synchronous: a cohort is asked, and the round is over when its last member has answered or gone. Or
they are asynchronous (``--async K``): so many clients as ``--cohort`` says train at any time, each on what it was sent
when it began; one that answers or goes makes room for another; and the server steps whenever it has K answers.

Nothing here depends on what clients answer, so that all of it can be worked out anew by a run that goes on.
"""

from __future__ import annotations

import abc
import heapq
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fedloom.core.errors import ConfigError, RoundError
from fedloom.core.random import stream
from fedloom.core.trees import ClientId
from fedloom.training import cohorts
from fedloom.training.availability import TICKS, Availability, Rows

GUESSES = 256
"""Clients that are drawn before those who could be drawn are looked for, which takes time in a large federation: of
phones that are there for 1% of the day nine in ten are found so."""

PATIENCE = 100_000
"""Clients that may begin in one round; then nobody comes through often enough."""


class Turn(NamedTuple):
    """A round on the clock."""

    time: float
    """In seconds since the start, when it is over."""
    came: tuple[ClientId, ...]
    """Whose answers the server has then, in the roster's order."""
    left: tuple[ClientId, ...]
    """Who went away without one."""
    begun: tuple[ClientId, ...] = ()
    """Who began from the state before this round, and will answer, in this round or later; empty where all answer."""
    staleness: Mapping[ClientId, int] = MappingProxyType({})
    """How many rounds passed since each of those who came began."""


class AbstractClock(abc.ABC):
    """Rounds by number. ``steps`` are those of each client's training, in the roster's order."""

    def __init__(
        self, clients: Sequence[ClientId], availability: Availability, steps: Sequence[int], seed: int, cohort: int
    ) -> None:
        self.availability = availability
        self._clients, self._seed, self._cohort = clients, seed, cohort
        self._lasts: Rows = np.maximum(1, np.rint(TICKS * np.asarray(steps) / availability.speeds)).astype(np.int64)
        self._now = 0
        self._turns: list[Turn] = []
        able = int((self._lasts <= availability.longest()).sum())
        if able < self.least:
            raise ConfigError(
                f"Of {len(clients)} clients {able} are ever there long enough to finish their training, and a round "
                f"needs {self.least}. Give fewer steps, a smaller --async, or longer times in --availability."
            )

    @property
    def least(self) -> int:
        """How many answers a round needs."""
        return 1

    def turn(self, number: int) -> Turn:
        """The round of that number, from 1."""
        while len(self._turns) < number:
            self._turns.append(self._next(len(self._turns) + 1))
        return self._turns[number - 1]

    @abc.abstractmethod
    def _next(self, number: int) -> Turn:
        """The round of that number, which follows on those before."""

    def _names(self, rows: Iterable[int]) -> tuple[ClientId, ...]:
        return tuple(self._clients[row] for row in sorted(rows))

    def _ends(self, row: int) -> tuple[int, bool]:
        """When a client that begins now is done, or gone, and whether it is done."""
        done, gone = self._now + int(self._lasts[row]), self.availability.until(row, self._now)
        return (done, True) if done <= gone else (int(gone), False)


class Synchronous(AbstractClock):
    """A cohort of those who are there is drawn, by the streams that a run without a clock has."""

    def _next(self, number: int) -> Turn:
        """Draw until somebody answers; the round lasts until the last of those drawn is done, or gone."""
        left: list[int] = []
        for attempt in range(PATIENCE):
            there = self.availability.there(self._now)
            if not len(there):
                self._now = self.availability.opens(self._now)
                continue
            draw = stream(self._seed, number, "cohort", *([attempt] if attempt else []))
            drawn = there[cohorts.drawn(draw, len(there), self._cohort, "fixed")]
            ends = {int(row): self._ends(int(row)) for row in drawn}
            self._now = max(end for end, _ in ends.values())
            came = [row for row, (_, is_done) in ends.items() if is_done]
            left += [row for row in ends if row not in came]
            if came:
                return Turn(self._now / TICKS, self._names(came), self._names(set(left) - set(came)))
        raise RoundError(_nobody(number, self._now))


class Asynchronous(AbstractClock):
    """Clients begin whenever there is room, and the server steps with every ``buffer`` answers."""

    def __init__(
        self,
        clients: Sequence[ClientId],
        availability: Availability,
        steps: Sequence[int],
        seed: int,
        cohort: int,
        buffer: int,
    ) -> None:
        self._buffer = buffer
        super().__init__(clients, availability, steps, seed, cohort)
        self._draw = stream(seed, "asynchronous")
        self._events: list[tuple[int, int, int, bool]] = []  # when, which in order, whose, whether it is done
        self._begun_in: dict[int, int] = {}  # by row, of those who train and of those whose answers wait
        self._count = 0

    @property
    def least(self) -> int:
        """As many as the buffer takes: nobody answers twice in a round."""
        return self._buffer

    def _next(self, number: int) -> Turn:
        """Go from moment to moment, at which a client ends or somebody comes, until ``buffer`` answers are there."""
        came: list[int] = []
        left: list[int] = []
        begun = self._begin(number)
        for _ in range(PATIENCE):
            moments = [self._events[0][0]] if self._events else []
            if len(self._events) < self._cohort and len(self._begun_in) < len(self._clients):  # they are not there
                moments.append(self.availability.opens(self._now))
            self._now = min(moments)
            # who answers at one moment is heard before others begin
            while self._events and self._events[0][0] == self._now and len(came) < self._buffer:
                _, _, row, is_done = heapq.heappop(self._events)
                if is_done:
                    came.append(row)
                else:
                    left.append(row)
                    del self._begun_in[row]
            if len(came) == self._buffer:
                staleness = {self._clients[row]: number - self._begun_in.pop(row) for row in sorted(came)}
                gone = set(left) - set(came)
                return Turn(self._now / TICKS, self._names(came), self._names(gone), self._names(begun), staleness)
            begun += self._begin(number)
        raise RoundError(_nobody(number, self._now))

    def _begin(self, number: int) -> list[int]:
        """Have as many begin as there is room for; those of them who will answer."""
        begun = []
        while len(self._events) < self._cohort:
            row = self._drawn()
            if row is None:
                break
            end, is_done = self._ends(row)
            self._count += 1
            heapq.heappush(self._events, (end, self._count, row, is_done))
            self._begun_in[row] = number
            if is_done:
                begun.append(row)
        return begun

    def _drawn(self) -> int | None:
        """One of those who are there and have nothing to do, each as likely; None: there is nobody."""
        for _ in range(GUESSES):
            row = int(self._draw.integers(len(self._clients)))
            if row not in self._begun_in and self.availability.is_there(row, self._now):
                return row
        idle = [int(row) for row in self.availability.there(self._now) if int(row) not in self._begun_in]
        return idle[int(self._draw.integers(len(idle)))] if idle else None


def _nobody(number: int, now: int) -> str:
    return (
        f"Round {number} finds too few clients that answer, after {now / TICKS:,.0f} seconds on the clock: they go "
        "away before they are done. Give fewer steps, or longer times in --availability."
    )
