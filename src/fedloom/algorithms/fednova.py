# SPDX-License-Identifier: Apache-2.0
"""FedNova: FedAvg whose clients count by their data and not by how many steps they take.

Wang, Liu, Liang, Joshi, Poor: Tackling the objective inconsistency problem in heterogeneous federated optimization.
NeurIPS 2020 (arXiv:2007.07481).

A client with more steps goes further and pulls the mean towards its own optimum. So each divides its change by the sum
a_i of the weights with which its gradients enter it: the number of steps, or more with momentum. The server steps
along the mean of these, as far as the mean of the a_i.

Symbols: ||a_i||_1: ``effective_steps``, d_i: ``delta``, p_i: the share of the samples.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``).
Sent up: the change of the parameters per effective step (and the running statistics), the number of steps that counts,
    the number of samples, the training loss. Evaluations as in FedAvg.
Kept by the client: its model's running statistics, unless they are averaged.
Kept by the server: the global parameters.
Reduces to: FedAvg if all clients take as many steps, as with ``local_steps``.
Differs from the paper: nothing for SGD, with momentum or without; other optimisers are refused. Its proximal variant
and its server momentum are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Program, Setup
from fedloom.core.errors import ConfigError
from fedloom.core.training import Training
from fedloom.core.trees import Tree, tree_map
from fedloom.programs import local
from fedloom.programs.allowed import of_participants


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """FedNova's options."""

    local_epochs: int = option(
        2, "Passes over the client's data, so that clients differ in steps (sec. 6); 0: use steps, which is FedAvg.",
        low=0,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimiser != "sgd" or self.keep_optimiser:
            raise ConfigError(
                "FedNova counts with what weight each gradient enters a change, which it knows for SGD that starts "
                f"afresh in every round; got --optimiser {self.optimiser}, keep_optimiser={self.keep_optimiser}. "
                "Leave both out."
            )


def round(setup: Setup[Config], state: fedavg.State, cohort: Cohort, ask: Ask) -> tuple[fedavg.State, Diagnostics]:
    """w <- w + tau_eff sum p_i d_i, tau_eff = sum p_i ||a_i||_1."""
    replies = ask(training(setup.config), *fedavg.send(setup, state, cohort.clients))
    far = weighted_mean(replies, "effective_steps")
    params = tree_map(lambda w, d: w + far * d, state.params, weighted_mean(replies, "delta"))
    buffers = fedavg.average_buffers(setup, state.buffers, replies)
    return fedavg.State(params, buffers), {"local_loss": mean_loss(replies), "effective_steps": far}


def training(config: Config) -> Program:
    """What a client of FedNova runs."""
    plain = local.local_training(config)
    return replace(plain, name="fednova.train", init=client_init, step=client_step, final=client_final, expects=expects)


class Carry(NamedTuple):
    """Training; with what weight a gradient enters the last step, and all steps together."""

    training: Training
    latest: Tensor  # () 1 + rho + ... + rho^k
    total: Tensor  # () ||a_i||_1


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """Start from the global parameters; no step yet."""
    zero = torch.zeros_like(home.num_samples)
    return Carry(local.client_init(home, shared, mine, memory), zero, zero)


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """One step of FedAvg; the velocity has the gradients so far with weights 1, rho, rho^2, ..."""
    latest = home.config.momentum * carry.latest + 1
    return Carry(local.client_step(home, shared, carry.training, batch), latest, carry.total + latest)


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change per effective step, and their number."""
    reply, after = local.client_final(home, shared, carry.training, memory)
    per_step = tree_map(lambda d: d / carry.total.clamp(min=1), reply["delta"])
    return {**reply, "delta": per_step, "effective_steps": carry.total}, after


def expects(shared: Tree, mine: Tree) -> Tree:
    """As in FedAvg, and one more number."""
    return {**local.expects(shared, mine), "effective_steps": torch.empty(())}


def notes(setup: Setup[Config]) -> list[str]:
    """With steps there is nothing to count."""
    return [] if setup.config.local_epochs else ["this is FedAvg: all clients take as many steps; give --local-epochs"]


CITATION = """@inproceedings{wang2020fednova,
  title={Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization},
  author={Wang, Jianyu and Liu, Qinghua and Liang, Hao and Joshi, Gauri and Poor, H. Vincent},
  booktitle={NeurIPS}, year={2020}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="FedNova",
    family="aggregation",
    citation=CITATION,
    config=Config,
    round=round,
    means=(),
    programs=of_participants(training),
    notes=notes,
)
