# SPDX-License-Identifier: Apache-2.0
"""FedAvg: one global model, the mean of what clients make of it.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-efficient learning of deep networks from decentralized
data. AISTATS 2017 (arXiv:1602.05629).

Each client of a cohort trains the global parameters on its own data; the server adds the mean of their changes,
weighted by the clients' numbers of samples.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``).
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss.
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

from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import Algorithm, Ask, Batch, Cohort, Diagnostics, Home, Needs, Program, Sent, Setup
from fedloom.core.random import seed_of
from fedloom.core.statistics import settle_statistics
from fedloom.core.training import LocalConfig, Training, begin, delta, like_report, remember, report, train_step
from fedloom.core.trees import ClientId, PerClient, Tree, tree_map


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


def init(setup: Setup[Config]) -> State:
    """The model as its module initialises it."""
    model = setup.models[setup.clients[0]]
    return State(model.init(seed_of(setup.seed, "global model")), model.fresh_buffers())


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Ask the cohort to train the global model; add the weighted mean of the changes."""
    replies = ask(program(setup.config), message(setup.config, state), PerClient.empty(cohort.clients))
    return average(setup.config, state, replies), {"local_loss": mean_loss(replies)}


def message(config: Any, state: Any) -> dict[str, Any]:
    """The global model as it is sent down; ``state`` has ``params`` and ``buffers``."""
    averaged = {"buffers": state.buffers} if config.batchnorm == "averaged" else {}
    return {"params": state.params, **averaged}


def average(config: Any, state: State, replies: PerClient) -> State:
    """The global model after the replies."""
    params = tree_map(torch.add, state.params, weighted_mean(replies, "delta"))
    return State(params, average_buffers(config, state.buffers, replies))


def average_buffers(config: Any, before: Mapping[str, Tensor], replies: PerClient) -> Mapping[str, Tensor]:
    """The running statistics after the replies."""
    if config.batchnorm == "local":
        return before
    # counters are whole numbers: to the nearest one, as weights may add up to a little less than 1
    after: Mapping[str, Tensor] = tree_map(
        lambda new, old: (new if old.is_floating_point() else new.round()).to(old.dtype),
        weighted_mean(replies, "buffers"),
        before,
    )
    return after


def program(config: LocalConfig) -> Program:
    """What a client of FedAvg runs."""
    return Program("fedavg.train", client_init, client_step, client_final, config.batches(), expects)


def expects(shared: Tree, mine: Tree) -> Tree:
    """A change for every tensor sent."""
    return {
        "delta": shared["params"],
        **like_report(),
        **({"buffers": shared["buffers"]} if "buffers" in shared else {}),
    }


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Training:
    """Start from the global parameters."""
    return begin(home, shared["params"], {**memory, "buffers": shared.get("buffers", memory["buffers"])})


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """One step on the client's own loss."""
    return train_step(home, carry, batch)


def client_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change."""
    averaged = {"buffers": carry.buffers} if "buffers" in shared else {}
    return {"delta": delta(carry), **report(home, carry), **averaged}, remember(home, carry, memory)


def personalise(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """The same model for everybody."""
    return Sent(message(setup.config, state), PerClient.empty(clients))


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """The global parameters, with the running statistics that were sent or else the client's own."""
    return {"params": shared["params"], "buffers": shared.get("buffers", memory["buffers"])}


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets the global model and, if they are not averaged, settles its running statistics."""
    sent = personalise(setup, state, newcomers.clients)
    return sent if setup.config.batchnorm == "averaged" else settle_statistics(setup, client_deploy, sent, ask)


CITATION = """@inproceedings{mcmahan2017fedavg,
  title={Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author={McMahan, H. Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and Ag{\\"u}era y Arcas, Blaise},
  booktitle={AISTATS}, year={2017}}"""

ALGORITHM = Algorithm(
    name="FedAvg",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    round=round,
    personalise=personalise,
    client_deploy=client_deploy,
    admit=admit,
    admit_labels=False,
    carries_prior=False,
    cohort=5,  # pFedHN, App. B: baselines aggregate over 5 clients
    needs=Needs(same_model=True),
)
