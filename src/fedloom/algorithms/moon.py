# SPDX-License-Identifier: Apache-2.0
"""MOON: FedAvg whose clients see samples more as the global model does, and less as they themselves did before.

Li, He, Song: Model-contrastive federated learning. CVPR 2021 (arXiv:2103.16257).

To its loss a client adds mu times the contrast -log(exp(s_g / tau) / (exp(s_g / tau) + exp(s_p / tau))). There s_g is
the cosine of a sample's features under the model in training and under the global model as it was sent, and s_p that
with the client's model of last time. All else is FedAvg.

Symbols: mu: ``mu``, tau: ``temperature``; the model of last time: ``memory["previous"]``.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``).
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: its model of last time with its running statistics; those to train with, unless they are averaged.
Kept by the server: the global parameters.
Reduces to: FedAvg at mu = 0, and in every client's first round, as it has no model of last time.
Differs from the paper: features are what the output layer gets. The authors put a projection of two dense layers before
it, which makes another network. Clients are weighted by their samples, as in its code. A client that comes late has a
random model of last time there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Model, Needs, Program, Seeds, Setup
from fedloom.core.training import Training, train_step
from fedloom.core.trees import Params, Tree
from fedloom.programs import local
from fedloom.programs.allowed import of_participants
from fedloom.programs.personal import keep, kept_or, untrained


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """MOON's options."""

    mu: float = option(1.0, "Weight of the contrast (the authors' code; the paper takes 0.1 to 5).", low=0)
    temperature: float = option(0.5, "Temperature of the contrast, tau (the authors' code).", above=0)


def first_memory(model: Model, config: Any, seeds: Seeds) -> Tree:
    """There is no model of last time yet."""
    return {"previous": untrained(model, seeds.common)}


def round(setup: Setup[Config], state: fedavg.State, cohort: Cohort, ask: Ask) -> tuple[fedavg.State, Diagnostics]:
    """A round of FedAvg with another client step."""
    replies = ask(training(setup.config), *fedavg.send(setup, state, cohort.clients))
    return fedavg.combine(setup, state, replies)


def training(config: Config) -> Program:
    """What a client of MOON runs."""
    return Program("moon.train", client_init, client_step, client_final, config.batches(), local.expects)


class Carry(NamedTuple):
    """Training; the running statistics that the global model came with; the model of last time."""

    own: Training
    buffers: Tree
    previous: Tree


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """Start from the global model, which stands in for a model of last time if there is none."""
    own = local.client_init(home, shared, mine, memory)
    return Carry(own, own.buffers, kept_or(memory["previous"], {"params": own.params, "buffers": own.buffers}))


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """One step on the client's own loss plus mu times the contrast; the other models are frozen, in evaluation mode."""
    model, previous = home.model, carry.previous

    def objective(params: Params, buffers: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tree]]:
        common = model.features(shared["params"], carry.buffers, batch.x)
        before = model.features(previous["params"], previous["buffers"], batch.x)
        away = direction(before) - direction(common)
        z, after = model.train_features(params, buffers, batch.x, batch.mask, batch.key)
        loss = batch.mean(home.task.loss(model.classify(params, z), batch.y))
        return loss + home.config.mu * batch.mean(contrast(z, away, home.config.temperature)), (loss, after)

    return carry._replace(own=train_step(home, carry.own, batch, objective=objective))


def contrast(z: Tensor, away: Tensor, temperature: float) -> Tensor:
    """Eq. 3 for every sample: log(1 + exp((s_p - s_g) / tau)); both cosines are one product."""
    return F.softplus((direction(z) * away).sum(1) / temperature)


def direction(z: Tensor) -> Tensor:
    """Features divided by their norm."""
    return F.normalize(z.flatten(1), eps=1e-8)


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply as in FedAvg; keep the trained model for next time."""
    reply, after = local.client_final(home, shared, carry.own, memory)
    return reply, {**after, "previous": keep(carry.own, memory["previous"])}


CITATION = """@inproceedings{li2021moon,
  title={Model-Contrastive Federated Learning},
  author={Li, Qinbin and He, Bingsheng and Song, Dawn},
  booktitle={CVPR}, year={2021}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="MOON",
    citation=CITATION,
    config=Config,
    round=round,
    first_memory=first_memory,
    programs=of_participants(training),
    needs=Needs(same_model=True, features="any"),
)
