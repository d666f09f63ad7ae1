# SPDX-License-Identifier: Apache-2.0
"""Windows of signals that overlap: neighbours are nearly copies, and on both sides of a split scores are too good."""

from __future__ import annotations

import numpy as np

from fedloom.clients.partition import Partition

PAIRS = 64
"""Neighbours that are looked at to find by how much windows overlap."""
PIECE = 1 << 14
"""Of all windows, how many are looked at together: what is compared takes memory, and windows may lie on a disk."""


def leak(x: np.ndarray, parts: Partition) -> str | None:
    """A note where overlapping windows are on both sides of the split; None for what are no such windows.

    Samples are taken to lie in the order in which they were cut from a signal.
    """
    shift = _shift(x)
    if shift is None:
        return None
    overlap = _overlap(x, shift)
    tried = np.full(len(x), -1)
    for client in parts.clients:
        tried[client.train] = 0
        tried[np.concatenate([client.val, client.test])] = 1
    apart = overlap & (tried[1:] >= 0) & (tried[:-1] >= 0) & (tried[1:] != tried[:-1])
    if not apart.any():
        return None
    return (
        f"windows overlap, and {int(apart.sum()):,} of {int(overlap.sum()):,} pairs of neighbours are one in training "
        "and one in validation or test data: scores will be too good. Keep those of a recording together: --split-by"
    )


def _overlap(x: np.ndarray, shift: int) -> np.ndarray:
    """Of each window but the last, whether the next one begins in it."""
    pieces = [x[start : start + PIECE + 1] for start in range(0, len(x) - 1, PIECE)]
    return np.concatenate([(p[1:, :, : x.shape[2] - shift] == p[:-1, :, shift:]).all(axis=(1, 2)) for p in pieces])


def _shift(x: np.ndarray) -> int | None:
    """By how many steps neighbouring windows are apart, if half of those looked at overlap."""
    if x.ndim != 3 or len(x) < 3 or x.shape[2] < 4:
        return None
    rows = np.unique(np.linspace(0, len(x) - 2, PAIRS).astype(np.int64))
    before, after = x[rows], x[rows + 1]
    rows = np.flatnonzero((before != before[:, :, :1]).any(axis=(1, 2)))  # a signal that stands still overlaps anyhow
    before, after = before[rows], after[rows]
    if not len(rows):
        return None
    length = x.shape[2]
    for shift in range(1, length - 1):
        first = (after[:, :, 0] == before[:, :, shift]).all(axis=1)
        if 2 * first.sum() >= len(rows):
            alike = (after[:, :, : length - shift] == before[:, :, shift:]).all(axis=(1, 2))
            if 2 * alike.sum() >= len(rows):
                return shift
    return None
