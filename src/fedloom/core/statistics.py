# SPDX-License-Identifier: Apache-2.0
"""A client program that belongs to no method: a newcomer's running statistics, found on its own unlabelled samples.

BatchNorm's statistics stay with the clients. A newcomer has none, and a model with mean 0 and variance 1 in their
place is useless; some passes of the model over the newcomer's samples, in training mode, settle them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from torch import Tensor

from fedloom.core.contract import Ask, Batch, Batches, Home, Program, Sent, Setup
from fedloom.core.trees import Params, Tree

Deploy = Callable[[Home, Tree, Tree, Tree], Tree]


def settle_statistics(setup: Setup[Any], deploy: Deploy, sent: Sent, ask: Ask) -> Sent:
    """Have newcomers settle the statistics of the model ``sent`` to them; models without any are left alone.

    ``deploy`` is the method's ``client_deploy``.
    """
    if any(setup.models[client].fresh_buffers() for client in sent.mine):
        ask(_program(deploy), sent.shared, sent.mine)
    return sent


@cache
def _program(deploy: Deploy) -> Program:
    return Program("statistics", partial(_init, deploy), _step, _final, Batches("train", 64, epochs=10), _expects)


class _Carry(NamedTuple):
    params: Params
    buffers: dict[str, Tensor]


def _init(deploy: Deploy, home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Carry:
    deployed = deploy(home, shared, mine, memory)
    return _Carry(deployed["params"], deployed["buffers"])


def _step(home: Home, shared: Tree, carry: _Carry, batch: Batch) -> _Carry:
    _, buffers = home.model.train(carry.params, carry.buffers, batch.x, batch.mask, batch.key)
    return carry._replace(buffers=buffers)


def _final(home: Home, shared: Tree, carry: _Carry, memory: Tree) -> tuple[Tree, Tree]:
    return {}, {**memory, "buffers": carry.buffers}


def _expects(shared: Tree, mine: Tree) -> Tree:
    return {}
