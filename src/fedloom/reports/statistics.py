# SPDX-License-Identifier: Apache-2.0
"""How sure a number is: intervals of a client, of clients, of seeds; distances of label shares; a flat map of vectors.

An interval has the level ``LEVEL``. Nothing here is random but the bootstrap and t-SNE, which have fixed seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
DRAWS = 2_000
"""Of the bootstrap."""

Floats = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """A mean with its bounds, which are None where nothing can be said of them."""

    mean: float
    low: float | None
    high: float | None

    def excludes_zero(self) -> bool:
        """Whether the bounds are known and on one side of zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def wilson(share: float, samples: int) -> tuple[float, float]:
    """Bounds of a share that was seen in so many samples (Wilson, 1927): never outside of 0 and 1."""
    z, n = 1.959963984540054, max(samples, 1)
    centre, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # of shares of 0 and 1 the bound is the share itself, up to rounding
    return min(share, max(0.0, (centre - half) / scale)), max(share, min(1.0, (centre + half) / scale))


def over_seeds(numbers: Sequence[float]) -> Interval:
    """The mean with Student's interval: one number says nothing of how much others would differ."""
    mean = float(np.mean(numbers))
    if len(numbers) < 2:
        return Interval(mean, None, None)
    from scipy import stats

    spread = float(np.std(numbers, ddof=1)) / math.sqrt(len(numbers))
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(numbers) - 1)) * spread
    return Interval(mean, mean - half, mean + half)


def over_clients(numbers: Sequence[float]) -> Interval:
    """The mean with the bounds of a bootstrap: other clients of the same kind, the same training."""
    values = np.asarray(numbers, dtype=float)
    mean = float(values.mean())
    if len(values) < 2:
        return Interval(mean, None, None)
    drawn = np.random.default_rng(0).integers(0, len(values), (DRAWS, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high))


def worst_tenth(values: npt.ArrayLike, higher_is_better: bool) -> float:
    """The mean over the tenth of the clients that fare worst, one client at least."""
    ranked = np.sort(np.asarray(values, dtype=float))
    ranked = ranked if higher_is_better else ranked[::-1]
    return float(ranked[: max(1, len(ranked) // 10)].mean())


def shares(counts: Sequence[Sequence[int]]) -> Floats:
    """Rows of counts as rows of shares."""
    table: Floats = np.asarray(counts, dtype=float)
    found: Floats = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    return found


def nearest(one: Floats, others: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    """For each row of ``one`` the nearest row of ``others`` by total variation, and how far it is (0 to 1)."""
    found = [np.abs(others - row).sum(axis=1) / 2 for row in one]
    at = np.array([int(distances.argmin()) for distances in found], dtype=np.int64)
    return at, np.array([distances[i] for distances, i in zip(found, at)])


def principal(fitted: Floats, *others: Floats) -> tuple[list[Floats], tuple[float, float]]:
    """The first two principal components of ``fitted``, and of others by the same axes; the shares of its variance.

    The sign of an axis is chosen so that its largest entry is positive: the same picture each time.
    """
    centre = fitted.mean(axis=0)
    _, sizes, axes = np.linalg.svd(fitted - centre, full_matrices=False)
    axes = np.vstack([axes, np.zeros((2, fitted.shape[1]))])[:2]  # one client, or one number each
    axes = axes * np.where(axes[np.arange(2), np.abs(axes).argmax(axis=1)] < 0, -1, 1)[:, None]
    variance = np.append(sizes**2, [0.0, 0.0])
    total = variance.sum() or 1.0
    parts = [(part - centre) @ axes.T for part in (fitted, *others)]
    return parts, (float(variance[0] / total), float(variance[1] / total))


def neighbours(points: Floats) -> tuple[Floats, float]:
    """t-SNE in two dimensions with a fixed seed, and its perplexity."""
    from sklearn.manifold import TSNE

    perplexity = float(min(30, max(2, (len(points) - 1) // 3)))
    made = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(points)
    return np.asarray(made, dtype=float), perplexity
