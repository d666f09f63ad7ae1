# SPDX-License-Identifier: Apache-2.0
"""What a run shows while it runs."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol


class Display(Protocol):
    """Entered for the time of a run."""

    def __enter__(self) -> Display: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def begin(self, simulation: Any) -> None:
        """Training begins, at ``simulation.round`` of ``simulation.options.rounds``."""

    def update(self, record: dict[str, Any]) -> None:
        """A round is done."""

    def end(self, directory: Any) -> None:
        """The summary is written."""


class Quiet:
    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def begin(self, simulation: Any) -> None: ...
    def update(self, record: dict[str, Any]) -> None: ...
    def end(self, directory: Any) -> None: ...


def display(name: str) -> Display:
    return Quiet()
