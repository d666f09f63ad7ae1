# SPDX-License-Identifier: Apache-2.0
"""pFedLA's looms: one for each client, which says how much of everybody's model goes into its own, layer by layer.

A loom is an embedding, hidden layers with ReLU, and one linear head per layer of the target network with a number for
each client; ReLU and shares make weights of these. The looms of all clients are kept as stacks: row i of every tensor
is client i's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.random import stream
from fedloom.core.trees import Params


@dataclass(frozen=True)
class MixingLooms:
    """The structure of the looms; their parameters are a tree that ``init`` makes and every call is given."""

    clients: int
    targets: int  # layers of the target network
    embed_dim: int = 100
    hidden: int = 100
    layers: int = 3

    def init(self, seed: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Embeddings from N(0, 1), layers as in ``nn.Linear``, heads from U(0, 1): all scores positive."""
        drawn, outputs = stream(seed, "mixing looms"), self.targets * self.clients
        found = {"embedding": drawn.standard_normal((self.clients, self.embed_dim))}
        for i in range(self.layers):
            inputs = self.hidden if i else self.embed_dim
            bound = 1 / math.sqrt(inputs)
            found[f"trunk.{i}.weight"] = drawn.uniform(-bound, bound, (self.clients, self.hidden, inputs))
            found[f"trunk.{i}.bias"] = drawn.uniform(-bound, bound, (self.clients, self.hidden))
        found["head.weight"] = drawn.uniform(0, 1, (self.clients, outputs, self.hidden))
        found["head.bias"] = 0 * drawn.uniform(0, 1, (self.clients, outputs))
        return {name: torch.as_tensor(value).to(device, dtype) for name, value in found.items()}

    def __call__(self, rows: Params, own: Tensor) -> Tensor:
        """alpha: (some clients, layers, clients), summing to 1 over the last; ``own`` says which clients the rows are.

        A layer whose scores are all 0 is the client's own alone.
        """
        x = rows["embedding"]
        for i in range(self.layers):
            x = torch.relu(_dense(rows, f"trunk.{i}", x))
        scores = torch.relu(_dense(rows, "head", x)).reshape(len(x), self.targets, self.clients)
        total = scores.sum(2, keepdim=True)
        alone = torch.nn.functional.one_hot(own, self.clients).to(scores)[:, None]
        return torch.where(total > 0, scores / torch.where(total > 0, total, 1), alone)


def _dense(rows: Params, layer: str, x: Tensor) -> Tensor:
    return torch.baddbmm(rows[f"{layer}.bias"][..., None], rows[f"{layer}.weight"], x[..., None])[..., 0]


def mix(alpha: Tensor, models: Params, layers: Iterable[tuple[str, ...]]) -> dict[str, Tensor]:
    """sum_j alpha_ij^l theta_j^l of each of the clients i, for the parameters of each layer l."""
    return {
        name: torch.tensordot(weights, models[name], dims=1)
        for weights, names in zip(alpha.unbind(1), layers, strict=True)
        for name in names
    }
