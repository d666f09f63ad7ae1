# SPDX-License-Identifier: Apache-2.0
"""Is there a label shift at all, and is it a *label* shift? Two checks on a newcomer's own samples, without labels.

*Shift*: twice the log of the likelihood ratio of the estimated shares against the federation's mean shares. If the
newcomer has the latter it is at most about chi-square with classes - 1 degrees of freedom: at most, as the estimate is
not the one of largest likelihood.

*Fit*: if only the label shares differ, any statistic of the scores has the mean sum_k pi_k mu_k, where mu_k is its mean
in class k. The statistics are the energy (log-sum-exp) and the entropy of the calibrated scores: other lighting, other
sensors and unknown classes move them. Participants tell sums of both by class, from validation data, in one ask; the
distance of the newcomer's means from the mixture's is chi-square with 2 degrees of freedom, once the spread between
participants is allowed for.

*What follows*. A correction still helps under a mild feature shift where clients differ much, and does harm where they
are alike: scores that are off then pass for shares that are off. So a bad fit does not switch the correction off: the
samples count less, by (critical value / chi-square)^2, and the federation's Dirichlet decides what so few samples can
do. Where that leaves less than a twentieth of the estimate to the samples, the plain predictor is kept.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.adaptation.calibration import Privacy, protect
from fedloom.adaptation.dirichlet import shares
from fedloom.core.contract import Algorithm, Ask, Batch, Batches, Home, Program, Sent
from fedloom.core.trees import Tree

STATISTICS = 2
CRITICAL = 5.99
"""The 95% point of chi-square with two degrees of freedom."""
POWER = 2
"""How fast samples lose weight with a bad fit: chosen on held-out training data of Fashion-MNIST and CIFAR-10."""
FAR = 1e12
LEAST = 0.05
"""The plain predictor is kept if less than this share of the estimate is left to the samples."""
BORROWED = 5.0
"""A class's covariance borrows this many samples from all classes together; its mean borrows one."""


def statistics(scores: Tensor) -> Tensor:
    """(..., 2): energy and entropy of calibrated scores (..., classes)."""
    log_p = torch.log_softmax(scores, -1)
    return torch.stack([torch.logsumexp(scores, -1), -(log_p.exp() * log_p).sum(-1)], -1)


class Reference(NamedTuple):
    """The statistics by class, as the participants have them."""

    mean: Tensor  # (classes, 2)
    covariance: Tensor  # (classes, 2, 2) of one sample
    unsure: Tensor  # (classes, 2, 2) covariance of the means' own error
    between: Tensor  # (2, 2) covariance of participants' means beyond chance
    samples: Tensor  # () behind all of this; 0: nothing is known


def no_reference(like: Tensor) -> Reference:
    """Nothing is known, so that everything fits; ``like`` is (classes,)."""
    wide = 1e12 * torch.eye(STATISTICS, dtype=like.dtype, device=like.device)
    by_class = wide.repeat(len(like), 1, 1)
    return Reference(like.new_zeros(len(like), STATISTICS), by_class, by_class, wide, like.new_zeros(()))


class Verdict(NamedTuple):
    """What the fit makes of a newcomer's estimate."""

    misfit: Tensor  # (...,) chi-square, 2 degrees of freedom
    weight: Tensor  # (...,) what a sample without a label counts, from 0 to 1
    counts: Tensor  # (..., classes) labels counted, and expected ones by that weight
    keep_plain: Tensor  # (...,) bool: too little is left of the samples to touch the predictor


def judge(
    known: Tensor, expected: Tensor, mean: Tensor, number: Tensor, alpha: Tensor, reference: Reference
) -> Verdict:
    """How far to trust ``expected`` labels (..., classes): by the statistics' ``mean`` (..., 2) over ``number``."""
    misfit = chi_square(mean, number, shares(known + expected, alpha), reference)
    weight = (CRITICAL / misfit.clamp(min=CRITICAL)) ** POWER
    counts = known + weight[..., None] * expected  # a label is a label, whatever the features
    left = counts.sum(-1)
    return Verdict(misfit, weight, counts, (weight < 1) & (left < LEAST * (left + alpha.sum(-1))))


def chi_square(mean: Tensor, number: Tensor, shares: Tensor, reference: Reference) -> Tensor:
    """The distance of a newcomer's mean statistics from those of the mixture by ``shares``, in units of its spread."""
    centre = shares @ reference.mean
    off = reference.mean - centre[..., None, :]  # (..., classes, 2)
    one = reference.covariance + off[..., :, None] * off[..., None, :]
    spread = torch.einsum("...k,...kij->...ij", shares, one) / number.clamp(min=1)[..., None, None]
    spread = spread + torch.einsum("...k,kij->...ij", shares.square(), reference.unsure) + reference.between
    a, b, d = spread[..., 0, 0], spread[..., 0, 1], spread[..., 1, 1]
    x, y = (mean - centre).unbind(-1)
    # the inverse of a 2 x 2 matrix, kept from being singular where a statistic hardly varies
    a, d = a * (1 + 1e-4) + 1e-12, d * (1 + 1e-4) + 1e-12
    found = (d * x * x - 2 * b * x * y + a * y * y) / (a * d - b * b).clamp(min=1e-30)
    return torch.where(found.isfinite(), found, FAR)  # statistics that are not numbers fit nothing


def log_ratio(scores: Tensor, shares: Tensor, common: Tensor) -> Tensor:
    """log of p(x) under ``shares`` against that under ``common``, per sample (..., samples)."""
    one, other = (torch.logsumexp(scores + torch.log(s)[..., None, :], -1) for s in (shares, common))
    return one - other


def gather(algorithm: Algorithm, sent: Sent, ask: Ask, privacy: Privacy) -> Reference:
    """The reference from participants' validation data; ``sent.shared`` has ``base``, ``slope`` and ``bias``."""
    replies = ask(referring(algorithm, privacy), sent.shared, sent.mine)
    number, first, second = (
        torch.cat([tree[name].double() for _, tree in replies.groups]) for name in ("number", "first", "second")
    )  # (clients, classes, ...)
    found = combine(number, first, second, privacy.clip * privacy.noise)
    return Reference(*(value.to(sent.shared["bias"]) for value in found))


def combine(number: Tensor, first: Tensor, second: Tensor, noise: float = 0.0) -> Reference:
    """Sums of clients by class -> what newcomers are compared with; ``noise`` is the deviation of that on every sum."""
    total, sums, squares = number.sum(0).clamp(min=0), first.sum(0), second.sum(0)
    everything, blur = total.sum(), noise * len(number) ** 0.5  # the noise on a sum over clients
    if float(everything) < max(STATISTICS + 1, 10 * blur * len(total) ** 0.5):
        return no_reference(total)
    overall = sums.sum(0) / everything
    spread = _positive(squares.sum(0) / everything - overall[:, None] * overall[None, :])
    mean = (sums + overall) / (total + 1)[:, None]
    within = squares - total[:, None, None] * mean[:, :, None] * mean[:, None, :]
    one = torch.eye(STATISTICS, dtype=total.dtype, device=total.device)
    size = 1 + mean.square().sum(-1)  # a sum's noise enters a mean by 1 and by the mean itself
    covariance = _positive(within + BORROWED * spread) + (blur * size)[:, None, None] * one
    covariance = covariance / (total + BORROWED)[:, None, None]
    unsure = covariance / (total + 1)[:, None, None] + (blur**2 * size / (total + 1) ** 2)[:, None, None] * one
    # a client's mean distance from the class means, less what chance and noise make of it
    held = number.sum(1)
    residual = (first - number[:, :, None] * mean).sum(1)
    chance = torch.einsum("ck,kij->cij", number.clamp(min=0), covariance) + noise**2 * size.sum() * one
    excess = (residual[:, :, None] * residual[:, None, :] - chance) / held.clamp(min=1)[:, None, None]
    between = _positive(excess[held >= 1].sum(0) / held.clamp(min=1)[held >= 1].sum().clamp(min=1))
    return Reference(mean, covariance, unsure, between, everything)


def _positive(matrix: Tensor) -> Tensor:
    """The nearest covariance: noise and rounding may have made eigenvalues negative."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    nearest: Tensor = (vectors * values.clamp(min=0)[..., None, :]) @ vectors.mT
    return nearest


def referring(algorithm: Algorithm, privacy: Privacy) -> Program:
    """One pass over validation data: sums of the statistics by class."""
    batches = Batches("val", 256, epochs=1, shuffle=False)
    init, step, final = partial(_init, algorithm), partial(_step, algorithm), partial(_final, privacy)
    return Program("reference", init, step, final, batches, _expects, noise=privacy.declared)


class _Carry(NamedTuple):
    deployed: Tree
    number: Tensor
    first: Tensor
    second: Tensor


def _init(algorithm: Algorithm, home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Carry:
    sums = _expects(shared, mine)
    deployed = algorithm.client_deploy(home, shared["base"], mine, memory)
    return _Carry(deployed, *(torch.zeros_like(sums[name]) for name in ("number", "first", "second")))


def _step(algorithm: Algorithm, home: Home, shared: Tree, carry: _Carry, batch: Batch) -> _Carry:
    scores = shared["slope"] * algorithm.predict(home, carry.deployed, batch.x) + shared["bias"]
    found = statistics(scores)  # (batch, 2)
    of = F.one_hot(batch.y.clamp(min=0), scores.shape[-1]).to(scores.dtype) * batch.mask[:, None]
    return carry._replace(
        number=carry.number + of.sum(0),
        first=carry.first + of.T @ found,
        second=carry.second + torch.einsum("bk,bi,bj->kij", of, found, found),
    )


def _final(privacy: Privacy, home: Home, shared: Tree, carry: _Carry, memory: Tree) -> tuple[Tree, Tree]:
    return protect(privacy, home, {name: getattr(carry, name) for name in ("number", "first", "second")}), memory


def _expects(shared: Tree, mine: Tree) -> Tree:
    bias = shared["bias"]
    shapes: dict[str, tuple[int, ...]] = {"number": (), "first": (STATISTICS,), "second": (STATISTICS, STATISTICS)}
    return {name: bias.new_zeros(len(bias), *shape) for name, shape in shapes.items()}
