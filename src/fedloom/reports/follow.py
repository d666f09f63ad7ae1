# SPDX-License-Identifier: Apache-2.0
"""Following a run directory that somebody else writes: each file is read from where the last look ended.

Nothing is locked. A file that was put in the place of another, as when a run is resumed, is read anew; a line that is
not finished yet is left for the next look.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fedloom.core.errors import RunError
from fedloom.reports.facts import Facts
from fedloom.runs import files
from fedloom.runs.directory import APPENDED, CONFIG, METRICS, ROSTER, SUMMARY, RunDirectory


class Lines:
    """The lines of one file so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.lines = path, list[dict[str, Any]]()
        self._file, self._read = 0, 0

    def look(self) -> bool:
        """Read what has come; whether anything has."""
        try:
            with files.opened(self.path) as file:
                state = files.identity(file)
                anew = state.number != self._file or state.size < self._read
                if anew:
                    self._file, self._read = state.number, 0
                    self.lines = []
                file.seek(self._read)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            gone, self.lines, self._file, self._read = bool(self.lines), [], 0, 0
            return gone
        except OSError as error:
            raise RunError(f"Cannot read {self.path}: {error.strerror}; restore or remove it.") from error
        try:
            self.lines += [files.from_json(line) for line in (whole.split(b"\n") if newline else ())]
        except ValueError as error:  # nothing of it counts as read: it may be mended
            raise RunError(f"A line of {self.path} is not a JSON object; remove it to use the others.") from error
        self._read += len(whole) + len(newline)
        return anew or bool(newline)


class Follower:
    """A run directory and what is known of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen = time.time()
        """When something came last (``time.time``)."""
        self._lines = {name: Lines(path / name) for name in APPENDED}
        self._stamps: tuple[float, ...] = ()
        self._directory = RunDirectory.open(path)

    def look(self) -> bool:
        """Read what has come; whether anything has."""
        news = [lines.look() for lines in self._lines.values()]
        stamps = tuple(_changed(self.path / name) for name in (CONFIG, ROSTER, SUMMARY))
        if stamps != self._stamps:
            self._stamps, self._directory = stamps, RunDirectory.open(self.path)
            news.append(True)
        if any(news):
            written = _changed(self.path / METRICS)
            self.seen = written or time.time()
        return any(news)

    @property
    def facts(self) -> Facts:
        """What is known now."""
        return Facts.of(self._directory, {name: lines.lines for name, lines in self._lines.items()})


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
