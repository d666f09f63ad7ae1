# SPDX-License-Identifier: Apache-2.0
"""FedPer: a common body, a head for each client.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated learning with personalization layers. 2019 (arXiv:1912.00818).

Clients train the whole network; the server averages the body, and the output layer never leaves the client.

Sent down: the body's parameters.
Sent up: the change of the body, the number of samples, the training loss. Evaluations as in FedAvg.
Kept by the client: its head and its model's running statistics.
Kept by the server: the body.
Reduces to: FedAvg if the head is empty.
Differs from the paper: nothing; one output layer is personal (the paper also tries more).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Model, Needs, Seeds, Sent, Setup
from fedloom.core.training import LocalConfig
from fedloom.core.trees import ClientId, PerClient, Tree, tree_map
from fedloom.programs.local import local_training


class State(NamedTuple):
    """The common body."""

    body: Mapping[str, Tensor]


def init(setup: Setup[Any]) -> State:
    """The body as the module initialises it."""
    model = setup.models[setup.clients[0]]
    first = model.init(setup.common_seed)
    return State({name: value for name, value in first.items() if name not in model.head})


def first_memory(model: Model, config: Any, seeds: Seeds) -> Tree:
    """Each client starts from a head of its own."""
    return {"own": {name: value for name, value in model.init(seeds.own).items() if name in model.head}}


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """The body for everybody."""
    return Sent({"params": state.body}, PerClient.empty(clients))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Ask the cohort to train body and head; average the bodies."""
    replies = ask(local_training(setup.config), *send(setup, state, cohort.clients))
    body = tree_map(torch.add, state.body, weighted_mean(replies, "delta"))
    return State(body), {"local_loss": mean_loss(replies)}


CITATION = """@article{arivazhagan2019fedper,
  title={Federated Learning with Personalization Layers},
  author={Arivazhagan, Manoj Ghuhan and Aggarwal, Vinay and Singh, Aaditya Kumar and Choudhary, Sunav},
  journal={arXiv:1912.00818}, year={2019}}"""

ALGORITHM = Algorithm(
    name="FedPer",
    family="split",
    citation=CITATION,
    config=LocalConfig,
    state=State,
    init=init,
    send=send,
    round=round,
    means=("delta",),
    averaged=("body",),
    first_memory=first_memory,
    cohort=5,  # pFedHN, App. B: baselines aggregate over 5 clients
    needs=Needs(same_model=True, head=True),
)
