# SPDX-License-Identifier: Apache-2.0
"""A newcomer's running statistics, found on its own unlabelled samples.

BatchNorm's statistics stay with the clients. A newcomer has none, and a model with mean 0 and variance 1 in their
place is useless; some passes of the model over the newcomer's samples, in training mode, settle them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fedloom.core.contract import Ask, Batch, Batches, Home, Program, Sent, Setup, composed
from fedloom.core.trees import Params, Tree, only


def settle_statistics(setup: Setup[Any], sent: Sent, ask: Ask) -> Sent:
    """Have newcomers settle the statistics of the model ``sent`` to them; models without any are left alone."""
    if any(setup.models[client].fresh_buffers() for client in sent.mine):
        ask(settling(), sent.shared, sent.mine)
    return sent


def settling(place: str = "buffers") -> Program:
    """Ten passes over the training data, nothing trained; statistics go to ``memory[place]``, the reply is empty."""
    return Program("statistics", _init, _step, partial(_final, place), Batches("train", 64, epochs=10), _expects)


class _Carry(NamedTuple):
    params: Params
    buffers: dict[str, Tensor]


def _init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Carry:
    deployed = composed(home, shared, mine, memory)
    return _Carry(only(deployed["params"], home.model.shapes), deployed["buffers"])


def _step(home: Home, shared: Tree, carry: _Carry, batch: Batch) -> _Carry:
    _, buffers = home.model.train(carry.params, carry.buffers, batch.x, batch.mask, batch.key)
    return carry._replace(buffers=buffers)


def _final(place: str, home: Home, shared: Tree, carry: _Carry, memory: Tree) -> tuple[Tree, Tree]:
    return {}, {**memory, place: carry.buffers}


def _expects(shared: Tree, mine: Tree) -> Tree:
    return {}
