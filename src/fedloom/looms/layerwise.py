# SPDX-License-Identifier: Apache-2.0
"""pFedLHN's loom: each tensor of a client's network has coefficients of its own over a few common embeddings.

An embedding of this loom is a client's row of coefficients, so many for each tensor in turn. What they make of the
common embeddings goes through one dense layer and then through the tensor's own head. All of it is linear. Rows are as
long as the architecture with the most tensors needs; others use the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.random import stream
from fedloom.core.trees import Params
from fedloom.looms.per_tensor import Targets, first_layers, sizes_of


@dataclass(frozen=True)
class LayerwiseLoom(Targets):
    """The loom's structure; its parameters are a tree that ``init`` makes and every call is given."""

    basis: int = 5  # common embeddings
    width: int = 40  # numbers in one of them
    hidden: int = 128

    def init(self, seed: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Common embeddings from N(0, 1); layers as ``nn.Linear`` initialises them."""
        sizes = [("trunk", self.hidden, self.width)]
        sizes += [(f"head.{name}", sum(sizes_of(shapes)), self.hidden) for name, shapes in self.targets.items()]
        drawn = torch.as_tensor(stream(seed, "basis").standard_normal((self.basis, self.width)))
        return {"basis": drawn.to(device, dtype), **first_layers(sizes, seed, device, dtype)}

    def __call__(self, params: Params, embeddings: Tensor, target: str) -> Tensor:
        """The woven parameters as vectors: (clients, embed_dim) -> (clients, parameters)."""
        tensors = sizes_of(self.targets[target])
        coefficients = embeddings[:, : len(tensors) * self.basis].reshape(len(embeddings), len(tensors), self.basis)
        x = F.linear(coefficients @ params["basis"], params["trunk.weight"], params["trunk.bias"])
        weights, biases = (torch.split(params[f"head.{target}.{part}"], tensors) for part in ("weight", "bias"))
        return torch.cat([F.linear(x[:, i], *head) for i, head in enumerate(zip(weights, biases))], dim=1)
