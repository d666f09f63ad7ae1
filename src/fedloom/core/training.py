# SPDX-License-Identifier: Apache-2.0
"""Local training, which most client programs share: its options, its carry and its step.

A program that trains the usual way is three lines: ``begin``, ``train_step`` and a reply made from ``delta``. What a
method adds goes in as a penalty on the loss, a correction of the gradients (SCAFFOLD, FedProx) or an objective of its
own in place of the task's loss (MOON).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedloom.core.config import check, option
from fedloom.core.contract import Batch, Batches, Home
from fedloom.core.errors import ConfigError
from fedloom.core.noised import clipped_sum, hides_samples, noised
from fedloom.core.optim import Optimiser, OptimiserName
from fedloom.core.random import fold
from fedloom.core.trees import Params, Tree, tree_map


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """How a client trains; the defaults are those of pFedHN's experiments."""

    local_steps: int = option(
        50,
        "Mini-batch steps per client and round (pFedHN, sec. 5: K = 50). Given alone, it is used instead of epochs.",
        low=0,
    )
    local_epochs: int = option(0, "Passes over the client's data instead of a number of steps; 0: use steps.", low=0)
    batch_size: int = option(64, "Samples per step; the last batch of a pass has what is left.", low=1)
    optimiser: OptimiserName = option("sgd", "Local optimiser.")
    local_lr: float = option(5e-3, "Local learning rate (pFedHN's code), or auto: by short trials.", low=0)
    momentum: float = option(0.9, "Local momentum, for sgd (pFedHN's code).", low=0, high=1)
    weight_decay: float = option(5e-5, "Local weight decay (pFedHN's code).", low=0)
    clip: float = option(50.0, "Largest norm of a local gradient; 0: no clipping (pFedHN's code).", low=0)
    keep_optimiser: bool = option(False, "Keep a client's optimiser state from round to round.")
    sample_dp_clip: float = option(0.0, "With --sample-dp-noise: the largest norm of one sample's gradient.", low=0)
    sample_dp_noise: float = option(
        0.0,
        "Differential privacy for samples: Gaussian noise on the sum of a step's gradients, in units of "
        "--sample-dp-clip; each sample is drawn by itself. 0: none.",
        low=0,
    )

    INSTEAD: ClassVar = {"local_steps": {"local_epochs": 0}}

    def __post_init__(self) -> None:
        check(self)
        if not (self.local_steps or self.local_epochs):
            raise ConfigError("--local-steps and --local-epochs are both 0; give one of them at least 1.")
        if bool(self.sample_dp_noise) != bool(self.sample_dp_clip):
            raise ConfigError(
                "--sample-dp-noise and --sample-dp-clip go together: noise hides only what is bounded, and a bound "
                "alone hides nothing. Give both."
            )

    @property
    def form(self) -> tuple[str, ...]:
        """What of these options a trained model is made for: they must not change afterwards, nor differ by client."""
        return ()

    @property
    def before(self) -> int:
        """Steps, or passes where passes are counted, that come before those of local training, for something else."""
        return 0

    def batches(self) -> Batches:
        """The training data that one ask goes through."""
        steps = 0 if self.local_epochs else self.before + self.local_steps
        epochs = self.before + self.local_epochs if self.local_epochs else 0
        return Batches("train", self.batch_size, steps=steps, epochs=epochs)

    def is_before(self, batch: Batch) -> Tensor:
        """Whether a batch comes before those of local training: () bool."""
        return (batch.epoch if self.local_epochs else batch.step) < self.before

    def local_optimiser(self) -> Optimiser:
        """The optimiser that these options name."""
        return Optimiser(self.optimiser, self.local_lr, self.momentum, self.weight_decay, self.clip)


class Training(NamedTuple):
    """The carry of local training."""

    params: Params
    start: Params
    buffers: Tree
    optimiser: Tree
    loss: Tensor  # () summed over steps
    steps: Tensor  # ()


Penalty = Callable[[Params], Tensor]
Correction = Callable[[Params], Params]
Objective = Callable[[Params, Tree, Batch], tuple[Tensor, tuple[Tensor, Tree]]]
"""(params, buffers, batch) -> what is minimised, and beside it the loss for the records and the new buffers."""

SAMPLE_NOISE = -2
"""Folded into a client's key for noise on gradients: steps fold their numbers, from 0, into the same key."""


def begin(home: Home, params: Params, memory: Tree, optimiser: Optimiser | None = None) -> Training:
    """Training starts from ``params``, with the client's buffers and, if it is kept, its optimiser state.

    ``optimiser`` takes the place of the one that the options of local training name, here and in ``train_step``.
    """
    state = memory.get("optimiser") or (optimiser or home.config.local_optimiser()).init(params)
    zero = torch.zeros_like(home.num_samples)
    return Training(params, params, memory["buffers"], state, zero, zero)


def gradient(
    home: Home,
    params: Params,
    buffers: Tree,
    batch: Batch,
    penalty: Penalty | None = None,
    objective: Objective | None = None,
) -> tuple[Params, Tensor, Tree]:
    """The gradient of the mean loss on a batch (plus a penalty), the loss without it, and the new buffers.

    ``objective`` takes the place of the mean loss, and says which loss is recorded. With ``--sample-dp-noise`` the
    gradient hides each sample of the batch, and the loss is 0: it would tell of them.
    """
    minimised = objective or mean_loss_of(home)
    if hides_samples(home.config):
        grads = _hiding_samples(home, params, buffers, batch, penalty, minimised)
        return grads, torch.zeros_like(home.num_samples), buffers

    def penalised(params: Params) -> tuple[Tensor, tuple[Tensor, Tree]]:
        value, beside = minimised(params, buffers, batch)
        return value + penalty(params) if penalty else value, beside

    return differentiate(penalised, params)


def _hiding_samples(
    home: Home, params: Params, buffers: Tree, batch: Batch, penalty: Penalty | None, minimised: Objective
) -> Params:
    """The noised mean of the gradients that the samples have each by itself; a penalty knows nothing of samples."""
    config = home.config

    def of_sample(x: Tensor, y: Tensor, number: Tensor) -> Params:
        key, alone = fold(batch.key, number), torch.ones(1, dtype=torch.bool, device=x.device)
        only = Batch(x[None], y[None], alone, batch.step, batch.epoch, key)
        grads: Params = torch.func.grad(lambda params: minimised(params, buffers, only), has_aux=True)(params)[0]
        return grads

    numbers = torch.arange(len(batch.mask), device=batch.mask.device)
    total = clipped_sum(of_sample, (batch.x, batch.y, numbers), batch.mask, config.sample_dp_clip)
    expected = home.num_samples.clamp(min=1, max=config.batch_size)
    key = fold(fold(home.key, SAMPLE_NOISE), batch.step)
    grads: Params = noised(total, config.sample_dp_clip, config.sample_dp_noise, expected, key)
    if penalty:
        nothing = torch.zeros_like(home.num_samples)
        slope, _, _ = differentiate(lambda params: (penalty(params), (nothing, {})), params)
        grads = tree_map(torch.add, grads, slope)
    return grads


def mean_loss_of(home: Home) -> Objective:
    """The task's loss of the client's own model, as an objective."""

    def objective(params: Params, buffers: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tree]]:
        outputs, after = home.model.train(params, buffers, batch.x, batch.mask, batch.key)
        loss = batch.mean(home.task.loss(outputs, batch.y))
        return loss, (loss, after)

    return objective


_RECOMPUTED = (
    "the network saves tensors by hooks, as torch.utils.checkpoint does; what it computes again would be wrong"
)


def differentiate(
    objective: Callable[[Params], tuple[Tensor, tuple[Tensor, Tree]]], params: Params
) -> tuple[Params, Tensor, Tree]:
    """The gradient of an objective, with what it gives beside its value.

    Under ``vmap`` only ``torch.func`` can do it; for one client plain autograd gives the same in half the time.
    """
    if torch._C._functorch.maybe_current_level() is not None:
        grads, (_, (loss, after)) = torch.func.grad_and_value(objective, has_aux=True)(params)
        return grads, loss, after
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    with torch.enable_grad(), torch.autograd.graph.disable_saved_tensors_hooks(_RECOMPUTED):
        value, (loss, after) = objective(leaves)
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found)), loss.detach(), tree_map(torch.Tensor.detach, after)


def train_step(
    home: Home,
    carry: Training,
    batch: Batch,
    *,
    penalty: Penalty | None = None,
    correction: Correction | None = None,
    objective: Objective | None = None,
    optimiser: Optimiser | None = None,
) -> Training:
    """One step of the local optimiser; what a method adds to it is as in ``gradient``."""
    grads, loss, buffers = gradient(home, carry.params, carry.buffers, batch, penalty, objective)
    if correction:
        grads = correction(grads)
    params, state = (optimiser or home.config.local_optimiser()).update(carry.params, grads, carry.optimiser)
    return carry._replace(
        params=params, buffers=buffers, optimiser=state, loss=carry.loss + loss, steps=carry.steps + 1
    )


def pulled(params: Params, centre: Params, strength: float) -> Correction:
    """A correction that adds the slope of (strength / 2) ||params - centre||^2: a penalty without a backward pass."""
    return lambda grads: {
        name: torch.add(grad, params[name] - centre[name], alpha=strength) for name, grad in grads.items()
    }


def delta(carry: Training) -> dict[str, Tensor]:
    """After minus before."""
    change: dict[str, Tensor] = tree_map(torch.sub, carry.params, carry.start)
    return change


def report(home: Home, carry: Training) -> dict[str, Tensor]:
    """What every training reply says besides its result: the client's weight and its mean training loss."""
    return {"num_samples": home.num_samples, "loss": carry.loss / carry.steps.clamp(min=1)}


def remember(home: Home, carry: Training, memory: Tree) -> dict[str, Any]:
    """The memory after training: running statistics and, if it is kept, the optimiser state."""
    kept = {"optimiser": carry.optimiser} if home.config.keep_optimiser else {}
    return {**memory, "buffers": carry.buffers, **kept}


def like_report() -> dict[str, Tensor]:
    """The shapes of ``report``, for a program's ``expects``."""
    return {"num_samples": torch.empty(()), "loss": torch.empty(())}
