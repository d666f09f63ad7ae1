# SPDX-License-Identifier: Apache-2.0
"""Shards in this process, for tests that are not about processes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fedloom.core.sharded import Held, Shard, Work, sent_to


class Inside:
    """As ``engines.shards.RayShards``."""

    def __init__(self, number: int = 2) -> None:
        self.number = number
        self.shards = [Shard(torch.device("cpu")) for _ in range(number)]
        self.gone: list[int] = []

    def run(self, work: Work, arguments: Sequence[Any], kept: Sequence[Held], *, answers: bool) -> list[Any]:
        """As ``Shards.run``."""
        gone = [self.gone.pop() for _ in range(len(self.gone))]
        for held in kept:
            weakref.finalize(held, self.gone.append, held.number)
        names = [held.number for held in kept]
        return [shard.run(work, sent_to(i, arguments), names, gone) for i, shard in enumerate(self.shards)]
