# SPDX-License-Identifier: Apache-2.0
"""FedProx: FedAvg whose clients are held near the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous networks. MLSys 2020
(arXiv:1812.06127).

Each client minimises its loss plus (mu / 2) ||w - w_global||^2; all else is FedAvg.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``).
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: its model's running statistics, unless they are averaged.
Kept by the server: the global parameters.
Reduces to: FedAvg at mu = 0.
Differs from the paper: clients are weighted by their samples at aggregation and drawn uniformly, as in FedAvg here; the
paper draws them by size and weighs them equally. Work per client is fixed, not the device's own choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedloom.algorithms import fedavg
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Program, Setup
from fedloom.core.training import Training, pulled, train_step
from fedloom.core.trees import Tree
from fedloom.programs.allowed import of_participants
from fedloom.programs.local import local_training


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """FedProx's options."""

    mu: float = option(0.01, "Weight of the proximal term (the paper tries 0.001 to 1).", low=0)


def round(setup: Setup[Config], state: fedavg.State, cohort: Cohort, ask: Ask) -> tuple[fedavg.State, Diagnostics]:
    """A round of FedAvg with another client step."""
    replies = ask(proximal_training(setup.config), *fedavg.send(setup, state, cohort.clients))
    return fedavg.combine(setup, state, replies)


def proximal_training(config: Config) -> Program:
    """What a client of FedProx runs."""
    return replace(local_training(config), name="fedprox.train", step=client_step)


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """One step on the client's own loss plus the proximal term, eq. 2 of the paper: (mu / 2) ||w - w_t||^2."""
    return train_step(home, carry, batch, correction=pulled(carry.params, carry.start, home.config.mu))


CITATION = """@inproceedings{li2020fedprox,
  title={Federated Optimization in Heterogeneous Networks},
  author={Li, Tian and Sahu, Anit Kumar and Zaheer, Manzil and Sanjabi, Maziar and Talwalkar, Ameet and
          Smith, Virginia},
  booktitle={MLSys}, year={2020}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="FedProx",
    citation=CITATION,
    config=Config,
    round=round,
    programs=of_participants(proximal_training),
)
