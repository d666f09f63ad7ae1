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
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.adaptation.dirichlet import shares
from fedloom.core.contract import Algorithm, Ask, Batch, Batches, Home, Noise, Program, Sent, Setup
from fedloom.core.random import fold, normal
from fedloom.core.trees import ClientId, Params, PerClient, Tree

MAX_ASKS = 20
NOISED_ASKS = 8
"""Where answers are noised: each costs privacy."""
HOLD = 1.0
"""Half of this times the squared biases is added to the loss: classes that no client can compare stay as they are."""
LEAST = 1e-3
"""The slope of scores that say nothing about the class, or the opposite of it."""


class Privacy(NamedTuple):
    """How a client's answers are protected: norm at most ``clip``, then Gaussian noise of ``noise * clip``."""

    clip: float = 0.0
    noise: float = 0.0

    @property
    def declared(self) -> Noise | None:
        """What a program that answers so declares."""
        return Noise("gaussian", self.noise) if self.noise else None


class Fitted(NamedTuple):
    """The fit that the participants agree on, and what each of them has to say of it."""

    point: Tensor  # (1 + classes,) 1/T and the biases
    curve: Tensor  # (1 + classes, 1 + classes) curvature of the penalised loss
    clients: tuple[ClientId, ...]
    gradients: Tensor  # (clients, 1 + classes)
    curvatures: Tensor  # (clients, 1 + classes, 1 + classes)

    @property
    def line(self) -> dict[str, Tensor]:
        """``{"slope": 1/T, "bias": (classes,)}``; the biases are shrunk by as much as participants disagree."""
        return _line(self.point, self.agreement)

    @property
    def agreement(self) -> Tensor:
        """(classes,) from 0 to 1: how much of a class's bias is left when the variance between clients is taken off.

        That of the fit follows from the clients' gradients (the "sandwich" estimate), whatever they differ in.
        """
        number, bias = len(self.clients), self.point[1:] - self.point[1:].mean()
        if number < 2:
            return torch.zeros_like(bias)
        moved = torch.linalg.solve(self.curve, self.gradients.T).T[:, 1:]
        variance = (moved - moved.mean(1, keepdim=True)).square().sum(0) * number / (number - 1)
        kept: Tensor = (1 - variance / bias.square().clamp(min=1e-30)).clamp(0, 1)
        return kept

    def left_out(self, *, noisy: bool) -> PerClient:
        """The line that the others would have fitted without each client: one Newton step from that of all.

        Where answers are ``noisy`` it is that of all: what one client adds is lost in the noise.
        """
        points = self.point.expand(len(self.clients), -1)
        if not noisy:
            others = self.curve - self.curvatures
            points = points + torch.linalg.solve(others, self.gradients[..., None])[..., 0]
        lines = [_line(point, self.agreement) for point in points]
        return PerClient([(self.clients, {name: torch.stack([line[name] for line in lines]) for name in lines[0]})])


def _line(point: Tensor, agreement: Tensor) -> dict[str, Tensor]:
    bias = agreement * (point[1:] - point[1:].mean())
    if float(point[0]) <= LEAST:
        bias = torch.zeros_like(bias)  # alone, it would make all samples of every newcomer vote for one class
    return {"slope": point[0].clamp(min=LEAST), "bias": bias}


def fit(
    setup: Setup[Any], algorithm: Algorithm, sent: Sent, clients: Sequence[ClientId], ask: Ask, privacy: Privacy
) -> Fitted:
    """1/T and a bias per class for the scores of ``algorithm``; ``sent.shared`` must have ``alpha``."""
    classes = setup.models[clients[0]].num_outputs
    point = torch.zeros(classes + 1, dtype=torch.float64, device=setup.device)
    point[0] = 1.0  # (1/T, b): the model as it is
    hold = torch.full_like(point, HOLD)
    hold[0] = 0.0
    program, step, best = calibrating(algorithm, privacy), torch.zeros_like(point), math.inf
    for _ in range(NOISED_ASKS if privacy.noise else MAX_ASKS):
        shared = {**sent.shared, "point": (point + step).to(setup.dtype)}
        replies = ask(program, shared, sent.mine)
        values, grads, curves, counts = (
            torch.cat([tree[name].double() for _, tree in replies.groups])
            for name in ("value", "gradient", "curvature", "samples")
        )
        held, count = (point + step) * hold, max(float(counts.sum()), 1.0)
        value = values.sum() + 0.5 * held @ (point + step)
        grad, curve = grads.sum(0) + held, curves.sum(0) + torch.diag(hold)
        if not privacy.noise and float(value) > best + 1e-12 * abs(best):
            step = step / 2  # too far: the quadratic was no good there
            continue
        ridge = 1e-8 * count * torch.eye(classes + 1, dtype=torch.float64, device=setup.device)
        if privacy.noise:
            ridge = ridge * 1e6 + _shift_to_positive(curve)
        elif float(torch.linalg.eigvalsh(curve)[0]) < -float(ridge[0, 0]):  # honest answers are convex; one lies
            ridge = ridge + _shift_to_positive(curve)
        point, best = point + step, float(value)
        found = Fitted(point, curve + ridge, tuple(replies), grads, curves)
        step = -torch.linalg.solve(curve + ridge, grad)
        if float(-grad @ step) < 1e-12 * count:
            break
    return found


def _shift_to_positive(curve: Tensor) -> Tensor:
    """What to add to a noisy or wrong curvature so that it is one of a convex function."""
    lowest = float(torch.linalg.eigvalsh((curve + curve.T) / 2)[0])
    return max(-2 * lowest, 0.0) * torch.eye(len(curve), dtype=curve.dtype, device=curve.device)


def calibrating(algorithm: Algorithm, privacy: Privacy) -> Program:
    """One pass over validation data: value, gradient and curvature at the present point."""
    batches = Batches("val", 256, epochs=1, shuffle=False)
    init, step, final = partial(_init, algorithm), partial(_step, algorithm), partial(_final, privacy)
    return Program("calibrate", init, step, final, batches, _expects, noise=privacy.declared)


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
    """An answer of a client, clipped and noised as ``privacy`` says.

    One that is not finite counts as 0: it would show through any noise.
    """
    if not privacy.clip:
        return reply
    finite = torch.stack([value.isfinite().all() for value in reply.values()]).all()
    reply = {name: torch.where(finite, value, 0) for name, value in reply.items()}
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
