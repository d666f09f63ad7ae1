# SPDX-License-Identifier: Apache-2.0
"""``fedloom serve`` in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def process(path: Path, *words: str) -> Iterator[tuple[Any, str]]:
    """The process and its address; it is stopped in the end."""
    command = [sys.executable, "-m", "fedloom", "serve", str(path), "--port", "0", "--rate", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        try:
            assert running.stdout
            line = running.stdout.readline()
            assert " at http" in line
            yield running, line.rpartition(" ")[2].strip()
        finally:
            running.terminate()
            running.wait(timeout=30)
