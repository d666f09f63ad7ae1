# SPDX-License-Identifier: Apache-2.0
"""Ditto: FedAvg, and beside it a personal model for every client, held near the global one.

Li, Hu, Beirami, Smith: Ditto: fair and robust federated learning through personalization. ICML 2021
(arXiv:2012.04221).

On every batch a client steps on its personal model, along the gradient of its own loss plus (lambda / 2) ||v - w||^2
with the global model as it was sent, and on its copy of the global model, as in FedAvg. The personal model never leaves
the client, and the global one does not know of it.

Symbols: w: ``params``, v_k: ``memory["personal"]``, lambda: ``pull``, eta: ``personal_lr``.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``).
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: its personal model with running statistics of its own; the global one's, unless they are averaged.
Kept by the server: the global parameters.
Reduces to: FedAvg for the global model, with any lambda; Local for the personal ones at lambda = 0.
Differs from the paper: clients are drawn uniformly and weighted by their samples, as in FedAvg here; its code draws
them by size and weighs them equally. Both models see the same batches, as in the code. lambda is one for all; the
authors also choose it for each client. Newcomers are not in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fedloom.algorithms import fedavg
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Model, Program, Sent, Setup, composed
from fedloom.core.optim import Optimiser
from fedloom.core.training import Training, begin, like_report, pulled, remember, report, train_step
from fedloom.core.trees import Tree
from fedloom.programs import local, personal


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """Ditto's options."""

    pull: float = option(
        1.0, "How strongly the global model holds the personal one, lambda (the authors' scripts).", low=0
    )
    personal_lr: float | None = option(
        None, "Learning rate of the personal model; without it, --local-lr (as in the authors' scripts).", low=0
    )
    admit_rounds: int = option(
        1, "Rounds in which a newcomer trains its personal model, with labels; 0: it uses the global one (ours).", low=0
    )

    def personal_optimiser(self) -> Optimiser:
        """The optimiser of the personal model."""
        rate = self.local_lr if self.personal_lr is None else self.personal_lr
        return replace(self.local_optimiser(), lr=rate)


def round(setup: Setup[Config], state: fedavg.State, cohort: Cohort, ask: Ask) -> tuple[fedavg.State, Diagnostics]:
    """Algorithm 1: a round of FedAvg, in which clients also train their personal models."""
    replies = ask(training(setup.config), *fedavg.send(setup, state, cohort.clients))
    return fedavg.combine(setup, state, replies)


def training(config: Config) -> Program:
    """What a client of Ditto runs."""
    return Program("ditto.train", client_init, client_step, client_final, config.batches(), local.expects)


class Carry(NamedTuple):
    """Training of the copy of the global model, and of the personal one."""

    common: Training
    personal: Training


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """The personal model goes on from where it is, at first from the initial global model."""
    own = memory["personal"]
    return Carry(local.client_init(home, shared, mine, memory), begin(home, own["params"], own))


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """A step on each model, on the same batch."""
    return Carry(train_step(home, carry.common, batch), personal_step(home, shared, carry.personal, batch))


def personal_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """v <- v - eta (gradient + lambda (v - w)), with w as it was sent."""
    towards = pulled(carry.params, shared["params"], home.config.pull)
    return train_step(home, carry, batch, correction=towards, optimiser=home.config.personal_optimiser())


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply as in FedAvg; the personal model stays."""
    reply, after = local.client_final(home, shared, carry.common, memory)
    return reply, {**after, "personal": kept(home, carry.personal, memory)}


def kept(home: Home, training: Training, memory: Tree) -> Tree:
    """The personal model after training, and its optimiser's state, if that is kept."""
    return personal.keep(training, remember(home, training, memory["personal"]))


def admit(setup: Setup[Config], state: fedavg.State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets the global model and trains a personal one from it, by the same rule."""
    sent = fedavg.admit(setup, state, newcomers, ask)
    for _ in range(setup.config.admit_rounds):
        ask(admission(setup.config), *sent)
    return sent


def admission(config: Config) -> Program:
    """What a newcomer runs: the personal model's part of training, from the global model."""
    return Program("ditto.admit", newcomer_init, personal_step, newcomer_final, config.batches(), newcomer_expects)


def newcomer_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Training:
    """Start from the global model; in later rounds from where the personal one is."""
    start = personal.kept_or(memory["personal"], composed(home, shared, mine, memory))
    return begin(home, start["params"], {**memory["personal"], "buffers": start["buffers"]})


def newcomer_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """No parameter leaves a newcomer."""
    return report(home, carry), {**memory, "personal": kept(home, carry, memory)}


def newcomer_expects(shared: Tree, mine: Tree) -> Tree:
    """The number of samples and the loss."""
    return like_report()


def needs_labels(config: Config) -> bool:
    """Whether newcomers train."""
    return config.admit_rounds > 0


def programs(config: Any, model: Model, newcomer: bool) -> list[Program]:
    """A participant trains both models, a newcomer its own, if any."""
    if newcomer:
        return [admission(config)] if needs_labels(config) else []
    return [training(config)]


CITATION = """@inproceedings{li2021ditto,
  title={Ditto: Fair and Robust Federated Learning Through Personalization},
  author={Li, Tian and Hu, Shengyuan and Beirami, Ahmad and Smith, Virginia},
  booktitle={ICML}, year={2021}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="Ditto",
    family="personal",
    citation=CITATION,
    config=Config,
    round=round,
    first_memory=personal.first_memory,
    client_deploy=personal.deploy,
    programs=programs,
    admit=admit,
    admit_labels=needs_labels,
    carries_prior=True,
)
