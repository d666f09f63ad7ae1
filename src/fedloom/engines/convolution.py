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


AT_ONCE = 80
"""Products that keep a GPU busy: of fewer clients each has several, for parts of its batch."""


def products_for(clients: int) -> AsProducts:
    """Convolutions as products, where that is faster for so many clients."""
    return AsProducts(MIN_INPUTS if clients < MANY else 1, max(1, AT_ONCE // clients))


class AsProducts(TorchFunctionMode):
    """Within it, ``conv2d`` with stride 1 is computed as products of at least ``min_inputs`` terms.

    A batch makes at most ``parts`` products, of as many samples each.
    """

    def __init__(self, min_inputs: int = 1, parts: int = 1) -> None:
        super().__init__()
        self.min_inputs, self.parts = min_inputs, parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            found = _as_products(self.min_inputs, self.parts, *args, **(kwargs or {}))
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))


def _as_products(
    min_inputs: int,
    parts: int,
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
    parts = next(number for number in range(min(parts, len(input)), 0, -1) if len(input) % number == 0)
    patches: Tensor = _Patches.apply(x, high, wide, parts)
    y = torch.bmm(weight.reshape(1, outputs, -1).expand(parts, -1, -1), patches)
    y = y.reshape(parts, outputs, -1, rows, columns).transpose(1, 2).reshape(-1, outputs, rows, columns)
    return y if bias is None else y + bias[:, None, None]


class _Patches(torch.autograd.Function):
    """(batch, inputs, ...) -> (parts, inputs * high * wide, samples of a part * rows * columns).

    What each output value is made of.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, high: int, wide: int, parts: int) -> Tensor:
        windows: Tensor = x.unflatten(0, (parts, -1)).unfold(3, high, 1).unfold(4, wide, 1)
        # (parts, samples, inputs, rows, columns, high, wide)
        return windows.permute(0, 2, 5, 6, 1, 3, 4).reshape(parts, x.shape[1] * high * wide, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int, int], output: Tensor) -> None:
        x, ctx.high, ctx.wide, ctx.parts = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (batch, inputs, tall, broad), high, wide = ctx.shape, ctx.high, ctx.wide
        rows, columns = tall - high + 1, broad - wide + 1
        windows = grad.reshape(ctx.parts, inputs, high, wide, -1, rows, columns)
        # padded to the input's size, the windows are summed by one fused kernel
        places = [(i, j) for i in range(high) for j in range(wide)]
        padded = [F.pad(windows[:, :, i, j], (j, wide - 1 - j, i, high - 1 - i)) for i, j in places]
        summed = functools.reduce(torch.add, padded).transpose(1, 2)
        return summed.reshape(batch, inputs, tall, broad), None, None, None


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)
