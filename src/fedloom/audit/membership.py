# SPDX-License-Identifier: Apache-2.0
"""Whether a sample was trained on, from its loss: models have learned their own samples better than others.

Yeom, Giacomelli, Fredrikson, Jha: Privacy risk in machine learning: analyzing the connection to overfitting. IEEE CSF
2018 (arXiv:1709.01604). Its threshold is the mean loss of training.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedloom.audit.finding import Finding, Measure, Side, judged, side
from fedloom.audit.replies import MOST_CLIENTS
from fedloom.core.contract import Batch, Home, Model
from fedloom.core.errors import NeedsError
from fedloom.core.random import key, stream
from fedloom.core.task import Task
from fedloom.core.training import LocalConfig
from fedloom.programs.local import local_training
from fedloom.reports.statistics import Floats
from fedloom.runs.records import panel
from fedloom.training.simulation import Simulation

MOST_SAMPLES = 1000
"""Of a client's split that are tried."""
OVERFITTED, MEMORISED, STEPS, LEARNED = 5, 30, 1000, 0.05
"""Control: so many networks, on so many samples each, for so many steps or until the loss is that small."""


def attack(simulation: Simulation) -> Finding:
    """Tell each participant's training samples from its test samples."""
    server, data, task = simulation.server, simulation.federation, simulation.federation.task
    clients = panel(data.having("test", data.having("train", server.setup.clients)), MOST_CLIENTS)
    if not clients:
        raise NeedsError("No participant has training and test samples both, to be told apart. Run with other splits.")
    told = []
    for client in clients:
        home, deployed, rows = server.home(client), server.deployed(client), data.roster[client].rows
        parts = []
        for split in ("train", "test"):
            some = stream(server.options.seed, client, "audited", split).permutation(rows[split])[:MOST_SAMPLES]
            at = torch.as_tensor(np.sort(some), device=data.device)
            with torch.no_grad():
                outputs = server.algorithm.predict(home, deployed, data.x[at])
            parts.append(_floats(task.loss(outputs, data.y[at])))
        told.append(told_apart(*parts))
    areas, advantages = _sides(told)
    controls = _sides([_overfitted(simulation, number) for number in range(OVERFITTED)])
    measures = [
        Measure("area under the ROC curve", areas, controls[0]),
        Measure("advantage at the mean training loss", advantages, controls[1]),
    ]
    return Finding(
        "membership",
        server.round,
        sees=f"the deployed models of {len(clients)} clients, and samples with their labels, which are the same "
        "client's training or test samples",
        knows="the mean training loss of each model",
        control=f"{OVERFITTED} fresh networks of the run's kind, trained until they know {MEMORISED} samples with "
        "shuffled labels by heart",
        measures=measures,
        verdict=judged("who was trained on", measures[0]),
    )


def told_apart(members: Floats, others: Floats) -> tuple[float, float]:
    """The area under the ROC curve of small losses, and the advantage (TPR - FPR) at the mean loss of members."""
    smaller = (members[:, None] < others).mean() + (members[:, None] == others).mean() / 2
    threshold = members.mean()
    return float(smaller), float((members <= threshold).mean() - (others <= threshold).mean())


def _sides(told: list[tuple[float, float]]) -> tuple[Side, Side]:
    areas, advantages = ([one[i] for one in told] for i in (0, 1))
    guesses = [0.0] * len(told)
    return side(areas, [0.5] * len(told), higher=True), side(advantages, guesses, higher=True)


def _overfitted(simulation: Simulation, number: int) -> tuple[float, float]:
    """How well members are told from others by a network that has learned nothing but its samples."""
    server, data = simulation.server, simulation.federation
    model = server.setup.models[server.setup.clients[0]]
    draw = stream(server.options.seed, number, "overfitted")
    rows = draw.permutation(np.concatenate([data.roster[client].of("all") for client in server.setup.clients]))
    size = min(MEMORISED, len(rows) // 2)
    halves = [torch.as_tensor(rows[at : at + size], device=data.device) for at in (0, size)]
    mixed = [data.y[torch.as_tensor(draw.permutation(half.cpu().numpy()), device=data.device)] for half in halves]
    losses = memorised(model, data.task, [data.x[half] for half in halves], mixed, server.options.seed + number)
    return told_apart(*losses)


def memorised(model: Model, task: Task, x: list[Tensor], y: list[Tensor], seed: int) -> list[Floats]:
    """The losses on both batches of a fresh network that was trained on the first one until it knew it."""
    config = LocalConfig(local_steps=STEPS, batch_size=len(x[0]), optimiser="adam", local_lr=2e-3, weight_decay=0.0)
    device = y[0].device
    zero, drawn = torch.zeros((), dtype=torch.int64, device=device), key(seed, "overfitted").to(device)
    home = Home(model, task, config, torch.tensor(float(len(x[0])), device=device), drawn)
    shared, program = {"params": model.init(seed)}, local_training(config)
    batch = Batch(x[0], y[0], torch.ones(len(x[0]), dtype=torch.bool, device=device), zero, zero, drawn)
    carry = program.init(home, shared, {}, {"buffers": model.fresh_buffers()})
    before = 0.0
    for _ in range(STEPS):
        carry = program.step(home, shared, carry, batch)
        loss = float(carry.loss)
        if loss - before < LEARNED:
            break
        before = loss
    with torch.no_grad():
        return [_floats(task.loss(model(carry.params, carry.buffers, some), of)) for some, of in zip(x, y)]


def _floats(losses: Tensor) -> Floats:
    found: Floats = losses.double().cpu().numpy()
    return found
