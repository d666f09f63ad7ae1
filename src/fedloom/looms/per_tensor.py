# SPDX-License-Identifier: Apache-2.0
"""pFedHN's loom: a fully connected trunk, then one linear head per tensor of the target network.

The heads of one architecture are kept side by side as one matrix, so that weaving a model is one product; several
architectures have their own heads on the same trunk (pFedHN, sec. 5.2: one loom for the budgets S, M and L). Heads may
be sharded, by their outputs: then each shard makes its part of every model (``core.sharded``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.sharded import Each, Sharded, Shards, made, ranges, through
from fedloom.core.trees import Params

Shapes = Mapping[str, tuple[int, ...]]

AT_ONCE = 1 << 14
"""Rows of a head that a shard draws at a time."""


@dataclass(frozen=True)
class Targets:
    """What a loom weaves tensor by tensor, from embeddings of so many numbers."""

    embed_dim: int
    targets: Mapping[str, Shapes]  # architecture -> the shapes it weaves

    def unflatten(self, vectors: Tensor, target: str) -> dict[str, Tensor]:
        """(clients, parameters) -> {name: (clients, ...)}."""
        shapes = self.targets[target]
        parts = torch.split(vectors, sizes_of(shapes), dim=1)
        return {name: part.reshape(len(part), *shape) for (name, shape), part in zip(shapes.items(), parts)}

    def flatten(self, params: Params, target: str) -> Tensor:
        """{name: (clients, ...)} -> (clients, parameters)."""
        return torch.cat([params[name].reshape(len(params[name]), -1) for name in self.targets[target]], dim=1)


@dataclass(frozen=True)
class PerTensorLoom(Targets):
    """The loom's structure; its parameters are a tree that ``init`` makes and every call is given."""

    hidden: int = 100
    layers: int = 3
    spectral_norm: bool = False

    def init(
        self, seed: int, device: torch.device, dtype: torch.dtype, shards: Shards | None = None
    ) -> dict[str, Tensor]:
        """Every layer as ``nn.Linear`` initialises it; heads in ``shards``, if there are some: the same numbers.

        With ``spectral_norm`` heads stay here: a singular value is of a whole tensor.
        """
        trunk = [(f"trunk.{i}", self.hidden, self.hidden if i else self.embed_dim) for i in range(self.layers + 1)]
        heads = [(f"head.{name}", sum(sizes_of(shapes)), self.hidden) for name, shapes in self.targets.items()]
        if shards is None or self.spectral_norm:
            return first_layers([*trunk, *heads], seed, device, dtype)
        params = first_layers(trunk, seed, device, dtype)
        for i, (name, outputs, inputs) in enumerate(heads):
            before = [size for _, *size in (*trunk, *heads[:i])]
            shapes, rows = [(outputs, inputs), (outputs,)], Each(ranges(outputs, shards.number))
            layer = made(shards, shapes, dtype, device, _some_outputs, seed, before, (outputs, inputs), rows, dtype)
            params |= {f"{name}.weight": layer[0], f"{name}.bias": layer[1]}
        return params

    def __call__(self, params: Params, embeddings: Tensor, target: str) -> Tensor:
        """The woven parameters as vectors: (clients, embed_dim) -> (clients, parameters)."""
        x = embeddings
        for i in range(self.layers + 1):
            weight = params[f"trunk.{i}.weight"]
            weight = weight / _largest_singular_value(weight) if self.spectral_norm else weight
            x = F.linear(F.relu(x) if i else x, weight, params[f"trunk.{i}.bias"])
        weight = params[f"head.{target}.weight"]
        if self.spectral_norm:
            blocks = torch.split(weight, sizes_of(self.targets[target]))
            weight = torch.cat([block / _largest_singular_value(block) for block in blocks])
        bias = params[f"head.{target}.bias"]
        if isinstance(weight, Sharded) and isinstance(bias, Sharded):
            return through(_head, x, weight, bias, cut=False)
        return _head(x, weight, bias)


def first_layers(
    sizes: Iterable[tuple[str, int, int]], seed: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Dense layers of these names, outputs and inputs, as ``nn.Linear`` initialises them."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = {name: nn.Linear(inputs, outputs) for name, outputs, inputs in sizes}
    return {
        f"{name}.{part}": value.detach().to(device, dtype)
        for name, layer in made.items()
        for part, value in layer.named_parameters()
    }


def _head(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def _some_outputs(
    seed: int, before: Iterable[tuple[int, int]], size: tuple[int, int], rows: range, dtype: torch.dtype
) -> tuple[list[Tensor], None]:
    """Some outputs of a layer of ``size``, drawn as if it came whole, after layers of the sizes ``before``."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for others in before:
            _drawn(*others, range(0), dtype)
        return _drawn(*size, rows, dtype), None


def _drawn(outputs: int, inputs: int, rows: range, dtype: torch.dtype) -> list[Tensor]:
    """Those rows of the weight and the bias of an ``nn.Linear``, for which all are drawn, some at a time."""
    bound = 1 / math.sqrt(inputs)
    found = []
    for shape in ((inputs,), ()):
        own = torch.empty(len(rows), *shape, dtype=dtype)
        for start in range(0, outputs, AT_ONCE):
            some = torch.empty(min(AT_ONCE, outputs - start), *shape)
            some = nn.init.kaiming_uniform_(some, a=math.sqrt(5)) if shape else some.uniform_(-bound, bound)
            first, last = max(start, rows.start), min(start + len(some), rows.stop)
            if first < last:
                own[first - rows.start : last - rows.start] = some[first - start : last - start]
        found.append(own)
    return found


def sizes_of(shapes: Shapes) -> list[int]:
    """The number of parameters in each tensor."""
    return [math.prod(shape) for shape in shapes.values()]


def _largest_singular_value(weight: Tensor) -> Tensor:
    """Exact, from the small Gram matrix: a power iteration would be state to carry."""
    gram = weight.T @ weight if weight.shape[0] >= weight.shape[1] else weight @ weight.T
    largest: Tensor = torch.linalg.eigvalsh(gram)[-1]
    return largest.clamp(min=1e-24).sqrt()
