# SPDX-License-Identifier: Apache-2.0
"""A sample and its label, from the gradient that a client made with it.

Zhao, Mopuri, Bilen: iDLG: improved deep leakage from gradients. arXiv:2001.02610: of one sample the label is the only
class whose bias grows, and a sample is sought that has the same gradient. Sought as in: Geiping, Bauermeister, Dröge,
Moeller: Inverting gradients: how easy is it to break privacy in federated learning? NeurIPS 2020 (arXiv:2003.14053), by
the angle between gradients, with steps by sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.audit.finding import Finding, Measure, judged, side
from fedloom.audit.replies import head_of, one_step, replies_of
from fedloom.audit.samples import attackable, drawn_rows, ends, guesses, in_words, likeness, picture, training_rows
from fedloom.core.contract import Model
from fedloom.core.random import key, uniform
from fedloom.core.task import Task
from fedloom.core.trees import Params, only, stack
from fedloom.training.simulation import Simulation

MOST = 20
"""Clients that are attacked, a sample each."""
STEPS, RATE = 300, 0.1
"""Of the search: steps, and the first one's length as a share of the samples' range."""


class Sought(NamedTuple):
    """Samples that were sought, with what is known of each."""

    x: Tensor  # (clients, ...)
    labels: Tensor  # (clients,)


def attack(simulation: Simulation) -> Finding:
    """Seek a training sample of each client by its reply."""
    server, data, task = simulation.server, simulation.federation, simulation.federation.task
    clients = attackable(simulation, MOST)
    model = server.setup.models[clients[0]]
    own = {client: training_rows(simulation, client) for client in clients}
    low, high = ends(data.x)
    seed = server.options.seed
    replies = replies_of(simulation, clients, whole=True)
    sent = [only(reply.sent, model.shapes) for reply in replies]
    changes = [only(reply.delta, model.shapes) for reply in replies]
    found = sought(model, task, sent, changes, (low, high), seed)
    victims = [int(drawn_rows(simulation, client, 1)) for client in clients]
    fresh = [model.init(server.setup.common_seed)] * len(clients)
    steps = [one_step(model, task, fresh[0], data.x[row : row + 1], data.y[row : row + 1]) for row in victims]
    control = sought(model, task, fresh, steps, (low, high), seed)
    measures: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ("x", "y", "cx", "cy")}
    for at, reply in enumerate(replies):
        rows = own[reply.client]
        other, _ = guesses(simulation, clients, reply.client, found.labels[at : at + 1])
        true = data.x[reply.seen]
        _add(measures["x"], likeness(found.x[at : at + 1], true, high - low), likeness(other, true, high - low))
        shares = torch.bincount(data.y[rows], minlength=model.num_outputs) / len(rows)
        _add(measures["y"], float(shares[found.labels[at]] > 0), float((shares > 0).double().mean()))
    for at, (client, row) in enumerate(zip(clients, victims)):
        true, label = data.x[row : row + 1], data.y[row : row + 1]
        other, _ = guesses(simulation, clients, client, label)
        _add(measures["cx"], likeness(control.x[at : at + 1], true, high - low), likeness(other, true, high - low))
        _add(measures["cy"], float(control.labels[at] == label), 1 / model.num_outputs)
    images = Measure(
        "likeness to the likest sample that the reply was made from (PSNR, dB)",
        side(*measures["x"], higher=True), side(*measures["cx"], higher=True),
    )  # fmt: skip
    labels = Measure(
        "label is one that the client has", side(*measures["y"], higher=True), side(*measures["cy"], higher=True)
    )
    return Finding(
        "idlg",
        server.round,
        sees=f"one reply of each of {len(replies)} clients, made by {in_words([r.steps for r in replies])} in batches "
        f"of up to {server.config.batch_size}, as the server does; the server of a private run does as well",
        knows="what it sent, the network, the range of samples; a guess is another client's sample of the same class",
        control="one plain step on one sample of the same client's, from fresh parameters",
        measures=[images, labels],
        verdict=judged("a training sample", images),
        picture=picture({"run": found.x, "control": control.x, "its samples": data.x[victims]}, low, high),
    )


def sought(
    model: Model, task: Task, sent: Sequence[Params], changes: Sequence[Params], ends: tuple[float, float], seed: int
) -> Sought:
    """For each change of parameters, the class that it is most of and a sample whose gradient goes its way."""
    bias = head_of(model).bias
    labels = torch.stack([change[bias].argmax() for change in changes])
    params, target = stack(sent), {name: -rows for name, rows in stack(changes).items()}

    def loss(params: Params, x: Tensor, label: Tensor) -> Tensor:
        return task.loss(model(params, {}, x[None]), label[None]).sum()

    gradients = torch.func.vmap(torch.func.grad(loss))
    (low, high), device = ends, labels.device
    first = uniform(key(seed, "sought").to(device), (len(labels), *model.input_shape), model.dtype)
    x = (low + (high - low) * first).requires_grad_()
    optimiser = torch.optim.Adam([x])
    sizes = _dots(target, target)
    for step in range(STEPS):
        here = gradients(params, x, labels)
        angles = 1 - _dots(here, target) / (_dots(here, here) * sizes).clamp(min=1e-30).sqrt()
        (slope,) = torch.autograd.grad(angles.sum(), x)
        x.grad = slope.sign()
        optimiser.param_groups[0]["lr"] = RATE * (high - low) * (1 - step / STEPS)
        optimiser.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return Sought(x.detach(), labels)


def _dots(one: Params, other: Params) -> Tensor:
    """The inner product of each row's parameters: (rows,)."""
    return torch.stack([(one[name] * other[name]).flatten(1).sum(1) for name in one]).sum(0)


def _add(to: tuple[list[float], list[float]], value: float, guess: float) -> None:
    to[0].append(value)
    to[1].append(guess)
