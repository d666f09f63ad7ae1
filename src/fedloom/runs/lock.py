# SPDX-License-Identifier: Apache-2.0
"""One process at a time: a lock that the operating system takes back when its holder dies, however.

A file whose mere existence meant "in use" would outlive a killed process and lock everybody out. Here it is the open
file that is locked; what is written in it, who has it, is for people.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedloom.core.errors import RunError
from fedloom.runs.files import writing

LOCK = "lock"

if sys.platform == "win32":
    import msvcrt

    def _seize(descriptor: int) -> None:
        os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # far from the text, which others must be able to read
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _seize(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process. The file says who has it, and stays: removing it would be a race."""
    path = folder / LOCK
    with writing(path):  # what it links to is not ours to write, in a folder by somebody else
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
    try:
        _take(descriptor, folder)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _take(descriptor: int, folder: Path) -> None:
    """Lock the open file, or say who has it, and write into it who has it now."""
    try:
        _seize(descriptor)
    except (BlockingIOError, PermissionError) as error:
        holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
        raise RunError(f"{folder} is in use by {holder}; wait for it or stop it, then try again.") from error
    except OSError as error:
        raise RunError(
            f"{folder} cannot be locked: {error.strerror}; give an --out on a file system that has locks, "
            "such as a local disk."
        ) from error
    with writing(folder / LOCK):
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, f"process {os.getpid()} on {platform.node()}".encode())
