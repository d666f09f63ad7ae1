# SPDX-License-Identifier: Apache-2.0
"""APFL: a client uses a mix of a model of its own and the global one, and learns how much of each.

Deng, Kamani, Mahdavi: Adaptive personalized federated learning. 2020 (arXiv:2003.13461).

The global model is FedAvg's. Beside it a client has a model v and a weight alpha in [0, 1]. On every batch it also
takes the gradient of its loss at the mix alpha v + (1 - alpha) w_i of the parameters, w_i being its copy of the global
model in training, and steps with it on v and on alpha. It uses the mix of v and the global model.

Symbols: w: ``params``, v_i: ``memory["personal"]``, alpha_i: ``memory["alpha"]``.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``).
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: its own model, its running statistics (those of the mix) and the weight; the running statistics of
    the global model, unless they are averaged.
Kept by the server: the global parameters.
Reduces to: FedAvg at a fixed alpha = 0; training alone, without the others, at a fixed alpha = 1.
Differs from the paper: alpha steps on every batch; the authors' library steps once a round. Clients are weighted by
their samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Model, Program, Seeds, Setup, composed
from fedloom.core.training import Training, begin, gradient, remember, train_step
from fedloom.core.trees import Params, Tree, tree_map
from fedloom.programs import local, personal
from fedloom.programs.allowed import of_participants


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """APFL's options."""

    alpha: float = option(0.5, "Weight of the client's own model at first (the authors' library).", low=0, high=1)
    learn_alpha: bool = option(True, "The weight is learned (the paper's adaptive variant); else it stays.")


def round(setup: Setup[Config], state: fedavg.State, cohort: Cohort, ask: Ask) -> tuple[fedavg.State, Diagnostics]:
    """A round of FedAvg, in which clients also train models of their own."""
    replies = ask(training(setup.config), *fedavg.send(setup, state, cohort.clients))
    return fedavg.combine(setup, state, replies)


def first_memory(model: Model, config: Config, seeds: Seeds) -> Tree:
    """A model that starts where the global one does, and its weight."""
    alpha = torch.full((), config.alpha, dtype=model.dtype, device=model.device)
    return {**personal.first_memory(model, config, seeds), "alpha": alpha}


def training(config: Config) -> Program:
    """What a client of APFL runs."""
    return replace(
        local.local_training(config), name="apfl.train", init=client_init, step=client_step, final=client_final
    )


class Carry(NamedTuple):
    """Training of both models, and the weight of the client's own."""

    common: Training  # w_i
    own: Training  # v_i; its statistics and its loss are those of the mix
    alpha: Tensor  # ()


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """Start from the global model and from the client's own."""
    own = memory["personal"]
    return Carry(local.client_init(home, shared, mine, memory), begin(home, own["params"], own), memory["alpha"])


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """Algorithm 1: a step on each model, and one on the weight; all from where they were before this batch."""
    common, own, alpha = carry
    grads, loss, buffers = gradient(home, mixed(alpha, own.params, common.params), own.buffers, batch)
    # eqs. 6 and 10: the mix has the slope alpha in v, and v - w in alpha
    params, state = home.config.local_optimiser().update(
        own.params, {name: alpha * g for name, g in grads.items()}, own.optimiser
    )
    trained = own._replace(params=params, buffers=buffers, optimiser=state, loss=own.loss + loss, steps=own.steps + 1)
    if home.config.learn_alpha:
        slope = torch.stack([((own.params[name] - common.params[name]) * g).sum() for name, g in grads.items()]).sum()
        alpha = (alpha - home.config.local_lr * slope).clamp(0, 1)
    return Carry(train_step(home, common, batch), trained, alpha)


def mixed(alpha: Tensor, own: Params, common: Params) -> dict[str, Tensor]:
    """alpha v + (1 - alpha) w."""
    mix: dict[str, Tensor] = tree_map(lambda v, w: alpha * v + (1 - alpha) * w, own, common)
    return mix


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply as in FedAvg; keep the own model and its weight."""
    reply, after = local.client_final(home, shared, carry.common, memory)
    own = personal.keep(carry.own, remember(home, carry.own, memory["personal"]))
    return reply, {**after, "personal": own, "alpha": carry.alpha}


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> dict[str, Any]:
    """The mix with the global model as it is; until the own model is trained, the global one alone."""
    model, own = composed(home, shared, mine, memory), memory["personal"]
    return personal.kept_or({**own, "params": mixed(memory["alpha"], own["params"], model["params"])}, model)


CITATION = """@article{deng2020apfl,
  title={Adaptive Personalized Federated Learning},
  author={Deng, Yuyang and Kamani, Mohammad Mahdi and Mahdavi, Mehrdad},
  journal={arXiv:2003.13461}, year={2020}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="APFL",
    family="personal",
    citation=CITATION,
    config=Config,
    round=round,
    first_memory=first_memory,
    client_deploy=client_deploy,
    programs=of_participants(training),
    carries_prior=True,
)
