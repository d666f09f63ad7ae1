# SPDX-License-Identifier: Apache-2.0
"""A network for every sample, some samples at a time; or one network that is told something of each sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.contract import Model
from fedloom.core.errors import NeedsError
from fedloom.core.random import stream
from fedloom.core.trees import Params, Tree, tree_map


def net(params: Params, name: str) -> dict[str, Tensor]:
    """The parameters of one of several networks that travel side by side."""
    return {leaf.removeprefix(f"{name}."): value for leaf, value in params.items() if leaf.startswith(f"{name}.")}


def slices(count: int, size: int) -> Iterator[slice]:
    """``count`` samples in parts of ``size``."""
    return (slice(start, start + size) for start in range(0, count, size))


def gradient_by_slices(
    objective: Callable[[Params, slice], tuple[Tensor, Tensor]], params: Params, parts: Iterable[slice], beside: Tensor
) -> tuple[Params, Tensor]:
    """The gradient of a sum over parts of ``objective(params, part)[0]``; ``beside`` plus what else it gives.

    The networks of a part are gone when the next one begins: memory is bounded by the size of a part.
    """
    grads: Params = tree_map(torch.zeros_like, params)
    for part in parts:
        more, (_, of_part) = torch.func.grad_and_value(objective, has_aux=True)(params, part)
        grads, beside = tree_map(torch.add, grads, more), beside + of_part
    return grads, beside


def classify(model: Model, common: Params, own: Params, buffers: Tree, x: Tensor, keys: Tensor | None = None) -> Tensor:
    """Each sample through a network of its own: (samples, ...) -> (samples, outputs).

    ``own`` has the parameters that differ, stacked; ``common`` the others. With ``keys``, one per sample, in training
    mode, in which changes of the buffers are lost: a sample alone has no batch statistics.
    """
    if keys is None:
        return torch.vmap(lambda own, x: model({**common, **own}, buffers, x[None])[0])(own, x)

    def one(own: Params, buffers: Tree, x: Tensor, key: Tensor) -> Tensor:
        alone = torch.ones(1, dtype=torch.bool, device=x.device)
        return model.train({**common, **own}, buffers, x[None], alone, key)[0][0]

    # a sample writes into buffers of its own
    stacked = tree_map(lambda buffer: buffer.expand(len(x), *buffer.shape), buffers)
    return torch.vmap(one)(own, stacked, x, keys)


def append_init(model: Model, dim: int, seed: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """V for ``append``, drawn as the columns that ``nn.Linear`` would have for ``dim`` inputs more."""
    weight, bias = _first_layer(model)
    if bias not in model.shapes:
        raise NeedsError(
            f"Appending to the input needs a bias in the first layer; {model.spec} has no {bias}. "
            "Choose another --model."
        )
    units, bound = model.shapes[weight][0], (math.prod(model.shapes[weight][1:]) + dim) ** -0.5
    drawn = stream(seed).uniform(-bound, bound, (units, dim))
    return {"weight": torch.as_tensor(drawn).to(device, dtype)}


def append(model: Model, common: Params, params: Params, conditions: Tensor) -> dict[str, Tensor]:
    """Conditions appended to the input of a dense first layer: W [x; e] + b = W x + (b + V e), a bias per sample.

    For a convolution it is the same with a map of constant e added to the channels, but for padding at the rim.
    """
    bias = _first_layer(model)[1]
    return {bias: common[bias] + F.linear(conditions, params["weight"])}


def _first_layer(model: Model) -> tuple[str, str]:
    # a parameter that is no layer's, such as a class token, comes before those of layers
    weight = next((name for name in model.shapes if name.endswith("weight")), next(iter(model.shapes)))
    return weight, f"{weight.removesuffix('weight')}bias"
