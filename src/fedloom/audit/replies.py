# SPDX-License-Identifier: Apache-2.0
"""What the server sees of clients: the replies of the round after the run's checkpoint, which change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.contract import Batch, Cohort, Home, Model, Program, sent_params
from fedloom.core.errors import NeedsError
from fedloom.core.random import key
from fedloom.core.sparse import change_in
from fedloom.core.task import Task
from fedloom.core.training import LocalConfig
from fedloom.core.trees import ClientId, Params, PerClient, Tree
from fedloom.engines.job import Job
from fedloom.models.layers import shaped
from fedloom.programs.local import local_training
from fedloom.runs.records import panel
from fedloom.training.simulation import Simulation

MOST_CLIENTS = 100
"""Who is attacked: no more than so many of the participants."""
RATE = 0.1
"""Of the one step of controls."""


class Reply(NamedTuple):
    """What passed between the server and a client."""

    client: ClientId
    sent: Params
    """The parameters that were sent."""
    delta: Params
    """Their change."""
    rate: float
    """The sum of what each step's gradient counts for in it, with the momentum."""
    steps: int
    seen: Tensor
    """Where the samples are that it was made from: what an attack is judged by, which the server does not know."""


class Heads(NamedTuple):
    """The names of the parameters of a dense output layer."""

    weight: str
    bias: str


def attacked(simulation: Simulation) -> tuple[ClientId, ...]:
    """The participants that are attacked."""
    return tuple(panel(simulation.federation.having("train", simulation.server.setup.clients), MOST_CLIENTS))


def head_of(model: Model) -> Heads:
    """The output layer, if it is one that changes by the sum of its inputs' gradients."""
    shapes = {name: model.shapes[name] for name in model.head}
    weights, biases = ([name for name, shape in shapes.items() if len(shape) == n] for n in (2, 1))
    if not model.has_linear_head or len(weights) != 1 or len(biases) != 1:
        raise NeedsError(
            f"This attack reads the bias of a dense output layer, and {model.spec} has none. There is nothing to audit "
            "in this way."
        )
    return Heads(weights[0], biases[0])


def replies_of(simulation: Simulation, clients: Sequence[ClientId], *, whole: bool = False) -> list[Reply]:
    """One round's replies of these clients; ``whole``: the attack takes the change of the whole network."""
    server, name = simulation.server, simulation.server.algorithm.name
    config = server.config
    if not isinstance(config, LocalConfig) or config.optimiser != "sgd":
        raise NeedsError(
            f"This attack reads sums of gradients off plain steps (--optimiser sgd), and clients of {name} take others "
            "in this run. There is nothing to audit in this way."
        )
    session = simulation.engine.session(server.round + 1, server.now.memory)
    heard: list[tuple[Job, PerClient]] = []

    def ask(program: Program, shared: Tree, mine: Any) -> PerClient:
        replies = session.ask(program, shared, mine)
        heard.append((session.job(program, shared, PerClient.of(mine)), replies))  # of the ask that was just made
        return replies

    server.algorithm.round(server.setup, server.state, Cohort(server.round + 1, tuple(clients)), ask)
    found = []
    for job, replies in heard:
        for client in replies:
            model, reply = server.setup.models[client], replies[client]
            sent, delta = named(model, config, job.shared, job.mine[client], reply)
            wanted = set(model.shapes) if whole else set(head_of(model))
            if job.program.batches and wanted <= set(sent) and wanted <= set(delta):
                batches = job.schedule(client).rows
                seen = torch.as_tensor(np.unique(np.concatenate(batches)), device=simulation.federation.device)
                found.append(Reply(client, sent, delta, _rate(config, len(batches)), len(batches), seen))
    if not found:
        what = "the whole network" if whole else "the output layer"
        raise NeedsError(
            f"Clients of {name} do not reply with the change of {what}, which this attack reads. There is nothing to "
            "audit in this way; it does not mean that nothing leaks."
        )
    return found


def named(model: Model, config: Any, shared: Tree, mine: Tree, reply: Tree) -> tuple[Params, Params]:
    """The parameters that were sent, and their change, by name also where they travel as a vector (MH-pFedHN)."""
    if "vector" not in mine or not {"delta", "values"} & set(reply):
        return sent_params(shared, mine), reply.get("delta", {})
    vector: Tensor = mine["vector"]
    change = change_in({name: leaf[None] for name, leaf in reply.items()}, len(vector))[0]
    return shaped(model, config.keep_local, vector), shaped(model, config.keep_local, change)


def _rate(config: LocalConfig, steps: int) -> float:
    """Of a gradient that stays the same, how much of it ``steps`` steps add up to."""
    moving, total = 0.0, 0.0
    for _ in range(steps):
        moving = config.momentum * moving + 1
        total += moving
    return config.local_lr * total


def one_step(model: Model, task: Task, params: Params, x: Tensor, y: Tensor) -> Params:
    """The change of these parameters by one plain step on one batch, as a client's program makes it: the control."""
    config = LocalConfig(
        local_steps=1, batch_size=len(x), local_lr=RATE, momentum=0.0, weight_decay=0.0, clip=0.0
    )  # fmt: skip
    device = y.device
    zero, drawn = torch.zeros((), dtype=torch.int64, device=device), key(0).to(device)
    home = Home(model, task, config, torch.tensor(float(len(x)), device=device), drawn)
    shared, memory = {"params": params}, {"buffers": model.fresh_buffers()}
    batch = Batch(x, y, torch.ones(len(x), dtype=torch.bool, device=device), zero, zero, drawn)
    program = local_training(config)
    carry = program.step(home, shared, program.init(home, shared, {}, memory), batch)
    change: Params = program.final(home, shared, carry, memory)[0]["delta"]
    return change
