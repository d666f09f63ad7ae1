# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C interrupts, and what it has begun it does not interrupt again."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from fedloom.core.interrupts import ignore, take_as_one, taken_as_one

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Python's own handler, before and after."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_what_an_interrupt_has_begun_goes_on() -> None:
    done = []
    with taken_as_one():
        with pytest.raises(KeyboardInterrupt):
            try:
                press()
            except KeyboardInterrupt:
                press()
                try:
                    raise OSError
                except OSError:
                    press()
                done.append("saved")
                raise
            finally:
                press()
        with pytest.raises(KeyboardInterrupt):  # a new one, also where somebody has swallowed the first
            press()
    assert done == ["saved"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_handles_it_already_goes_on_doing_so() -> None:
    mine = signal.signal(signal.SIGINT, signal.SIG_IGN) and signal.getsignal(signal.SIGINT)
    with taken_as_one():
        assert signal.getsignal(signal.SIGINT) is mine
    ignored: list[bool] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=lambda: ignored.append(take_as_one()))
    thread.start()
    thread.join()
    assert ignored == [False]


def test_a_process_that_ends_is_left_in_peace() -> None:
    ignore()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not ours to change
    assert take_as_one()
    ignore()
    press()
