# SPDX-License-Identifier: Apache-2.0
"""pFedMe: each client's model is the best one near its copy of the global model, which follows it slowly.

T. Dinh, Tran, Nguyen: Personalized federated learning with Moreau envelopes. NeurIPS 2020 (arXiv:2006.08848).

R times, a client draws a batch, takes K steps on it along the gradient of its loss plus (lambda / 2) ||theta - w_i||^2,
and moves its copy w_i of the global model towards theta: a gradient step on the loss's Moreau envelope.

Symbols: R: ``local_steps``, K: ``inner_steps``, lambda: ``pull``, eta: ``local_lr``, beta: ``server_lr``, theta_i:
``memory["personal"]``; the rate of theta's steps is ``personal_lr``.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``).
Sent up: the change of the copy's parameters (and the running statistics), the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: theta_i (or w_i), to use, with its running statistics; those to train with, unless they are
    averaged.
Kept by the server: the global parameters.
Reduces to: FedAvg with equal weights at rate ``personal_lr`` if R = 1, lambda is small and eta = 1 / lambda.
Differs from the paper: the cohort trains, and nobody else (``everybody_trains`` has the paper's way). theta_i is
deployed; what the authors' code scores as personal is w_i, as both are kept in one place (``deployed=copy``). Clients
weigh equally, as in the paper; in the code by their samples. Newcomers are not in the paper.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from fedloom.algorithms import fedavg
from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Model, Program, Sent, Setup
from fedloom.core.errors import RoundError
from fedloom.core.optim import Optimiser
from fedloom.core.training import Training, pulled, remember, report, train_step
from fedloom.core.trees import Params, Tree, tree_map
from fedloom.programs import local, personal


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """pFedMe's options."""

    local_steps: int = option(20, "Batches per client and round, R (the authors' code).", low=0)
    inner_steps: int = option(5, "Steps on each batch, K (the authors' code).", low=1)
    batch_size: int = option(20, "Samples per batch; the last batch of a pass has what is left (the code).", low=1)
    local_lr: float = option(5e-3, "Rate at which a copy of the global model follows, eta (the code).", low=0)
    personal_lr: float = option(0.09, "Learning rate of the personal model (the authors' code, for networks).", low=0)
    pull: float = option(15.0, "How strongly the copy holds the personal model, lambda (the code).", low=0)
    server_lr: float = option(1.0, "Rate of the server's step, beta (the authors' code; tuned: 2).", low=0)
    momentum: float = option(
        0.0, "Momentum of the personal model's steps, for sgd (the paper uses none).", low=0, high=1
    )
    weight_decay: float = option(1e-3, "Weight decay of the personal model (the authors' code).", low=0)
    everybody_trains: bool = option(
        False, "All clients train in every round, as in the paper; the cohort alone is averaged."
    )
    deployed: Literal["theta", "copy"] = option(
        "theta", "What clients use: theta (the paper), or w_i, which the authors' code scores as personal."
    )
    train_newcomers: bool = option(True, "Newcomers train a personal model, with labels; else they use the global one.")

    def personal_optimiser(self) -> Optimiser:
        """The optimiser of the personal model."""
        return replace(self.local_optimiser(), lr=self.personal_lr)


def round(setup: Setup[Config], state: fedavg.State, cohort: Cohort, ask: Ask) -> tuple[fedavg.State, Diagnostics]:
    """Algorithm 1: w <- (1 - beta) w + beta times the mean of the cohort's w_i."""
    config = setup.config
    replies = ask(training(config), *fedavg.send(setup, state, cohort.clients))
    change = weighted_mean(replies, "delta", weight=None)
    params = tree_map(lambda p, d: p + config.server_lr * d, state.params, change)
    buffers = fedavg.average_buffers(setup, state.buffers, replies, weight=None)
    others = [client for client in setup.clients if client not in set(cohort.clients)]
    if config.everybody_trains and others:
        with suppress(RoundError):  # nothing that they reply is used
            ask(training(config), *fedavg.send(setup, state, others))
    return fedavg.State(params, buffers), {"local_loss": mean_loss(replies)}


def training(config: Config) -> Program:
    """What a client of pFedMe runs."""
    return Program("pfedme.train", client_init, client_step, client_final, config.batches(), local.expects)


class Carry(NamedTuple):
    """Training of theta, and the copy of the global model."""

    theta: Training
    copy: Params


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """Both start from the global model."""
    theta = local.client_init(home, shared, mine, memory)
    return Carry(theta, theta.params)


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """Lines 7 and 8: K steps of theta on one batch, then w_i <- w_i - eta lambda (w_i - theta)."""
    config, theta, copy = home.config, carry.theta, carry.copy

    for _ in range(config.inner_steps):
        towards = pulled(theta.params, copy, config.pull)
        theta = train_step(home, theta, batch, correction=towards, optimiser=config.personal_optimiser())
    rate = config.local_lr * config.pull
    return Carry(theta, {name: copy[name] - rate * (copy[name] - theta.params[name]) for name in copy})


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change of the copy; keep theta, or the copy, for use."""
    theta, config = carry.theta, home.config
    used = theta if config.deployed == "theta" else theta._replace(params=carry.copy)
    averaged = {"buffers": theta.buffers} if "buffers" in shared and local.averages_statistics(config) else {}
    reply = {"delta": tree_map(torch.sub, carry.copy, theta.start), **report(home, theta), **averaged}
    return reply, {**remember(home, theta, memory), "personal": personal.keep(used, memory["personal"])}


def admit(setup: Setup[Config], state: fedavg.State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets the global model; if it trains, it does what a participant does in a round and keeps theta."""
    sent = fedavg.admit(setup, state, newcomers, ask)
    if setup.config.train_newcomers:
        ask(training(setup.config), *sent)  # the changes are not used
    return sent


def needs_labels(config: Config) -> bool:
    """Whether newcomers train."""
    return config.train_newcomers


def programs(config: Any, model: Model, newcomer: bool) -> list[Program]:
    """A participant trains; so does a newcomer, if it is to."""
    return [training(config)] if not newcomer or needs_labels(config) else []


CITATION = """@inproceedings{dinh2020pfedme,
  title={Personalized Federated Learning with {M}oreau Envelopes},
  author={T. Dinh, Canh and Tran, Nguyen and Nguyen, Josh},
  booktitle={NeurIPS}, year={2020}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="pFedMe",
    family="personal",
    citation=CITATION,
    config=Config,
    round=round,
    mean_weight=None,
    first_memory=personal.first_memory,
    client_deploy=personal.deploy,
    programs=programs,
    admit=admit,
    admit_labels=needs_labels,
    carries_prior=True,
    cohort=5,  # the authors' code and pFedHN, App. B
)
