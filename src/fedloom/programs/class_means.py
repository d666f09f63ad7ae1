# SPDX-License-Identifier: Apache-2.0
"""Prototypes: the mean features of a client's samples of each class, by its model in evaluation mode."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core.contract import Ask, Batch, Batches, Home, Model, Program, Setup, composed
from fedloom.core.trees import ClientId, Params, PerClient, Tree, only


def feature_size(model: Model) -> int:
    """d: the numbers of a sample's features."""
    return math.prod(model.feature_shape or ())


def ask_class_means(setup: Setup[Any], clients: list[ClientId], ask: Ask) -> tuple[Tensor, Tensor]:
    """The prototypes (clients, classes, d) of those that answer, in the roster's order, and how many samples each has.

    Clients compose their models of their own alone: nothing is sent. A class without samples has zeros.
    """
    ((_, told),) = ask(class_means(setup.models[clients[0]]), {}, PerClient.empty(clients)).groups
    return told["prototypes"], told["counts"]


def class_means(model: Model) -> Program:
    """The program: one pass over the training data, nothing trained."""
    batches = Batches("train", 256, epochs=1, shuffle=False)
    return Program("class_means", _init, _step, _final, batches, partial(_expects, model.num_outputs,
                                                                         feature_size(model)))  # fmt: skip


class _Carry(NamedTuple):
    params: Params
    buffers: Tree
    sums: Tensor  # (classes, d)
    counts: Tensor  # (classes,)


def _init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Carry:
    own = composed(home, shared, mine, memory)
    sums = home.num_samples.new_zeros(home.model.num_outputs, feature_size(home.model))
    return _Carry(only(own["params"], home.model.shapes), own["buffers"], sums, sums[:, 0])


def _step(home: Home, shared: Tree, carry: _Carry, batch: Batch) -> _Carry:
    z = home.model.features(carry.params, carry.buffers, batch.x).flatten(1)
    classes = torch.arange(len(carry.counts), device=z.device)
    member = ((batch.y[:, None] == classes) & batch.mask[:, None]).to(z.dtype)  # (batch, classes)
    return carry._replace(sums=carry.sums + member.T @ z, counts=carry.counts + member.sum(0))


def _final(home: Home, shared: Tree, carry: _Carry, memory: Tree) -> tuple[Tree, Tree]:
    return {"prototypes": carry.sums / carry.counts.clamp(min=1)[:, None], "counts": carry.counts}, memory


def _expects(classes: int, size: int, shared: Tree, mine: Tree) -> Tree:
    return {"prototypes": torch.empty(classes, size), "counts": torch.empty(classes)}
