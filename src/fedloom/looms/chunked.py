# SPDX-License-Identifier: Apache-2.0
"""A loom that weaves a network chunk by chunk, small enough to run on clients.

The parameters of the target network are one vector, cut into chunks of one size. A chunk has an embedding of its own;
one fully connected network, the same for all chunks, makes chunk k from the condition e and the chunk's embedding v_k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import NeedsError
from fedloom.core.trees import Params


@dataclass(frozen=True)
class ChunkedLoom:
    """The loom's structure; its parameters are a tree that ``init`` makes and every call is given."""

    condition_dim: int
    size: int  # parameters to weave
    hidden: tuple[int, ...] = (300, 300)
    chunk_size: int = 576
    chunk_dim: int = 32

    @property
    def chunks(self) -> int:
        """Enough for every parameter; what the last chunk has too many of is discarded."""
        return math.ceil(self.size / self.chunk_size)

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the network that all chunks share."""
        return (self.condition_dim + self.chunk_dim, *self.hidden, self.chunk_size)

    @property
    def num_params(self) -> int:
        """The loom's own parameters."""
        return self.chunks * self.chunk_dim + dense_size(self.widths)

    def init(self, seed: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Layers as ``nn.Linear`` initialises them, chunk embeddings from N(0, 1)."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            chunks = torch.randn(self.chunks, self.chunk_dim).to(device, dtype)
            return {"chunks": chunks, **_dense(self.widths, device, dtype)}

    def __call__(self, params: Params, conditions: Tensor) -> Tensor:
        """(samples, condition_dim) -> (samples, size)."""
        # the first layer is a sum over its two inputs: neither is repeated for every pair
        weight = params["0.weight"]
        ours = F.linear(conditions, weight[:, : self.condition_dim], params["0.bias"])
        theirs = F.linear(params["chunks"], weight[:, self.condition_dim :])
        x = ours[:, None] + theirs  # (samples, chunks, width)
        for i in range(1, len(self.widths) - 1):
            x = F.linear(F.relu(x), params[f"{i}.weight"], params[f"{i}.bias"])
        return x.flatten(1)[:, : self.size]


@cache
def matched(loom: ChunkedLoom, others: int) -> ChunkedLoom:
    """The loom with hidden layers so wide that, with ``others``, it has as many parameters as it weaves, within 5%.

    Where one unit more or less is too coarse a step, chunks are halved.
    """
    budget, found = loom.size - others, loom
    while found.chunk_size >= 1:
        low, high = 1, max(budget, 1)
        while low < high:  # the widest within the budget: the number of parameters grows with the width
            middle = (low + high + 1) // 2
            low, high = (middle, high) if _wide(found, middle).num_params <= budget else (low, middle - 1)
        nearest = min((_wide(found, low), _wide(found, low + 1)), key=lambda one: abs(one.num_params - budget))
        if abs(nearest.num_params - budget) <= 0.05 * loom.size:
            return nearest
        found = replace(found, chunk_size=found.chunk_size // 2)
    raise NeedsError(
        f"No loom has, with the {others:,} parameters of the extractor, as many as the {loom.size:,} that it weaves; "
        "give another --extractor-hidden, a larger --model, or leave --size-match out."
    )


def _wide(loom: ChunkedLoom, width: int) -> ChunkedLoom:
    return replace(loom, hidden=(width,) * len(loom.hidden))


def dense_init(widths: Sequence[int], seed: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters ``0.weight``, ``0.bias``, ``1.weight`` ... of fully connected layers."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _dense(widths, device, dtype)


def dense(params: Params, x: Tensor) -> Tensor:
    """Fully connected layers with ReLU between them."""
    for i in range(len(params) // 2):
        x = F.linear(F.relu(x) if i else x, params[f"{i}.weight"], params[f"{i}.bias"])
    return x


def dense_size(widths: Sequence[int]) -> int:
    """The number of parameters of fully connected layers."""
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(widths))


def _dense(widths: Sequence[int], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
    return {
        f"{i}.{part}": value.detach().to(device, dtype)
        for i, layer in enumerate(layers)
        for part, value in layer.named_parameters()
    }
