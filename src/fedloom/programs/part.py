# SPDX-License-Identifier: Apache-2.0
"""Training of one part of the composed model, the other frozen: what was sent, or what is the client's own.

The optimiser knows nothing of the frozen part, so that neither decay nor momentum moves it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from fedloom.core.contract import Batch, Home, Program, composed
from fedloom.core.training import (
    LocalConfig,
    Objective,
    Training,
    begin,
    like_report,
    mean_loss_of,
    report,
    train_step,
)
from fedloom.core.trees import Params, Tree
from fedloom.programs import local

Part = Literal["sent", "own"]


def training_of_sent(config: LocalConfig) -> Program:
    """Train what was sent and reply with its change; what is the client's own stays as it is."""
    return _training(config, "sent", _sent_final, local.expects)


def training_of_own(config: LocalConfig) -> Program:
    """Train what is the client's own and keep it; what was sent stays as it is."""
    return _training(config, "own", _own_final, _own_expects)


class Carry(NamedTuple):
    """Training of one part, and the other."""

    training: Training
    frozen: Params


def _training(
    config: LocalConfig, part: Part, final: Callable[..., tuple[Tree, Tree]], expects: Callable[[Tree, Tree], Tree]
) -> Program:
    return Program(f"train_{part}", partial(_init, part), _step, final, config.batches(), expects)


def _init(part: Part, home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    model, own = composed(home, shared, mine, memory), memory["own"]
    trained = {name: value for name, value in model["params"].items() if (name in own) == (part == "own")}
    frozen = {name: value for name, value in model["params"].items() if name not in trained}
    return Carry(begin(home, trained, {**memory, "buffers": model["buffers"]}), frozen)


def _step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    return carry._replace(training=train_step(home, carry.training, batch, objective=with_frozen(home, carry.frozen)))


def with_frozen(home: Home, frozen: Params) -> Objective:
    """The mean loss as a function of the parameters that are not frozen."""
    whole = mean_loss_of(home)
    return lambda params, buffers, batch: whole({**frozen, **params}, buffers, batch)


def _sent_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    reply, after = local.client_final(home, shared, carry.training, {**memory, "own": {}})
    return reply, {**after, "own": memory["own"]}


def _own_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    kept = {**memory, "buffers": carry.training.buffers, "own": carry.training.params}
    return report(home, carry.training), kept


def _own_expects(shared: Tree, mine: Tree) -> Tree:
    return like_report()
