# SPDX-License-Identifier: Apache-2.0
"""Per-FedAvg: a common model that is good after one step on a client's own data.

Fallah, Mokhtari, Ozdaglar: Personalized federated learning with theoretical guarantees: a model-agnostic meta-learning
approach. NeurIPS 2020 (arXiv:2002.07948).

A client does not descend its loss f, but f(w - alpha grad f(w)), its loss after a step. The gradient of that is
(I - alpha H(w)) grad f(w - alpha grad f(w)), with three samples of the data for its three parts. The server averages.
Before use, everybody takes the step.

Symbols: alpha: ``inner_lr``, beta: ``local_lr``, delta: ``hessian_step``, H: the Hessian.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``), to train and to tune.
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss; after
    tuning, the number of samples and the loss only. Evaluations as in FedAvg.
Kept by the client: the tuned model with its running statistics; those of the global one, unless they are averaged.
Kept by the server: the global parameters.
Reduces to: FedAvg with equal weights at alpha = 0.
Differs from the paper: the samples for the parts of a step are cut from one batch of two or three times the size, so
that a pass is a pass. The default drops the Hessian (the paper's FO); ``meta_gradient=hf`` is its HF.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.algorithms import fedavg, fedavg_ft
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Batches, Cohort, Diagnostics, Home, Model, Program, Setup
from fedloom.core.optim import Optimiser
from fedloom.core.random import fold
from fedloom.core.training import Training, gradient, train_step
from fedloom.core.trees import Params, Tree, tree_map
from fedloom.programs.local import local_training
from fedloom.programs.tuning import needs_labels, tuning


@dataclass(frozen=True, kw_only=True)
class Config(fedavg_ft.Config):
    """Per-FedAvg's options."""

    local_steps: int = option(20, "Steps per client and round (pFedMe's code, which compares with it).", low=0)
    batch_size: int = option(20, "Samples for each part of a step (pFedMe's code).", low=1)
    local_lr: float = option(1e-3, "Rate of the steps on the meta-gradient, beta (pFedMe's code).", low=0)
    momentum: float = option(0.0, "Local momentum, for sgd (the paper uses none).", low=0, high=1)
    inner_lr: float = option(5e-3, "Rate of the step before use, alpha (pFedMe's code).", low=0)
    meta_gradient: Literal["fo", "hf"] = option(
        "fo", "Drop the Hessian (fo: two gradients a step), or take it from two more gradients (hf)."
    )
    hessian_step: float = option(1e-3, "Length of the step by which hf takes the Hessian, delta (FL-bench).", above=0)
    tune_steps: int = option(1, "Steps of rate alpha before use (the paper: one).", low=0)

    @property
    def parts(self) -> int:
        """How many samples of the data a step needs."""
        return 2 if self.meta_gradient == "fo" else 3

    def batches(self) -> Batches:
        """The training data that one ask goes through: batches for all parts of a step."""
        return replace(super().batches(), size=self.parts * self.batch_size)

    def tuner(self) -> Optimiser:
        """Plain descent at rate alpha."""
        return Optimiser("sgd", self.inner_lr)


def round(setup: Setup[Config], state: fedavg.State, cohort: Cohort, ask: Ask) -> tuple[fedavg.State, Diagnostics]:
    """Algorithm 1: clients step on the meta-gradient; w is the mean of their parameters."""
    replies = ask(training(setup.config), *fedavg.send(setup, state, cohort.clients))
    return fedavg.combine(setup, state, replies, weight=None)


def training(config: Config) -> Program:
    """What a client of Per-FedAvg runs."""
    return replace(local_training(config), name="per_fedavg.train", step=client_step)


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """Lines 6 to 8: w <- w - beta (I - alpha H(w; B3)) grad f(w - alpha grad f(w; B1); B2)."""
    config, w, buffers = home.config, carry.params, carry.buffers
    first, *others = dealt(batch, config.parts)

    def meta(grads: Params) -> Params:
        after, _, _ = gradient(home, moved(w, -config.inner_lr, grads), buffers, others[0])
        if config.meta_gradient == "fo":
            return after
        # H d = (grad f(w + delta d) - grad f(w - delta d)) / (2 delta)
        ahead, behind = (
            gradient(home, moved(w, length, after), buffers, others[1])[0]
            for length in (config.hessian_step, -config.hessian_step)
        )
        curved = tree_map(torch.sub, ahead, behind)
        return moved(after, -config.inner_lr / (2 * config.hessian_step), curved)

    return train_step(home, carry, first, correction=meta)


def moved(params: Params, length: float, direction: Params) -> Mapping[str, Tensor]:
    """params + length * direction."""
    found: Mapping[str, Tensor] = tree_map(lambda p, d: torch.add(p, d, alpha=length), params, direction)
    return found


def dealt(batch: Batch, parts: int) -> list[Batch]:
    """The batch dealt out like cards; a part for which there is no sample is the first one again."""
    size = len(batch.mask)
    at = torch.arange(-(-size // parts), device=batch.mask.device) * parts
    first = part_of(batch, at, 0)
    dealt = [first]
    for number in range(1, parts):
        own = part_of(batch, (at + number).clamp(max=size - 1), number)
        own = own._replace(mask=own.mask & (at + number < size))
        some = own.mask.any()
        x, y, mask = (torch.where(some, one, other) for one, other in zip(own[:3], first[:3]))
        dealt.append(own._replace(x=x, y=y, mask=mask))
    return dealt


def part_of(batch: Batch, at: Tensor, number: int) -> Batch:
    """The samples at these places, with draws of their own."""
    key = fold(batch.key, number) if number else batch.key
    return batch._replace(x=batch.x[at], y=batch.y[at], mask=batch.mask[at], key=key)


def programs(config: Any, model: Model, newcomer: bool) -> list[Program]:
    """A participant trains and takes the step before use; a newcomer only takes the step."""
    if newcomer:
        return [tuning(config)] if needs_labels(config) else []
    return [training(config), *([tuning(config)] if config.tunes else [])]


CITATION = """@inproceedings{fallah2020perfedavg,
  title={Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach},
  author={Fallah, Alireza and Mokhtari, Aryan and Ozdaglar, Asuman},
  booktitle={NeurIPS}, year={2020}}"""

ALGORITHM = replace(
    fedavg_ft.ALGORITHM,
    name="Per-FedAvg",
    citation=CITATION,
    config=Config,
    round=round,
    mean_weight=None,
    programs=programs,
)
