# SPDX-License-Identifier: Apache-2.0
"""Methods compared on the same clients. With one seed, the split is the same whatever the method: pair by client.

Two units, which must not be confused. Over the clients of one seed, an interval says how much other clients of the kind
would differ, with the training as it went; it says nothing of another training. Over seeds, it says something of the
method. With one seed there is only the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from fedloom.reports.facts import Facts, Scores
from fedloom.reports.statistics import Interval, over_clients, over_seeds

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Seed:
    """Two runs with one seed: how their clients differ. Positive is better than the baseline, whatever the metric."""

    seed: int
    clients: Sequence[str]
    differences: Floats
    samples: int
    """Test samples of all clients together."""
    apart: int
    """How many more of them are right; 0 where the metric is no share."""
    error: float
    """The standard error of the difference of the two pooled shares."""

    @property
    def mean(self) -> float:
        """Each client counted once."""
        return float(self.differences.mean())


@dataclass(frozen=True)
class Paired:
    """A method against the baseline."""

    method: str
    baseline: str
    seeds: Sequence[Seed]
    is_share: bool

    @property
    def interval(self) -> Interval:
        """Of the mean difference, over seeds; with one seed, without bounds."""
        return over_seeds([seed.mean for seed in self.seeds])

    @property
    def of_clients(self) -> Interval:
        """Of the mean difference of the first seed, over its clients."""
        return over_clients(self.seeds[0].differences.tolist())

    @property
    def lose(self) -> float:
        """Share of the clients, over all seeds, that fare worse than with the baseline."""
        return float(np.mean(np.concatenate([seed.differences for seed in self.seeds]) < 0))

    @property
    def worst(self) -> tuple[str, float]:
        """The client that loses most, and how much."""
        found = [(float(d), c) for seed in self.seeds for c, d in zip(seed.clients, seed.differences)]
        difference, client = min(found)
        return client, difference

    @property
    def told_apart(self) -> bool:
        """Whether the runs tell the two apart: over seeds, or with one seed by what its samples allow."""
        if len(self.seeds) > 1:
            return self.interval.excludes_zero()
        if not self.is_share:
            return self.of_clients.excludes_zero()
        (seed,) = self.seeds
        return abs(seed.apart) / max(seed.samples, 1) > 2 * seed.error

    def sentence(self) -> str:
        """What the runs say, and no more."""
        names, n = f"{self.method} and {self.baseline}", len(self.seeds)
        if n > 1:
            found = self.interval
            assert found.low is not None and found.high is not None
            if not self.told_apart:
                bounds = f"{self._size(found.low, unit=False)} to {self._size(found.high, unit=False)}"
                return (
                    f"{names} differ by {self._size(found.mean)} (95% interval over {n} seeds: {bounds}): too few "
                    "seeds to tell them apart."
                )
            way, low, high = ("better", found.low, found.high) if found.mean > 0 else ("worse", -found.high, -found.low)
            bounds = f"{self._size(low, sign=False, unit=False)} to {self._size(high, sign=False, unit=False)}"
            size = self._size(abs(found.mean), sign=False)
            return f"{self.method} is {way} than {self.baseline} by {size} (95% interval over {n} seeds: {bounds})."
        (seed,) = self.seeds
        if not self.is_share:
            if not self.told_apart:
                size = f"{self._size(seed.mean)} over {len(seed.clients)} clients"
                return f"{names} differ by {size}: too few to tell them apart."
            way = "better" if seed.mean > 0 else "worse"
            size = self._size(abs(seed.mean), sign=False)
            return f"{self.method} is {way} than {self.baseline} by {size} over {len(seed.clients)} clients."
        if not self.told_apart:
            return f"{names} are {abs(seed.apart)} of {seed.samples} test samples apart: too few to tell them apart."
        way = "more" if seed.apart > 0 else "fewer"
        return f"{self.method} is right on {abs(seed.apart)} {way} of {seed.samples} test samples than {self.baseline}."

    def _size(self, number: float, *, sign: bool = True, unit: bool = True) -> str:
        plus = "+" if sign else ""
        return f"{100 * number:{plus}.1f}{' points' * unit}" if self.is_share else f"{number:{plus}.4g}"


def paired(
    method: str, runs: Mapping[int, Facts], baseline: str, others: Mapping[int, Facts], who: str = "participants"
) -> Paired | None:
    """A method against the baseline, by seed and client, where both have a run with that seed and the same clients."""
    seeds = []
    for number, run in runs.items():
        other = others.get(number)
        scores = [_scores(facts, who) for facts in (run, other) if facts is not None]
        if other is None or None in scores:
            continue
        one, base = scores
        assert one is not None and base is not None
        found = _seed(number, one, base, run.higher_is_better, run.is_share)
        if found is not None:
            seeds.append(found)
    first = next(iter(runs.values()))
    return Paired(method, baseline, seeds, first.is_share) if seeds else None


def _scores(facts: Facts, who: str) -> Scores | None:
    return facts.scores(facts.shown) if who == "participants" else facts.unseen()


def _seed(number: int, one: Scores, base: Scores, higher_is_better: bool, is_share: bool) -> Seed | None:
    """None where clients are not the same: another split, or another number of test samples."""
    place = {client: i for i, client in enumerate(base.clients)}
    rows = [(i, place[client]) for i, client in enumerate(one.clients) if client in place]
    if not rows:
        return None
    mine, theirs = (np.array(column) for column in zip(*rows))
    if (one.samples[mine] != base.samples[theirs]).any():
        return None
    differences = (one.metric[mine] - base.metric[theirs]) * (1 if higher_is_better else -1)
    known = np.isfinite(differences)
    if not known.any():
        return None
    samples = int(one.samples[mine][known].sum())
    p, q = (float(s.metric[r][known] @ s.samples[r][known]) / max(samples, 1) for s, r in ((one, mine), (base, theirs)))
    error = sqrt(max(p * (1 - p) + q * (1 - q), 0.0) / max(samples, 1)) if is_share else 0.0
    clients = [one.clients[i] for i, fine in zip(mine, known) if fine]
    return Seed(number, clients, differences[known], samples, round((p - q) * samples) if is_share else 0, error)
