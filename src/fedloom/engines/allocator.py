# SPDX-License-Identifier: Apache-2.0
"""Tuning glibc's allocator from within.

By default it gives every block over 128 KiB back to the kernel when freed, and the next one of that size is mapped and
zeroed page by page: for tensors of a small model that costs more than the arithmetic. Higher thresholds keep blocks.
"""

import ctypes
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from malloc.h
_KEEP = 1 << 30  # in all
_KEEP_BLOCK = 1 << 27  # larger ones, as of a large loom, would leave holes that nothing else fits into
_OLD_LIMIT = 1 << 25  # of the threshold for mapping, in older versions


@cache
def keep_freed_memory() -> bool:
    """Have this process keep freed blocks of up to 128 MiB, or what it can; False where there is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    kept = any(mallopt(_MMAP_THRESHOLD, size) for size in (_KEEP_BLOCK, _OLD_LIMIT))
    return kept and bool(mallopt(_TRIM_THRESHOLD, _KEEP))
