# SPDX-License-Identifier: Apache-2.0
"""A client's label shares, from one reply: the change of the output layer tells them.

The gradient of the cross-entropy by the bias of a class is the mean probability that the network gives it, less the
share of samples that have it. The mean feature, at which the probability is reckoned, is read off the weights: their
gradient is the bias's times the feature. As in: Ma, Sun, Cui, Li, Guo, Liu: Instance-wise batch label restoration via
gradients in federated learning. ICLR 2023. Here a reply is taken for the sum of so many equal steps.

A network that is sure of itself tells samples apart: no one feature stands for them all. The attacker then goes by the
classes whose bias has grown.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.audit.finding import Finding, Measure, judged, side
from fedloom.audit.replies import RATE, attacked, head_of, one_step, replies_of
from fedloom.core.contract import Model
from fedloom.core.errors import NeedsError
from fedloom.core.trees import Params
from fedloom.training.simulation import Simulation

POINTS = 10
"""Between the parameters before and after, at which probabilities are reckoned."""
SURE = 0.5
"""A network is, where no more than this share of the classes is in question at the mean feature."""


def attack(simulation: Simulation) -> Finding:
    """Read the shares of each client off its reply."""
    server, data, task = simulation.server, simulation.federation, simulation.federation.task
    if not task.class_scores:
        raise NeedsError(f"The task is {task.name}: its samples have no classes whose shares could be found out.")
    clients, classes = attacked(simulation), simulation.arrays.num_classes
    own = {client: torch.as_tensor(data.roster[client].rows["train"], device=data.device) for client in clients}
    counts = torch.stack([_counts(data.y[rows], classes) for rows in own.values()])
    federation = counts.sum(0) / counts.sum()
    found: dict[str, list[float]] = {"error": [], "guessed": [], "top": [], "top guessed": []}
    tried: dict[str, list[float]] = {name: [] for name in found}
    for reply in replies_of(simulation, clients):
        model, rows = server.setup.models[reply.client], own[reply.client]
        read = shares(model, reply.sent, reply.delta, reply.rate, reply.steps)
        _compare(found, read, federation, data.y[rows])
        batch = rows[: server.config.batch_size]
        fresh = model.init(server.setup.common_seed)
        change = one_step(model, task, fresh, data.x[batch], data.y[batch])
        _compare(tried, shares(model, fresh, change, RATE, 1), federation, data.y[batch])
    run, control = (
        (side(t["error"], t["guessed"], higher=False), side(t["top"], t["top guessed"], higher=True))
        for t in (found, tried)
    )
    measures = [
        Measure("distance to the true shares (total variation)", run[0], control[0]),
        Measure("largest class found", run[1], control[1]),
    ]
    return Finding(
        "labels",
        server.round,
        sees=f"the change of the output layer in one reply of each of {len(found['error'])} clients, as the server "
        "does; the server of a private run does as well",
        knows="what it sent, the steps and the rate of local training, and the label shares of all clients together, "
        "which is what a guess goes by",
        control="one plain step of one batch of the same client's, from fresh parameters",
        measures=measures,
        verdict=judged("clients' label shares", measures[0]),
    )


def shares(model: Model, sent: Params, delta: Params, rate: float, steps: int) -> Tensor:
    """The label shares (classes,) that the change of an output layer tells of."""
    head = head_of(model)
    weight, bias, moved, tilt = (t.double() for t in (*(sent[n] for n in head), *(delta[n] for n in head)))
    size = tilt.square().sum()
    if not float(size):
        return torch.full_like(tilt, 1 / len(tilt))
    feature = tilt @ moved / size
    places = [number / steps for number in range(0, steps, max(1, steps // POINTS))]
    likely = torch.stack([((weight + at * moved) @ feature + bias + at * tilt).softmax(0) for at in places]).mean(0)
    in_question = float(torch.special.entr(likely).sum().exp())
    if in_question - 1 < SURE * (len(tilt) - 1):
        grown = tilt.clamp(min=0)
        return grown / grown.sum()
    return onto_shares(likely + tilt / rate)


def onto_shares(numbers: Tensor) -> Tensor:
    """The nearest shares: not negative, and 1 together (Held, Wolfe and Crowder 1974)."""
    ranked = numbers.sort(descending=True).values
    over = (ranked.cumsum(0) - 1) / torch.arange(1, len(numbers) + 1, device=numbers.device)
    last = int((ranked > over).sum()) - 1
    return (numbers - over[last]).clamp(min=0)


def _counts(y: Tensor, classes: int) -> Tensor:
    return torch.bincount(y, minlength=classes).double()


def _compare(into: dict[str, list[float]], read: Tensor, guess: Tensor, y: Tensor) -> None:
    true = _counts(y, len(guess)) / len(y)
    for error, top, told in (("error", "top", read), ("guessed", "top guessed", guess)):
        into[error].append(float((told - true).abs().sum() / 2))
        into[top].append(float(true[int(told.argmax())] == true.max()))
