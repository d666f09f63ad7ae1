# SPDX-License-Identifier: Apache-2.0
"""``--local-lr auto``: the local rate is found by short trials on participants' validation data, before round 1.

The method is trained for a twentieth of the rounds, or three turns of every client, with each of five rates around its
own, from a tenth to ten times it, and with larger ones as long as the largest is best. The two best and its own go on
to three times as many rounds. The best of these is used, unless its lead over the method's own rate is within two
standard errors over clients: what has hardly begun to learn says nothing of rates. Trials draw what the run itself
draws, so the same seed finds the same rate. Test data and newcomers have no say. For other options, and more rounds,
there is ``fedloom tune``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fedloom.core.errors import ConfigError, RoundError
from fedloom.core.noised import hides_samples
from fedloom.data.arrays import Arrays
from fedloom.runs.options import RunOptions
from fedloom.training.simulation import Simulation

AUTO = "auto"
FACTORS = (0.1, 0.3, 1, 3, 10)
"""What a method's rate is multiplied by."""
FURTHER, MOST = 3, 300
"""Then by this again while the largest is best, up to so many times the method's own."""
SHARE, TURNS, LONGER = 20, 3, 3
"""A trial has so small a part of the rounds, or so many turns of every client; the best have so many times as many."""

CLEAR = 2
"""So many standard errors over clients the best must be ahead of the method's own rate."""
FAILED = (-math.inf, -math.inf)


class Tried(NamedTuple):
    """A rate, and how good it was: more is better."""

    score: tuple[float, float]
    """The metric, and for what is still at chance the loss."""
    rate: float
    trial: Simulation | None
    metrics: tuple[float, ...] = ()
    """By client."""


class Found(NamedTuple):
    """What came of the trials."""

    config: Any
    """The method's, with the rate that was best."""
    note: str


def found(method: str, options: RunOptions, config: Any, arrays: Arrays) -> Found:
    """The method's config with the rate that short trials say."""
    own = getattr(config, "local_lr", 0.0)
    if not own:
        raise ConfigError(f"--local-lr {AUTO} tries rates around that of {method}, which has none. Give a number.")
    if options.dp_noise or hides_samples(config):
        raise ConfigError(
            f"--local-lr {AUTO} does not go with --dp-noise or --sample-dp-noise: its trials would make answers public "
            "that nobody counts. Give a number."
        )
    options = replace(options, adapt="none", adapt_clip=0.0, adapt_noise=0.0, tracker=None)
    rates, several = [own * factor for factor in FACTORS], list[Tried]()
    while len(several) < len(rates):
        rate = float(f"{rates[len(several)]:.3g}")
        trial = Simulation(method, options, replace(config, local_lr=rate), arrays)
        several.append(trained(Tried(FAILED, rate, trial), short(trial)))
        best = ranked(several)[:2]
        several = [one if one in best or one.rate == own else one._replace(trial=None) for one in several]  # for memory
        if len(several) == len(rates) and best[0].rate == rate and best[0].score > FAILED and rate < own * MOST:
            rates.append(rate * FURTHER)
    last = [trained(one, LONGER * short(one.trial)) for one in several if one.trial]
    best = ranked(last)
    best = [one for one in last if one.rate == own and not ahead(best[0], one)] or best
    if best[0].score == FAILED:
        raise RoundError(f"Training failed at every rate from {several[0].rate:g} on. Give --local-lr a number.")
    tried, rate = ", ".join(f"{one.rate:g}" for one in several), best[0].rate
    return Found(replace(config, local_lr=rate), f"local rate {rate:g}, by short trials of {tried}")


def short(trial: Simulation) -> int:
    """The rounds of a trial: a share of all, but enough for every client to have a turn."""
    options = trial.server.options
    turn = math.ceil(len(trial.server.setup.clients) / options.cohort)
    return max(1, min(options.rounds, max(TURNS * turn, round(options.rounds / SHARE))))


def ahead(one: Tried, other: Tried) -> bool:
    """Whether one is clearly better than another, over clients."""
    if other.score == FAILED or len(one.metrics) < 2:
        return one.score > other.score
    gains = [a - b for a, b in zip(one.metrics, other.metrics)]
    return bool(fmean(gains) > CLEAR * stdev(gains) / len(gains) ** 0.5)


def ranked(several: list[Tried]) -> list[Tried]:
    """The best one first; of equals the smaller rate."""
    return sorted(several, key=lambda one: (*(-value for value in one.score), one.rate))


def trained(one: Tried, rounds: int) -> Tried:
    """A trial after so many rounds; without a score if its training fails."""
    trial = one.trial
    assert trial is not None
    try:
        while trial.server.round < rounds:
            trial.train_round()
        trial.settle()
        scores = list(trial.evaluate("val").values())
    except RoundError:
        return one._replace(score=FAILED)
    if not scores:
        raise ConfigError(f"--local-lr {AUTO} needs validation data; give a --val-share above 0, or a number.")
    sign = 1 if trial.server.setup.task.higher_is_better else -1
    metrics = tuple(sign * score.metric for score in scores)
    score = fmean(metrics), -fmean(score.loss for score in scores)
    return one._replace(score=score if all(map(math.isfinite, score)) else FAILED, metrics=metrics)
