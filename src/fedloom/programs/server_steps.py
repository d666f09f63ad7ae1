# SPDX-License-Identifier: Apache-2.0
"""Training on the server: the batches, the steps, and the answers of clients' models to samples of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.clients.batching import PaddedSchedule, schedule
from fedloom.core.contract import Batch, Batches, Model, Setup
from fedloom.core.device import to_device
from fedloom.core.optim import Optimiser
from fedloom.core.random import fold, key, stream
from fedloom.core.training import differentiate
from fedloom.core.trees import Params, Tree, tree_map

AT_ONCE = 256
"""Samples that the clients' models answer at a time."""

Objective = Callable[[Params, Tree, Tree, Batch], tuple[Tensor, tuple[Tensor, Tree]]]
"""(params, buffers, constants, batch) -> what is minimised, and beside it a loss and the new buffers."""


class Trained(NamedTuple):
    """What there is after a step."""

    params: Params
    buffers: Tree
    optimiser: Tree


def server_steps(
    setup: Setup[Any],
    name: str,
    objective: Objective,
    start: tuple[Params, Tree],
    optimiser: Optimiser,
    samples: tuple[Tensor, Tensor],
    batches: Batches,
    round: int,
    *,
    constants: Tree | None = None,
    rate: Callable[[int], float] | None = None,
) -> Iterator[Trained]:
    """Minimise ``objective`` over batches of ``samples`` (x, y); what there is after each step.

    Args:
        name: Fixes the objective: steps can be recorded by it. Also names the order of the samples.
        start: Parameters and buffers.
        constants: What the objective uses besides, the same in all steps of a call.
        rate: By the number of the step, from 0: what the optimiser's rate is multiplied with.
    """
    params, buffers = start
    state, (x, y), fixed = optimiser.init(params), samples, constants or {}

    def step(params: Params, buffers: Tree, state: Tree, fixed: Tree, batch: Batch, scale: Tensor) -> Any:
        grads, _, after = differentiate(lambda params: objective(params, buffers, fixed, Batch(*batch)), params)
        moved, state = optimiser.update(params, grads, state)
        if rate:  # every optimiser's step is proportional to its rate
            moved = tree_map(lambda old, new: torch.lerp(old, new, scale), params, moved)
        return moved, after, state

    drawn = stream(setup.seed, round, name, "server batches")
    plan = PaddedSchedule.of([schedule(np.arange(len(x)), batches, drawn)])
    rows, sizes = (to_device(part[:, 0], x.device) for part in (plan.rows, plan.sizes))
    epochs, numbers = to_device(plan.epochs[:, 0], x.device), torch.arange(len(rows), device=x.device)
    real = torch.arange(rows.shape[1], device=x.device) < sizes[:, None]  # all batches of one size: one recording
    keys = fold(key(setup.seed, round, name, "server draws").to(x.device), numbers)
    scales = to_device([rate(i) if rate else 1.0 for i in range(len(rows))], x.device, setup.dtype)
    for i, own in enumerate(rows):
        batch = Batch(x.index_select(0, own), y.index_select(0, own), real[i], numbers[i], epochs[i], keys[i])
        arguments = (params, buffers, state, fixed, batch, scales[i])
        params, buffers, state = setup.replay((name, optimiser, bool(rate)), step, *arguments)
        yield Trained(params, buffers, state)


def last(steps: Iterator[Trained], start: tuple[Params, Tree]) -> tuple[Params, Tree]:
    """Parameters and buffers after all steps; ``start`` if there are none."""
    end = deque(steps, maxlen=1)
    return (end[0].params, end[0].buffers) if end else start


def answers(model: Model, params: Params, buffers: Tree, x: Tensor) -> Tensor:
    """(models, samples, outputs) of a stack of models in evaluation mode, a part of the samples at a time."""
    with torch.no_grad():
        parts = [torch.vmap(model, (0, 0, None))(params, buffers, part) for part in torch.split(x, AT_ONCE)]
        return torch.cat(parts, 1)
