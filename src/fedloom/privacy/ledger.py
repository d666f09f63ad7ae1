# SPDX-License-Identifier: Apache-2.0
"""What a run has made public under differential privacy, release by release, and what it amounts to.

Epsilon is worked out by Google's ``dp-accounting`` (the extra ``privacy``), from what was done:

- clients, or samples of one client, drawn one by one (``poisson``): privacy loss distributions (PLD); neighbours
  are federations with and without one client, or data of a client with and without one sample, whose place is then
  empty: how many it has is no secret;
- a fixed number of clients drawn (``fixed``): likewise, by ``fixed_cohorts``; neighbours differ in one client's data,
  which counts twice, so that it costs much more.

What hides samples is added up for each client by itself, and holds for the one that spent most. Noise without a bound
that goes with it, such as Laplace noise on changes of any size, is written down and has no epsilon.

A release that is drawn again from the same seed is the same release; from the operating system it is another one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, reduce
from typing import Any, Literal, NamedTuple

from fedloom.core.errors import NeedsError
from fedloom.privacy.fixed_cohorts import loss_of_round

Sampling = Literal["poisson", "fixed"]
Unit = Literal["client", "sample"]
Mechanism = Literal["gaussian", "laplace"]

DESCRIPTOR = "descriptor"
"""What a newcomer says of its data, once for each admission."""

ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
"""Of Renyi DP. Whole ones: at others the library's sums fail to converge for little noise."""
FINEST, COARSEST = 1e-5, 1e-3
"""Of the grids that losses are rounded to."""
COARSE = 500.0
"""An epsilon beyond this protects nobody: the quicker bound will do."""


class Release(NamedTuple):
    """Noised answers that were made public. As they are written down, a line each."""

    round: int
    what: str
    """A round of training, say."""
    noise: float
    """The deviation of the Gaussian noise, in units of the bound on one part of a sum; of other noise, its scale."""
    sampling: Sampling
    clients: int
    """Clients, or samples, that could have been drawn."""
    size: float
    """How many were, or how many are on average."""
    draw: str = "seed"
    """Where the noise came from: the run's seed, or a name of its own for each secret draw."""
    times: int = 1
    unit: Unit = "client"
    """What is hidden."""
    who: tuple[str, ...] = ()
    """The clients whose samples these are."""
    mechanism: Mechanism = "gaussian"
    split: str = "train"
    """Where the samples are: those of another split are others."""

    @property
    def is_bounded(self) -> bool:
        """Whether noise is known to be large beside what it is to hide."""
        return self.mechanism == "gaussian"

    @property
    def from_seed(self) -> bool:
        """Whether the noise follows from the run's seed."""
        return self.draw.startswith("seed")


def releases_of(lines: Iterable[Mapping[str, Any]]) -> list[Release]:
    """The releases that were written down; a draw that was repeated bit for bit counts once."""
    found = [Release(**{name: line[name] for name in Release._fields if name in line}) for line in lines]
    return list(dict.fromkeys(one._replace(who=tuple(one.who)) for one in found))


def hiding(releases: Iterable[Release], unit: Unit) -> list[Release]:
    """Those that hide this, by noise that has a bound."""
    return [one for one in releases if one.unit == unit and one.is_bounded]


def epsilon(releases: Sequence[Release], delta: float) -> float:
    """The (epsilon, ``delta``) guarantee that holds for all of these releases together."""
    unbounded = [one for one in releases if not one.is_bounded]
    if unbounded:
        raise NeedsError(
            f"{unbounded[0].mechanism.capitalize()} noise of scale {unbounded[0].noise:g} is on answers that have no "
            "bound, so that no epsilon can be named for it."
        )
    return _epsilon(_kinds(releases), delta)


class Spent(NamedTuple):
    """What a client spent of the privacy of each of its samples."""

    client: str
    epsilon: float


def worst(releases: Sequence[Release], delta: float) -> Spent | None:
    """The client whose samples have the weakest guarantee by these releases; None where they hide no samples."""
    spent: dict[str, Counter[Release]] = {}
    for one in hiding(releases, "sample"):
        for client in one.who:
            spent.setdefault(client, Counter())[_kind(one)] += one.times
    found = {tuple(sorted(kinds.items())): client for client, kinds in reversed(spent.items())}
    return max((Spent(found[kinds], _epsilon(kinds, delta)) for kinds in _weakest(list(found))),
               key=lambda one: one.epsilon, default=None)  # fmt: skip


def most_steps(like: Release, limit: float, delta: float) -> int:
    """How many releases like this one keep epsilon within the limit: their number, up to a billion."""
    low, high = 0, 1
    while high < 10**9 and epsilon([like._replace(times=high)], delta) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if epsilon([like._replace(times=middle)], delta) <= limit:
            low = middle
        else:
            high = middle
    return low


Kinds = tuple[tuple[Release, int], ...]
"""Releases that are alike, and how many."""


def _kind(release: Release) -> Release:
    return release._replace(round=0, what="", draw="", times=1, who=(), split="")


def _kinds(releases: Iterable[Release]) -> Kinds:
    kinds: Counter[Release] = Counter()
    for one in releases:
        kinds[_kind(one)] += one.times
    return tuple(sorted(kinds.items()))


def _weakest(found: Sequence[Kinds]) -> list[Kinds]:
    """Those that no other is sure to be weaker than: as often at least, with no more noise, drawn as likely at least.

    A federation has as many kinds as clients with other numbers of samples, and each takes time to account for.
    """

    def facts(kinds: Kinds) -> tuple[float, float, int] | None:
        if len(kinds) != 1:
            return None
        ((one, times),) = kinds
        return min(1.0, one.size / one.clients), -one.noise, times

    def beaten(kinds: Kinds) -> bool:
        own = facts(kinds)
        others = (facts(other) for other in found if other is not kinds)
        return own is not None and any(
            other is not None and other != own and all(a <= b for a, b in zip(own, other)) for other in others
        )

    return [kinds for kinds in found if not beaten(kinds)]


@cache
def _epsilon(kinds: Kinds, delta: float) -> float:
    if not kinds:
        return 0.0
    dp = _library()
    fixed = any(kind.sampling == "fixed" and kind.size < kind.clients for kind, _ in kinds)
    relation = dp.NeighboringRelation.REPLACE_ONE if fixed else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    event = dp.ComposedDpEvent([dp.SelfComposedDpEvent(_event(kind, fixed), times) for kind, times in kinds])
    quick = dp.rdp.RdpAccountant(ORDERS, relation)
    quick.compose(event)
    bound = float(quick.get_epsilon(delta))
    if bound > COARSE:
        return bound
    step = _step(kinds, fixed)
    if fixed:
        rounds = [
            loss_of_round(kind.noise, min(1.0, round(kind.size) / kind.clients), step).self_compose(times)
            for kind, times in kinds
        ]
        return float(reduce(lambda one, other: one.compose(other), rounds).get_epsilon_for_delta(delta))
    exact = dp.pld.PLDAccountant(relation, value_discretization_interval=step)
    exact.compose(event)
    return float(exact.get_epsilon(delta))


def _step(kinds: Kinds, fixed: bool) -> float:
    """The grid that losses are rounded to: rounding is to add a hundredth of their variance at most.

    Where they are tiny it may add more: what is below a thousandth need not be exact.
    """
    apart = 2.0 if fixed else 1.0
    # the exponent is one that noise so small brings to the coarsest grid anyway
    each = [
        min(1.0, kind.size / kind.clients) ** 2 * math.expm1(min((apart / kind.noise) ** 2, 50.0)) * times
        for kind, times in kinds
    ]
    return min(COARSEST, max(FINEST, math.sqrt(0.06 * sum(each) / sum(times for _, times in kinds))))


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


def rounds_within(
    done: Sequence[Release], coming: Callable[[int], Sequence[Release]], most: int, limit: float, delta: float
) -> int:
    """How many more rounds, up to ``most``, keep epsilon within ``limit``; ``coming(n)`` is what n of them release."""
    low, high = 0, most + 1  # low are within it, high are not, as far as is known
    while high - low > 1:
        middle = (low + high) // 2
        if epsilon([*done, *coming(middle)], delta) <= limit:
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
