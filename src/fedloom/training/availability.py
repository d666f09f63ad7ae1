# SPDX-License-Identifier: Apache-2.0
"""When clients are there to be asked, and how fast they are: ``--availability``, on a clock of whole milliseconds.

``always``: everybody, at any time. A file has a row for each stretch of time that a client is there::

    client,start,end,speed
    0,0,3600,2.5
    0,7200,10800,2.5
    1,0,86400,

``start`` and ``end`` are seconds of the clock, ``speed`` is how many steps of training the client does in a second; the
column can be left out. What the file says repeats after its last end. A speed that is not given is drawn by the seed,
from a log-normal distribution with the median 1 in which the slowest and the fastest twentieth lie ten times apart.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedloom.core.errors import DataError
from fedloom.core.random import stream
from fedloom.core.trees import ClientId
from fedloom.runs.files import read_file

ALWAYS = "always"
TICKS = 1000
"""Of the clock, in a second: whole numbers, so that a run that goes on meets the same moments."""
SPREAD = 0.7
"""Deviation of the logarithm of the speeds that are drawn."""
LONGEST = 1e9
"""Seconds that a file may span."""
SPEEDS = 1e-6, 1e6
"""The slowest and the fastest client, in steps a second."""

Rows = npt.NDArray[np.int64]


class Availability:
    """When each client is there, by its row in the roster, and the steps that it does in a second.

    ``starts`` and ``ends`` are the ticks of the stretches, by client and in order; those of the client in row r are
    from ``first[r]`` to ``first[r + 1]``. Without them everybody is always there.
    """

    def __init__(
        self,
        speeds: npt.NDArray[np.float64],
        first: Rows | None = None,
        starts: Rows | None = None,
        ends: Rows | None = None,
        digest: str = "",
    ) -> None:
        self.speeds, self.digest = speeds, digest
        self._first, self._starts, self._ends = first, starts, ends
        self._span = 0 if ends is None else int(ends.max())

    @classmethod
    def of(cls, text: str, clients: Sequence[ClientId], others: Sequence[ClientId], seed: int) -> Availability:
        """What ``--availability`` says of ``clients``; a file may have rows of ``others``, who take no part."""
        speeds = np.exp(SPREAD * stream(seed, "speeds").standard_normal(len(clients)))
        return cls(speeds) if text == ALWAYS else _read(Path(text), clients, others, speeds)

    def there(self, now: int) -> Rows:
        """The rows of the clients that are there at this tick; what the file says begins again where it ends."""
        if self._first is None or self._starts is None or self._ends is None:
            return np.arange(len(self.speeds))
        at = now % self._span
        covered = np.flatnonzero((self._starts <= at) & (at < self._ends))
        return np.searchsorted(self._first, covered, side="right") - 1

    def is_there(self, row: int, now: int) -> bool:
        """Whether a client is there."""
        return self._stretch(row, now) is not None

    def until(self, row: int, now: int) -> float:
        """When a client that is there goes away: a tick, or infinity."""
        found = self._stretch(row, now)
        assert found is not None
        start, end = found
        if self._first is None or end - start == self._span:
            return math.inf
        here = now - now % self._span
        if end == self._span:  # what the file says begins again
            again = self._stretch(row, 0)
            end += again[1] if again else 0
        return float(here + end)

    def opens(self, now: int) -> int:
        """When somebody comes next, after now."""
        assert self._starts is not None  # else nobody would be waited for
        waits = (self._starts - now) % self._span
        return now + int(np.where(waits > 0, waits, self._span).min())

    def longest(self) -> npt.NDArray[np.float64]:
        """By client, the longest time that it is there without a break."""
        if self._first is None or self._starts is None or self._ends is None:
            return np.full(len(self.speeds), math.inf)
        first, last = self._first[:-1], self._first[1:] - 1
        found = np.maximum.reduceat(self._ends - self._starts, first).astype(np.float64)
        # what the file says begins again
        around = (self._starts[first] == 0) & (self._ends[last] == self._span)
        joined = self._ends[first] + self._span - self._starts[last]
        found = np.where(around, np.maximum(found, joined), found)
        return np.where(around & (first == last), math.inf, found)

    def _of(self, row: int) -> tuple[Rows, Rows]:
        assert self._first is not None and self._starts is not None and self._ends is not None
        start, stop = self._first[row], self._first[row + 1]
        return self._starts[start:stop], self._ends[start:stop]

    def _stretch(self, row: int, now: int) -> tuple[int, int] | None:
        """The stretch of the span in which a client is there now, if it is."""
        if self._first is None:
            return 0, 0
        starts, ends = self._of(row)
        at = now % self._span
        number = int(np.searchsorted(starts, at, side="right")) - 1
        return (int(starts[number]), int(ends[number])) if number >= 0 and at < ends[number] else None


def _read(
    path: Path, clients: Sequence[ClientId], others: Sequence[ClientId], speeds: npt.NDArray[np.float64]
) -> Availability:
    """The file at ``path``; ``speeds`` are of those for whom it has none.

    Every client needs a row, and no stretches that overlap; rows of clients that take no part are passed over. Faults
    are told with their line.
    """
    known, given = {client: row for row, client in enumerate(clients)}, dict[int, float]()
    stretches: list[list[tuple[int, int]]] = [[] for _ in clients]
    ignored = set(others)
    try:
        data = read_file(path)
        with io.StringIO(data.decode("utf-8-sig"), newline="") as file:
            for where, line in _lines(path, file):
                client = line["client"]
                if client in ignored:
                    continue
                if client not in known:
                    raise DataError(f"{where}: there is no client {client!r} in this federation. Remove the row.")
                row, start, end = known[client], *(_number(line, name, 0, LONGEST, where) for name in ("start", "end"))
                ticks = round(start * TICKS), round(end * TICKS)
                if ticks[0] >= ticks[1]:
                    raise DataError(
                        f"{where}: it ends at {end:g} and starts at {start:g}; give an end after the start."
                    )
                stretches[row].append(ticks)
                if line.get("speed"):
                    speed = _number(line, "speed", *SPEEDS, where)
                    if given.setdefault(row, speed) != speed:
                        raise DataError(
                            f"{where}: client {client} has the speeds {given[row]:g} and {speed:g}. Give one."
                        )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"Cannot read {path}: {error}. Give --availability a text file with the columns client, start and end, or "
            f"{ALWAYS}."
        ) from error
    missing = [client for client, own in zip(clients, stretches) if not own]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise DataError(f"{path} does not say when clients {shown} are there. Give a row for each client.")
    whole = [_joined(path, client, own) for client, own in zip(clients, stretches)]
    first = np.cumsum([0, *map(len, whole)], dtype=np.int64)
    ticks_of = np.array([stretch for own in whole for stretch in own], dtype=np.int64)
    speeds = np.array([given.get(row, speed) for row, speed in enumerate(speeds)])
    return Availability(speeds, first, ticks_of[:, 0], ticks_of[:, 1], hashlib.sha256(data).hexdigest())


def _lines(path: Path, file: Iterator[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Each row with its place, by the names of its columns."""
    reader = csv.reader(file, strict=True)
    names = [name.strip() for name in next(reader, [])]
    wanted, allowed = {"client", "start", "end"}, {"client", "start", "end", "speed"}
    if not wanted <= set(names) <= allowed or len(set(names)) < len(names):
        raise DataError(
            f"{path} has the columns {', '.join(names)[:200] or 'of an empty file'}; expected client, start, end and "
            "perhaps speed, in its first line."
        )
    for line in reader:
        where = f"{path}, line {reader.line_num}"
        if line and len(line) != len(names):
            raise DataError(f"{where} has {len(line)} values, expected {len(names)}: one for each column.")
        if line:
            yield where, {name: value.strip() for name, value in zip(names, line)}


def _number(line: dict[str, str], name: str, low: float, high: float, where: str) -> float:
    try:
        value = float(line[name])
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise DataError(f"{where}: {name} is {line[name][:40]!r}; expected a number from {low:g} to {high:g}.")
    return value


def _joined(path: Path, client: ClientId, own: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """A client's stretches in order, those as one that touch."""
    own = sorted(own)
    for (start, end), (then, _) in pairwise(own):
        if then < end:
            raise DataError(
                f"{path}: client {client} is there from {start / TICKS:g} to {end / TICKS:g} and again from "
                f"{then / TICKS:g}. Give rows that do not overlap."
            )
    joined = own[:1]
    for start, end in own[1:]:
        if start == joined[-1][1]:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined
