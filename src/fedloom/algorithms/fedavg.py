# SPDX-License-Identifier: Apache-2.0
"""FedAvg: one global model, the mean of what clients make of it.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-efficient learning of deep networks from decentralized
data. AISTATS 2017 (arXiv:1602.05629).

Each client of a cohort trains the global parameters on its own data; the server adds the mean of their changes,
weighted by the clients' numbers of samples.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``).
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss.
    In evaluations, here and in every method: the sum of losses, the number right, the number of samples.
Kept by the client: its model's running statistics, unless they are averaged.
Kept by the server: the global parameters.
Reduces to: plain SGD with one client and one step.
Differs from the paper: the mean goes over the changes, not the models, which is the same as the weights sum to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.core.aggregate import mean_buffers, mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Needs, Sent, Setup
from fedloom.core.training import LocalConfig
from fedloom.core.trees import ClientId, PerClient, tree_map
from fedloom.programs.local import local_training
from fedloom.programs.statistics import settle_statistics


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """FedAvg's options."""

    batchnorm: Literal["local", "averaged"] = option(
        "local", "Running statistics stay with the client, or are averaged like parameters."
    )


class State(NamedTuple):
    """The global model."""

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def init(setup: Setup[Any]) -> State:
    """The model as its module initialises it."""
    model = setup.models[setup.clients[0]]
    return State(model.init(setup.common_seed), model.fresh_buffers())


def send(setup: Setup[Any], state: Any, clients: Sequence[ClientId]) -> Sent:
    """The same model for everybody; ``state`` has ``params`` and ``buffers``."""
    averaged = {"buffers": state.buffers} if setup.config.batchnorm == "averaged" else {}
    return Sent({"params": state.params, **averaged}, PerClient.empty(clients))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Ask the cohort to train the global model; add the weighted mean of the changes."""
    replies = ask(local_training(setup.config), *send(setup, state, cohort.clients))
    return combine(setup, state, replies)


def combine(
    setup: Setup[Any], state: State, replies: PerClient, weight: str | None = "num_samples"
) -> tuple[State, Diagnostics]:
    """The server's half of a round: the mean of the changes, weighted by that branch of the replies; None: equally."""
    params = tree_map(torch.add, state.params, weighted_mean(replies, "delta", weight))
    buffers = average_buffers(setup, state.buffers, replies, weight)
    return State(params, buffers), {"local_loss": mean_loss(replies)}


def average_buffers(
    setup: Setup[Any], before: Mapping[str, Tensor], replies: PerClient, weight: str | None = "num_samples"
) -> Mapping[str, Tensor]:
    """The running statistics after the replies, if they are averaged."""
    if setup.config.batchnorm == "local":
        return before
    after: Mapping[str, Tensor] = mean_buffers(replies, before, weight)
    return after


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets the global model and, if they are not averaged, settles its running statistics."""
    sent = send(setup, state, newcomers.clients)
    return sent if setup.config.batchnorm == "averaged" else settle_statistics(setup, sent, ask)


CITATION = """@inproceedings{mcmahan2017fedavg,
  title={Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author={McMahan, H. Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and Ag{\\"u}era y Arcas, Blaise},
  booktitle={AISTATS}, year={2017}}"""

ALGORITHM = Algorithm(
    name="FedAvg",
    family="global",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    means=("delta",),
    averaged=("params", "buffers"),
    admit=admit,
    admit_labels=False,
    carries_prior=False,
    cohort=5,  # pFedHN, App. B: baselines aggregate over 5 clients
    needs=Needs(same_model=True),
)
