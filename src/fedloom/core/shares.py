# SPDX-License-Identifier: Apache-2.0
"""A client program that belongs to no method: a client counts its training labels and tells their shares."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.core.contract import Ask, Batch, Batches, Home, Program, Setup
from fedloom.core.trees import ClientId, PerClient, Tree


def ask_class_shares(setup: Setup[Any], clients: list[ClientId] | tuple[ClientId, ...], ask: Ask) -> PerClient:
    """``{"shares": (classes,)}`` of each client, over its training data."""
    classes = setup.models[clients[0]].num_outputs
    template = torch.zeros(classes, dtype=setup.dtype, device=setup.device)
    return ask(_PROGRAM, {"classes": template}, PerClient.empty(clients))


def _init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tensor:
    return torch.zeros_like(shared["classes"])


def _step(home: Home, shared: Tree, carry: Tensor, batch: Batch) -> Tensor:
    classes = torch.arange(carry.shape[0], device=carry.device)
    return carry + ((batch.y[:, None] == classes) & batch.mask[:, None]).sum(0)


def _final(home: Home, shared: Tree, carry: Tensor, memory: Tree) -> tuple[Tree, Tree]:
    return {"shares": carry / carry.sum().clamp(min=1)}, memory


def _expects(shared: Tree, mine: Tree) -> Tree:
    return {"shares": shared["classes"]}


_PROGRAM = Program("class_shares", _init, _step, _final, Batches("train", 512, epochs=1, shuffle=False), _expects)
