# SPDX-License-Identifier: Apache-2.0
"""What a run shows while it runs. Progress goes to stderr; the lines of ``json`` are results and go to stdout."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from fedloom.core.errors import unknown
from fedloom.runs.files import to_json

WAITS = "fedloom waits "
"""How the lines begin that say for what."""


class Headline(NamedTuple):
    """What runs, on what, and what a user should know of it."""

    name: str
    dataset: str
    clients: int
    cohort: int
    unseen: int
    models: tuple[str, ...]
    engine: str
    device: str
    engine_reason: str
    notes: tuple[str, ...]
    metric: str
    round: int
    """Rounds done already."""
    rounds: int

    def __str__(self) -> str:
        unseen = f", {self.unseen} unseen" if self.unseen else ""
        parts = [
            f"{self.name} on {self.dataset}",
            f"{self.clients} clients, {self.cohort} a round{unseen}",
            f"model {', '.join(self.models)}",
            f"{self.engine} engine on {self.device} ({self.engine_reason})",
            *(f"note: {note}" for note in self.notes),
        ]
        return "; ".join(parts)


class Display(Protocol):
    """Entered for the time of a run."""

    def __enter__(self) -> Display: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def begin(self, run: Headline) -> None:
        """Training begins."""

    def update(self, record: dict[str, Any]) -> None:
        """A round is done."""

    def wait(self, text: str) -> None:
        """Nothing happens until something comes: ``for 4 clients; 2 are connected``."""

    def note(self, text: str) -> None:
        """Something that whoever watches should know."""

    def end(self, directory: Any) -> None:
        """The summary is written."""


class Quiet:
    """Shows nothing; the base of the others."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
    def begin(self, run: Headline) -> None: ...
    def update(self, record: dict[str, Any]) -> None: ...
    def wait(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def end(self, directory: Any) -> None: ...


class Json(Quiet):
    """One JSON line per round, and the summary as the last one."""

    def update(self, record: dict[str, Any]) -> None:
        self._line(record)

    def end(self, directory: Any) -> None:
        self._line(directory.summary())

    def _line(self, value: Mapping[str, Any]) -> None:
        sys.stdout.write(to_json(value).decode())
        sys.stdout.flush()  # whoever reads the pipe sees a round when it is done


class Plain(Quiet):
    """A line at the beginning, one per evaluation and one at the end: for log files."""

    def begin(self, run: Headline) -> None:
        self._news = News(run.metric)
        self._rounds = run.rounds
        self._line(str(run))

    def update(self, record: dict[str, Any]) -> None:
        self._news.add(record)
        if "metrics" in record:
            self._line(f"round {record['round']}/{self._rounds}: {self._news}")

    def wait(self, text: str) -> None:
        self._line(WAITS + text)

    def note(self, text: str) -> None:
        self._line(f"note: {text}")

    def end(self, directory: Any) -> None:
        self._line(f"saved in {directory.path}")

    def _line(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class Rich(Quiet):
    """A bar, the time left and the newest numbers: for terminals and notebooks."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        self._bar = Progress(
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            # where the line is too long, the numbers at its end are cut off, not the time
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True, highlight=False, markup=False),
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, run: Headline) -> None:
        self._news = News(run.metric)
        self._bar.console.print(str(run))
        self._task = self._bar.add_task("", total=run.rounds, completed=run.round)

    def update(self, record: dict[str, Any]) -> None:
        self._news.add(record)
        self._bar.update(self._task, completed=record["round"], description=str(self._news))

    def wait(self, text: str) -> None:
        self._bar.console.print(WAITS + text)

    def note(self, text: str) -> None:
        self._bar.console.print(f"note: {text}")

    def end(self, directory: Any) -> None:
        self._bar.console.print(f"saved in {directory.path}", soft_wrap=True)  # a path is to be copied whole


class News:
    """The newest numbers of a run as a short text."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._metrics: Mapping[str, float | None] = {}
        self._loss: float | None = None
        self._dropped = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in the record of a round."""
        self._metrics = record.get("metrics", self._metrics)
        self._loss = record["diagnostics"].get("local_loss")
        self._dropped += len(record["dropped"])

    def __str__(self) -> str:
        names = {split: f"deployed/participants/{split}/{self._metric}" for split in ("val", "test")}
        known = {split: self._metrics.get(name) for split, name in names.items()}
        scores = [f"{split} {value:.4f}" for split, value in known.items() if value is not None]
        parts = [f"{self._metric} {' '.join(scores)}"] if scores else []
        parts += [f"local loss {self._loss:.4f}"] if self._loss is not None else []
        parts += [f"{self._dropped} dropped so far"] if self._dropped else []
        return ", ".join(parts)


DISPLAYS = {"rich": Rich, "plain": Plain, "json": Json, "quiet": Quiet}


def display(name: str) -> Display:
    """The display of that name; ``auto`` is ``rich`` where somebody watches and ``plain`` elsewhere."""
    if name == "auto":
        name = "rich" if _watched() else "plain"
    if name not in DISPLAYS:
        raise unknown("progress display", name, ["auto", *DISPLAYS])
    return DISPLAYS[name]()


def _watched() -> bool:
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        return importlib.util.find_spec("ipywidgets") is not None  # rich's bars need it there
    # not console.is_terminal, which FORCE_COLOR sets in the logs of CI
    return sys.stderr.isatty() and not console.is_dumb_terminal
