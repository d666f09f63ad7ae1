# SPDX-License-Identifier: Apache-2.0
"""Optimisers as pure functions: ``init(params) -> state`` and ``update(params, grads, state) -> (params, state)``.

The same ones train clients and looms. They give what ``torch.optim`` gives (tested), state is a tree like any other,
and they run under ``vmap``. Clipping is by the norm over all tensors together, as ``clip_grad_norm_`` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from fedloom.core.trees import Params, Tree, squared_norm, tree_map

OptimiserName = Literal["sgd", "adam", "adamw"]


@dataclass(frozen=True)
class Optimiser:
    """SGD (with momentum), Adam or AdamW; ``clip`` 0 means no clipping."""

    name: OptimiserName = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def init(self, params: Params) -> Tree:
        """The state before the first step."""
        if self.name == "sgd":
            return {"momentum": tree_map(torch.zeros_like, params)} if self.momentum else {}
        first = next(iter(params.values()))
        return {
            "mean": tree_map(torch.zeros_like, params),
            "square": tree_map(torch.zeros_like, params),
            "count": torch.zeros((), dtype=first.dtype, device=first.device),
        }

    def update(self, params: Params, grads: Params, state: Tree) -> tuple[Params, Tree]:
        """One step; the inputs are left as they are."""
        if self.clip:
            scale = (self.clip / (squared_norm(grads).sqrt() + 1e-6)).clamp(max=1.0)
            grads = tree_map(lambda g: g * scale, grads)
        if self.weight_decay and self.name != "adamw":
            grads = tree_map(lambda g, p: torch.add(g, p, alpha=self.weight_decay), grads, params)
        return self._sgd(params, grads, state) if self.name == "sgd" else self._adam(params, grads, state)

    def _sgd(self, params: Params, grads: Params, state: Tree) -> tuple[Params, Tree]:
        if self.momentum:
            # as torch does: no dampening, so that the first step is the plain gradient
            grads = tree_map(lambda g, m: torch.add(g, m, alpha=self.momentum), grads, state["momentum"])
            state = {"momentum": grads}
        return tree_map(lambda p, g: torch.add(p, g, alpha=-self.lr), params, grads), state

    def _adam(self, params: Params, grads: Params, state: Tree) -> tuple[Params, Tree]:
        b1, b2 = self.betas
        count = state["count"] + 1
        mean = tree_map(lambda m, g: torch.lerp(m, g, 1 - b1), state["mean"], grads)
        square = tree_map(lambda s, g: b2 * s + (1 - b2) * g * g, state["square"], grads)
        # 1 - b**count, without the rounding of 0.999 to the parameters' type
        corrections = [-torch.expm1(count * (math.log(b) if b else -math.inf)) for b in self.betas]
        rate, root = self.lr / corrections[0], torch.sqrt(corrections[1])
        decay = 1 - self.lr * self.weight_decay if self.name == "adamw" else 1.0
        params = tree_map(lambda p, m, s: decay * p - rate * m / (s.sqrt() / root + self.eps), params, mean, square)
        return params, {"mean": mean, "square": square, "count": count}
