# SPDX-License-Identifier: Apache-2.0
"""Local training as a program: the client half of every method that sends parameters and gets their change back.

One rule: **what a client trains, and what it deploys, is what was sent, together with what is its own**: ``params`` of
the message, and the tensors that it keeps as ``memory["own"]``. The reply is the change of what was sent; what is its
own stays with the client.

    sends everything, keeps nothing    FedAvg, pFedHN        sends the body, keeps the head    FedPer
    sends nothing, keeps everything    Local

A method changes one part: ``replace(local_training(config), step=...)``.
"""

from __future__ import annotations

from fedloom.core.contract import Batch, Home, Program, composed, sent_params
from fedloom.core.training import LocalConfig, Training, begin, delta, like_report, remember, report, train_step
from fedloom.core.trees import Tree


def local_training(config: LocalConfig) -> Program:
    """Train the composed model on the client's own data; reply with the change of what was sent."""
    return Program("train", client_init, client_step, client_final, config.batches(), expects)


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Training:
    """Start from the composed model."""
    model = composed(home, shared, mine, memory)
    return begin(home, model["params"], {**memory, "buffers": model["buffers"]})


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """One step on the client's own loss."""
    return train_step(home, carry, batch)


def client_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change of what was sent; keep what is the client's own."""
    own = memory.get("own", {})
    change = {name: moved for name, moved in delta(carry).items() if name not in own}
    averaged = {"buffers": carry.buffers} if "buffers" in shared and averages_statistics(home.config) else {}
    reply = {**({"delta": change} if change else {}), **report(home, carry), **averaged}
    kept = {"own": {name: carry.params[name] for name in own}} if own else {}
    return reply, {**remember(home, carry, memory), **kept}


def averages_statistics(config: LocalConfig) -> bool:
    """Whether running statistics travel. The client's own config says so: a server could send some to have its own."""
    return bool(getattr(config, "batchnorm", "local") == "averaged")


def expects(shared: Tree, mine: Tree) -> Tree:
    """A change for every tensor that was sent."""
    change, averaged = sent_params(shared, mine), {"buffers": shared["buffers"]} if "buffers" in shared else {}
    return {**({"delta": change} if change else {}), **like_report(), **averaged}
