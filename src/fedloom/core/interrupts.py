# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, which is often pressed more than once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Interrupt, unless what an interrupt has begun is not over: it would be cut short."""
    if not is_of_one(sys.exc_info()[1]):
        raise KeyboardInterrupt


def is_of_one(error: BaseException | None) -> bool:
    """Whether an error is an interrupt, or came of one: in the body of a class, Python makes another error of it."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False


def take_as_one() -> bool:
    """Have Ctrl-C change nothing while an earlier one is dealt with; whether that was changed here.

    It is not where somebody else handles Ctrl-C, or in another thread than the main one.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    signal.signal(signal.SIGINT, _interrupt)
    return True


@contextmanager
def taken_as_one() -> Iterator[None]:
    """``take_as_one`` in here only."""
    changed = take_as_one()
    try:
        yield
    finally:
        if changed:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore() -> None:
    """Have Ctrl-C change nothing any more: this process is about to end. Only where ``take_as_one`` had an effect."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
