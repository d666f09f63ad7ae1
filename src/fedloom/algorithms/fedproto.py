# SPDX-License-Identifier: Apache-2.0
"""FedProto: nothing travels but class means of features, to which every client's own features are pulled.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: federated prototype learning across heterogeneous clients. AAAI 2022
(arXiv:2105.00243).

A client trains a model of its own, of any architecture whose features have the common size, on its loss plus lambda
times the distance of a sample's features to the common prototype of its class. After training it tells the mean
features of each class that it has. The server averages them over the clients that have the class. A sample is of the
class whose prototype is nearest.

Symbols: z: features, P: ``prototypes``, c_iy: ``class_means``' reply, lambda: ``proto_weight``.

Sent down: the prototypes of the classes, and which of them are known.
Sent up: the number of samples and the training loss; then the client's own prototypes and its counts of each class.
    Evaluations as in FedAvg.
Kept by the client: its model and its running statistics.
Kept by the server: the prototypes, and which classes are known.
Reduces to: Local (with a fresh optimiser every round) at lambda = 0, as far as training goes.
Differs from the paper: the distance is the authors' code's, the squared distance of each sample over d, and clients
weigh the same, as in the code; the paper has the distance of class means and weighs by counts. Own prototypes come from
a pass after training; the code collects them while the model still moves. A class that nobody in a cohort has keeps its
prototype. All known classes compete in prediction, the code's only those that the client has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import local
from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Model, Needs, Program, Sent, Setup, composed
from fedloom.core.training import Training, train_step
from fedloom.core.trees import ClientId, Params, PerClient, Tree
from fedloom.models.load import PredictorModule
from fedloom.programs.class_means import ask_class_means, class_means, feature_size
from fedloom.programs.local import local_training
from fedloom.programs.newcomers import TrainsNewcomers, train_newcomers

FAR = -1e9
"""The score of a class without a prototype: finite, and below that of any that has one."""


@dataclass(frozen=True, kw_only=True)
class Config(TrainsNewcomers):
    """FedProto's options."""

    proto_weight: float = option(1.0, "Weight of the distance to the prototypes, lambda (the authors' code).", low=0)


class State(NamedTuple):
    """What the server knows of the classes."""

    prototypes: Tensor  # (classes, d)
    known: Tensor  # (classes,) 1 for those that have a prototype, else 0


def init(setup: Setup[Any]) -> State:
    """Nothing is known of any class."""
    model = setup.models[setup.clients[0]]
    nothing = torch.zeros(model.num_outputs, feature_size(model), dtype=setup.dtype, device=setup.device)
    return State(nothing, nothing[:, 0].clone())


def send(setup: Setup[Any], state: Any, clients: Sequence[ClientId]) -> Sent:
    """The prototypes, to train with and to predict by; ``state`` has ``prototypes`` and ``known``."""
    return Sent({"prototypes": state.prototypes, "known": state.known}, PerClient.empty(clients))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Have the cohort train, then tell its prototypes; average them class by class."""
    replies = ask(training(setup.config), *send(setup, state, cohort.clients))
    prototypes, counts = ask_class_means(setup, list(replies), ask)
    return averaged(state, prototypes, counts), {"local_loss": mean_loss(replies)}


def averaged(state: State, prototypes: Tensor, counts: Tensor) -> State:
    """The mean over the clients that have a class; classes that none of them has stay as they were."""
    has = (counts > 0).to(prototypes.dtype)  # (clients, classes)
    clients = has.sum(0)
    mean = torch.einsum("cy,cyd->yd", has, prototypes) / clients.clamp(min=1)[:, None]
    seen = clients > 0
    return State(torch.where(seen[:, None], mean, state.prototypes), torch.where(seen, 1, state.known))


def training(config: Any) -> Program:
    """What a client runs: local training that is pulled to the prototypes."""
    return replace(local_training(config), name="fedproto.train", step=client_step)


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """One step on CE + lambda * |z - P_y|^2 / d; samples of a class without a prototype are not pulled."""

    def objective(params: Params, buffers: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tree]]:
        z, after = home.model.train_features(params, buffers, batch.x, batch.mask, batch.key)
        loss = batch.mean(home.task.loss(home.model.classify(params, z), batch.y))
        apart = (z.flatten(1) - shared["prototypes"][batch.y]).square().mean(1) * shared["known"][batch.y]
        return loss + home.config.proto_weight * batch.mean(apart), (loss, after)

    return train_step(home, carry, batch, objective=objective)


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """The client's own model, and the prototypes."""
    return {**composed(home, shared, mine, memory), "prototypes": shared["prototypes"], "known": shared["known"]}


def predict(home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """Minus the squared distance to each known prototype."""
    z = home.model.features(deployed["params"], deployed["buffers"], x).flatten(1)
    near = -(z[:, None] - deployed["prototypes"]).square().sum(2)  # (samples, classes)
    return torch.where(deployed["known"] > 0, near, FAR)


def admit(setup: Setup[Any], state: Any, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer trains a model of its own against the prototypes, on its labels."""
    sent = send(setup, state, newcomers.clients)
    return train_newcomers(training(setup.config), sent, setup.config.admit_rounds, ask)


def programs(config: Any, model: Model, newcomer: bool) -> list[Program]:
    """A participant trains and tells its prototypes; a newcomer only trains."""
    return [training(config), *([] if newcomer else [class_means(model)])]


CITATION = """@inproceedings{tan2022fedproto,
  title={{FedProto}: Federated Prototype Learning across Heterogeneous Clients},
  author={Tan, Yue and Long, Guodong and Liu, Lu and Zhou, Tianyi and Lu, Qinghua and Jiang, Jing and
          Zhang, Chengqi},
  booktitle={AAAI}, year={2022}}"""

ALGORITHM = replace(
    local.ALGORITHM,
    name="FedProto",
    family="prototypes",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    client_deploy=client_deploy,
    predict=predict,
    module=partial(PredictorModule.of, predict),
    programs=programs,
    admit=admit,
    cohort=20,  # the authors' commands: all of 20 clients
    needs=Needs(class_labels=True, features="same"),
)
