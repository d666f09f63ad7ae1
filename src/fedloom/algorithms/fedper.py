# SPDX-License-Identifier: Apache-2.0
"""FedPer: a common body, a head for each client.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated learning with personalization layers. 2019 (arXiv:1912.00818).

Clients train the whole network; the server averages the body, and the output layer never leaves the client.

Sent down: the body's parameters.
Sent up: the change of the body, the number of samples, the training loss.
Kept by the client: its head and its model's running statistics.
Kept by the server: the body.
Reduces to: FedAvg if the head is empty.
Differs from the paper: nothing; one output layer is personal (the paper also tries more).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.contract import Algorithm, Ask, Batch, Cohort, Diagnostics, Home, Model, Needs, Program, Sent, Setup
from fedloom.core.random import seed_of
from fedloom.core.training import LocalConfig, Training, begin, delta, like_report, remember, report, train_step
from fedloom.core.trees import ClientId, Params, PerClient, Tree, tree_map


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """FedPer's options: those of local training."""


class State(NamedTuple):
    """The common body."""

    body: Mapping[str, Tensor]


def init(setup: Setup[Config]) -> State:
    """The body as the module initialises it."""
    model = setup.models[setup.clients[0]]
    return State(body_of(model, model.init(seed_of(setup.seed, "global model"))))


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Ask the cohort to train body and head; average the bodies."""
    replies = ask(program(setup.config), {"body": state.body}, PerClient.empty(cohort.clients))
    body = tree_map(torch.add, state.body, weighted_mean(replies, "delta"))
    return State(body), {"local_loss": mean_loss(replies)}


def body_of(model: Model, params: Params) -> dict[str, Tensor]:
    """The parameters that are shared."""
    return {name: value for name, value in params.items() if name not in model.head}


def head_of(model: Model, params: Params) -> dict[str, Tensor]:
    """The parameters that stay with the client."""
    return {name: value for name, value in params.items() if name in model.head}


def first_memory(model: Model, config: Any, seed: int) -> Tree:
    """Each client starts from a head of its own."""
    return {"head": head_of(model, model.init(seed))}


def program(config: Config) -> Program:
    """What a client of FedPer runs."""
    return Program("fedper.train", client_init, client_step, client_final, config.batches(), expects)


def expects(shared: Tree, mine: Tree) -> Tree:
    """A change for every tensor of the body."""
    return {"delta": shared["body"], **like_report()}


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Training:
    """Put the client's head on the common body."""
    return begin(home, {**shared["body"], **memory["head"]}, memory)


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """One step on body and head together."""
    return train_step(home, carry, batch)


def client_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change of the body, keep the head."""
    reply = {"delta": body_of(home.model, delta(carry)), **report(home, carry)}
    return reply, {**remember(home, carry, memory), "head": head_of(home.model, carry.params)}


def personalise(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """The body for everybody."""
    return Sent({"body": state.body}, PerClient.empty(clients))


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """The common body under the client's head."""
    return {"params": {**shared["body"], **memory["head"]}, "buffers": memory["buffers"]}


CITATION = """@article{arivazhagan2019fedper,
  title={Federated Learning with Personalization Layers},
  author={Arivazhagan, Manoj Ghuhan and Aggarwal, Vinay and Singh, Aaditya Kumar and Choudhary, Sunav},
  journal={arXiv:1912.00818}, year={2019}}"""

ALGORITHM = Algorithm(
    name="FedPer",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    round=round,
    personalise=personalise,
    first_memory=first_memory,
    client_deploy=client_deploy,
    cohort=5,  # pFedHN, App. B: baselines aggregate over 5 clients
    needs=Needs(same_model=True, head=True),
)
