# SPDX-License-Identifier: Apache-2.0
"""Several samples at once, from one reply.

Geiping, Bauermeister, Dröge, Moeller: Inverting gradients: how easy is it to break privacy in federated learning?
NeurIPS 2020 (arXiv:2003.14053): samples are sought whose gradient goes the way of the reply, by the angle between both,
with steps by sign; images are to have little total variation. A reply is taken for one step on as many samples as are
sought, with labels as the reply tells their shares (``audit.labels``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.audit.finding import Finding, Measure, judged, side
from fedloom.audit.labels import shares
from fedloom.audit.replies import RATE, one_step, replies_of
from fedloom.audit.samples import (
    attackable,
    drawn_rows,
    ends,
    guesses,
    in_words,
    likeness,
    matched,
    picture,
)
from fedloom.core.contract import Model
from fedloom.core.errors import NeedsError
from fedloom.core.random import key, uniform
from fedloom.core.task import Task
from fedloom.core.trees import ClientId, Params, only
from fedloom.training.simulation import Simulation

CLIENTS, SAMPLES = 13, 8
"""Who is attacked, and how many samples of each are sought: at most. Together they are a hundred."""
STEPS, SPEED = 300, 0.1
"""Of a search: steps, and the first one's length as a share of the samples' range."""
SMOOTH = 1e-2
"""What an image's total variation counts for beside the angle."""
WORK = 2e11
"""Multiplications and additions of all searches' forward passes: some minutes on two cores. Of large networks fewer
clients are attacked."""
SHOWN = 16
"""Samples in the picture."""


def attack(simulation: Simulation) -> Finding:
    """Seek several training samples of each client by its reply."""
    server, data, task = simulation.server, simulation.federation, simulation.federation.task
    clients = attackable(simulation, CLIENTS)
    model, (low, high) = server.setup.models[clients[0]], ends(data.x)
    clients = clients[: affordable(model, data.x)]
    replies = replies_of(simulation, clients, whole=True)
    number = min(SAMPLES, *(len(reply.seen) for reply in replies))
    fresh = model.init(server.setup.common_seed)
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ("run", "now", "first", "one")}
    shown: dict[str, list[Tensor]] = {}

    def compare(name: str, client: ClientId, samples: Tensor, labels: Tensor, true: Tensor) -> None:
        found[name][0].append(likeness(samples, true, high - low))
        others = guesses(simulation, clients, client, labels)
        found[name][1].append(max(likeness(guess, true, high - low) for guess in others))

    def show(name: str, samples: Tensor, true: Tensor) -> None:
        shown.setdefault(name, []).extend(samples)
        shown.setdefault(f"{name}: likest true sample", []).extend(true[matched(samples, true)])

    for reply in replies:
        sent, delta = only(reply.sent, model.shapes), only(reply.delta, model.shapes)
        true = data.x[reply.seen]
        labels = counted(shares(model, sent, delta, reply.rate, reply.steps), number)
        samples = sought(model, task, sent, delta, labels, (low, high), server.options.seed)
        compare("run", reply.client, samples, labels, true)
        show("the run's replies", samples, true)
        drawn = drawn_rows(simulation, reply.client, number)
        for name, start, rows in (("now", sent, drawn), ("first", fresh, drawn), ("one", fresh, drawn[:1])):
            step = one_step(model, task, start, data.x[rows], data.y[rows])
            told = counted(shares(model, start, step, RATE, 1), len(rows))
            samples = sought(model, task, start, step, told, (low, high), server.options.seed)
            compare(name, reply.client, samples, data.y[rows], data.x[rows])
            if name != "first":
                show(f"one step on {len(rows)}" if name == "now" else "control", samples, data.x[rows])

    run, now, first, one = (side(*values, higher=True) for values in found.values())
    decisive = Measure("likeness to samples that the reply was made from (PSNR, dB)", run, one)
    return Finding(
        "invert",
        server.round,
        sees=f"one reply of each of {len(replies)} clients, made by {in_words([r.steps for r in replies])} in batches "
        f"of up to {server.config.batch_size}, as the server does; {number} samples of each are sought",
        knows="what it sent, the network, the rate, the range of samples; a guess is the better of another client's "
        "samples of the same classes and the mean of all of them",
        control="one plain step on one sample of the same client's, from fresh parameters; in the second line on "
        f"{number}, which under `run` start from the parameters that were sent",
        measures=[decisive, Measure(f"the same, of one plain step on {number} samples", now, first)],
        verdict=judged("training samples", decisive),
        picture=picture({name: torch.stack(images[:SHOWN]) for name, images in shown.items()}, low, high),
    )


def affordable(model: Model, x: Tensor) -> int:
    """How many clients can be attacked with the work that is allowed."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(model.init(0), {}, x[:1])
    each = STEPS * (3 * SAMPLES + 1) * counter.get_total_flops()
    number = int(WORK / max(each, 1))
    if number < 2:
        raise NeedsError(
            f"To invert the gradients of {model.spec} would take hours on a CPU; this attack is for smaller networks, "
            "such as lenet. A failure of it would say nothing of this one."
        )
    return number


def counted(shares: Tensor, number: int) -> Tensor:
    """So many labels in these shares: (number,), by largest remainders."""
    exact = shares * number
    whole = exact.floor()
    left = (exact - whole).argsort(descending=True, stable=True)[: number - int(whole.sum())]
    whole[left] += 1
    return torch.repeat_interleave(torch.arange(len(shares), device=shares.device), whole.long())


def sought(
    model: Model, task: Task, sent: Params, delta: Params, labels: Tensor, ends: tuple[float, float], seed: int
) -> Tensor:
    """Samples with these labels whose mean gradient goes the way that the parameters did not."""
    params = {name: sent[name].detach().requires_grad_() for name in model.shapes}
    target = -torch.cat([delta[name].flatten() for name in params])
    (low, high), number = ends, len(labels)
    first = uniform(key(seed, "sought").to(target.device), (number, *model.input_shape), model.dtype)
    x = (low + (high - low) * first).requires_grad_()
    optimiser = torch.optim.Adam([x])
    for step in range(STEPS):
        loss = task.loss(model(params, {}, x), labels).mean()
        here = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(params.values()), create_graph=True)])
        angle = 1 - here @ target / (here.norm() * target.norm()).clamp(min=1e-30)
        (slope,) = torch.autograd.grad(angle + SMOOTH * variation(x) / (high - low), x)
        x.grad = slope.sign()
        optimiser.param_groups[0]["lr"] = SPEED * (high - low) * (1 - step / STEPS)
        optimiser.step()
        with torch.no_grad():
            x.clamp_(low, high)
    return x.detach()


def variation(x: Tensor) -> Tensor:
    """The total variation of images, by pixel; nothing of other samples."""
    if x.ndim != 4:
        return torch.zeros((), dtype=x.dtype, device=x.device)
    return x.diff(dim=2).abs().mean() + x.diff(dim=3).abs().mean()
