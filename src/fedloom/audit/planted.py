# SPDX-License-Identifier: Apache-2.0
"""Canaries: random directions that are planted in a run, and how well each is found again in what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.random import fold, key, normal
from fedloom.privacy.ledger import Release, Unit
from fedloom.reports.statistics import Floats

FEWEST, MOST, NUMBERS = 20, 1000, 100
"""Canaries: one for so many numbers of the model, so that they do not hide one another."""
ROOM = 1 << 28
"""Numbers of all directions together: a gigabyte."""
TOO_LONG = 10.0
"""A canary is so many times as long as the bound, to which it must be cut."""
LITTLE = 1e-3
"""The noise of the control, as a share of the run's."""


class Canaries:
    """Directions of one length among so many numbers, at right angles but for chance."""

    def __init__(self, number: int, seed: int, like: Tensor) -> None:
        """``like``: all numbers that could be told, as one vector."""
        found = [normal(fold(key(seed, "canaries"), i).to(like.device), like.shape, like.dtype) for i in range(number)]
        self.directions = torch.stack([one / one.norm() for one in found])

    def __len__(self) -> int:
        return len(self.directions)

    def found(self, change: Tensor) -> Floats:
        """The cosine of each with what was told, in deviations of the cosine of a direction that nobody sent."""
        cosines = self.directions @ change / change.norm()
        scaled: Floats = (cosines * len(change) ** 0.5).double().cpu().numpy()
        return scaled


class Trial(NamedTuple):
    """What canaries of one kind came to: how well each was found, and the releases that are promised."""

    unit: Unit
    """What a canary stands for."""
    sees: str
    """What the attacker sees."""
    run: tuple[Floats, Sequence[Release]]
    control: tuple[Floats, Sequence[Release]]


def number_for(size: int) -> int:
    """How many canaries a vector has room for."""
    return min(MOST, max(FEWEST, min(size // NUMBERS, ROOM // size)))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All numbers of some tensors as one vector."""
    return torch.cat([one.flatten() for one in tensors])
