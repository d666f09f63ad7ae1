# SPDX-License-Identifier: Apache-2.0
"""Label shares of clients: a Dirichlet learned from the participants, and a newcomer's shares from unlabelled samples.

The model is the mixture p(x) = sum_k pi_k p(x | k) with known likelihoods and pi ~ Dirichlet(alpha). Plain EM (Saerens
et al. 2002) lets every sample vote for its own class and is bold with few samples. Here a sample is judged by what the
*other* samples say, which is exact for one sample and close to collapsed variational inference (Asuncion et al. 2009)
for more: for class k the others' votes are, on average over the votes for k, c_k - sum_i r_ik^2 / c_k, where
r_ik is the responsibility and c_k = sum_i r_ik. A federation of like clients (large alpha) pulls an estimate from few
samples to the common shares, and one of unlike clients hardly does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import ConfigError

STEPS = 50
"""Steps of EM: more of them change nothing that can be seen in an accuracy."""
NONE = 1e-9
"""A lower bound below this is told as 0: the client may have none of the class."""


class Estimate(NamedTuple):
    """A posterior over a client's label shares; with known labels it is Dirichlet(alpha + counts)."""

    counts: Tensor  # (..., classes) labels counted or expected
    alpha: Tensor  # (classes,)
    evidence: Tensor  # (..., classes) samples that the counts are worth: see ``Votes.evidence``

    @property
    def shares(self) -> Tensor:
        """The posterior mean: what is predicted with."""
        return shares(self.counts, self.alpha)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Credible interval of each share: equal tails of a Beta, and the mean where that lies outside of them."""
        from scipy import stats  # a second to import, and no client needs it

        alpha = self.alpha.double().cpu()
        total, mean = alpha.sum(), shares(self.counts.double().cpu(), alpha)  # single precision rounds shares to 1
        # samples only add to a Dirichlet: the Beta of a class is never wider than that of the federation
        least = torch.maximum(alpha / mean, (total - alpha) / (1 - mean))
        size = torch.maximum(total + self.evidence.double().cpu(), least)
        tails = ((1 - level) / 2, (1 + level) / 2)
        low, high = (torch.as_tensor(stats.beta.ppf(q, mean * size, (1 - mean) * size)) for q in tails)
        low = torch.where(low < NONE, 0.0, low)
        return torch.minimum(low, mean), torch.maximum(high, mean)


def shares(counts: Tensor, alpha: Tensor) -> Tensor:
    """The posterior mean of the label shares."""
    a = counts + alpha
    return a / a.sum(-1, keepdim=True)


def fit_dirichlet(counts: np.ndarray, steps: int = 500, low: float = 1e-3, high: float = 1e4) -> np.ndarray:
    """The Dirichlet whose multinomials make ``counts`` (clients, classes) likeliest: Minka's fixed point.

    ``low`` keeps classes that no participant has possible; ``high`` stands for clients that are all alike.
    """
    from scipy import special

    counts = np.asarray(counts, dtype=np.float64)
    total = counts.sum(1)
    alpha: np.ndarray = (counts.sum(0) + 1) / (counts.sum() + counts.shape[1])
    for _ in range(steps):
        up = (special.digamma(counts + alpha) - special.digamma(alpha)).sum(0)
        down = (special.digamma(total + alpha.sum()) - special.digamma(alpha.sum())).sum()
        after = np.clip(alpha * up / max(down, 1e-300), low, high)
        done = np.abs(after - alpha).max() < 1e-8 * alpha.max()
        alpha = after
        if done:
            break
    return alpha


class Votes(NamedTuple):
    """What the samples say together; the next pass over them weighs the classes by it."""

    known: Tensor  # (..., classes) labels counted
    expected: Tensor  # (..., classes) c: responsibilities of samples without a label, summed
    squared: Tensor  # (..., classes) their squares, summed

    @property
    def counts(self) -> Tensor:
        """Labels counted and expected."""
        return self.known + self.expected

    @property
    def evidence(self) -> Tensor:
        """Samples that the counts of each class are worth.

        A sample without a label tells of class k what is left of the variance of its label: var(r_k) of p (1 - p).
        """
        number = self.expected.sum(-1, keepdim=True)
        share = self.expected / number.clamp(min=1)
        left = (self.squared / number.clamp(min=1) - share.square()) / (share * (1 - share)).clamp(min=1e-12)
        return self.known.sum(-1, keepdim=True) + number * left.clamp(0, 1)

    def log_weights(self, alpha: Tensor) -> Tensor:
        """The classes as a sample without a label sees them: by the labels and by the other samples."""
        number = self.expected.sum(-1, keepdim=True)
        others = (self.expected - self.squared / self.expected.clamp(min=1e-30)).clamp(min=0)
        # (1 - 1/n): two samples must not talk each other into a class
        return torch.log(alpha + self.known + (1 - 1 / number.clamp(min=1)) * others)


def no_votes(like: Tensor) -> Votes:
    """Before the first pass."""
    nothing = torch.zeros_like(like)
    return Votes(nothing, nothing, nothing)


def vote(log_likelihood: Tensor, log_weights: Tensor, labels: Tensor, mask: Tensor) -> Votes:
    """The votes of samples (..., samples, classes): certain where ``labels`` (..., samples) are >= 0, else by Bayes."""
    classes = torch.arange(log_likelihood.shape[-1], device=labels.device)
    here = mask[..., None]
    known = (labels[..., None] == classes) & here
    found = torch.softmax(log_likelihood + log_weights[..., None, :], dim=-1)
    found = torch.where((labels[..., None] < 0) & here, found, 0)
    return Votes(known.to(found.dtype).sum(-2), found.sum(-2), found.square().sum(-2))


def estimate(
    log_likelihood: Tensor,
    alpha: Tensor,
    labels: Tensor | None = None,
    mask: Tensor | None = None,
    steps: int = STEPS,
) -> Estimate:
    """A client's shares; many clients' with leading dimensions, ``mask`` (..., samples) saying which samples are real.

    ``log_likelihood`` (..., samples, classes) may have any constant added to a row; a label of -1 is not known.
    """
    shape, device = log_likelihood.shape[:-1], log_likelihood.device
    labels = torch.full(shape, -1, device=device) if labels is None else labels
    mask = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask
    votes = no_votes(alpha.expand(*shape[:-1], -1))
    for _ in range(steps):
        votes = vote(log_likelihood, votes.log_weights(alpha), labels, mask)
    return Estimate(votes.counts, alpha, votes.evidence)


class Stream:
    """The estimate from batch to batch at constant cost; ``forget`` below 1 lets old batches fade."""

    def __init__(self, alpha: Tensor, forget: float = 1.0) -> None:
        if not 0 <= forget <= 1:
            raise ConfigError(f"forget is {forget}; expected a number from 0 (only the last batch) to 1 (all of them).")
        nothing = torch.zeros_like(alpha)
        self.estimate, self.forget = Estimate(nothing, alpha, nothing), forget

    def update(self, log_likelihood: Tensor, labels: Tensor | None = None, steps: int = STEPS) -> Estimate:
        """Take in a batch: what came before counts as observed."""
        alpha, before = self.estimate.alpha, self.estimate.counts * self.forget
        found = estimate(log_likelihood, alpha + before, labels, steps=steps)
        evidence = self.estimate.evidence * self.forget + found.evidence
        self.estimate = Estimate(before + found.counts, alpha, evidence)
        return self.estimate
