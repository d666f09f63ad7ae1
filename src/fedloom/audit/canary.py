# SPDX-License-Identifier: Apache-2.0
"""Whether ``--dp-noise`` and ``--sample-dp-noise`` keep their promise: what was planted must not be found again.

Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar: One-shot empirical privacy estimation for federated learning.
ICLR 2024 (arXiv:2302.03098). The run's rounds are trained again with canaries: clients or samples from which random
directions come (``planted_clients``, ``planted_samples``). The cosine of each with what was told, in units of its
deviation for a direction that nobody sent, says how well it is found. Where the paper fits a normal distribution to the
cosines, canaries over a threshold are counted here, so that the bound on epsilon has a level of confidence (Clopper and
Pearson 1934).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedloom.audit import planted_clients, planted_samples
from fedloom.audit.finding import Finding, Measure, Side
from fedloom.audit.planted import LITTLE, Trial
from fedloom.core.errors import NeedsError
from fedloom.privacy.ledger import Release, epsilon
from fedloom.reports.statistics import LEVEL, Floats
from fedloom.training.simulation import Simulation

THRESHOLDS = tuple(range(1, 21))
"""At which canaries count as found, in deviations; fixed beforehand, and paid for in the level of confidence."""


def attack(simulation: Simulation) -> Finding:
    """Train the run again with canaries, and bound its epsilon from below by how well they are found."""
    tried = (planted_clients.trial(simulation), planted_samples.trial(simulation))
    trials = [one for one in tried if one is not None]
    if not trials:
        raise NeedsError(
            "Canaries test the promise of --dp-noise or --sample-dp-noise, and this run makes none. Audit one that was "
            "run with it."
        )
    delta = simulation.server.options.dp_delta
    measures = [
        Measure(
            f"epsilon of {one.unit}s is at least (delta {delta:g})", judge(*one.run, delta), judge(*one.control, delta)
        )
        for one in trials
    ]
    return Finding(
        "canary",
        simulation.server.round,
        sees="; and ".join(one.sees for one in trials),
        knows="the canaries' directions; chance is the epsilon that the ledger names, and a bound above it breaks the "
        "promise",
        control=f"the canaries with {LITTLE:g} of the noise that is accounted for",
        measures=measures,
        verdict=" ".join(map(_verdict, trials, measures)),
    )


def judge(found: Floats, releases: Sequence[Release], delta: float) -> Side:
    """The bound on epsilon from below, beside the one that is promised."""
    claimed, bound = epsilon(releases, delta), at_least(found, delta)
    return Side(bound, None, None, claimed, bound > claimed)


def at_least(found: Floats, delta: float) -> float:
    """Epsilon is at least this, with a confidence of 95%, where canaries are found so well."""
    from scipy import stats

    level = (1 - LEVEL) / len(THRESHOLDS)
    best = 0.0
    for threshold in THRESHOLDS:
        hits = int((found > threshold).sum())
        if hits:
            right = float(stats.beta.ppf(level, hits, len(found) - hits + 1))
            if right > delta:
                best = max(best, float(np.log(right - delta) - stats.norm.logsf(threshold)))
    return best


def _verdict(trial: Trial, measure: Measure) -> str:
    run, control = measure.run, measure.control
    if run.beats:
        return (
            f"The promise to {trial.unit}s is broken: epsilon is at least {run.value:.3g}, and the ledger names "
            f"{run.chance:.3g}. Noise, bound or sampling are not what was accounted for."
        )
    if not control.beats:
        return (
            f"The control failed: {trial.unit}s that are canaries are not found even with next to no noise, so that "
            "nothing follows. They need a larger model or fewer rounds."
        )
    return (
        f"Canaries say no more than that epsilon of {trial.unit}s is at least {run.value:.3g}; the ledger's "
        f"{run.chance:.3g} is above, as it must be. That does not prove that the promise is kept."
    )
