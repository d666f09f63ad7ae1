# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD: FedAvg whose clients correct their gradients for their own drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: stochastic controlled averaging for federated learning. ICML
2020 (arXiv:1910.06378).

Server and clients hold control variates, estimates of the mean gradient and of the client's own; a local step goes
along g - c_i + c. After K steps the client sets c_i by option II, from the way it has come.

Symbols: c: ``control``, c_i: ``memory["control"]``, eta_l: ``local_lr``, eta_g: ``server_lr``.

Sent down: the global parameters and the server's control variate.
Sent up: the change of the parameters, the change of the client's control variate, the number of samples, the loss.
    Evaluations as in FedAvg.
Kept by the client: its control variate and its model's running statistics.
Kept by the server: the global parameters and the control variate.
Reduces to: FedAvg with equal weights in the first round, when all control variates are zero.
Differs from the paper: clients weigh equally, as in its Algorithm 1. The defaults have no momentum, which the paper
does not use: option II divides by K eta_l, the length of the way under plain SGD. Other optimisers are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import (
    Ask,
    Batch,
    Cohort,
    Diagnostics,
    Handover,
    Home,
    Model,
    Program,
    Seeds,
    Sent,
    Setup,
)
from fedloom.core.errors import ConfigError
from fedloom.core.training import LocalConfig, Training, begin, delta, like_report, remember, report, train_step
from fedloom.core.trees import ClientId, Params, PerClient, Tree, tree_map
from fedloom.programs.allowed import of_participants
from fedloom.programs.statistics import settle_statistics


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """SCAFFOLD's options."""

    momentum: float = option(0.0, "Local momentum, for sgd (the paper uses none).", low=0, high=1)
    server_lr: float = option(1.0, "Rate of the server's step, eta_g (the paper's experiments: 1).", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimiser != "sgd" or self.momentum or self.keep_optimiser:
            raise ConfigError(
                "SCAFFOLD's control variates are the way divided by the rate, which holds for plain SGD only; got "
                f"--optimiser {self.optimiser}, --momentum {self.momentum}, keep_optimiser={self.keep_optimiser}. "
                "Leave all three out."
            )


class State(NamedTuple):
    """The global model and the server's control variate."""

    params: Mapping[str, Tensor]
    control: Mapping[str, Tensor]


def init(setup: Setup[Config]) -> State:
    """The model as its module initialises it; a control variate of zeros."""
    params = setup.models[setup.clients[0]].init(setup.common_seed)
    return State(params, tree_map(torch.zeros_like, params))


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """For use, the global model alone; in training the control variate goes with it."""
    return Sent({"params": state.params}, PerClient.empty(clients))


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Algorithm 1, lines 2 to 17."""
    replies = ask(program(setup.config), state._asdict(), PerClient.empty(cohort.clients))
    change, control = (weighted_mean(replies, branch, weight=None) for branch in ("delta", "control_delta"))
    share = len(replies) / len(setup.clients)  # |S| / N
    params = tree_map(lambda p, d: p + setup.config.server_lr * d, state.params, change)
    control = tree_map(lambda c, d: c + share * d, state.control, control)
    return State(params, control), {"local_loss": mean_loss(replies)}


def first_memory(model: Model, config: Any, seeds: Seeds) -> Tree:
    """A control variate of zeros."""
    return {"control": tree_map(torch.zeros_like, model.init(seeds.own))}


def program(config: Config) -> Program:
    """What a client of SCAFFOLD runs."""
    return Program("scaffold.train", client_init, client_step, client_final, config.batches(), expects)


def expects(shared: Tree, mine: Tree) -> Tree:
    """A change of parameters and of the control variate for every tensor."""
    return {"delta": shared["params"], "control_delta": shared["params"], **like_report()}


class Carry(NamedTuple):
    """Training and the client's control variate."""

    training: Training
    control: Params


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """Start from the global parameters."""
    return Carry(begin(home, shared["params"], memory), memory["control"])


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """Line 10: y <- y - eta_l (g - c_i + c)."""

    def corrected(grads: Params) -> Params:
        return {name: g - carry.control[name] + shared["control"][name] for name, g in grads.items()}

    return carry._replace(training=train_step(home, carry.training, batch, correction=corrected))


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Line 12, option II: c_i+ = c_i - c + (x - y) / (K eta_l)."""
    training, change = carry.training, delta(carry.training)
    way = training.steps.clamp(min=1) * max(home.config.local_lr, 1e-12)
    control = {name: carry.control[name] - shared["control"][name] - change[name] / way for name in change}
    reply = {"delta": change, "control_delta": tree_map(torch.sub, control, carry.control), **report(home, training)}
    return reply, {**remember(home, training, memory), "control": control}


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets the global model and settles its running statistics."""
    return settle_statistics(setup, send(setup, state, newcomers.clients), ask)


def for_use(setup: Setup[Any], state: State) -> State:
    """The global model alone."""
    return State(state.params, {})


CITATION = """@inproceedings{karimireddy2020scaffold,
  title={{SCAFFOLD}: Stochastic Controlled Averaging for Federated Learning},
  author={Karimireddy, Sai Praneeth and Kale, Satyen and Mohri, Mehryar and Reddi, Sashank and Stich, Sebastian and
          Suresh, Ananda Theertha},
  booktitle={ICML}, year={2020}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="SCAFFOLD",
    family="global",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    means=(),
    averaged=("params",),
    first_memory=first_memory,
    programs=of_participants(program),
    admit=admit,
    handover=Handover(for_use, for_use),
)
