# SPDX-License-Identifier: Apache-2.0
"""Optimisers as pure functions: ``init(params) -> state`` and ``update(params, grads, state) -> (params, state)``.

The same ones train clients and looms. They give what ``torch.optim`` gives (tested), state is a tree like any other,
and they run under ``vmap``. Clipping is by the norm over all tensors together, as ``clip_grad_norm_`` does.
"""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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
            grads = clipped(grads, self.clip)
        if self.weight_decay and self.name != "adamw":
            grads = tree_map(lambda g, p: torch.add(g, p, alpha=self.weight_decay), grads, params)
        return self._sgd(params, grads, state) if self.name == "sgd" else self._adam(params, grads, state)

    def coast(self, values: Tensor, momentum: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of a table and of its momentum after ``steps`` (rows,) steps of SGD without a gradient.

        Momentum and decay act on rows that nobody touches. Each step is one 2 x 2 matrix, so that rows can wait until
        they are touched and then take all steps at once, by the powers of its eigenvalues.
        """
        if self.name != "sgd":
            raise NotImplementedError(f"only sgd can coast, not {self.name}")
        keep, mu = 1 - self.lr * self.weight_decay, self.momentum
        a, b, c, d = keep, -self.lr * mu, self.weight_decay, mu  # value' = a value + b momentum; momentum' = c, d
        root = cmath.sqrt((a - d) ** 2 + 4 * b * c)
        one, other = (a + d + root) / 2, (a + d - root) / 2
        k = steps.to(torch.complex128)[:, None]
        if root:
            # A^k = p A + q by Cayley and Hamilton
            p = (_power(one, k) - _power(other, k)) / root
            q = (one * _power(other, k) - other * _power(one, k)) / root
        else:
            p = k * _power(one, k - 1)
            q = (1 - k) * _power(one, k)
        p, q = p.real, q.real
        wide, moving = values.double(), momentum.double()
        after = (p * a + q) * wide + p * b * moving, p * c * wide + (p * d + q) * moving
        still = (steps == 0)[:, None]
        return torch.where(still, values, after[0].to(values)), torch.where(still, momentum, after[1].to(values))

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


def clipped(grads: Params, largest: float) -> dict[str, Tensor]:
    """The gradients, scaled down to a norm of at most ``largest``, over all tensors together."""
    scale = (largest / (squared_norm(grads).sqrt() + 1e-6)).clamp(max=1.0)
    scaled: dict[str, Tensor] = tree_map(lambda g: g * scale, grads)
    return scaled


def _power(base: complex, exponent: Tensor) -> Tensor:
    powers: Tensor = torch.pow(base, exponent)
    return powers if base else (exponent == 0).to(powers)  # complex 0 to the 0 is not a number
