# SPDX-License-Identifier: Apache-2.0
"""GA: FedAvg that gives more weight to clients for which averaging hurts most.

Zhang, Xu, Yao, Zhang, Tian, Wang: Federated domain generalization with generalization adjustment. CVPR 2023. Also known
as FedDG-GA.

After a round of FedAvg each client tries two models on its validation data: the one that it has just trained and the
new global one. The loss of the second minus that of the first is its generalisation gap. Weights go up for clients
whose gap is above the mean, and down for the others, by steps that shrink to nothing over the run.

Symbols: a_i: ``weights``, G_i: the gap, d: ``weight_step``, R: ``rounds``.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``), before the server's step and
    after it.
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss; then the
    validation loss of both models and the number of validation samples. Evaluations as in FedAvg.
Kept by the client: its model's running statistics, unless they are averaged; its trained model between the two asks.
Kept by the server: the global parameters and the clients' weights.
Reduces to: FedAvg with equal weights at d = 0.
Differs from the paper: nothing where all clients take part. With smaller cohorts, which the paper does not have, the
weights of those who answered are adjusted among them. The authors' code has another rule: docs/methods/ga.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.core.config import option
from fedloom.core.contract import (
    Ask,
    Batch,
    Batches,
    Cohort,
    Diagnostics,
    Handover,
    Home,
    Model,
    Program,
    Setup,
    composed,
    without_rows,
)
from fedloom.core.device import to_device
from fedloom.core.training import Training
from fedloom.core.trees import PerClient, Tree
from fedloom.programs import local


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """GA's options."""

    weight_step: float = option(
        0.2, "Largest change of a weight in the first round, d (the authors' code).", low=0, high=1
    )


class State(NamedTuple):
    """The global model, and a weight for every client."""

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    weights: Tensor  # (clients,), with the sum 1


def init(setup: Setup[Any]) -> State:
    """FedAvg's model and equal weights."""
    number = len(setup.clients)
    return State(*fedavg.init(setup), torch.full((number,), 1 / number, dtype=setup.dtype, device=setup.device))


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Algorithm 1: train, average by the weights, have clients compare, adjust the weights."""
    replies = ask(training(setup.config), *fedavg.send(setup, state, cohort.clients))
    ((clients, reply),) = replies.groups
    own = state.weights[to_device(setup.rows(clients), setup.device)]
    weighted = PerClient([(clients, {**reply, "weight": own})])
    common, diagnostics = fedavg.combine(setup, fedavg.State(state.params, state.buffers), weighted, "weight")
    told = ask(comparison(), *fedavg.send(setup, common, clients))
    weights, gap = adjusted(setup, state.weights, told, cohort.round)
    return State(*common, weights), {**diagnostics, "gap": gap}


def adjusted(setup: Setup[Config], weights: Tensor, told: PerClient, number: int) -> tuple[Tensor, Tensor]:
    """Eq. 8 and 9: a_i + d_r (G_i - mean G) / max |G_j - mean G|, cut at 0 and scaled back; and the mean gap.

    Clients without validation samples, and those that did not answer, keep their weights.
    """
    ((clients, losses),) = told.groups
    at = to_device(setup.rows(clients), setup.device)
    before, known = weights[at], losses["samples"] > 0
    gap = losses["loss"] - losses["own_loss"]
    mean = torch.where(known, gap, 0).sum() / known.sum().clamp(min=1)
    apart = torch.where(known, gap - mean, 0)
    most = apart.abs().max()
    rate = setup.config.weight_step * (1 - (number - 1) / max(setup.rounds, number))  # 0 after the last round
    after = (before + rate * apart / torch.where(most > 0, most, 1)).clamp(min=0)
    total, sum_after = (torch.where(known, one, 0).sum() for one in (before, after))
    scaled = after * total / torch.where(sum_after > 0, sum_after, 1)
    return weights.index_copy(0, at, torch.where(known, scaled, before)), mean


def training(config: Config) -> Program:
    """FedAvg's program, after which the client keeps its model to compare."""
    return replace(local.local_training(config), name="ga.train", final=client_final)


def client_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """Reply as in FedAvg; keep the trained model."""
    reply, after = local.client_final(home, shared, carry, memory)
    return reply, {**after, "trained": carry.params}


def comparison() -> Program:
    """One pass over the validation data with both models, nothing trained."""
    batches = Batches("val", 256, epochs=1, shuffle=False)
    return Program("ga.compare", compare_init, compare_step, compare_final, batches, compare_expects)


class Sums(NamedTuple):
    """Both models, the sums of their losses, the number of samples."""

    own: Tree
    common: Tree
    own_loss: Tensor
    loss: Tensor
    samples: Tensor


def compare_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Sums:
    """The model that the client has trained, with its running statistics, and the new global one."""
    zero = torch.zeros_like(home.num_samples)
    own = {"params": memory["trained"], "buffers": memory["buffers"]}
    return Sums(own, composed(home, shared, mine, memory), zero, zero, zero)


def compare_step(home: Home, shared: Tree, carry: Sums, batch: Batch) -> Sums:
    """Add the losses of a batch."""
    own, common = (
        batch.sum(home.task.loss(home.model(model["params"], model["buffers"], batch.x), batch.y))
        for model in (carry.own, carry.common)
    )
    return carry._replace(
        own_loss=carry.own_loss + own, loss=carry.loss + common, samples=carry.samples + batch.mask.sum()
    )


def compare_final(home: Home, shared: Tree, carry: Sums, memory: Tree) -> tuple[Tree, Tree]:
    """Tell the mean losses; the trained model has done its work."""
    number = carry.samples.clamp(min=1)
    reply = {"own_loss": carry.own_loss / number, "loss": carry.loss / number, "samples": carry.samples}
    return reply, {name: branch for name, branch in memory.items() if name != "trained"}


def compare_expects(shared: Tree, mine: Tree) -> Tree:
    """Three numbers."""
    number = torch.empty(())
    return {"own_loss": number, "loss": number, "samples": number}


def programs(config: Any, model: Model, newcomer: bool) -> list[Program]:
    """A participant trains and compares; a newcomer only settles its running statistics."""
    return [] if newcomer else [training(config), comparison()]


CITATION = """@inproceedings{zhang2023ga,
  title={Federated Domain Generalization with Generalization Adjustment},
  author={Zhang, Ruipeng and Xu, Qinwei and Yao, Jiangchao and Zhang, Ya and Tian, Qi and Wang, Yanfeng},
  booktitle={CVPR}, year={2023}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="GA",
    family="aggregation",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    round=round,
    means=(),
    handover=Handover(newcomers=partial(without_rows, ("weights",))),
    programs=programs,
    cohort=100,  # the paper: all clients take part
)
