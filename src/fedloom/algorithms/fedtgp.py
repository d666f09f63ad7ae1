# SPDX-License-Identifier: Apache-2.0
"""FedTGP: FedProto whose server trains the prototypes apart from each other instead of averaging them.

Zhang, Liu, Hua, Cao: FedTGP: trainable global prototypes with adaptive-margin-enhanced contrastive learning for data
and model heterogeneity in federated learning. AAAI 2024 (arXiv:2401.03230).

Clients do what they do in FedProto. On the server a small network turns an embedding of each class into its prototype.
It is trained, for some passes over the prototypes that clients have sent, so that each of them is nearer to the
prototype of its own class than to the others, by a margin that follows how far apart the clients' classes are.

Symbols: T: ``net`` and ``embeddings``, P: ``prototypes``, S: ``server_epochs``, tau: ``max_margin``, lambda:
``proto_weight``.

Sent down: the prototypes of the classes, and whether they are trained yet.
Sent up: the number of samples and the training loss; then the client's own prototypes and its counts of each class.
    Evaluations as in FedAvg.
Kept by the client: its model and its running statistics.
Kept by the server: the network T and the classes' embeddings; the prototypes that it gives.
Reduces to: Local (with a fresh optimiser every round) at lambda = 0, as far as training goes.
Differs from the paper: the margin is the authors' code's, the largest over classes of the distance to the nearest other
class; the paper takes the largest distance between two classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.algorithms import fedproto
from fedloom.algorithms.fedproto import send, training
from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Batches, Cohort, Diagnostics, Setup
from fedloom.core.optim import Optimiser
from fedloom.core.random import seed_of, stream
from fedloom.core.trees import Params, Tree
from fedloom.looms.chunked import dense, dense_init
from fedloom.programs.class_means import ask_class_means
from fedloom.programs.server_steps import last, server_steps

TINY = 1e-12
"""Added to squared distances: the root of 0 has no slope."""


@dataclass(frozen=True, kw_only=True)
class Config(fedproto.Config):
    """FedTGP's options."""

    proto_weight: float = option(
        10.0, "Weight of the distance to the prototypes, lambda (the authors' command).", low=0
    )
    server_epochs: int = option(100, "Passes over the clients' prototypes in a round, S (HtFLlib; sec. 4.1).", low=0)
    server_batch_size: int = option(10, "Clients' prototypes per step (the authors' command).", low=1)
    server_lr: float = option(0.01, "Rate of the steps on T (the authors' command).", low=0)
    max_margin: float = option(100.0, "Largest margin, tau (the authors' command).", low=0)


class State(NamedTuple):
    """T, and what it gives."""

    net: Mapping[str, Tensor]
    embeddings: Tensor  # (classes, d)
    prototypes: Tensor  # (classes, d)
    known: Tensor  # (classes,) 1 once T was trained, else 0


def init(setup: Setup[Any]) -> State:
    """Two layers as ``nn.Linear`` initialises them, embeddings from N(0, 1)."""
    nothing = fedproto.init(setup)
    classes, size = nothing.prototypes.shape
    net = dense_init((size, size, size), seed_of(setup.seed, "prototypes"), setup.device, setup.dtype)
    drawn = stream(setup.seed, "embeddings of classes").standard_normal((classes, size))
    embeddings = torch.as_tensor(drawn).to(setup.device, setup.dtype)
    return State(net, embeddings, dense(net, embeddings), nothing.known)


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Have the cohort train, then tell its prototypes; train T on them."""
    replies = ask(training(setup.config), *send(setup, state, cohort.clients))
    told, counts = ask_class_means(setup, list(replies), ask)
    margin = margin_of(told, counts, setup.config.max_margin)
    state = learn(setup, state, told, counts, margin, cohort.round)
    return state, {"local_loss": mean_loss(replies), "margin": margin}


def margin_of(told: Tensor, counts: Tensor, most: float) -> Tensor:
    """(): how far the class that stands most apart is from the nearest other, by the clients' means; at most tau."""
    means, known = fedproto.averaged(fedproto.State(torch.zeros_like(told[0]), counts[0] * 0), told, counts)
    apart = torch.cdist(means, means)
    others = (known[:, None] * known > 0) & ~torch.eye(len(means), dtype=torch.bool, device=means.device)
    nearest = torch.where(others, apart, torch.inf).min(1).values
    return torch.where(others.any(1), nearest, 0).max().clamp(max=most)


def learn(setup: Setup[Any], state: State, told: Tensor, counts: Tensor, margin: Tensor, round: int) -> State:
    """S passes over the clients' prototypes (clients, classes, d), of the classes that they have."""
    config = setup.config
    has = counts > 0
    samples = told[has], has.nonzero()[:, 1]
    batches = Batches(size=config.server_batch_size, epochs=config.server_epochs)
    trained = {f"net.{name}": value for name, value in state.net.items()} | {"embeddings": state.embeddings}
    optimiser = Optimiser("sgd", config.server_lr)
    steps = server_steps(
        setup, "fedtgp", contrastive, (trained, {}), optimiser, samples, batches, round, constants={"margin": margin}
    )
    after, _ = last(steps, (trained, {}))
    net = {name: after[f"net.{name}"] for name in state.net}
    return State(net, after["embeddings"], of_classes(after), torch.ones_like(state.known))


def of_classes(params: Params) -> Tensor:
    """P: T of every class, (classes, d)."""
    net = {name.removeprefix("net."): value for name, value in params.items() if name.startswith("net.")}
    return dense(net, params["embeddings"])


def contrastive(params: Params, buffers: Tree, constants: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tree]]:
    """CE over the classes, by minus the distance to each prototype, the own one made harder by the margin."""
    apart = (batch.x[:, None] - of_classes(params)).square().sum(2)
    near = -(apart + TINY).sqrt()
    own = torch.arange(near.shape[1], device=near.device) == batch.y[:, None]
    scores = near - constants["margin"] * own
    loss = batch.mean(F.cross_entropy(scores, batch.y, reduction="none"))
    return loss, (loss, buffers)


CITATION = """@inproceedings{zhang2024fedtgp,
  title={{FedTGP}: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and Model
         Heterogeneity in Federated Learning},
  author={Zhang, Jianqing and Liu, Yang and Hua, Yang and Cao, Jian},
  booktitle={AAAI}, year={2024}}"""

ALGORITHM = replace(
    fedproto.ALGORITHM, name="FedTGP", citation=CITATION, config=Config, state=State, init=init, round=round
)
