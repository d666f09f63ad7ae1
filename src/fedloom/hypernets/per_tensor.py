# SPDX-License-Identifier: Apache-2.0
"""pFedHN's loom: a fully connected trunk, then one linear head per tensor of the target network.

The heads of one architecture are kept side by side as one matrix, so that weaving a model is one product; several
architectures have their own heads on the same trunk (pFedHN, sec. 5.2: one loom for the budgets S, M and L).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.config import option
from fedloom.core.errors import ConfigError
from fedloom.core.optim import Optimiser
from fedloom.core.training import LocalConfig
from fedloom.core.trees import Params

Shapes = Mapping[str, tuple[int, ...]]

MAX_DEFAULT_DIM = 10_000
"""The paper has at most 500 clients; its rule for the size of an embedding is not meant for millions."""


@dataclass(frozen=True, kw_only=True)
class PerTensorConfig(LocalConfig):
    """The options of every method with this loom: its size, and how the server steps."""

    embed_dim: int = option(0, "Size of an embedding; 0: 1 + clients // 4 (pFedHN, sec. 5).", low=0)
    hidden: int = option(100, "Width of the loom's trunk (pFedHN, App. B).", low=1)
    layers: int = option(3, "Hidden layers of the loom (pFedHN, App. B; C.3.3 tries 1 to 5).", low=1)
    server_lr: float = option(1e-2, "Outer learning rate, alpha (pFedHN's code).", low=0)
    server_momentum: float = option(0.9, "Outer momentum (pFedHN's code).", low=0, high=1)
    server_weight_decay: float = option(1e-3, "Outer weight decay, embeddings included (pFedHN's code).", low=0)
    server_clip: float = option(50.0, "Largest norm of an outer gradient; 0: no clipping (pFedHN's code).", low=0)
    server_step: Literal["per_client", "cohort_mean"] = option(
        "per_client", "One outer step per reply (the paper), or one on the mean, which wants a higher rate."
    )

    def dim(self, clients: int) -> int:
        """The size of an embedding: as given, or by the paper's rule."""
        size = self.embed_dim or 1 + clients // 4
        if size > MAX_DEFAULT_DIM and not self.embed_dim:
            raise ConfigError(
                f"The paper's embeddings of {size:,} numbers are too large for {clients:,} clients. "
                "Give --embed-dim, e.g. 32."
            )
        return size

    def outer(self) -> Optimiser:
        """The optimiser of loom and embeddings."""
        return Optimiser("sgd", self.server_lr, self.server_momentum, self.server_weight_decay, self.server_clip)


@dataclass(frozen=True)
class PerTensorLoom:
    """The loom's structure; its parameters are a tree that ``init`` makes and every call is given."""

    embed_dim: int
    targets: Mapping[str, Shapes]  # architecture -> the shapes it weaves
    hidden: int = 100
    layers: int = 3
    spectral_norm: bool = False

    def init(self, seed: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every layer as ``nn.Linear`` initialises it."""
        sizes = [(f"trunk.{i}", self.hidden, self.hidden if i else self.embed_dim) for i in range(self.layers + 1)]
        sizes += [(f"head.{name}", _total(shapes), self.hidden) for name, shapes in self.targets.items()]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            made = {name: nn.Linear(inputs, outputs) for name, outputs, inputs in sizes}
        return {
            f"{name}.{part}": value.detach().to(device, dtype)
            for name, layer in made.items()
            for part, value in layer.named_parameters()
        }

    def __call__(self, params: Params, embeddings: Tensor, target: str) -> Tensor:
        """The woven parameters as vectors: (clients, embed_dim) -> (clients, parameters)."""
        x = embeddings
        for i in range(self.layers + 1):
            weight = params[f"trunk.{i}.weight"]
            weight = weight / _largest_singular_value(weight) if self.spectral_norm else weight
            x = F.linear(F.relu(x) if i else x, weight, params[f"trunk.{i}.bias"])
        weight = params[f"head.{target}.weight"]
        if self.spectral_norm:
            blocks = torch.split(weight, [math.prod(shape) for shape in self.targets[target].values()])
            weight = torch.cat([block / _largest_singular_value(block) for block in blocks])
        return F.linear(x, weight, params[f"head.{target}.bias"])

    def unflatten(self, vectors: Tensor, target: str) -> dict[str, Tensor]:
        """(clients, parameters) -> {name: (clients, ...)}."""
        shapes = self.targets[target]
        parts = torch.split(vectors, [math.prod(shape) for shape in shapes.values()], dim=1)
        return {name: part.reshape(len(part), *shape) for (name, shape), part in zip(shapes.items(), parts)}

    def flatten(self, params: Params, target: str) -> Tensor:
        """{name: (clients, ...)} -> (clients, parameters)."""
        return torch.cat([params[name].reshape(len(params[name]), -1) for name in self.targets[target]], dim=1)


def _total(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _largest_singular_value(weight: Tensor) -> Tensor:
    """Exact, from the small Gram matrix: a power iteration would be state to carry."""
    gram = weight.T @ weight if weight.shape[0] >= weight.shape[1] else weight @ weight.T
    largest: Tensor = torch.linalg.eigvalsh(gram)[-1]
    return largest.clamp(min=1e-24).sqrt()
