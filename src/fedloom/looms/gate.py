# SPDX-License-Identifier: Apache-2.0
"""A gate looks at features of a sample and says which of several experts is for it; a client tells its mean."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.contract import Batch, Batches, Home, Model, Program
from fedloom.core.trees import Params, Tree
from fedloom.looms.chunked import dense


def gate_scores(model: Model, common: Params, buffers: Tree, gate: Params, x: Tensor) -> Tensor:
    """(samples, experts): the gate, fully connected layers, on the features of the common network."""
    return dense(gate, model.features(common, buffers, x).flatten(1))


def routing() -> Program:
    """Nothing is trained; the reply is the mean over the client's samples of the gate's softmax over all experts."""
    batches = Batches("train", 256, epochs=1, shuffle=False)
    return Program("route", _init, _step, _final, batches, _expects)


class _Carry(NamedTuple):
    common: Params
    gate: Params
    buffers: Tree
    shares: Tensor  # (experts,) summed over samples


def _init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Carry:
    return _Carry(shared["common"], shared["gate"], memory["buffers"], torch.zeros_like(shared["gate"]["1.bias"]))


def _step(home: Home, shared: Tree, carry: _Carry, batch: Batch) -> _Carry:
    scores = gate_scores(home.model, carry.common, carry.buffers, carry.gate, batch.x)
    return carry._replace(shares=carry.shares + torch.where(batch.mask[:, None], scores.softmax(1), 0).sum(0))


def _final(home: Home, shared: Tree, carry: _Carry, memory: Tree) -> tuple[Tree, Tree]:
    return {"shares": carry.shares / home.num_samples.clamp(min=1)}, memory


def _expects(shared: Tree, mine: Tree) -> Tree:
    return {"shares": shared["gate"]["1.bias"]}
