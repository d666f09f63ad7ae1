# SPDX-License-Identifier: Apache-2.0
"""A sample and its label, from the gradient that a client made with it.

Zhao, Mopuri, Bilen: iDLG: improved deep leakage from gradients. arXiv:2001.02610: of one sample the label is the only
class whose bias grows, and a sample is sought that has the same gradient. Sought as in: Geiping, Bauermeister, Dröge,
Moeller: Inverting gradients: how easy is it to break privacy in federated learning? NeurIPS 2020 (arXiv:2003.14053), by
the angle between gradients, with steps by sign.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.audit.finding import Finding, Measure, judged, side
from fedloom.audit.replies import attacked, head_of, one_step, replies_of
from fedloom.core.contract import Model
from fedloom.core.errors import NeedsError
from fedloom.core.random import key, stream, uniform
from fedloom.core.task import Task
from fedloom.core.trees import ClientId, Params, only, stack
from fedloom.training.simulation import Simulation

MOST = 20
"""Clients that are attacked, a sample each."""
STEPS, RATE = 300, 0.1
"""Of the search: steps, and the first one's length as a share of the samples' range."""
HARDLY = 1e-12
"""The smallest squared error that is told from none."""


class Sought(NamedTuple):
    """Samples that were sought, with what is known of each."""

    x: Tensor  # (clients, ...)
    labels: Tensor  # (clients,)


def attack(simulation: Simulation) -> Finding:
    """Seek a training sample of each client by its reply."""
    server, data, task = simulation.server, simulation.federation, simulation.federation.task
    clients = _attackable(simulation)
    model = server.setup.models[clients[0]]
    own = {client: torch.as_tensor(data.roster[client].rows["train"], device=data.device) for client in clients}
    low, high = float(data.x.min()), float(data.x.max())
    seed = server.options.seed
    replies = replies_of(simulation, clients, whole=True)
    sent = [only(reply.sent, model.shapes) for reply in replies]
    changes = [only(reply.delta, model.shapes) for reply in replies]
    found = sought(model, task, sent, changes, (low, high), seed)
    victims = [_victim(simulation, client) for client in clients]
    fresh = [model.init(server.setup.common_seed)] * len(clients)
    steps = [one_step(model, task, fresh[0], data.x[row : row + 1], data.y[row : row + 1]) for row in victims]
    control = sought(model, task, fresh, steps, (low, high), seed)
    measures: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ("x", "y", "cx", "cy")}
    for at, reply in enumerate(replies):
        rows = own[reply.client]
        other = _another(simulation, clients, reply.client, int(found.labels[at]))
        _add(measures["x"], _best(found.x[at], data.x[rows], high - low), _best(other, data.x[rows], high - low))
        shares = torch.bincount(data.y[rows], minlength=model.num_outputs) / len(rows)
        _add(measures["y"], float(shares[found.labels[at]] > 0), float((shares > 0).double().mean()))
    for at, (client, row) in enumerate(zip(clients, victims)):
        true, label = data.x[row], int(data.y[row])
        other = _another(simulation, clients, client, label)
        _add(measures["cx"], _best(control.x[at], true[None], high - low), _best(other, true[None], high - low))
        _add(measures["cy"], float(control.labels[at] == label), 1 / model.num_outputs)
    images = Measure(
        "likeness to the likest training sample (PSNR, dB)",
        side(*measures["x"], higher=True), side(*measures["cx"], higher=True),
    )  # fmt: skip
    labels = Measure(
        "label is one that the client has", side(*measures["y"], higher=True), side(*measures["cy"], higher=True)
    )
    return Finding(
        "idlg",
        server.round,
        sees=f"one reply of each of {len(replies)} clients, made by {_steps([r.steps for r in replies])} in batches of "
        f"up to {server.config.batch_size}, as the server does; the server of a private run does as well",
        knows="what it sent, the network, the range of samples; a guess is another client's sample of the same class",
        control="one plain step on one sample of the same client's, from fresh parameters",
        measures=[images, labels],
        verdict=judged("a training sample", images),
        picture=_picture({"run": found.x, "control": control.x, "its samples": data.x[victims]}, low, high),
    )


def _attackable(simulation: Simulation) -> list[ClientId]:
    """Some clients with one network, of which this attack can be made."""
    server, data = simulation.server, simulation.federation
    name = server.algorithm.name
    if not data.task.class_scores or data.x.dtype == torch.int64:
        raise NeedsError(
            f"This attack seeks samples of numbers by their class; the task of {name} is {data.task.name} here, on "
            f"{'tokens' if data.x.dtype == torch.int64 else 'numbers'}. There is nothing to audit in this way."
        )
    model = server.setup.models[server.setup.clients[0]]
    if model.fresh_buffers():
        raise NeedsError(
            f"{model.spec} has running statistics (BatchNorm), which mix the samples of a batch; this attack seeks one "
            "at a time. There is nothing to audit in this way."
        )
    head_of(model)
    clients = [c for c in attacked(simulation) if server.setup.models[c].spec == model.spec][:MOST]
    if len(clients) < 2:
        raise NeedsError("There is one client alone, so that there are no samples of others to guess. Run with more.")
    return clients


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


def _victim(simulation: Simulation, client: ClientId) -> int:
    rows = simulation.federation.roster[client].rows["train"]
    return int(stream(simulation.server.options.seed, client, "victim").choice(rows))


def _another(simulation: Simulation, clients: Sequence[ClientId], client: ClientId, label: int) -> Tensor:
    """Another client's sample of this class; of any, if no other has it."""
    data = simulation.federation
    rows = [row for other in clients if other != client for row in data.roster[other].rows["train"]]
    y = data.y[torch.as_tensor(rows, device=data.device)]
    alike = [row for row, is_it in zip(rows, (y == label).tolist()) if is_it]
    return data.x[int(stream(simulation.server.options.seed, client, "guess").choice(alike or rows))]


def _best(sample: Tensor, others: Tensor, span: float) -> float:
    """The PSNR of a sample to the likest of the others, in dB."""
    error = float((others - sample).double().square().flatten(1).mean(1).min()) / span**2
    return -10 * math.log10(max(error, HARDLY))


def _picture(rows: Mapping[str, Tensor], low: float, high: float) -> bytes:
    """Rows of images as one PNG; nothing where samples are none."""
    shape = next(iter(rows.values())).shape[1:]
    if len(shape) != 3 or shape[0] not in (1, 3):
        return b""
    from matplotlib.figure import Figure

    columns = len(next(iter(rows.values())))
    figure = Figure(figsize=(columns, len(rows) * 1.2))
    for place, (name, images) in enumerate(rows.items()):
        for column, image in enumerate(images):
            axes = figure.add_subplot(len(rows), columns, place * columns + column + 1)
            axes.imshow(((image - low) / (high - low)).permute(1, 2, 0).cpu().float().numpy(), cmap="gray")
            axes.set_axis_off()
            if column == 0:
                axes.set_title(name, loc="left", fontsize=9)
    written = io.BytesIO()
    figure.savefig(written, format="png", dpi=80)
    return written.getvalue()


def _add(to: tuple[list[float], list[float]], value: float, guess: float) -> None:
    to[0].append(value)
    to[1].append(guess)


def _steps(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low} step{'s' * (low != 1)}" if low == high else f"{low} to {high} steps"
