# SPDX-License-Identifier: Apache-2.0
"""Label shares of clients: a Dirichlet learned from the participants, and a newcomer's shares from unlabelled samples.

The estimate is variational EM for the mixture p(x) = sum_k pi_k p(x | k) with known likelihoods and
pi ~ Dirichlet(alpha). Plain EM (Saerens et al. 2002) is the same without the Dirichlet; with it, a federation of like
clients (large alpha) pulls an estimate from few samples to the common shares, and one of unlike clients hardly does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor


class Estimate(NamedTuple):
    """A posterior over a client's label shares: Dirichlet(alpha + counts)."""

    counts: Tensor  # (classes,) labels counted or expected
    alpha: Tensor  # (classes,)

    @property
    def shares(self) -> Tensor:
        """The posterior mean: what is predicted with."""
        return shares(self.counts, self.alpha)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Equal-tailed credible interval of each share (the marginals are Beta)."""
        a = (self.counts + self.alpha).double().numpy()
        tails = ((1 - level) / 2, (1 + level) / 2)
        low, high = (torch.as_tensor(stats.beta.ppf(q, a, a.sum() - a)) for q in tails)
        return low, high


def shares(counts: Tensor, alpha: Tensor) -> Tensor:
    """The posterior mean of the label shares."""
    a = counts + alpha
    return a / a.sum(-1, keepdim=True)


def fit_dirichlet(counts: np.ndarray, steps: int = 500, low: float = 1e-3, high: float = 1e4) -> np.ndarray:
    """The Dirichlet whose multinomials make ``counts`` (clients, classes) likeliest: Minka's fixed point.

    ``low`` keeps classes that no participant has possible; ``high`` stands for clients that are all alike.
    """
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


def log_weights(counts: Tensor, alpha: Tensor, first: Tensor) -> Tensor:
    """The weights of the classes in the next E-step: E[log pi]; in the ``first`` one, of the Dirichlet's mean.

    E[log pi] of a small alpha is nearly minus infinity for every class but the commonest, and EM would start stuck.
    """
    a = counts + alpha
    return torch.where(first, torch.log(alpha / alpha.sum()), torch.digamma(a) - torch.digamma(a.sum()))


def responsibilities(log_likelihood: Tensor, weights: Tensor, labels: Tensor) -> Tensor:
    """(samples, classes): which class a sample is of; certain where ``labels`` has it (>= 0), else by Bayes."""
    known = (labels[:, None] == torch.arange(weights.shape[0], device=weights.device)).to(weights.dtype)
    return torch.where(labels[:, None] >= 0, known, torch.softmax(log_likelihood + weights, dim=-1))


def estimate(log_likelihood: Tensor, alpha: Tensor, labels: Tensor | None = None, steps: int = 100) -> Estimate:
    """Variational EM. ``log_likelihood`` (samples, classes) may have any constant added to a row."""
    if labels is None:
        labels = torch.full((len(log_likelihood),), -1, device=alpha.device)
    counts = torch.zeros_like(alpha)
    for step in range(steps):
        weights = log_weights(counts, alpha, torch.tensor(step == 0, device=alpha.device))
        counts = responsibilities(log_likelihood, weights, labels).sum(0)
    return Estimate(counts, alpha)


class Stream:
    """The estimate from batch to batch at constant cost; ``forget`` below 1 lets old batches fade."""

    def __init__(self, alpha: Tensor, forget: float = 1.0) -> None:
        self.estimate, self.forget = Estimate(torch.zeros_like(alpha), alpha), forget
        self._fresh = True

    def update(self, log_likelihood: Tensor, steps: int = 20) -> Estimate:
        """Take in a batch: what came before counts as observed."""
        before, alpha = self.estimate.counts * self.forget, self.estimate.alpha
        labels = torch.full((len(log_likelihood),), -1)
        counts = before
        for step in range(steps):
            first = torch.tensor(self._fresh and step == 0)
            weights = log_weights(counts, alpha, first)
            counts = before + responsibilities(log_likelihood, weights, labels).sum(0)
        self.estimate, self._fresh = Estimate(counts, alpha), False
        return self.estimate
