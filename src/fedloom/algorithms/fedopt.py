# SPDX-License-Identifier: Apache-2.0
"""FedOpt: FedAvg whose server steps by FedAdam, FedYogi or FedAdagrad.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive federated optimization. ICLR 2021
(arXiv:2003.00295).

The server takes the mean of the clients' changes for a negative gradient, and steps along it with a rate of its own for
every parameter, as adaptive optimisers do. Clients do what they do in FedAvg.

Symbols: Delta_t: the mean change, m_t and v_t: ``optimiser``, eta: ``server_lr``, beta_1, beta_2: ``beta1``, ``beta2``.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``).
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: its model's running statistics, unless they are averaged.
Kept by the server: the global parameters, a mean of the changes and one of their squares.
Reduces to: FedAvg for a large tau with FedAdagrad, ``beta1=0`` and a server's rate of twice tau.
Differs from the paper: changes are weighted by the clients' samples; Algorithm 2 weighs them equally. As there, bias is
not corrected, and the squares start at tau squared, the least that is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import Ask, Cohort, Diagnostics, Handover, Setup
from fedloom.core.trees import Params, Tree, tree_map
from fedloom.programs.local import local_training

Rule = Literal["adam", "yogi", "adagrad"]


@dataclass(frozen=True)
class Adaptive:
    """Algorithm 2: the server's optimiser."""

    rule: Rule
    lr: float
    beta1: float
    beta2: float
    tau: float

    def init(self, params: Params) -> Tree:
        """m_0 = 0, v_0 = tau^2."""
        square = tree_map(lambda value: torch.full_like(value, self.tau**2), params)
        return {"mean": tree_map(torch.zeros_like, params), "square": square}

    def update(self, params: Params, grads: Params, state: Tree) -> tuple[Params, Tree]:
        """One step along the negative of ``grads``, which is the mean change."""
        mean = tree_map(lambda m, g: self.beta1 * m - (1 - self.beta1) * g, state["mean"], grads)
        square = tree_map(lambda v, g: self.squared(v, g * g), state["square"], grads)
        after = tree_map(lambda p, m, v: p + self.lr * m / (v.sqrt() + self.tau), params, mean, square)
        return after, {"mean": mean, "square": square}

    def squared(self, v: Tensor, new: Tensor) -> Tensor:
        """v_t from v_{t-1} and the squared change."""
        if self.rule == "adagrad":
            return v + new
        if self.rule == "yogi":
            return v - (1 - self.beta2) * new * torch.sign(v - new)
        return self.beta2 * v + (1 - self.beta2) * new


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """FedOpt's options."""

    server_optimiser: Rule = option("adam", "The server's optimiser: FedAdam, FedYogi or FedAdagrad.")
    server_lr: float = option(0.01, "Rate of the server's step, eta (ours; the paper searches a grid).", low=0)
    beta1: float = option(0.9, "How much is kept of the mean of earlier changes (the paper: 0.9).", low=0, high=1)
    beta2: float = option(
        0.99, "How much is kept of their squares, for adam and yogi (the paper: 0.99).", low=0, high=1
    )
    tau: float = option(1e-3, "What is added to their root: less makes it more adaptive (the paper: 0.001).", above=0)

    def server(self) -> Adaptive:
        """The server's optimiser."""
        return Adaptive(self.server_optimiser, self.server_lr, self.beta1, self.beta2, self.tau)


class State(NamedTuple):
    """The global model, and what the server's optimiser remembers."""

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    optimiser: Tree


def init(setup: Setup[Any]) -> State:
    """The model as its module initialises it."""
    params, buffers = fedavg.init(setup)
    return State(params, buffers, setup.config.server().init(params))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Ask the cohort to train the global model; step along the weighted mean of the changes."""
    replies = ask(local_training(setup.config), *fedavg.send(setup, state, cohort.clients))
    pseudo_grad = tree_map(torch.neg, weighted_mean(replies, "delta"))
    params, optimiser = setup.config.server().update(state.params, pseudo_grad, state.optimiser)
    buffers = fedavg.average_buffers(setup, state.buffers, replies)
    return State(params, buffers, optimiser), {"local_loss": mean_loss(replies)}


def for_use(setup: Setup[Any], state: State) -> State:
    """The global model without what the optimiser remembers."""
    return state._replace(optimiser={})


CITATION = """@inproceedings{reddi2021fedopt,
  title={Adaptive Federated Optimization},
  author={Reddi, Sashank J. and Charles, Zachary and Zaheer, Manzil and Garrett, Zachary and Rush, Keith and
          Kone{\\v{c}}n{\\'y}, Jakub and Kumar, Sanjiv and McMahan, H. Brendan},
  booktitle={ICLR}, year={2021}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="FedOpt",
    family="aggregation",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    round=round,
    handover=Handover(for_use, for_use),
)
