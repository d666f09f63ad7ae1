# SPDX-License-Identifier: Apache-2.0
"""Calibration without moving data: one temperature and a bias per class, fitted on participants' validation data.

Bias-corrected temperature scaling (Alexandari et al. 2020): log p(y | x, client) = s_y(x) / T + b_y + log pi_y(client),
up to a constant. Each participant's own label shares stand beside the scores, so that s / T + b is left to be a
log-likelihood: what EM for another client needs. The fit is convex in (1/T, b). A client answers with value, gradient
and curvature at the present point; the server takes Newton steps. Clients with few classes each can hardly compare the
others, so biases are held back by as much as one sample could say. Clipping and noise on what is answered make it
differentially private.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.adaptation.dirichlet import shares
from fedloom.core.contract import Algorithm, Ask, Batch, Batches, Home, Program, Sent, Setup
from fedloom.core.random import fold, normal
from fedloom.core.trees import ClientId, Params, Tree

MAX_ASKS = 20
HOLD = 1.0
"""Half of this times the squared biases is added to the loss: classes that no client can compare stay as they are."""
LEAST = 1e-3
"""The slope of scores that say nothing about the class, or the opposite of it."""


class Privacy(NamedTuple):
    """How a client's answers are protected: norm at most ``clip``, then Gaussian noise of ``noise * clip``."""

    clip: float = 0.0
    noise: float = 0.0


def fit(
    setup: Setup[Any], algorithm: Algorithm, sent: Sent, clients: Sequence[ClientId], ask: Ask, privacy: Privacy
) -> dict[str, Tensor]:
    """``{"slope": 1/T, "bias": (classes,)}`` for the scores of ``algorithm``; ``sent.shared`` must have ``alpha``."""
    classes = setup.models[clients[0]].num_outputs
    point = torch.zeros(classes + 1, dtype=torch.float64, device=setup.device)
    point[0] = 1.0  # (1/T, b): the model as it is
    hold = torch.full_like(point, HOLD)
    hold[0] = 0.0
    program, step, best = _program(algorithm, privacy), torch.zeros_like(point), math.inf
    for _ in range(8 if privacy.noise else MAX_ASKS):
        shared = {**sent.shared, "point": (point + step).to(setup.dtype)}
        replies = ask(program, shared, sent.mine)
        value, grad, curve = (
            sum(tree[name].double().sum(0) for _, tree in replies.groups) for name in ("value", "gradient", "curvature")
        )
        count = float(sum(tree["samples"].sum() for _, tree in replies.groups))
        held = (point + step) * hold
        value, grad, curve = value + 0.5 * held @ (point + step), grad + held, curve + torch.diag(hold)
        if not privacy.noise and float(value) > best + 1e-12 * abs(best):
            step = step / 2  # too far: the quadratic was no good there
            continue
        point, best = point + step, float(value)
        ridge = 1e-8 * max(count, 1.0) * torch.eye(classes + 1, dtype=torch.float64, device=setup.device)
        if privacy.noise:
            ridge = ridge * 1e6 + _shift_to_positive(curve)
        step = -torch.linalg.solve(curve + ridge, grad)
        if float(-grad @ step) < 1e-12 * max(count, 1.0):
            break
    slope, bias = point[0].clamp(min=LEAST), point[1:] - point[1:].mean()
    if float(point[0]) <= LEAST:
        bias = torch.zeros_like(bias)  # alone, it would make all samples of every newcomer vote for one class
    return {"slope": slope.to(setup.dtype), "bias": bias.to(setup.dtype)}


def _shift_to_positive(curve: Tensor) -> Tensor:
    """What to add to a noisy curvature so that it is one of a convex function."""
    lowest = float(torch.linalg.eigvalsh((curve + curve.T) / 2)[0])
    return max(-2 * lowest, 0.0) * torch.eye(len(curve), dtype=curve.dtype, device=curve.device)


@cache
def _program(algorithm: Algorithm, privacy: Privacy) -> Program:
    batches = Batches("val", 256, epochs=1, shuffle=False)
    init, step, final = partial(_init, algorithm), partial(_step, algorithm), partial(_final, privacy)
    return Program("calibrate", init, step, final, batches, _expects)


class _Carry(NamedTuple):
    deployed: Tree
    log_prior: Tensor
    value: Tensor
    gradient: Tensor
    curvature: Tensor
    samples: Tensor


def _init(algorithm: Algorithm, home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Carry:
    point = shared["point"]
    deployed = algorithm.client_deploy(home, shared["base"], mine, memory)
    log_prior = torch.log(shares(memory["label_counts"], shared["alpha"]))
    zero = torch.zeros_like(home.num_samples)
    return _Carry(deployed, log_prior, zero, torch.zeros_like(point), torch.zeros_like(torch.outer(point, point)), zero)


def _step(algorithm: Algorithm, home: Home, shared: Tree, carry: _Carry, batch: Batch) -> _Carry:
    slope, bias = shared["point"][0], shared["point"][1:]
    scores = algorithm.predict(home, carry.deployed, batch.x)  # (batch, classes)
    logits = slope * scores + bias + carry.log_prior
    real = batch.mask[:, None].to(scores.dtype)
    p = torch.softmax(logits, -1)
    off = (p - F.one_hot(batch.y.clamp(min=0), scores.shape[-1]).to(p.dtype)) * real
    gradient = torch.cat([(off * scores).sum().reshape(1), off.sum(0)])
    # J = [scores, identity]: curvature = sum_j J' (diag p - p p') J
    mean = (p * scores).sum(-1, keepdim=True)
    p = p * real
    cross = (p * (scores - mean)).sum(0)
    corner = (p * scores * (scores - mean)).sum().reshape(1)
    among = torch.diag_embed(p.sum(0)) - torch.einsum("bi,bj->ij", p, p)
    top = torch.cat([corner, cross])
    curvature = torch.cat([top[None], torch.cat([cross[:, None], among], 1)])
    loss = batch.sum(F.cross_entropy(logits, batch.y.clamp(min=0), reduction="none"))
    return carry._replace(
        value=carry.value + loss,
        gradient=carry.gradient + gradient,
        curvature=carry.curvature + curvature,
        samples=carry.samples + batch.mask.sum(),
    )


def _final(privacy: Privacy, home: Home, shared: Tree, carry: _Carry, memory: Tree) -> tuple[Tree, Tree]:
    reply = {name: getattr(carry, name) for name in ("value", "gradient", "curvature", "samples")}
    return protect(privacy, home, reply), memory


def protect(privacy: Privacy, home: Home, reply: Params) -> Params:
    """An answer of a client, clipped and noised as ``privacy`` says."""
    if not privacy.clip:
        return reply
    size = torch.cat([value.reshape(-1) for value in reply.values()]).norm()
    scale = (privacy.clip / (size + 1e-12)).clamp(max=1.0)
    spread = privacy.clip * privacy.noise
    return {
        name: value * scale + spread * normal(fold(home.key, i), tuple(value.shape), value.dtype)
        for i, (name, value) in enumerate(reply.items())
    }


def _expects(shared: Tree, mine: Tree) -> Tree:
    point, number = shared["point"], torch.empty(())
    square = point.new_empty(len(point), len(point))
    return {"value": number, "gradient": point, "curvature": square, "samples": number}
