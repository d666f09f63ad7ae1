# SPDX-License-Identifier: Apache-2.0
"""FedDyn: FedProx with a memory, which makes the clients' optima and the common one agree.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: Federated learning based on dynamic regularization. ICLR 2021
(arXiv:2111.04263).

A client minimises f_i(v) - <g_i, v> + (alpha / 2) ||v - w||^2. Afterwards g_i <- g_i - alpha (v - w), its gradient at
the end if it got to the minimum: at a fixed point every client stays where the others are. The server moves by the mean
change, and further by what all changes so far add up to.

Symbols: theta: ``params``, grad L_i: ``memory["gradient"]``, -h / alpha: ``drift``.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``).
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: its gradient g_i; its model's running statistics, unless they are averaged.
Kept by the server: the global parameters and the sum of all changes over the number of clients.
Reduces to: FedProx with mu = alpha for the clients of the first round, when all memories are zero.
Differs from the paper: the minimum is approached by the steps of local training. The authors' code also divides alpha
by a client's share of the data, and scores the mean of the clients' models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Handover, Home, Model, Program, Seeds, Setup
from fedloom.core.training import Training, train_step
from fedloom.core.trees import Params, Tree, tree_map
from fedloom.programs import local
from fedloom.programs.allowed import of_participants


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """FedDyn's options."""

    alpha: float = option(0.1, "Weight of the regularisation (the paper tries 0.001, 0.01 and 0.1).", above=0)


class State(NamedTuple):
    """The global model, and where all changes so far lead to."""

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    drift: Mapping[str, Tensor]


def init(setup: Setup[Config]) -> State:
    """The model as its module initialises it; nothing has changed yet."""
    params, buffers = fedavg.init(setup)
    return State(params, buffers, tree_map(torch.zeros_like, params))


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Algorithm 1: h <- h - alpha (sum of changes) / n; theta <- mean of models - h / alpha. Here h = -alpha drift."""
    replies = ask(training(setup.config), *fedavg.send(setup, state, cohort.clients))
    change = weighted_mean(replies, "delta", weight=None)
    share = len(replies) / len(setup.clients)
    drift = tree_map(lambda all_so_far, d: all_so_far + share * d, state.drift, change)
    params = tree_map(lambda w, d, further: w + d + further, state.params, change, drift)
    buffers = fedavg.average_buffers(setup, state.buffers, replies, weight=None)
    return State(params, buffers, drift), {"local_loss": mean_loss(replies)}


def first_memory(model: Model, config: Config, seeds: Seeds) -> Tree:
    """A gradient of zero."""
    return {"gradient": tree_map(torch.zeros_like, model.init(seeds.own))}


def training(config: Config) -> Program:
    """What a client of FedDyn runs."""
    return replace(
        local.local_training(config), name="feddyn.train", init=client_init, step=client_step, final=client_final
    )


class Carry(NamedTuple):
    """Training, and g_i + alpha w: what the regularisation pulls along."""

    training: Training
    pull: Params


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """Start from the global parameters."""
    training = local.client_init(home, shared, mine, memory)
    pull = tree_map(lambda g, w: torch.add(g, w, alpha=home.config.alpha), memory["gradient"], training.start)
    return Carry(training, pull)


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """One step on the client's own loss and the dynamic regularisation."""
    params = carry.training.params

    def dynamic(grads: Params) -> Params:
        # the slope of eq. 1's -<g_i, v> + (alpha / 2) ||v - w||^2, written out: it costs less than to find it
        return {
            name: torch.add(slope - carry.pull[name], params[name], alpha=home.config.alpha)
            for name, slope in grads.items()
        }

    return carry._replace(training=train_step(home, carry.training, batch, correction=dynamic))


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply as in FedAvg; g_i <- g_i - alpha (v - w)."""
    reply, after = local.client_final(home, shared, carry.training, memory)
    gradient = tree_map(lambda g, d: g - home.config.alpha * d, memory["gradient"], reply["delta"])
    return reply, {**after, "gradient": gradient}


def for_use(setup: Setup[Config], state: State) -> State:
    """The global model alone."""
    return state._replace(drift={})


CITATION = """@inproceedings{acar2021feddyn,
  title={Federated Learning Based on Dynamic Regularization},
  author={Acar, Durmus Alp Emre and Zhao, Yue and Matas Navarro, Ramon and Mattina, Matthew and Whatmough, Paul N. and
          Saligrama, Venkatesh},
  booktitle={ICLR}, year={2021}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="FedDyn",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    round=round,
    handover=Handover(for_use, for_use),
    means=(),
    first_memory=first_memory,
    programs=of_participants(training),
)
