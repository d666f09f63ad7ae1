# SPDX-License-Identifier: Apache-2.0
"""What one client can do to the others: how far its reply may reach, and how much it may weigh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median, median_low

import numpy as np
import torch

from fedloom.core.trees import ClientId, Tree, leaves, squared_norm
from fedloom.data.preparation import Sums
from fedloom.engines.job import Job

NOT_A_CHANGE = ("num_samples", "loss", "sums")
"""Parts of a reply that move no parameter."""

FEW = 3
"""Replies of which a median says something."""


def too_far(job: Job, replies: Mapping[ClientId, Tree], bound: float) -> dict[ClientId, str]:
    """The clients whose replies are absurdly large, and why; none for ``bound`` 0.

    A reply's norm may be ``bound`` times the median of those that came with it. Of fewer than three, it is compared
    with the norm of what was sent.
    """
    if not bound:
        return {}
    norms = {client: _norm(reply) for client, reply in replies.items()}
    norms = {client: norm for client, norm in norms.items() if not math.isnan(norm)}  # which are refused as such
    found = {}
    for client, norm in norms.items():
        sent = max(_norm(job.shared), _norm(job.mine[client]), 1.0)
        usual = max(median(norms.values()), 1e-6 * sent) if len(norms) >= FEW else sent
        if norm > bound * usual:
            what = "the median of the cohort" if len(norms) >= FEW else "the norm of what it was sent"
            found[client] = f"replied with numbers of norm {norm:.3g}, more than {bound:g} times {what}, {usual:.3g}"
    return found


def _norm(tree: Tree) -> float:
    changes = {name: branch for name, branch in tree.items() if name not in NOT_A_CHANGE}
    numbers = {path: leaf.double() for path, leaf in leaves(changes) if leaf.is_floating_point() and leaf.numel()}
    return float(squared_norm(numbers).sqrt()) if numbers else 0.0


def weights_of(samples: Mapping[ClientId, int], most: float) -> dict[ClientId, int]:
    """What clients weigh: the number of samples that they told when they joined, at most ``most`` times the median.

    Of an even number of clients it is the lower median: one of two must not make its own bound.
    """
    counts = [number for number in samples.values() if number]
    limit = int(most * median_low(counts)) if counts and most else max(counts, default=0)
    return {client: min(number, max(limit, 1)) for client, number in samples.items()}


MEANS_AWAY = 10.0
"""How far a client's mean of a column may be from the median of all, in units of how they usually vary."""
VARIANCES_MORE = 100.0
"""How many times the median variance a client's may be."""


def sums_of(replies: Mapping[ClientId, Tree], weights: Mapping[ClientId, int], *, missing: bool) -> Sums:
    """What clients told of their raw training data, as one; of few clients as told, of more within bounds.

    A client counts at most for its weight. ``missing``: a column may have fewer values than there are samples.
    """
    told = [{name: leaf.double().cpu().numpy() for name, leaf in reply["sums"].items()} for reply in replies.values()]
    most = np.array([float(weights.get(client) or 1) for client in replies])[:, None]
    number, mean, variance, categories = (
        np.stack([one[name] for one in told]) for name in ("number", "mean", "variance", "categories")
    )
    mean = mean + np.stack([one["rest"] for one in told])
    variance = np.maximum(variance, 0)
    number = np.clip(number, 0, most) if missing else np.where(number > 0, most, 0)
    if len(told) >= FEW:
        middle, usual = np.median(mean, axis=0), np.median(variance, axis=0)
        apart = MEANS_AWAY * (np.sqrt(usual) + np.median(np.abs(mean - middle), axis=0))
        mean = np.clip(mean, middle - apart, middle + apart)
        variance = np.minimum(variance, VARIANCES_MORE * usual)
    total = np.maximum(number.sum(0), 1)
    whole = (number * mean).sum(0) / total
    spread = (number * (variance + (mean - whole) ** 2)).sum(0) / total
    return Sums(number.sum(0), whole, spread, np.clip(categories, 0, most).sum(0))


def weight_fault(reply: Tree) -> str | None:
    """Why the number of samples in a reply is none; None if it is one, or there is none in it."""
    if "num_samples" not in reply:
        return None
    claimed = reply["num_samples"]
    if not isinstance(claimed, torch.Tensor) or claimed.numel() != 1:
        return "replied with something that is not one number of samples"
    number = float(claimed)
    return None if number >= 1 and number.is_integer() else f"says that it has {number:g} samples"
