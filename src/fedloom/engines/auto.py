# SPDX-License-Identifier: Apache-2.0
"""Choosing an engine, by a rule and not by a stopwatch: the same config must give the same bits on the next day too.

    GPU                              vectorised: a cohort is one batch
    CPU, one client a round          sequential: there is nothing to batch
    CPU, convolutions                parallel: clients one after another, in a process per core
    CPU, dense layers                parallel_vectorised: batches of a few clients, in a process per core
    a network that vmap cannot run   parallel, or sequential on a GPU

On one core the parallel engine is the sequential one: with one operator thread they give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedloom.core.contract import Model
from fedloom.core.errors import ConfigError, unknown
from fedloom.core.trees import Params, Tree, stack
from fedloom.engines.engine import AbstractEngine
from fedloom.engines.loopback import Loopback
from fedloom.engines.parallel import AbstractParallel, Parallel, ParallelVectorised
from fedloom.engines.ray import Ray
from fedloom.engines.sequential import Sequential
from fedloom.engines.vectorised import Vectorised
from fedloom.engines.workers import cores, possible

ENGINES: Mapping[str, type[AbstractEngine]] = {
    e.name: e for e in (Sequential, Parallel, Vectorised, ParallelVectorised, Loopback, Ray)
}

HEAVY = 1 << 23
"""Multiply-adds per sample above which threads inside an operator help; below, they wait for each other."""


def choose(
    name: str, device: torch.device, models: Iterable[Model], cohort: int, workers: int | None = None
) -> tuple[str, str]:
    """The engine that ``name`` stands for, and why; ``workers``: processes that there may be, by default the cores."""
    if name != "auto":
        if name not in ENGINES:
            raise unknown("engine", name, ["auto", *ENGINES, "flower-sim"])
        if issubclass(ENGINES[name], AbstractParallel) and device.type != "cpu":
            raise ConfigError(f"--engine {name} is for CPUs, the device is {device}. Use vectorised, or leave it out.")
        unfit = ENGINES[name] in (Vectorised, ParallelVectorised) and _unfit(models)
        if unfit:
            raise ConfigError(
                f"--engine {name} runs many clients at once; {unfit.spec} has operations that cannot. Use sequential, "
                "or leave it out."
            )
        return name, "as asked"
    if device.type == "cpu" and cohort == 1:
        return "sequential", "a cohort of one client has nothing to batch"
    distinct = {model.spec: model for model in models}.values()
    workers = (workers or cores()) if possible() and device.type == "cpu" else 1
    beside = f", side by side on {workers} cores" if workers > 1 else ""
    alone = None
    if device.type == "cpu" and any(len(shape) > 2 for model in distinct for shape in model.shapes.values()):
        alone = "on a CPU, convolutions of many clients at once are no faster than one after another"
    elif unfit := _unfit(distinct):
        alone = f"{unfit.spec} has operations that cannot run for many clients at once"
    if alone:
        return "parallel" if workers > 1 else "sequential", alone + beside
    if device.type == "cpu":
        return "parallel_vectorised", f"on a CPU, dense models are faster in batches of a few clients{beside}"
    return "vectorised", f"on {device.type} a cohort is one batch"


def _unfit(models: Iterable[Model]) -> Model | None:
    distinct = {model.spec: model for model in models}.values()
    return next((model for model in distinct if not batchable(model)), None)


def heavy(model: Model) -> bool:
    """Whether threads inside of its operators pay, by a bound: each weight at each of a sample's pixels or tokens."""
    convolves = any(len(shape) > 2 for shape in model.shapes.values())
    pixels = math.prod(model.input_shape[1:]) if convolves else model.input_shape[0] if model.tokens else 1
    return bool(model.size * pixels >= HEAVY)


def batchable(model: Model) -> bool:
    """Whether two clients of the model can be trained and tried as one: found by doing so, on zeros."""
    params, buffers = stack([model.init(0)] * 2), stack([model.fresh_buffers()] * 2)
    x = torch.zeros(2, 2, *model.input_shape, device=model.device, dtype=model.input_dtype)
    mask = torch.ones(2, dtype=torch.bool, device=model.device)
    key = torch.zeros((), dtype=torch.int64, device=model.device)

    def loss(params: Params, buffers: Tree, x: Tensor) -> Tensor:
        outputs: Tensor = model.train(params, buffers, x, mask, key)[0]
        return outputs.sum()

    try:
        torch.func.vmap(torch.func.grad(loss))(params, buffers, x)
        torch.func.vmap(model)(params, buffers, x)
    except Exception:  # whatever vmap or the network objects to
        return False
    return True
