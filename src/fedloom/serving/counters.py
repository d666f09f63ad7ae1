# SPDX-License-Identifier: Apache-2.0
"""Numbers that several workers share, in memory that they have in common: what was asked, and who asked how often.

Each worker adds to rows of its own; whoever is asked for the metrics adds up all rows.
"""

from __future__ import annotations

import hashlib
import mmap
import secrets
import time
from collections.abc import Sequence

import numpy as np

STATUSES = (200, 201, 206, 304, 400, 401, 403, 404, 405, 408, 409, 411, 413, 415, 416, 429, 500, 503)
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
SLOTS = 1 << 17
MINUTE = 60.0


class Counters:
    """Requests, seconds and bytes by route."""

    def __init__(self, routes: Sequence[str], workers: int) -> None:
        self.routes, self.worker = list(routes), 0
        self._row = {route: row for row, route in enumerate(self.routes)}
        columns = len(STATUSES) + len(BUCKETS) + 3
        self._table = _shared((workers, len(self.routes), columns))

    def add(self, route: str, status: int, seconds: float, bytes_in: int, bytes_out: int) -> None:
        """A request was answered."""
        row = self._table[self.worker, self._row[route]]
        row[STATUSES.index(status)] += 1
        times = row[len(STATUSES) : len(STATUSES) + len(BUCKETS)]
        times[[seconds <= bucket for bucket in BUCKETS]] += 1
        row[-3:] += (seconds, bytes_in, bytes_out)

    def text(self) -> str:
        """In the form that Prometheus reads."""
        total = self._table.sum(0)
        lines = ["# TYPE fedloom_requests_total counter"]
        for route, row in zip(self.routes, total):
            counts = zip(STATUSES, row)
            lines += [f'fedloom_requests_total{{route="{route}",status="{s}"}} {int(n)}' for s, n in counts if n]
        lines.append("# TYPE fedloom_request_seconds histogram")
        for route, row in zip(self.routes, total):
            number = int(row[: len(STATUSES)].sum())
            times = row[len(STATUSES) : len(STATUSES) + len(BUCKETS)]
            lines += [
                f'fedloom_request_seconds_bucket{{route="{route}",le="{b}"}} {int(n)}' for b, n in zip(BUCKETS, times)
            ]
            lines.append(f'fedloom_request_seconds_bucket{{route="{route}",le="+Inf"}} {number}')
            lines.append(f'fedloom_request_seconds_sum{{route="{route}"}} {row[-3]:.6f}')
            lines.append(f'fedloom_request_seconds_count{{route="{route}"}} {number}')
        for column, name in ((-2, "received"), (-1, "sent")):
            lines.append(f"# TYPE fedloom_{name}_bytes_total counter")
            lines += [
                f'fedloom_{name}_bytes_total{{route="{route}"}} {int(row[column])}'
                for route, row in zip(self.routes, total)
            ]
        return "\n".join([*lines, ""])


class Limiter:
    """At most ``rate`` requests a minute for each name; a minute's worth may come at once.

    For each name there is one number, the time at which all that it asked for would have been due. Two workers that
    change it at the same instant let one request too many pass, and nothing worse.
    """

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._due = _shared((SLOTS,))
        self._salt = secrets.token_bytes(16)  # so that nobody can choose a name that shares another's number

    def wait(self, name: str, now: float | None = None) -> float:
        """0 if the request may pass; else the seconds until it may."""
        if not self.rate:
            return 0.0
        now = time.monotonic() if now is None else now
        found = hashlib.blake2b(name.encode("utf-8", "replace"), key=self._salt, digest_size=8).digest()
        slot = int.from_bytes(found, "little") % SLOTS
        due = max(float(self._due[slot]), now) + MINUTE / self.rate
        if due - now > MINUTE:
            return due - now - MINUTE
        self._due[slot] = due
        return 0.0


def _shared(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros in memory that processes forked from this one share."""
    size = int(np.prod(shape))
    return np.frombuffer(mmap.mmap(-1, size * 8), dtype=np.float64, count=size).reshape(shape)
