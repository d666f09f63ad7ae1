# SPDX-License-Identifier: Apache-2.0
"""Overlapping windows: found, counted by hand, and kept together."""

import numpy as np
import pytest

from fedloom.clients.partition import ClientSplit, Partition, partition
from fedloom.clients.windows import leak

SIGNAL = np.random.default_rng(0).standard_normal((3, 500)).astype(np.float32)


def windows(step: int, length: int = 20) -> np.ndarray:
    return np.stack([SIGNAL[:, start : start + length] for start in range(0, 500 - length, step)])


def dealt(train: list[int], test: list[int]) -> Partition:
    rows = [np.array(one, np.int64) for one in (train, [], test)]
    return Partition((ClientSplit("a", *rows),), np.zeros(0, np.int64), ())


def test_neighbours_on_both_sides_are_counted() -> None:
    """Windows 0 to 4: pairs 1-2 and 3-4 are on both sides, 0-1 is not, and of 2-3 nobody has the last."""
    note = leak(windows(10)[:5], dealt([0, 1, 4], [2, 3]))
    assert note is not None and "2 of 4 pairs of neighbours" in note and "--split-by" in note
    assert leak(windows(10)[:5], dealt([0, 1], [2])) is not None
    assert leak(windows(10)[:5], dealt([0, 1, 2], [])) is None


@pytest.mark.parametrize(
    "x",
    [
        windows(20),  # next to each other
        np.random.default_rng(1).permutation(windows(10)),
        np.zeros((30, 3, 20), np.float32),
        np.zeros((30, 20), np.float32),
        windows(10)[:2],
    ],
)
def test_what_does_not_overlap_is_no_leak(x: np.ndarray) -> None:
    assert leak(x, dealt(list(range(0, len(x), 2)), list(range(1, len(x), 2)))) is None


def test_recordings_that_are_kept_together_do_not_leak() -> None:
    starts = [(90 * one, step) for one in range(5) for step in range(8)]  # each recording is a piece of the signal
    x = np.stack([SIGNAL[:, start + 5 * step : start + 5 * step + 20] for start, step in starts])
    recording, labels = np.repeat(np.arange(5), 8).astype(str), np.zeros(40, np.int64)
    assert leak(x, partition(labels, "iid", 1, 0)) is not None
    kept = partition(labels, "iid", 1, 0, groups={"recording": recording}, split_by="recording")
    assert leak(x, kept) is None
