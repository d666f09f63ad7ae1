# SPDX-License-Identifier: Apache-2.0
"""FedGH: every client has a body of its own; the server trains the one head for all, on class means of features.

Yi, Wang, Liu, Shi, Yu: FedGH: heterogeneous federated learning with generalized global header. ACM MM 2023
(arXiv:2303.13137).

A client puts the common head on its body and trains both. It keeps the body, drops the head that it has trained, and
tells the mean features of each of its classes. On these, with the class as the label, the server trains the head.

Symbols: h: ``head``, b_i: ``memory["own"]``, c_iy: ``class_means``' reply.

Sent down: the parameters of the head.
Sent up: the number of samples and the training loss; then the client's class means, its prototypes, and its counts of
    each class. Evaluations as in FedAvg.
Kept by the client: its body and its running statistics.
Kept by the server: the head.
Reduces to: local training under a head that stays as it is, at ``server_lr=0``.
Differs from the paper: nothing. In the authors' code the common head is never trained, as its optimiser holds the
parameters of a client; ours is (``server_lr=0`` leaves it as it is drawn). Participants deploy their body with the
common head; the code scores the heads that it drops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import (
    Algorithm,
    Ask,
    Batch,
    Batches,
    Cohort,
    Diagnostics,
    Home,
    Model,
    Needs,
    Program,
    Seeds,
    Sent,
    Setup,
)
from fedloom.core.optim import Optimiser
from fedloom.core.training import Training, like_report
from fedloom.core.trees import ClientId, Params, PerClient, Tree, only
from fedloom.programs import local
from fedloom.programs.class_means import ask_class_means, class_means
from fedloom.programs.newcomers import TrainsNewcomers, train_newcomers
from fedloom.programs.server_steps import last, server_steps


@dataclass(frozen=True, kw_only=True)
class Config(TrainsNewcomers):
    """FedGH's options."""

    server_lr: float = option(0.01, "Rate of the steps on the head (the authors' rate; HtFLlib).", low=0)
    server_epochs: int = option(
        1, "Passes over the clients' class means in a round (Algorithm 1; HtFLlib: 100).", low=0
    )
    server_batch_size: int = option(1, "Class means per step (Algorithm 1: one after another; HtFLlib: 10).", low=1)


class State(NamedTuple):
    """The common head."""

    head: Mapping[str, Tensor]  # "weight" and, if networks have one, "bias"


def init(setup: Setup[Any]) -> State:
    """The head as the module initialises it."""
    model = max(setup.architectures.values(), key=lambda model: len(model.head))  # one with a bias, if there is any
    first = model.init(setup.common_seed)
    return State({part_of(name): value for name, value in first.items() if name in model.head})


def part_of(name: str) -> str:
    """``weight`` or ``bias``: networks call their heads by different names."""
    return name.rpartition(".")[2]


def first_memory(model: Model, config: Any, seeds: Seeds) -> Tree:
    """Each client starts from a body of its own."""
    return {"own": {name: value for name, value in model.init(seeds.own).items() if name not in model.head}}


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """The head, by the names that each architecture has for it."""
    groups = []
    for members in setup.by_model(clients).values():
        head = {name: state.head[part_of(name)] for name in sorted(setup.models[members[0]].head)}
        groups.append((members, {"params": {n: value.expand(len(members), *value.shape) for n, value in head.items()}}))
    return Sent({}, PerClient(groups))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Have the cohort train, then tell its class means; train the head on them."""
    replies = ask(training(setup.config), *send(setup, state, cohort.clients))
    means, counts = ask_class_means(setup, list(replies), ask)
    return learn(setup, state, means, counts, cohort.round), {"local_loss": mean_loss(replies)}


def learn(setup: Setup[Any], state: State, means: Tensor, counts: Tensor, round: int) -> State:
    """Steps on CE(h(c_iy), y), over the classes that clients have of (clients, classes, d)."""
    config, has = setup.config, counts > 0
    samples = means[has], has.nonzero()[:, 1]
    batches = Batches(size=config.server_batch_size, epochs=config.server_epochs)
    optimiser = Optimiser("sgd", config.server_lr)
    steps = server_steps(setup, "fedgh", objective, (state.head, {}), optimiser, samples, batches, round)
    return State(last(steps, (state.head, {}))[0])


def objective(params: Params, buffers: Tree, constants: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tree]]:
    """The head's loss on class means."""
    outputs = F.linear(batch.x, params["weight"], params.get("bias"))
    loss = batch.mean(F.cross_entropy(outputs, batch.y, reduction="none"))
    return loss, (loss, buffers)


def training(config: Config) -> Program:
    """What a client runs: local training of body and head, of which nothing is told."""
    return replace(local.local_training(config), name="fedgh.train", final=client_final, expects=expects)


def client_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """Keep the body; the trained head is dropped."""
    reply, after = local.client_final(home, shared, carry, memory)
    return only(reply, like_report()), after


def expects(shared: Tree, mine: Tree) -> Tree:
    """How much was trained on, and how well."""
    return like_report()


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer trains a body of its own under the head, on its labels."""
    sent = send(setup, state, newcomers.clients)
    return train_newcomers(training(setup.config), sent, setup.config.admit_rounds, ask)


def programs(config: Config, model: Model, newcomer: bool) -> list[Program]:
    """A participant trains and tells its class means; a newcomer only trains."""
    return [training(config), *([] if newcomer else [class_means(model)])]


CITATION = """@inproceedings{yi2023fedgh,
  title={{FedGH}: Heterogeneous Federated Learning with Generalized Global Header},
  author={Yi, Liping and Wang, Gang and Liu, Xiaoguang and Shi, Zhuan and Yu, Han},
  booktitle={ACM Multimedia}, year={2023}}"""

ALGORITHM = Algorithm(
    name="FedGH",
    family="prototypes",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    first_memory=first_memory,
    programs=programs,
    admit=admit,
    cohort=10,  # the authors' code: 10 of 100 clients
    needs=Needs(head=True, class_labels=True, features="same", linear_head=True),
)
