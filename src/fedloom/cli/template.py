# SPDX-License-Identifier: Apache-2.0
"""Template: say in one line what the method does; this line is shown by `fedloom methods`.

Then the paper: authors, title, venue and arXiv number.

Then the idea in two or three sentences. As it stands, this file is FedAvg with a server learning rate: clients train
the global model on their own data, and the server takes a step along the weighted mean of their changes.

Sent down: the global parameters.
Sent up: the change of the parameters, the number of samples, the training loss.
Kept by the client: its model's running statistics.
Kept by the server: the global parameters.
Reduces to: FedAvg with ``server_lr=1``.
Differs from the paper: list here, one by one, what you decided otherwise, and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import (
    Algorithm,
    Ask,
    Batch,
    Cohort,
    Diagnostics,
    Home,
    Needs,
    Program,
    Sent,
    Setup,
    deploy_shared,
)
from fedloom.core.random import seed_of
from fedloom.core.training import LocalConfig, Training, begin, delta, like_report, remember, report, train_step
from fedloom.core.trees import ClientId, PerClient, Tree, tree_map

# ---- options: each field is a flag of `fedloom run template`; LocalConfig brings those of local training


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """The method's options. A help text says where the default comes from."""

    server_lr: float = option(1.0, "Learning rate of the server (1: FedAvg).", low=0)


# ---- the server: a state that is a value, and the paper's algorithm box


class State(NamedTuple):
    """All that the server keeps, trees and tensors only: it is checkpointed, and nothing else is."""

    params: Mapping[str, Tensor]


def init(setup: Setup[Config]) -> State:
    """Before round 1. Random values come from seeds that are named by what they are for."""
    model = setup.models[setup.clients[0]]
    return State(model.init(seed_of(setup.seed, "global model")))


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """One round: a new state, and numbers for the records. Clients that did not answer are not in ``replies``."""
    # shared goes to all clients; instead of PerClient.empty, give each client what is only for it
    replies = ask(program(setup.config), {"params": state.params}, PerClient.empty(cohort.clients))
    change = weighted_mean(replies, "delta")
    lr = setup.config.server_lr
    params = tree_map(lambda old, step: torch.add(old, step, alpha=lr), state.params, change)
    return State(params), {"local_loss": mean_loss(replies)}


# ---- the client: pure functions, written for one client; engines run them for many at once


def program(config: Config) -> Program:
    """What a client runs when asked: client_init, client_step for each batch, client_final."""
    return Program("template.train", client_init, client_step, client_final, config.batches(), expects)


def expects(shared: Tree, mine: Tree) -> Tree:
    """The shapes of a proper reply; others are refused."""
    return {"delta": shared["params"], **like_report()}


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Training:
    """Start from what was sent and what the client remembers."""
    return begin(home, shared["params"], memory)


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """One batch. ``train_step`` also takes a penalty on the loss, or a correction of the gradients."""
    return train_step(home, carry, batch)


def client_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """The reply, and what the client remembers until it is asked again."""
    return {"delta": delta(carry), **report(home, carry)}, remember(home, carry, memory)


# ---- use: what clients deploy; evaluation, export and serving know nothing else of the method


def personalise(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """What is sent to clients for use; ``client_deploy`` below makes a model of it on the client's side."""
    return Sent({"params": state.params}, PerClient.empty(clients))


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """The same for clients that took no part. Leave it out if the method has nothing for them."""
    return personalise(setup, state, newcomers.clients)


# ---- the declaration: all of this by name, and what the method needs


CITATION = ""  # BibTeX

ALGORITHM = Algorithm(
    name="Template",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    round=round,
    personalise=personalise,
    client_deploy=deploy_shared,
    admit=admit,
    admit_labels=False,  # newcomers are served without labels
    cohort=5,  # the paper's number of clients a round
    needs=Needs(same_model=True),
)
