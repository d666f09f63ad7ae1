# SPDX-License-Identifier: Apache-2.0
"""HyperGenFL's loom: from the embeddings of a cohort to one aggregation weight per client and layer.

It weaves no model: clients attend to each other, and one linear head per layer of the target network turns what each
has gathered into a score. The weights are the scores' shares, so that those of a layer sum to 1 over the cohort.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedloom.core.random import stream
from fedloom.core.trees import Params


def layers_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The parameters of each layer: those whose names differ in the last part only; one without a dot stands alone."""
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        layer = name.rpartition(".")[0] or name
        found[layer] = (*found.get(layer, ()), name)
    return found


def first_embeddings(kind: str, clients: int, dim: int, seed: int) -> Tensor:
    """One per client: ``ones``, ``random`` from N(0, 1), or ``one_hot``."""
    if kind == "random":
        return torch.as_tensor(stream(seed, "embeddings").standard_normal((clients, dim)))
    return torch.eye(clients) if kind == "one_hot" else torch.ones(clients, dim)


@dataclass(frozen=True)
class AttentionLoom:
    """The loom's structure; its parameters are a tree that ``init`` makes and every call is given."""

    embed_dim: int
    layers: Mapping[str, tuple[str, ...]]  # layer of the target -> its parameters
    width: int = 128  # of queries, keys and values together
    attention_heads: int = 4
    attention_layers: int = 1
    floor: float = 0.01  # lambda

    def init(self, seed: int, device: torch.device, dtype: torch.dtype, *, alive: bool = False) -> dict[str, Tensor]:
        """Attention as ``nn.MultiheadAttention`` initialises it, heads as ``nn.Linear`` does.

        ``alive``: the heads' biases start at 1, far from the ReLU's edge: a head that is off for the whole cohort has
        no gradient to return by.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            made: dict[str, nn.Linear] = {}
            for i in range(self.attention_layers):
                made[f"attention.{i}.in"] = nn.Linear(self.embed_dim, 3 * self.width)
                nn.init.xavier_uniform_(made[f"attention.{i}.in"].weight)
                made[f"attention.{i}.out"] = nn.Linear(self.width, self.embed_dim)
                for part in ("in", "out"):
                    nn.init.zeros_(made[f"attention.{i}.{part}"].bias)
            made["head"] = nn.Linear(self.embed_dim, len(self.layers))
            if alive:
                nn.init.ones_(made["head"].bias)
        return {
            f"{name}.{part}": value.detach().to(device, dtype)
            for name, layer in made.items()
            for part, value in layer.named_parameters()
        }

    def activations(self, params: Params, embeddings: Tensor) -> Tensor:
        """Eq. 4 and the linear part of eq. 5: (clients, embed_dim) -> (clients, layers). Positive: that head is on."""
        x = embeddings
        for i in range(self.attention_layers):
            x = x + self._attend(params, f"attention.{i}", x)
        return F.linear(torch.softmax(x, dim=-1), params["head.weight"], params["head.bias"])

    def is_alive(self, params: Params, embeddings: Tensor, size: int) -> bool:
        """Whether a head is on for anybody, in cohorts of that size."""
        number = len(embeddings) // size
        whole, rest = embeddings[: number * size], embeddings[number * size :]
        parts = [whole.reshape(number, size, embeddings.shape[1]), rest[None]]
        activations = vmap(partial(self.activations, params))
        return any(bool((activations(part) > 0).any()) for part in parts if part.numel())

    def weights(self, activations: Tensor) -> Tensor:
        """The rest of eq. 5, and eq. 6: the clients' shares of the scores, for each layer."""
        scores = torch.relu(activations) + self.floor
        shares: Tensor = scores / scores.sum(0)
        return shares

    def pull_back(
        self, before: Params, deltas: Params, loss_gradient: Callable[[Tensor, Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """The gradient of a loss of the average with respect to ``before``: the loom and, in it, ``embeddings``.

        ``deltas`` are the changes of the clients with these embeddings, stacked. ``loss_gradient(changes, weights)``
        gives the loss's slope in one layer of the average, from (active, parameters) and (active,). Weights sum to 1,
        so the average is start + sum_c alpha_c delta_c, and the slope of alpha_c is the product of delta_c with it.
        """
        wanted = {name: value.detach().double().requires_grad_() for name, value in before.items()}
        alpha = self.weights(self.activations(wanted, wanted["embeddings"]))  # (active, layers)
        slopes = []
        for weights, names in zip(alpha.detach().T, self.layers.values()):
            moved = torch.cat([deltas[name].reshape(len(alpha), -1) for name in names], dim=1).double()
            slopes.append(moved @ loss_gradient(moved, weights))
        grads = torch.autograd.grad(alpha, list(wanted.values()), torch.stack(slopes, dim=1))
        # where all clients look alike phi has no gradient; AdamW would divide what rounding leaves of it by its size
        rounding = 1e-12 * torch.stack([grad.abs().max() for grad in grads]).max()
        return {
            name: torch.where(grad.abs() > rounding, grad, 0.0).to(before[name].dtype)
            for name, grad in zip(wanted, grads)
        }

    def effective_clients(self, weights: Tensor) -> dict[str, float]:
        """For each layer, how many clients the weights amount to, by name for a run's records."""
        effective = 1 / weights.square().sum(0)  # all of them if all weigh the same
        return {f"effective_clients.{layer}": float(n) for layer, n in zip(self.layers, effective)}

    def _attend(self, params: Params, name: str, x: Tensor) -> Tensor:
        """Self-attention among the clients."""
        joint = F.linear(x, params[f"{name}.in.weight"], params[f"{name}.in.bias"])
        # (clients, 3 width) -> three of (attention heads, clients, width / attention heads)
        query, key, value = joint.reshape(len(x), 3, self.attention_heads, -1).permute(1, 2, 0, 3)
        attention = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1)
        gathered = (attention @ value).transpose(0, 1).reshape(len(x), self.width)
        return F.linear(gathered, params[f"{name}.out.weight"], params[f"{name}.out.bias"])
