# SPDX-License-Identifier: Apache-2.0
"""FedALA: a client takes of the global model what is good for it, entry by entry, and trains on from there.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: adaptive local aggregation for personalized federated learning. AAAI 2023
(arXiv:2212.01197).

A client that is asked has its model of last time, v, and the global one, w. Its lower tensors become those of w; of the
upper ones it takes v + (w - v) * W, with weights W in [0, 1] that it learns on its own data, everything else frozen.
From there it trains as in FedAvg.

Symbols: Theta_i: ``memory["personal"]``, W_i: ``memory["weights"]``, eta: ``weight_lr``, p: ``mixed_tensors``.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``).
Sent up: the change of the parameters from the global ones (and the running statistics), the number of samples, the
    training loss. Evaluations as in FedAvg.
Kept by the client: its model as it last trained it, and the weights; its running statistics, unless they are averaged.
Kept by the server: the global parameters.
Reduces to: FedAvg, scored with the clients' own models, if the weights stay at 1 (``weight_lr=0``).
Differs from the paper: weights are learned for a number of steps that is given. The paper's first time ends when their
loss has settled; later ones are a pass over 80% of the data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Model, Program, Seeds, Setup
from fedloom.core.training import Training, gradient
from fedloom.core.trees import Params, Tree, chosen
from fedloom.programs import local, personal
from fedloom.programs.allowed import of_participants


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """FedALA's options."""

    mixed_tensors: int = option(
        2,
        "Tensors at the end of the network that are mixed: 2 are a layer's weight and bias (the authors' code).",
        low=1,
    )
    weight_lr: float = option(1.0, "Rate at which the weights are learned, eta (the paper: 1).", low=0)
    weight_steps: int = option(10, "Steps on the weights before those of training (ours).", low=0)
    weight_epochs: int = option(
        1, "Passes for the weights instead, where --local-epochs is given (the paper: 1).", low=0
    )

    @property
    def before(self) -> int:
        """The weights come first."""
        return self.weight_epochs if self.local_epochs else self.weight_steps

    def mixed(self, model: Model) -> list[str]:
        """The tensors that have weights."""
        return list(model.shapes)[-self.mixed_tensors :]


def round(setup: Setup[Config], state: fedavg.State, cohort: Cohort, ask: Ask) -> tuple[fedavg.State, Diagnostics]:
    """A round of FedAvg, in which clients start from where they want."""
    replies = ask(training(setup.config), *fedavg.send(setup, state, cohort.clients))
    return fedavg.combine(setup, state, replies)


def first_memory(model: Model, config: Config, seeds: Seeds) -> Tree:
    """The global model as it starts, and weights of 1: all of the next one."""
    first = personal.first_memory(model, config, seeds)
    own = first["personal"]["params"]
    return {**first, "weights": {name: torch.ones_like(own[name]) for name in config.mixed(model)}}


def training(config: Config) -> Program:
    """What a client of FedALA runs."""
    return replace(
        local.local_training(config), name="fedala.train", init=client_init, step=client_step, final=client_final
    )


class Carry(NamedTuple):
    """Training, the mixed tensors of the model of last time, and their weights."""

    training: Training
    last: Params
    weights: Params


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """Mix by the weights as they are. The reply will be the change from the global model, the training's start."""
    training, weights = local.client_init(home, shared, mine, memory), memory["weights"]
    last = {name: memory["personal"]["params"][name] for name in weights}
    start = {**training.params, **mix(training.params, last, weights)}
    return Carry(training._replace(params=start), last, weights)


def mix(common: Params, last: Params, weights: Params) -> dict[str, Tensor]:
    """v + (w - v) * W."""
    return {name: torch.lerp(last[name], common[name], weight) for name, weight in weights.items()}


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """A step on the weights, later one of training."""
    training, common = carry.training, carry.training.start
    grads, loss, buffers = gradient(home, training.params, training.buffers, batch)
    # eq. 6: W <- clip(W - eta grad * (w - v)), and the model follows
    weights = {
        name: (weight - home.config.weight_lr * grads[name] * (common[name] - carry.last[name])).clamp(0, 1)
        for name, weight in carry.weights.items()
    }
    mixed = {**training.params, **mix(common, carry.last, weights)}
    params, state = home.config.local_optimiser().update(training.params, grads, training.optimiser)
    before = home.config.is_before(batch)
    trained = training._replace(
        params=chosen(before, mixed, params),
        buffers=chosen(before, training.buffers, buffers),
        optimiser=chosen(before, training.optimiser, state),
        loss=torch.where(before, training.loss, training.loss + loss),
        steps=torch.where(before, training.steps, training.steps + 1),
    )
    return Carry(trained, carry.last, chosen(before, weights, carry.weights))


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply as in FedAvg; keep the model and the weights."""
    reply, after = local.client_final(home, shared, carry.training, memory)
    return reply, {**after, "personal": personal.keep(carry.training, memory["personal"]), "weights": carry.weights}


CITATION = """@inproceedings{zhang2023fedala,
  title={{FedALA}: Adaptive Local Aggregation for Personalized Federated Learning},
  author={Zhang, Jianqing and Hua, Yang and Wang, Hao and Song, Tao and Xue, Zhengui and Ma, Ruhui and Guan, Haibing},
  booktitle={AAAI}, year={2023}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="FedALA",
    family="personal",
    citation=CITATION,
    config=Config,
    round=round,
    first_memory=first_memory,
    client_deploy=personal.deploy,
    programs=of_participants(training),
    carries_prior=True,
)
