# SPDX-License-Identifier: Apache-2.0
"""Memory that has no room for something: a GPU's or this machine's. Nothing here imports torch."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_ON_CPU = ("DefaultCPUAllocator", "Storage size calculation overflowed")
"""Of torch's errors on a CPU, which are of no type of their own."""

_LIMIT = Path("/sys/fs/cgroup/memory.max")


def is_full(error: BaseException) -> bool:
    """Whether an error says that memory has no room for something."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _ON_CPU)


def why_full(error: BaseException) -> str:
    """Such an error in a few words."""
    number = re.search(r"allocate ([\d.]+) (bytes|\w+)", str(error))
    if number and number[2] == "bytes":
        return f"{int(number[1]) / 1e9:,.1f} GB are wanted at once"
    return str(error).partition(". ")[0] or "memory is full"


def total() -> int:
    """The bytes of this machine's memory, or of the part that its control group may use."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 62
    with suppress(OSError, ValueError):  # there is no limit
        found = min(found, int(_LIMIT.read_text()))
    return found
