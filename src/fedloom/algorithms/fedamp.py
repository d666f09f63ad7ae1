# SPDX-License-Identifier: Apache-2.0
"""FedAMP: each client is pulled to a mix of all clients' models in which those like its own weigh more.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized cross-silo federated learning on non-IID data. AAAI 2021
(arXiv:2007.03797).

The server has the last model of every client. For client i it mixes a cloud model u_i, in which the model of client j
has the weight (alpha / sigma) exp(-||w_i - w_j||^2 / sigma) and the client's own has what is left. The client trains
its own model on its loss plus (lambda / (2 alpha)) ||w - u_i||^2.

Symbols: w_i: a row of ``models`` and ``memory["model"]``, alpha: ``server_lr``, sigma: ``likeness``, lambda: ``pull``.

Sent down: the client's cloud model; for use, nothing.
Sent up: the client's parameters, the number of samples, the training loss. Evaluations as in FedAvg.
Kept by the client: its model and its running statistics.
Kept by the server: the last models of all clients.
Reduces to: Local, from one start, with ``pull=0``, which is what PFLlib's FedAMP does: its pull has no gradient.
Differs from the paper: alpha does not fall over rounds. A client goes on from its own last model; the paper only says
what it minimises. Where the others' weights sum to more than 1 they are divided by their sum. Smaller cohorts than all
clients are mixed from everybody's last models. Newcomers, who are not in the paper, get the mean of all models. The
variant with cosines, HeurFedAMP, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import (
    Algorithm,
    Ask,
    Batch,
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
)
from fedloom.core.device import to_device
from fedloom.core.rows import for_everybody, mean_row, with_rows
from fedloom.core.training import LocalConfig, Training, begin, like_report, pulled, remember, report, train_step
from fedloom.core.trees import ClientId, Params, PerClient, Tree, leaves, tree_map
from fedloom.programs.allowed import of_participants
from fedloom.programs.statistics import settle_statistics


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """FedAMP's options."""

    server_lr: float = option(1.0, "Step of the cloud models towards those that are alike, alpha (PFLlib).", above=0)
    likeness: float = option(
        1.0,
        "Squared distance over which models count as alike, sigma (PFLlib); it must fit the size of the network.",
        above=0,
    )
    pull: float = option(1.0, "How strongly a client is held near its cloud model, lambda (PFLlib).", low=0)


class State(NamedTuple):
    """A row for every client."""

    models: Mapping[str, Tensor]


def init(setup: Setup[Any]) -> State:
    """All models start where the module initialises them."""
    first = setup.models[setup.clients[0]].init(setup.common_seed)
    return State(for_everybody(setup, first))


def first_memory(model: Model, config: Any, seeds: Seeds) -> Tree:
    """The client's copy of its row."""
    return {"model": model.init(seeds.common)}


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """For use, nothing: a client has its model already."""
    return Sent({}, PerClient.empty(clients))


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Algorithm 1: a cloud model for each client, which then trains near it and sends its own."""
    weights = attention(setup, state.models, cohort.clients)
    clouds = tree_map(lambda rows: torch.tensordot(weights, rows, dims=1), state.models)
    replies = ask(training(setup.config), {}, PerClient([(cohort.clients, {"cloud": clouds})]))
    ((clients, reply),) = replies.groups
    models = with_rows(setup, state.models, clients, reply["params"])
    own = weights[torch.arange(len(weights)), setup.rows(cohort.clients)]
    return State(models), {"local_loss": mean_loss(replies), "own_weight": own.mean()}


def attention(setup: Setup[Config], models: Params, clients: Sequence[ClientId]) -> Tensor:
    """xi: (these clients, all clients), each row with the sum 1."""
    config, rows = setup.config, to_device(setup.rows(clients), setup.device)
    apart = squared_distances(models, rows)
    weights = (config.server_lr / config.likeness) * torch.exp(-apart / config.likeness)
    own = torch.arange(apart.shape[1], device=setup.device) == rows[:, None]
    weights = torch.where(own, 0, weights)
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    left = (1 - weights.sum(1, keepdim=True)).clamp(min=0)  # a sum of 1 may come out a little larger
    return torch.where(own, left, weights)


def squared_distances(models: Params, rows: Tensor) -> Tensor:
    """(these rows, all rows), over all tensors together."""
    found = torch.zeros((), device=rows.device)
    for _, table in leaves(models):
        flat = table.flatten(1)
        flat = flat - flat.mean(0)  # so that small distances are not lost beside large values
        norms = flat.square().sum(1)
        found = found + (norms[rows, None] + norms - 2 * flat[rows] @ flat.T)
    return found.clamp(min=0)


def training(config: Config) -> Program:
    """What a client of FedAMP runs."""
    return Program("fedamp.train", client_init, client_step, client_final, config.batches(), expects)


class Carry(NamedTuple):
    """Training of the client's model, and its cloud model."""

    own: Training
    cloud: Params


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """Go on from the client's own model."""
    return Carry(begin(home, memory["model"], memory), mine["cloud"])


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """One step on the client's own loss plus (lambda / (2 alpha)) ||w - u||^2."""
    strength = home.config.pull / home.config.server_lr
    towards = pulled(carry.own.params, carry.cloud, strength)
    return carry._replace(own=train_step(home, carry.own, batch, correction=towards))


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Send the model, and keep it."""
    params = carry.own.params
    return {"params": params, **report(home, carry.own)}, {**remember(home, carry.own, memory), "model": params}


def expects(shared: Tree, mine: Tree) -> Tree:
    """A value for every parameter."""
    return {"params": mine["cloud"], **like_report()}


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> dict[str, Any]:
    """The client's own model; a newcomer's is the one that was sent."""
    return {"params": {**memory["model"], **sent_params(shared, mine)}, "buffers": memory["buffers"]}


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets the mean of all models and settles its running statistics."""
    mean = tree_map(lambda rows: rows.mean(0), state.models)
    return settle_statistics(setup, Sent({"params": mean}, PerClient.empty(newcomers.clients)), ask)


def for_participants(setup: Setup[Any], state: State) -> State:
    """Nothing: clients have their models."""
    return State({})


def for_newcomers(setup: Setup[Any], state: State) -> State:
    """The mean of all models in the place of all."""
    return State(mean_row(state.models))


CITATION = """@inproceedings{huang2021fedamp,
  title={Personalized Cross-Silo Federated Learning on Non-{IID} Data},
  author={Huang, Yutao and Chu, Lingyang and Zhou, Zirui and Wang, Lanjun and Liu, Jiangchuan and Pei, Jian and
          Zhang, Yong},
  booktitle={AAAI}, year={2021}}"""

ALGORITHM = Algorithm(
    name="FedAMP",
    family="similarity",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    first_memory=first_memory,
    client_deploy=client_deploy,
    programs=of_participants(training),
    admit=admit,
    admit_labels=False,
    handover=Handover(for_participants, for_newcomers),
    cohort=100,  # cross-silo: all clients take part
    needs=Needs(same_model=True),
)
