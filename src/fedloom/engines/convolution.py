# SPDX-License-Identifier: Apache-2.0
"""Convolutions of many clients as matrix products, for steps that are compiled.

A convolution with a weight per client is a grouped one, for which cuDNN has no good exact kernels: it runs a kernel per
client. Written as a product with the shifted copies of the input (im2col), a cohort is one batched product, and the
compiler makes the copies, and the sum over them that is their gradient, one kernel each.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MIN_INPUTS = 128
"""Input values per output value: below, the product is too thin to be faster, unless for very many clients."""

MANY = 200
"""Clients from which on products are faster whatever their shape."""


def products_for(clients: int) -> AsProducts:
    """Convolutions as products, where that is faster for so many clients."""
    return AsProducts(MIN_INPUTS if clients < MANY else 1)


class AsProducts(TorchFunctionMode):
    """Within it, ``conv2d`` with stride 1 is computed as a product, if one of at least ``min_inputs`` terms."""

    def __init__(self, min_inputs: int = 1) -> None:
        super().__init__()
        self.min_inputs = min_inputs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            found = _as_product(self.min_inputs, *args, **(kwargs or {}))
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))


def _as_product(
    min_inputs: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """The convolution, or None where it is not of the kind that gains."""
    outputs, inputs, high, wide = weight.shape
    plain = {1, (1, 1)} >= {_pair(stride), _pair(dilation)} and groups == 1 and not isinstance(padding, str)
    if not plain or input.dim() != 4 or high * wide == 1 or inputs * high * wide < min_inputs:
        return None
    up, side = _pair(padding)
    x = F.pad(input, (side, side, up, up)) if up or side else input
    rows, columns = x.shape[2] - high + 1, x.shape[3] - wide + 1
    patches: Tensor = _Patches.apply(x, high, wide)
    y = (weight.reshape(outputs, -1) @ patches).reshape(outputs, len(input), rows, columns).transpose(0, 1)
    return y if bias is None else y + bias[:, None, None]


class _Patches(torch.autograd.Function):
    """(batch, inputs, ...) -> (inputs * high * wide, batch * rows * columns): what each output value is made of."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, high: int, wide: int) -> Tensor:
        windows = x.unfold(2, high, 1).unfold(3, wide, 1)  # (batch, inputs, rows, columns, high, wide)
        return windows.permute(1, 4, 5, 0, 2, 3).reshape(x.shape[1] * high * wide, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        x, ctx.high, ctx.wide = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (batch, inputs, tall, broad), high, wide = ctx.shape, ctx.high, ctx.wide
        rows, columns = tall - high + 1, broad - wide + 1
        parts = grad.reshape(inputs, high, wide, batch, rows, columns)
        # padded to the input's size, the parts are summed by one fused kernel
        places = [(i, j) for i in range(high) for j in range(wide)]
        padded = [F.pad(parts[:, i, j], (j, wide - 1 - j, i, high - 1 - i)) for i, j in places]
        return functools.reduce(torch.add, padded).transpose(0, 1), None, None


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)
