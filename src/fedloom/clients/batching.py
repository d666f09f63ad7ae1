# SPDX-License-Identifier: Apache-2.0
"""Which samples a client sees in which step: for one client a list of batches, for a cohort padded index tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from fedloom.core.contract import Batches


@dataclass(frozen=True)
class Schedule:
    """The batches of one client, in order."""

    rows: list[np.ndarray]  # per step: the rows of the federation's data
    epochs: list[int]  # per step: which pass over the data
    empty: list[bool] = field(default_factory=list)  # per step, if some can be: its one row stands for none

    @property
    def sizes(self) -> list[int]:
        """Per step: how many samples it has."""
        empty = self.empty or [False] * len(self.rows)
        return [0 if none else len(rows) for rows, none in zip(self.rows, empty)]


def schedule(rows: np.ndarray, batches: Batches | None, rng: np.random.Generator) -> Schedule:
    """Cut passes over ``rows`` into batches until there are enough; a client without samples has none."""
    plan = Schedule([], [])
    if batches is None or len(rows) == 0:
        return plan
    cuts = list(range(0, len(rows), batches.size))
    if len(cuts) > 1 and len(rows) - cuts[-1] < batches.least:
        cuts.pop()
    passes = batches.epochs or -(-batches.steps // len(cuts))
    for epoch in range(passes):
        order = rng.permutation(rows) if batches.shuffle else rows
        for start, stop in pairwise([*cuts, len(rows)]):
            plan.rows.append(order[start:stop])
            plan.epochs.append(epoch)
            if len(plan.rows) == batches.steps and not batches.epochs:
                return plan
    return plan


def steps_of(samples: int, batches: Batches) -> int:
    """How many steps ``drawn_one_by_one`` has for a client with so many samples."""
    if not samples:
        return 0
    return batches.epochs * -(-samples // batches.size) if batches.epochs else batches.steps


def drawn_one_by_one(rows: np.ndarray, batches: Batches, rng: np.random.Generator) -> Schedule:
    """As many steps as ``schedule`` has; in each, every sample is drawn by itself, ``batches.size`` on average.

    Batches vary in size, and none is cut short.
    """
    plan, steps = Schedule([], [], []), steps_of(len(rows), batches)
    for step in range(steps):
        drawn = rows[rng.random(len(rows)) * len(rows) < batches.size]
        plan.rows.append(drawn if len(drawn) else rows[:1])
        plan.empty.append(not len(drawn))
        plan.epochs.append(step * batches.epochs // steps)
    return plan


@dataclass(frozen=True)
class PaddedSchedule:
    """The batches of a cohort whose clients are ordered by their number of steps, most first."""

    rows: np.ndarray  # (steps, clients, size) int64; padding repeats the client's first row of the batch
    sizes: np.ndarray  # (steps, clients) real samples; 0 in a step that drew none, too
    epochs: np.ndarray  # (steps, clients)
    active: np.ndarray  # (steps,) clients that still have a step: always the first ones

    @classmethod
    def of(cls, schedules: Sequence[Schedule]) -> PaddedSchedule:
        """Pad ``schedules``, which must be in order of their number of steps, most first."""
        steps, clients = len(schedules[0].rows) if schedules else 0, len(schedules)
        size = max((len(rows) for s in schedules for rows in s.rows), default=0)
        padded = np.zeros((steps, clients, size), dtype=np.int64)
        sizes, epochs = np.zeros((2, steps, clients), dtype=np.int64)
        for c, plan in enumerate(schedules):
            own = plan.sizes
            sizes[: len(own), c], epochs[: len(own), c] = own, plan.epochs
            if own and min(own) == size:
                padded[: len(own), c] = plan.rows
                continue
            for t, rows in enumerate(plan.rows):
                padded[t, c, : len(rows)] = rows
                padded[t, c, len(rows) :] = rows[0]
        lengths = np.array([len(plan.rows) for plan in schedules], dtype=np.int64)
        return cls(padded, sizes, epochs, (lengths > np.arange(steps)[:, None]).sum(1))
