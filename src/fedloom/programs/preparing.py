# SPDX-License-Identifier: Apache-2.0
"""A client tells of its raw training data what a preparation is fitted by: counts, means, variances, and no sample.

It is asked once, before round 1, where clients are on machines of their own. The samples that the program sees are raw.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.contract import Batch, Batches, Home, Program
from fedloom.core.trees import Tree
from fedloom.data.preparation import Preparation

PREPARING = "preparing"
BATCH = 512


def preparing(preparation: Preparation) -> Program:
    """Two passes over training data: the second is for deviations from the client's own means.

    The reply has ``sums``: for each column of numbers the ``number`` of values, their ``mean`` with the ``rest`` that
    its type cannot hold, and their ``variance``; and how often each of the ``categories`` is there.
    """
    init, step = partial(_init, preparation), partial(_step, preparation)
    final, expects = partial(_final, preparation), partial(_expects, preparation)
    return Program(PREPARING, init, step, final, Batches("train", BATCH, epochs=2, shuffle=False), expects)


class _Carry(NamedTuple):
    number: Tensor
    total: Tensor
    squares: Tensor
    categories: Tensor


def _sizes(preparation: Preparation) -> tuple[int, int]:
    numbers = len(preparation.numbers)
    return numbers, preparation.size - numbers


def _init(preparation: Preparation, home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Carry:
    numbers, categories = _sizes(preparation)
    empty = partial(torch.zeros, dtype=torch.float64, device=home.num_samples.device)
    return _Carry(empty(numbers), empty(numbers), empty(numbers), empty(categories))


def _step(preparation: Preparation, home: Home, shared: Tree, carry: _Carry, batch: Batch) -> _Carry:
    x, first = batch.x.double(), (batch.epoch == 0).double()
    numbers = x.movedim(1, -1).flatten(1, -2) if preparation.kind == "images" else x[:, None, preparation.numbers]
    there = ~numbers.isnan() & batch.mask[:, None, None]
    values = torch.where(there, numbers, 0.0)
    mean = carry.total / carry.number.clamp(min=1)
    away = torch.where(there, (values - mean).square(), 0.0).sum((0, 1))
    found = [
        ((x[:, row, None] == torch.arange(column.size, device=x.device)) & batch.mask[:, None]).double().sum(0)
        for row, column in enumerate(preparation.columns)
        if column.categories is not None
    ]
    return _Carry(
        carry.number + first * there.double().sum((0, 1)),
        carry.total + first * values.sum((0, 1)),
        carry.squares + (1 - first) * away,
        carry.categories + first * (torch.cat(found) if found else torch.zeros_like(carry.categories)),
    )


def _final(preparation: Preparation, home: Home, shared: Tree, carry: _Carry, memory: Tree) -> tuple[Tree, Tree]:
    kind, number = home.model.dtype, carry.number.clamp(min=1)
    mean = carry.total / number
    told = {
        "number": carry.number,
        "mean": mean,
        "rest": mean - mean.to(kind).double(),
        "variance": carry.squares / number,
        "categories": carry.categories,
    }
    return {"sums": {name: value.to(kind) for name, value in told.items()}}, memory


def _expects(preparation: Preparation, shared: Tree, mine: Tree) -> Tree:
    numbers, categories = _sizes(preparation)
    shapes = {"number": numbers, "mean": numbers, "rest": numbers, "variance": numbers, "categories": categories}
    return {"sums": {name: torch.empty(size) for name, size in shapes.items()}}
