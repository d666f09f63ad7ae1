# SPDX-License-Identifier: Apache-2.0
"""FedBE: FedDF with more teachers: models drawn from a distribution around those of the clients.

Chen, Chao: FedBE: making Bayesian model ensemble applicable to federated learning. ICLR 2021 (arXiv:2009.01974).

The teachers are the average of the clients' models, these models, and M draws from a Gaussian or a Dirichlet
distribution that fits them. The server has samples without labels; the mean of the teachers' probabilities, sharpened,
is what the average learns to answer. The mean of the student's parameters along the way is the next global model.

Symbols: w: ``params``, M: ``draws``, s: ``draw_scale``, T: ``temperature``.

Sent down: the global parameters and running statistics.
Sent up: the change of the parameters, the running statistics, the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: nothing that counts; it begins with the running statistics that it is sent.
Kept by the server: the global parameters and running statistics.
Reduces to: FedAvg with averaged running statistics, at ``server_epochs=0``.
Differs from the paper: nothing that it says; what it leaves open is taken from the authors' code. Draws have the
averaged running statistics; the code draws those, too. Where there are fewer steps than ``average_from``, the last
student goes out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.algorithms.fedavg import State, send
from fedloom.algorithms.feddf import server_samples
from fedloom.core.aggregate import mean_buffers, mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batches, Cohort, Diagnostics, Needs, Setup
from fedloom.core.optim import Optimiser
from fedloom.core.random import fold, key, normal, stream
from fedloom.core.training import LocalConfig
from fedloom.core.trees import Params, Tree, tree_map
from fedloom.programs.ensemble import distilling
from fedloom.programs.local import local_training
from fedloom.programs.server_steps import answers, server_steps

LEAST = 1e-5
"""The smallest variance of a draw (the authors' code)."""


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """FedBE's options."""

    draws: int = option(10, "Models drawn as further teachers, M (the authors' code).", low=0)
    distribution: Literal["gaussian", "dirichlet"] = option("gaussian", "What they are drawn from (sec. 3.2).")
    draw_scale: float = option(0.1, "What a Gaussian's deviation is multiplied with (the authors' code).", low=0)
    temperature: float = option(0.5, "Sharpens the teachers' mean: p^(1/T), to sum 1 (the authors' code).", above=0)
    server_epochs: int = option(20, "Passes over the server's samples in a round (App. B).", low=0)
    server_lr: float = option(1e-3, "Rate of the distillation (App. B).", low=0)
    server_momentum: float = option(0.9, "Its momentum (the authors' code).", low=0, high=1)
    server_weight_decay: float = option(1e-5, "Its weight decay (the authors' code).", low=0)
    server_batch_size: int = option(128, "Samples per step of the distillation (App. B).", low=1)
    average_from: int = option(500, "The student is averaged from this step on (the authors' code).", low=1)
    average_every: int = option(25, "Steps between students that are averaged (the authors' code).", low=1)

    batchnorm: ClassVar[str] = "averaged"  # the server runs the clients' models


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """A round of FedAvg; draw teachers; distil them into the average."""
    config = setup.config
    replies = ask(local_training(config), *send(setup, state, cohort.clients))
    average = tree_map(torch.add, state.params, weighted_mean(replies, "delta"))
    after, told = State(average, mean_buffers(replies, state.buffers)), {"local_loss": mean_loss(replies)}
    if not config.server_epochs:
        return after, told
    ((_, reply),) = replies.groups
    clients = tree_map(torch.add, reply["delta"], state.params)  # (clients, ...)
    drawn = drawn_from(setup, clients, average, cohort.round)
    x, _ = server_samples(setup)
    target = sharpened(teaching(setup, after, clients, reply["buffers"], drawn, x), config.temperature)
    return distilled(setup, after, x, target, cohort.round), told


def drawn_from(setup: Setup[Any], clients: Params, average: Params, round: int) -> dict[str, Tensor]:
    """M models (draws, ...) from the distribution of the clients' models (clients, ...)."""
    config, count = setup.config, len(next(iter(clients.values())))
    if config.distribution == "dirichlet":
        shares = stream(setup.seed, round, "draws").dirichlet([1.0] * count, config.draws)
        weights = torch.as_tensor(shares).to(setup.device, setup.dtype)
        return {name: torch.tensordot(weights, own, dims=1) for name, own in clients.items()}
    seed = key(setup.seed, round, "draws").to(setup.device)
    return {
        name: gaussian(config, own, average[name], normal(fold(seed, i), (config.draws, *own.shape[1:]), own.dtype))
        for i, (name, own) in enumerate(clients.items())
    }


def gaussian(config: Config, clients: Tensor, average: Tensor, noise: Tensor) -> Tensor:
    """w + (m + s sqrt(v) noise) * the mean distance from w, m and v being of the directions from w to each client."""
    apart = clients - average
    distances = apart.flatten(1).square().sum(1).sqrt()
    directions = apart / distances.clamp(min=torch.finfo(apart.dtype).tiny).reshape(-1, *[1] * average.dim())
    mean = directions.mean(0)
    variance = (directions.square().mean(0) - mean.square()).clamp(min=LEAST)
    drawn: Tensor = average + (mean + config.draw_scale * variance.sqrt() * noise) * distances.mean()
    return drawn


def teaching(setup: Setup[Any], average: State, clients: Params, buffers: Tree, drawn: Params, x: Tensor) -> Tensor:
    """The mean probabilities (samples, classes) of the average, the clients and the draws."""
    model = setup.models[setup.clients[0]]

    def everybody(count: int, one: Tree) -> Tree:
        return {name: leaf.expand(count, *leaf.shape) for name, leaf in one.items()}

    own = everybody(1, average.params), everybody(1, average.buffers)
    teachers = [own, (clients, buffers), (drawn, everybody(setup.config.draws, average.buffers))]
    found = [answers(model, params, stats, x) for params, stats in teachers if len(next(iter(params.values())))]
    return torch.cat(found).softmax(-1).mean(0)


def sharpened(p: Tensor, temperature: float) -> Tensor:
    """p^(1/T), divided by its sum."""
    return (p.log() / temperature).softmax(-1)


def distilled(setup: Setup[Any], average: State, x: Tensor, target: Tensor, round: int) -> State:
    """The mean of the students from a step on; the last one, where there are fewer steps."""
    config, model = setup.config, setup.models[setup.clients[0]]
    # the authors' loss is a mean over the classes, too
    optimiser = Optimiser("sgd", config.server_lr, config.server_momentum, config.server_weight_decay)
    steps = server_steps(
        setup, f"distil {model.spec}", distilling(model, per_class=True), (average.params, average.buffers), optimiser,
        (x, target), Batches(size=config.server_batch_size, epochs=config.server_epochs), round,
    )  # fmt: skip
    count, mean = 0, average.params
    for number, now in enumerate(steps, 1):
        past = number - config.average_from
        if past >= 0 and past % config.average_every == 0:
            count += 1
            mean = tree_map(lambda old, new, n=count: torch.lerp(old, new, 1 / n), mean, now.params)
    return State(mean if count else now.params, now.buffers)


CITATION = """@inproceedings{chen2021fedbe,
  title={{FedBE}: Making Bayesian Model Ensemble Applicable to Federated Learning},
  author={Chen, Hong-You and Chao, Wei-Lun},
  booktitle={ICLR}, year={2021}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="FedBE",
    family="ensemble",
    citation=CITATION,
    config=Config,
    round=round,
    means=(),
    cohort=10,  # the authors' code: all of 10 clients
    needs=Needs(same_model=True, class_labels=True, server_data="unlabelled"),
)
