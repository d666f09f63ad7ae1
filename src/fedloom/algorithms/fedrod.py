# SPDX-License-Identifier: Apache-2.0
"""Fed-RoD: one body with two heads: a common one trained as if classes were balanced, and the client's own beside it.

Chen, Chao: On bridging generic and personalized federated learning for image classification. ICLR 2022
(arXiv:2107.00778).

Body and common head learn by the balanced softmax: the logarithm of how many samples the client has of each class is
added to the scores, so that the common model need not know who has what. The client's own head learns what to add to
the common head's scores for this client; its gradient ends at the features. Participants use the sum of both heads,
newcomers the common one.

Symbols: h_G: the model's head, h_i: ``personal``, n_iy: ``label_counts``, gamma: ``balance``.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``); once, how many classes there are.
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: its own head, its counts of labels, its model's running statistics unless they are averaged.
Kept by the server: the global parameters, and which clients have counted their labels.
Reduces to: FedAvg, as far as the common model goes, where a client has as many samples of every class, or at gamma = 0.
Differs from the paper: a client's own head starts at 0 and not at random, so that who has not trained predicts with the
common model. Both heads take one step at a time, as in the paper's own one-stage form. The variant with a hypernetwork
for the own head is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.algorithms.fedavg import send
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
    Needs,
    Program,
    Seeds,
    Setup,
    without_rows,
)
from fedloom.core.training import Training, train_step
from fedloom.core.trees import ClientId, Params, Tree, only, tree_map
from fedloom.models.load import PredictorModule
from fedloom.models.per_sample import net
from fedloom.programs import local
from fedloom.programs.labels import have_labels_counted, label_counts

NEVER = -1e9
"""In place of the logarithm of 0, which times a probability of 0 would be no number."""


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """Fed-RoD's options."""

    balance: float = option(1.0, "What the logarithms of class counts are multiplied with, gamma (sec. 4.2).", low=0)


class State(NamedTuple):
    """The global model, and whom it need not ask to count."""

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    counted: Tensor  # (clients,) bool


def init(setup: Setup[Any]) -> State:
    """The model as FedAvg's."""
    nobody = torch.zeros(len(setup.clients), dtype=torch.bool, device=setup.device)
    return State(*fedavg.init(setup), nobody)


def first_memory(model: Model, config: Any, seeds: Seeds) -> Tree:
    """A head of 0, and no labels counted."""
    first = model.init(seeds.common)
    own = {f"personal.{name}": torch.zeros_like(first[name]) for name in sorted(model.head)}
    return {"own": own, "label_counts": torch.zeros(model.num_outputs, dtype=model.dtype, device=model.device)}


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Have those count their labels who have not; a round of FedAvg with another client half."""
    state = count(setup, state, cohort.clients, ask)
    able = [c for c, done in zip(cohort.clients, state.counted[setup.rows(cohort.clients)].tolist()) if done]
    replies = ask(training(setup.config), *send(setup, state, able))
    params = tree_map(torch.add, state.params, weighted_mean(replies, "delta"))
    buffers = fedavg.average_buffers(setup, state.buffers, replies)
    return state._replace(params=params, buffers=buffers), {"local_loss": mean_loss(replies)}


def count(setup: Setup[Any], state: State, clients: Sequence[ClientId], ask: Ask) -> State:
    """Have clients count their labels; the server hears only that they did."""
    known = state.counted[setup.rows(clients)].tolist()
    missing = [client for client, done in zip(clients, known, strict=True) if not done]
    if not missing:
        return state
    counted = state.counted.clone()
    counted[setup.rows(have_labels_counted(setup, missing, ask))] = True
    return state._replace(counted=counted)


def training(config: Config) -> Program:
    """What a client of Fed-RoD runs."""
    plain = local.local_training(config)
    return replace(plain, name="fedrod.train", init=client_init, step=client_step, final=client_final)


class Carry(NamedTuple):
    """Training, and what the client knows of its classes."""

    training: Training
    prior: Tensor  # (classes,) gamma log n_iy


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """Start from the global model and the client's own head."""
    counts = memory["label_counts"]
    prior = home.config.balance * torch.where(counts > 0, counts.clamp(min=1).log(), NEVER)
    return Carry(local.client_init(home, shared, mine, memory), prior)


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """One step on CE(h_G(z) + prior) for body and common head, and on CE(h_G(z) + h_i(z)) for the own head."""
    task = home.task

    def objective(params: Params, buffers: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tree]]:
        common = only(params, home.model.shapes)
        z, after = home.model.train_features(common, buffers, batch.x, batch.mask, batch.key)
        scores = home.model.classify(common, z)
        balanced = batch.mean(task.loss(scores + carry.prior, batch.y))
        ours = batch.mean(task.loss(scores.detach() + personal(home.model, params, z.detach()), batch.y))
        return balanced + ours, (ours, after)

    return carry._replace(training=train_step(home, carry.training, batch, objective=objective))


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply as in local training; keep the own head."""
    return local.client_final(home, shared, carry.training, memory)


def personal(model: Model, params: Params, z: Tensor) -> Tensor:
    """h_i(z)."""
    return model.classify({**only(params, model.shapes), **net(params, "personal")}, z)


def predict(home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """h_G(z) + h_i(z); h_i is 0 for newcomers."""
    params, model = deployed["params"], home.model
    z = model.features(only(params, model.shapes), deployed["buffers"], x)
    return model.classify(only(params, model.shapes), z) + personal(model, params, z)


def programs(config: Config, model: Model, newcomer: bool) -> list[Program]:
    """A participant counts its labels and trains; a newcomer only settles its running statistics."""
    return [] if newcomer else [label_counts(), training(config)]


CITATION = """@inproceedings{chen2022fedrod,
  title={On Bridging Generic and Personalized Federated Learning for Image Classification},
  author={Chen, Hong-You and Chao, Wei-Lun},
  booktitle={ICLR}, year={2022}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="Fed-RoD",
    family="split",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    round=round,
    means=(),
    handover=Handover(newcomers=partial(without_rows, ("counted",))),
    first_memory=first_memory,
    predict=predict,
    module=partial(PredictorModule.of, predict),
    programs=programs,
    carries_prior=True,
    needs=Needs(same_model=True, head=True, class_labels=True, features="any"),
)
