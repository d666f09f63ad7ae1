# SPDX-License-Identifier: Apache-2.0
"""FedAvg-FT: FedAvg, and every client tunes the final model on its own data before it uses it.

No paper of its own. HyperFedZero compares with it under this name, after McMahan et al. (arXiv:1602.05629).

Training is FedAvg's. When a state settles, before evaluations and for use, each participant trains the global model for
some steps and keeps the result. Training always goes on from the global model, never from a tuned one.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``), to train and to tune.
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss; after
    tuning, the number of samples and the loss only. Evaluations as in FedAvg.
Kept by the client: the tuned model with its running statistics; as in FedAvg, the running statistics of the global one.
Kept by the server: the global parameters.
Reduces to: FedAvg without tuning (``tune_steps=0``).
Differs from the paper: there is none. HyperFedZero tunes as long as in a round and has newcomers use the global model
as it is (``tune_newcomers=False``); here newcomers with labels tune too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedloom.algorithms import fedavg
from fedloom.core.contract import Ask, Cohort, Model, Program, Sent, Setup
from fedloom.programs import personal
from fedloom.programs.local import local_training
from fedloom.programs.tuning import TuningConfig, needs_labels, tune, tuning


@dataclass(frozen=True, kw_only=True)
class Config(TuningConfig, fedavg.Config):
    """FedAvg-FT's options: those of FedAvg and of tuning."""


def settle(setup: Setup[Any], state: fedavg.State, ask: Ask) -> fedavg.State:
    """Every participant tunes the global model, whether it was asked in a round or not."""
    if setup.config.tunes:
        tune(setup, fedavg.send(setup, state, setup.clients), ask)
    return state


def admit(setup: Setup[Any], state: fedavg.State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets the global model, as in FedAvg, and tunes it on its labelled samples."""
    sent = fedavg.admit(setup, state, newcomers, ask)
    return tune(setup, sent, ask) if needs_labels(setup.config) else sent


def programs(config: Any, model: Model, newcomer: bool) -> Sequence[Program]:
    """A participant trains and tunes; a newcomer only tunes."""
    if newcomer:
        return [tuning(config)] if needs_labels(config) else []
    return [local_training(config), *([tuning(config)] if config.tunes else [])]


ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="FedAvg-FT",
    family="personal",
    citation="",
    config=Config,
    first_memory=personal.first_memory,
    client_deploy=personal.deploy,
    settle=settle,
    admit=admit,
    admit_labels=needs_labels,
    programs=programs,
    carries_prior=True,
)
