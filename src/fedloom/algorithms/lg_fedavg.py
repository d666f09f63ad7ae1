# SPDX-License-Identifier: Apache-2.0
"""LG-FedAvg: a body for each client under a common head, after some rounds of FedAvg.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think locally, act globally: federated learning with
local and global representations. 2020 (arXiv:2001.01523).

First all clients train one model, as in FedAvg. From then on each trains a body of its own and the common output layer
together, and the server averages the output layer alone: FedPer turned round. Less travels than in FedAvg.

Symbols: T1: ``pretrain_rounds``, h: ``head``, b_i: ``memory["body"]``.

Sent down: the whole model's parameters in rounds of FedAvg; afterwards the head's parameters, with those of FedAvg's
    body for clients that have none of their own yet.
Sent up: the change of what is averaged, the number of samples, the training loss. Evaluations as in FedAvg.
Kept by the client: its body and its model's running statistics.
Kept by the server: FedAvg's model, the head, which clients have a body.
Reduces to: FedAvg with equal weights if everything is the head; Local if nothing is; FedPer with equal weights if body
and head are exchanged.
Differs from the paper: the head is the output layer. The authors' code shares the convolutions of its CIFAR-10 network
instead, by the order of a list, and three layers of its MNIST network. Newcomers without labels get FedAvg's model; the
paper also averages the outputs of all participants' models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import (
    Algorithm,
    Ask,
    Cohort,
    Diagnostics,
    Handover,
    Home,
    Model,
    Needs,
    Program,
    Seeds,
    Sent,
    Setup,
    sent_params,
    without_rows,
)  # fmt: skip
from fedloom.core.device import to_device
from fedloom.core.training import LocalConfig, Training, begin, delta, like_report, remember, report
from fedloom.core.trees import ClientId, Params, PerClient, Tree, tree_map
from fedloom.programs.local import local_training
from fedloom.programs.statistics import settle_statistics


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """LG-FedAvg's options."""

    pretrain_rounds: int = option(
        50, "Rounds of FedAvg before bodies go apart (the authors: 400 on MNIST, 1,200 on CIFAR-10).", low=0
    )
    admit_rounds: int = option(
        1, "Rounds in which a newcomer trains its body, with labels; 0: it uses FedAvg's model (ours).", low=0
    )


class State(NamedTuple):
    """FedAvg's model, which stays as it is when bodies have gone apart; the common head."""

    params: Mapping[str, Tensor]
    head: Mapping[str, Tensor]
    started: Tensor  # (clients,) bool: who has a body of its own


def head_of(setup: Setup[Any], params: Params) -> Params:
    """The common part of a model's parameters."""
    head = setup.models[setup.clients[0]].head
    return {name: value for name, value in params.items() if name in head}


def init(setup: Setup[Any]) -> State:
    """The model as its module initialises it; nobody has a body of its own."""
    params = setup.models[setup.clients[0]].init(setup.common_seed)
    started = torch.zeros(len(setup.clients), dtype=torch.bool, device=setup.device)
    return State(params, head_of(setup, params), started)


def first_memory(model: Model, config: Any, seeds: Seeds) -> Tree:
    """A place for the body; what is there is not used before the client has trained it."""
    return {"body": {name: value for name, value in model.init(seeds.common).items() if name not in model.head}}


def whole(state: State) -> dict[str, Tensor]:
    """FedAvg's body under the common head."""
    return {**state.params, **state.head}


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """The head for everybody, and FedAvg's body for those who have none of their own."""
    has = dict(zip(clients, state.started[setup.rows(clients)].tolist(), strict=True))
    lacking = [client for client in clients if not has[client]]
    if len(lacking) == len(clients):
        return Sent({"params": whole(state)}, PerClient.empty(clients))
    body = {name: value for name, value in state.params.items() if name not in state.head}
    copies = tree_map(lambda value: value.expand(len(lacking), *value.shape), {"params": body})
    return Sent({"params": state.head}, PerClient([([c for c in clients if has[c]], {}), (lacking, copies)]))


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """A round of FedAvg; or clients train their bodies with the head, and the heads are averaged."""
    sent = send(setup, state, cohort.clients)
    if cohort.round <= setup.config.pretrain_rounds:
        replies = ask(local_training(setup.config), *sent)
        params = tree_map(torch.add, state.params, weighted_mean(replies, "delta"))
        return State(params, head_of(setup, params), state.started), {"local_loss": mean_loss(replies)}
    replies = ask(training(setup.config, setup.models[setup.clients[0]]), *sent)
    head = tree_map(torch.add, state.head, weighted_mean(replies, "delta", weight=None))
    heard = to_device(setup.rows(list(replies)), setup.device)
    return State(state.params, head, state.started.index_fill(0, heard, True)), {"local_loss": mean_loss(replies)}


def training(config: Config, model: Model) -> Program:
    """Local training of body and head, of which the body stays."""
    plain = local_training(config)
    return replace(
        plain, name="lg_fedavg.train", init=client_init, final=client_final, expects=partial(expects, model.head)
    )


def composed(shared: Tree, mine: Tree, memory: Tree) -> dict[str, Tensor]:
    """What was sent, over the client's own body."""
    return {**memory["body"], **sent_params(shared, mine)}


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Training:
    """Start from the common head on the own body, or on the one that came with it."""
    return begin(home, composed(shared, mine, memory), memory)


def client_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change of the head; keep the body."""
    head = home.model.head
    change = {name: moved for name, moved in delta(carry).items() if name in head}
    body = {name: value for name, value in carry.params.items() if name not in head}
    return {"delta": change, **report(home, carry)}, {**remember(home, carry, memory), "body": body}


def expects(head: frozenset[str], shared: Tree, mine: Tree) -> Tree:
    """A change of every tensor of the head."""
    sent = sent_params(shared, mine)
    return {"delta": {name: value for name, value in sent.items() if name in head}, **like_report()}


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> dict[str, Any]:
    """The common head on the client's body."""
    return {"params": composed(shared, mine, memory), "buffers": memory["buffers"]}


def admit(setup: Setup[Config], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer with labels trains a body as participants do; one without gets FedAvg's model."""
    everything = Sent({"params": state.params}, PerClient.empty(newcomers.clients))
    settle_statistics(setup, everything, ask)
    params: Params = whole(state)
    for _ in range(setup.config.admit_rounds):
        program = training(setup.config, setup.models[setup.clients[0]])
        ask(program, {"params": params}, everything.mine)  # the changes of the head are not used
        params = state.head
    return Sent({"params": params}, everything.mine) if setup.config.admit_rounds else everything


def notes(setup: Setup[Config]) -> list[str]:
    """A run that is over before bodies go apart is FedAvg."""
    first = setup.config.pretrain_rounds
    if not 0 < setup.rounds <= first:
        return []
    return [f"this is FedAvg: bodies go apart after round {first}; give more --rounds or fewer --pretrain-rounds"]


def needs_labels(config: Config) -> bool:
    """Whether newcomers train."""
    return config.admit_rounds > 0


def programs(config: Any, model: Model, newcomer: bool) -> list[Program]:
    """A participant trains everything, then body and head; a newcomer trains the latter way, if at all."""
    if newcomer:
        return [training(config, model)] if needs_labels(config) else []
    return [local_training(config), training(config, model)]


CITATION = """@article{liang2020lgfedavg,
  title={Think Locally, Act Globally: Federated Learning with Local and Global Representations},
  author={Liang, Paul Pu and Liu, Terrance and Ziyin, Liu and Allen, Nicholas B. and Auerbach, Randy P. and
          Brent, David and Salakhutdinov, Ruslan and Morency, Louis-Philippe},
  journal={arXiv:2001.01523}, year={2020}}"""

ALGORITHM = Algorithm(
    name="LG-FedAvg",
    family="split",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    handover=Handover(newcomers=partial(without_rows, ("started",))),
    first_memory=first_memory,
    client_deploy=client_deploy,
    programs=programs,
    admit=admit,
    admit_labels=needs_labels,
    cohort=5,  # pFedHN, App. B: baselines aggregate over 5 clients
    needs=Needs(same_model=True, head=True),
    notes=notes,
)
