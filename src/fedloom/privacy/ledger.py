# SPDX-License-Identifier: Apache-2.0
"""What a run has made public under differential privacy, release by release, and what it amounts to.

Epsilon is worked out by Google's ``dp-accounting`` (the extra ``privacy``), from what was done:

- clients drawn one by one (``poisson``): privacy loss distributions (PLD); neighbours are federations with and without
  one client;
- a fixed number of clients drawn (``fixed``): Renyi DP of sampling without replacement (Wang, Balle, Kasiviswanathan
  2019); neighbours differ in one client's data, which counts twice, so that it costs much more.

A release that is drawn again from the same seed is the same release; from the operating system it is another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from fedloom.core.errors import NeedsError

Sampling = Literal["poisson", "fixed"]

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
"""Of Renyi DP. Whole ones: at others the library's sums fail to converge for little noise."""
COARSE = 500.0
"""An epsilon beyond this protects nobody: the quicker bound will do."""


class Release(NamedTuple):
    """A noised answer that was made public. As it is written down, a line each."""

    round: int
    what: str
    """A round of training, say."""
    noise: float
    """The deviation of the Gaussian noise, in units of the bound on one client's part."""
    sampling: Sampling
    clients: int
    """That could have been drawn."""
    size: float
    """How many were, or how many are on average."""
    draw: str = "seed"
    """Where the noise came from: the run's seed, or a name of its own for each secret draw."""
    times: int = 1


def releases_of(lines: Iterable[Mapping[str, Any]]) -> list[Release]:
    """The releases that were written down; a draw that was repeated bit for bit counts once."""
    found = [Release(**{name: line[name] for name in Release._fields}) for line in lines]
    return list(dict.fromkeys(found))


def epsilon(releases: Sequence[Release], delta: float) -> float:
    """The (epsilon, ``delta``) guarantee that holds for all of these releases together."""
    kinds: Counter[Release] = Counter()
    for one in releases:
        kinds[one._replace(round=0, what="", draw="", times=1)] += one.times
    return _epsilon(tuple(sorted(kinds.items())), delta)


@cache
def _epsilon(kinds: tuple[tuple[Release, int], ...], delta: float) -> float:
    if not kinds:
        return 0.0
    dp = _library()
    fixed = any(kind.sampling == "fixed" and kind.size < kind.clients for kind, _ in kinds)
    relation = dp.NeighboringRelation.REPLACE_ONE if fixed else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    event = dp.ComposedDpEvent([dp.SelfComposedDpEvent(_event(kind, fixed), times) for kind, times in kinds])
    quick = dp.rdp.RdpAccountant(ORDERS, relation)
    quick.compose(event)
    bound = float(quick.get_epsilon(delta))
    if fixed or bound > COARSE:
        return bound
    # losses are rounded up to whole steps: an epsilon that is too large by less than a thousandth
    exact = dp.pld.PLDAccountant(relation, value_discretization_interval=min(1e-3, bound / 100))
    exact.compose(event)
    return min(bound, float(exact.get_epsilon(delta)))


def _event(kind: Release, fixed: bool) -> Any:
    dp = _library()
    if kind.size >= kind.clients:
        return dp.GaussianDpEvent(kind.noise / 2 if fixed else kind.noise)
    if kind.sampling == "fixed":  # another client's data in place of its own move the sum by two bounds
        return dp.SampledWithoutReplacementDpEvent(kind.clients, round(kind.size), dp.GaussianDpEvent(kind.noise / 2))
    if fixed:
        raise NeedsError(
            "These releases were sampled in two ways, poisson and fixed, and their guarantees are of two kinds, which "
            "do not add up. Account for them one by one."
        )
    return dp.PoissonSampledDpEvent(kind.size / kind.clients, dp.GaussianDpEvent(kind.noise))


def rounds_within(done: Sequence[Release], coming: Release, most: int, limit: float, delta: float) -> int:
    """How many more releases like ``coming``, up to ``most``, keep epsilon within ``limit``."""
    low, high = 0, most + 1  # low are within it, high are not, as far as is known
    while high - low > 1:
        middle = (low + high) // 2
        if epsilon([*done, coming._replace(times=middle)], delta) <= limit:
            low = middle
        else:
            high = middle
    return low


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise NeedsError(
            "Accounting for privacy needs the package dp-accounting; install it with: pip install 'fedloom[privacy]'."
        ) from error
    return dp_accounting
