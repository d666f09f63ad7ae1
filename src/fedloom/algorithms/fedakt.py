# SPDX-License-Identifier: Apache-2.0
"""FedAKT (reconstruction): clients of any architecture learn from each other by way of a small adapter for all.

Liu, Jin, Tang, Zhai, Lu, Yu, Bai: Adapter-guided knowledge transfer for heterogeneous federated learning. Journal of
Systems Architecture 159, 2025 (doi:10.1016/j.sysarc.2025.103338).

A reconstruction: we had the abstract and no code. A client has a model of its own, body and head. An adapter, a small
network that is the same for all, makes features of a sample, too. Model and adapter are trained together: the client's
head answers on the features of both, and each kind of features is pulled to the other. Only the adapter travels, and is
averaged as in FedAvg.

Symbols: z: the features of the client's body, u: those of the adapter, h: the client's head, mu: ``mutual_weight``.

Sent down: the adapter's parameters.
Sent up: the change of the adapter's parameters, the number of samples, the loss of the client's own model in training.
    Evaluations as in FedAvg.
Kept by the client: its model and its running statistics.
Kept by the server: the adapter.
Reduces to: Local (with a fresh optimiser every round) at ``mutual_weight=0`` and ``adapter_weight=0``.
Differs from the paper: unknown. The loss, CE(h(z)) + CE(h(u)) + mu (|z - sg u|^2 + |u - sg z|^2) / d, its weights, the
adapter's network and what participants use, their own model alone, are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import local
from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import (
    Ask,
    Batch,
    Cohort,
    Diagnostics,
    Home,
    Model,
    Needs,
    Program,
    Sent,
    Setup,
    predict_with_target,
    target_module,
)
from fedloom.core.errors import NeedsError
from fedloom.core.random import fold
from fedloom.core.training import Training, train_step
from fedloom.core.trees import ClientId, Params, PerClient, Tree, only, tree_map
from fedloom.models.model import network
from fedloom.models.per_sample import net
from fedloom.models.spec import parse
from fedloom.programs.class_means import feature_size
from fedloom.programs.distillation import guest_of
from fedloom.programs.local import local_training
from fedloom.programs.newcomers import TrainsNewcomers, train_newcomers


@dataclass(frozen=True, kw_only=True)
class Config(TrainsNewcomers):
    """FedAKT's options."""

    adapter: str = option(
        "", "The adapter's network, without BatchNorm; empty: lenet_s for images, else mlp:hidden=64 (ours).", code=True
    )
    adapter_weight: float = option(1.0, "Weight of the head's loss on the adapter's features (ours).", low=0)
    mutual_weight: float = option(1.0, "Weight of the pull between both kinds of features, mu (ours).", low=0)


class State(NamedTuple):
    """The adapter."""

    adapter: Mapping[str, Tensor]


def adapter_of(config: Any, model: Model) -> Model:
    """The adapter's network, whose outputs are features as this model has them."""
    name = config.adapter or ("gru" if model.tokens else "lenet_s" if len(model.input_shape) == 3 else "mlp:hidden=64")
    return network(parse(name, model.input_shape, feature_size(model), model.tokens), model.device, model.dtype)


def init(setup: Setup[Any]) -> State:
    """The adapter as its module initialises it."""
    adapter = adapter_of(setup.config, setup.models[setup.clients[0]])
    if adapter.fresh_buffers():
        raise NeedsError(
            f"FedAKT's adapter must be all parameters; {adapter.spec} has running statistics or the like. Choose "
            "another --adapter."
        )
    return State(adapter.init(setup.common_seed))


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """The adapter for everybody."""
    return Sent({"params": {f"adapter.{name}": v for name, v in state.adapter.items()}}, PerClient.empty(clients))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Have the cohort train models and adapter; average the adapters."""
    program = training(setup.config, setup.models[cohort.clients[0]])
    replies = ask(program, *send(setup, state, cohort.clients))
    adapter = tree_map(torch.add, state.adapter, net(weighted_mean(replies, "delta"), "adapter"))
    return State(adapter), {"local_loss": mean_loss(replies)}


def training(config: Any, model: Model) -> Program:
    """What a client of FedAKT runs; the adapter is the same for all whose features have one shape."""
    plain = local_training(config)
    return replace(plain, name="fedakt.train", step=client_step, guest=adapter_of(config, model))


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """One step of model and adapter together."""
    config, model, task = home.config, home.model, home.task

    def objective(params: Params, buffers: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tree]]:
        own = only(params, model.shapes)
        z, after = model.train_features(own, buffers, batch.x, batch.mask, batch.key)
        # dropout of the model draws from the same key, by the numbers from 1 on
        u, _ = guest_of(home).train(net(params, "adapter"), {}, batch.x, batch.mask, fold(batch.key, -1))
        u = u.reshape(z.shape)
        loss = batch.mean(task.loss(model.classify(own, z), batch.y))
        also = batch.mean(task.loss(model.classify(own, u), batch.y))
        pull = batch.mean(((z - u.detach()).square() + (u - z.detach()).square()).flatten(1).mean(1))
        return loss + config.adapter_weight * also + config.mutual_weight * pull, (loss, after)

    return train_step(home, carry, batch, objective=objective)


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """The client's own model."""
    return {"params": memory["own"], "buffers": memory["buffers"]}


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer trains a model of its own beside the adapter, on its labels."""
    sent = send(setup, state, newcomers.clients)
    program = training(setup.config, setup.models[newcomers.clients[0]])
    return train_newcomers(program, sent, setup.config.admit_rounds, ask)


def programs(config: Any, model: Model, newcomer: bool) -> list[Program]:
    """Everybody trains."""
    return [training(config, model)]


CITATION = """@article{liu2025fedakt,
  title={Adapter-Guided Knowledge Transfer for Heterogeneous Federated Learning},
  author={Liu and Jin and Tang and Zhai and Lu and Yu and Bai},
  journal={Journal of Systems Architecture}, volume={159}, pages={103338}, year={2025}}"""

ALGORITHM = replace(
    local.ALGORITHM,
    name="FedAKT (reconstruction)",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    client_deploy=client_deploy,
    predict=predict_with_target,
    module=target_module,
    programs=programs,
    admit=admit,
    cohort=10,
    needs=Needs(class_labels=True, features="same"),
)
