# SPDX-License-Identifier: Apache-2.0
"""Convolutions of many clients by kernels of our own or as matrix products, for steps that are compiled.

A convolution with a weight per client is a grouped one, for which cuDNN has no good exact kernels: it runs a kernel per
client. Written as a product with the shifted copies of the input (im2col), a cohort is one batched product, and the
compiler makes the copies, and the sum over them that is their gradient, one kernel each. Kernels of our own (see
``kernels``) do without the copies; they need Triton, which comes with torch for CUDA, and tensor cores.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

MIN_INPUTS = 128
"""Input values per output value: below, the product is too thin to be faster, unless for very many clients."""

MAX_INPUTS = 1024
"""Input values per output value: below, kernels of our own are used."""

MAX_NUMBERS = 1 << 31
"""Of a client's images: kernels of our own count them in 32 bits."""

MANY = 200
"""Above so many clients products are faster, whatever their shape."""


AT_ONCE = 80
"""Products that keep a GPU busy: of fewer clients each has several, for parts of its batch."""


def faster_for(clients: int, own_kernels: bool = True) -> Faster:
    """Convolutions as they are fastest for so many clients, by kernels of our own only where they are wanted."""
    few = clients < MANY
    return Faster(MIN_INPUTS if few else 1, max(1, AT_ONCE // clients), MAX_INPUTS if few and own_kernels else 0)


class Faster(TorchFunctionMode):
    """Within it, ``conv2d`` with stride 1 is computed by kernels of our own, or as products.

    Kernels of our own where there are some for the device and type, and an output value has less than ``own_inputs``
    input values. Products else, of at least ``min_inputs`` terms; a batch makes at most ``parts`` of them, of as many
    samples each.
    """

    def __init__(self, min_inputs: int = 1, parts: int = 1, own_inputs: int = 0) -> None:
        super().__init__()
        self.min_inputs, self.parts, self.own_inputs = min_inputs, parts, own_inputs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            found = self._convolved(*args, **(kwargs or {}))
            if found is not None:
                return found
        return func(*args, **(kwargs or {}))

    def _convolved(
        self,
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
        if not plain or input.dim() != 4 or high * wide == 1:
            return None
        numbers = input.numel() // inputs * max(inputs, outputs)
        own = inputs * high * wide < self.own_inputs and 0 < numbers < MAX_NUMBERS and _has_kernels(input)
        if own and not torch.is_autocast_enabled("cuda"):
            from fedloom.engines.kernels import convolution  # imports Triton, which only this needs

            precision = "tf32" if torch.get_float32_matmul_precision() == "high" else "tf32x3"
            return convolution(input, weight, bias, *_pair(padding), precision)
        if inputs * high * wide < self.min_inputs:
            return None
        y = _as_products(self.parts, input, weight, *_pair(padding))
        return y if bias is None else y + bias[:, None, None]


def _has_kernels(input: Tensor) -> bool:
    if not input.is_cuda or input.dtype not in (torch.float32, torch.bfloat16):
        return False
    return why_no_kernels(input.device) is None


@functools.cache
def why_no_kernels(device: torch.device) -> str | None:
    """Why there are no kernels of our own for a GPU; None if there are."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} cannot compute with TF32"
    return None


def _as_products(parts: int, input: Tensor, weight: Tensor, up: int, side: int) -> Tensor:
    outputs, _, high, wide = weight.shape
    x = F.pad(input, (side, side, up, up)) if up or side else input
    rows, columns = x.shape[2] - high + 1, x.shape[3] - wide + 1
    parts = next(number for number in range(min(parts, len(input)), 0, -1) if len(input) % number == 0)
    patches: Tensor = _Patches.apply(x, high, wide, parts)
    y = torch.bmm(weight.reshape(1, outputs, -1).expand(parts, -1, -1), patches)
    return y.reshape(parts, outputs, -1, rows, columns).transpose(1, 2).reshape(-1, outputs, rows, columns)


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
