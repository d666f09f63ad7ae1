# SPDX-License-Identifier: Apache-2.0
"""A script that waits for its parent's end and then ends what that began in a folder: ``sweep.py FOLDER PARENT``.

Ray's processes end with the process that started Ray, but a few of them only after a minute where that one was killed.
They all have files open in Ray's folder. A line on standard input says that there is nothing left to do.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TRIES = 20


def users(folder: str) -> Iterator[int]:
    """The processes that have a file of the folder open."""
    for process in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with suppress(OSError):  # it is over, or somebody else's
            if any(Path(folder) in file.readlink().parents for file in Path(f"/proc/{process}/fd").iterdir()):
                yield process


def sweep(folder: str, parent: int) -> None:
    """End them, but for the parent, and what they began meanwhile; remove the folder."""
    for _ in range(TRIES):
        found = [process for process in users(folder) if process != parent]
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not found:
            break
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if not sys.stdin.read(1):  # nobody is there to write
        sweep(sys.argv[1], int(sys.argv[2]))
