# SPDX-License-Identifier: Apache-2.0
"""FedBABU: only the body is trained together, under a head that stays random; clients tune before use.

Oh, Kim, Yun: FedBABU: toward enhanced representation for federated image classification. ICLR 2022 (arXiv:2106.06042).

All clients have the same head, drawn once and never trained in rounds. They train the body below it, and the server
averages the bodies. When a state settles, before evaluations and for use, each participant trains the whole model, body
and head, for some passes over its data and keeps the result; rounds never read it.

Sent down: the body's parameters, to train and to tune.
Sent up: the change of the body, the number of samples, the training loss; after tuning, the number of samples and the
    loss only. Evaluations as in FedAvg.
Kept by the client: the random head, the tuned model, the running statistics of both.
Kept by the server: the body.
Reduces to: FedAvg-FT if the head is empty.
Differs from the paper: bodies are weighted by the clients' samples. Clients tune all of the model; the paper also tries
one of the parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fedloom.algorithms import fedper
from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import Ask, Cohort, Diagnostics, Model, Program, Seeds, Sent, Setup
from fedloom.core.training import LocalConfig
from fedloom.core.trees import Tree, tree_map
from fedloom.programs import personal
from fedloom.programs.part import training_of_sent
from fedloom.programs.statistics import settle_statistics
from fedloom.programs.tuning import TuningConfig, needs_labels, tune, tuning


@dataclass(frozen=True, kw_only=True)
class Config(TuningConfig):
    """FedBABU's options: those of local training and of tuning."""

    tune_epochs: int = option(
        5, "Passes over the client's data to tune the model before use (the paper: 5); 0: use --tune-steps.", low=0
    )

    INSTEAD: ClassVar = {**LocalConfig.INSTEAD, "tune_steps": {"tune_epochs": 0}}


def first_memory(model: Model, config: Any, seeds: Seeds) -> Tree:
    """The head that all clients have, and a tuned model that is still the first global one."""
    head = {name: value for name, value in model.init(seeds.common).items() if name in model.head}
    return {"own": head, **personal.first_memory(model, config, seeds)}


def round(setup: Setup[Config], state: fedper.State, cohort: Cohort, ask: Ask) -> tuple[fedper.State, Diagnostics]:
    """Ask the cohort to train the body below the random head; average the bodies."""
    replies = ask(training_of_sent(setup.config), *fedper.send(setup, state, cohort.clients))
    body = tree_map(torch.add, state.body, weighted_mean(replies, "delta"))
    return fedper.State(body), {"local_loss": mean_loss(replies)}


def settle(setup: Setup[Config], state: fedper.State, ask: Ask) -> fedper.State:
    """Every participant tunes body and head, whether it was asked in a round or not."""
    if setup.config.tunes:
        tune(setup, fedper.send(setup, state, setup.clients), ask)
    return state


def admit(setup: Setup[Config], state: fedper.State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets the body and tunes it with the head that all have; without labels it uses them as they are."""
    sent = settle_statistics(setup, fedper.send(setup, state, newcomers.clients), ask)
    return tune(setup, sent, ask) if needs_labels(setup.config) else sent


def programs(config: Config, model: Model, newcomer: bool) -> list[Program]:
    """A participant trains and tunes; a newcomer only tunes."""
    tunes = needs_labels(config) if newcomer else config.tunes
    return [*([] if newcomer else [training_of_sent(config)]), *([tuning(config)] if tunes else [])]


CITATION = """@inproceedings{oh2022fedbabu,
  title={{FedBABU}: Toward Enhanced Representation for Federated Image Classification},
  author={Oh, Jaehoon and Kim, Sangmook and Yun, Se-Young},
  booktitle={ICLR}, year={2022}}"""

ALGORITHM = replace(
    fedper.ALGORITHM,
    name="FedBABU",
    citation=CITATION,
    config=Config,
    round=round,
    first_memory=first_memory,
    client_deploy=personal.deploy,
    settle=settle,
    admit=admit,
    admit_labels=needs_labels,
    programs=programs,
)
