# SPDX-License-Identifier: Apache-2.0
"""Participants' models tried on clients that took no part: what a method that admits newcomers is to be compared with.

The modes are those of ``hypernets.unlabelled``. They need a method whose participants get a whole model each, woven on
the server, where it can be handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from fedloom.core.contract import Algorithm, Ask, Sent, Setup, deploy_mine
from fedloom.core.errors import NeedsError, unknown
from fedloom.core.statistics import settle_statistics
from fedloom.core.trees import ClientId
from fedloom.hypernets.unlabelled import ensemble, ensemble_predict, nearest, sampled
from fedloom.metrics.evaluation import Score, evaluate

MODES = ("sampled", "ensemble", "nearest")


def evaluate_handed_on(
    algorithm: Algorithm,
    setup: Setup[Any],
    state: Any,
    newcomers: Sequence[ClientId],
    split: str,
    mode: str,
    ask: Ask,
) -> dict[ClientId, Score]:
    """The scores of newcomers with participants' models."""
    if mode not in MODES:
        raise unknown("mode", mode, ["admit", *MODES])
    if algorithm.client_deploy is not deploy_mine:
        raise NeedsError(
            f"The mode {mode} hands the participants' models to newcomers, and the server of {algorithm.name} has no "
            "whole model for each participant. Use a run of pfedhn, or the mode admit."
        )
    models = algorithm.personalise(setup, state, setup.clients).mine

    def tried(sent: Sent, algorithm: Algorithm = algorithm) -> dict[ClientId, Score]:
        return evaluate(
            algorithm,
            lambda _: sent,
            list(sent.mine),
            split,
            ask,
            at_once=len(newcomers),
            higher_is_better=setup.task.higher_is_better,
        )

    if mode == "ensemble":
        return tried(ensemble(setup, models, newcomers), replace(algorithm, predict=ensemble_predict))
    if mode == "nearest":
        return tried(settle_statistics(setup, deploy_mine, nearest(setup, models, newcomers, ask), ask))
    each = [tried(settle_statistics(setup, deploy_mine, sent, ask)) for sent in sampled(setup, models, newcomers)]
    return {client: _mean([scores[client] for scores in each if client in scores]) for client in newcomers}


def _mean(scores: Sequence[Score]) -> Score:
    return Score(fmean(s.loss for s in scores), fmean(s.metric for s in scores), scores[0].samples)
