# SPDX-License-Identifier: Apache-2.0
"""Convolutions of a stack of clients, each with weights of its own, by Triton kernels.

A convolution is a product of the weights with what each output is made of, its taps: (outputs, taps) times (taps,
pixels). The libraries have a grouped convolution for it, which for few channels is far from what a GPU can do, or want
the taps written out, 25 times the image. Here a tile of them is gathered when it is multiplied. The gradient by the
input is a convolution too, of the gradient with the weights turned round; the gradient by the weights sums over the
pixels, in parts that are added afterwards, always in the same order.

``precision`` is that of Triton's ``dot``: "tf32x3" splits a float32 into two TF32 numbers and leaves out the smallest
of the four products, which is as exact as float32; "tf32" does not split. Other types than float32 ignore it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FILLED = 264
"""Tiles of a result, a program each, above which a large GPU is busy: two for each of its processors."""

PIXELS, TAPS = 32, 32
"""Of a step of a sum over pixels."""


@triton.jit
def _taps(x, at, there, i, j, k, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
          UP: tl.constexpr, SIDE: tl.constexpr):  # fmt: skip
    """(taps, pixels): taps ``k`` of the outputs (i, j), which begin ``at``; 0 where there are none."""
    h, w = k // KW % KH - UP, k % KW - SIDE
    there = (k < K)[:, None] & there[None, :]
    if UP or SIDE:
        row, column = i[None, :] + h[:, None], j[None, :] + w[:, None]
        there = there & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    return tl.load(x + at[None, :] + (k // (KH * KW) * (H * W) + h * W + w)[:, None], mask=there, other=0.0)


@triton.jit
def _convolve(x, weight, bias, y, B: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUT: tl.constexpr,
              KH: tl.constexpr, KW: tl.constexpr, UP: tl.constexpr, SIDE: tl.constexpr, PRECISION: tl.constexpr,
              BIASED: tl.constexpr, PIXELS: tl.constexpr, TAPS: tl.constexpr, OUTPUTS: tl.constexpr):  # fmt: skip
    """PIXELS pixels of OUTPUTS channels of one client."""
    OH: tl.constexpr = H + 2 * UP - KH + 1
    OW: tl.constexpr = W + 2 * SIDE - KW + 1
    K: tl.constexpr = C * KH * KW
    client = tl.program_id(1).to(tl.int64)
    p = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    o = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = p < B * OH * OW
    b, r = p // (OH * OW), p % (OH * OW)
    i, j = r // OW, r % OW
    sums = tl.zeros((OUTPUTS, PIXELS), dtype=tl.float32)
    for start in range(0, K, TAPS):
        k = start + tl.arange(0, TAPS)
        part = tl.load(weight + client * (OUT * K) + o[:, None] * K + k[None, :],
                       mask=(o < OUT)[:, None] & (k < K)[None, :], other=0.0)  # fmt: skip
        taps = _taps(
            x + client * (B * C * H * W), b * (C * H * W) + i * W + j, there, i, j, k, K, H, W, KH, KW, UP, SIDE
        )
        sums = tl.dot(part, taps, sums, input_precision=PRECISION)
    if BIASED:
        sums += tl.load(bias + client * OUT + o, mask=o < OUT, other=0.0).to(tl.float32)[:, None]
    places = (b * (OUT * OH * OW) + r)[None, :] + o[:, None] * (OH * OW)
    tl.store(
        y + client * (B * OUT * OH * OW) + places, sums.to(y.dtype.element_ty), mask=there[None, :] & (o < OUT)[:, None]
    )


@triton.jit
def _by_weight(x, grad, sums_of_parts, parts, pixels, B: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
               W: tl.constexpr, OUT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, UP: tl.constexpr,
               SIDE: tl.constexpr, PRECISION: tl.constexpr, PIXELS: tl.constexpr, TAPS: tl.constexpr,
               OUTPUTS: tl.constexpr):  # fmt: skip
    """The gradient by TAPS taps of OUTPUTS channels of one client's weights, summed over ``pixels`` pixels."""
    OH: tl.constexpr = H + 2 * UP - KH + 1
    OW: tl.constexpr = W + 2 * SIDE - KW + 1
    K: tl.constexpr = C * KH * KW
    TILES: tl.constexpr = (OUT + OUTPUTS - 1) // OUTPUTS
    part, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o = tl.program_id(2) % TILES * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.program_id(2) // TILES * TAPS + tl.arange(0, TAPS)
    sums = tl.zeros((TAPS, OUTPUTS), dtype=tl.float32)
    for start in range(0, pixels, PIXELS):
        p = part * pixels + start + tl.arange(0, PIXELS)
        there = p < B * OH * OW
        b, r = p // (OH * OW), p % (OH * OW)
        i, j = r // OW, r % OW
        places = (b * (OUT * OH * OW) + r)[None, :] + o[:, None] * (OH * OW)
        by_output = tl.load(
            grad + client * (B * OUT * OH * OW) + places, mask=there[None, :] & (o < OUT)[:, None], other=0.0
        )
        taps = _taps(
            x + client * (B * C * H * W), b * (C * H * W) + i * W + j, there, i, j, k, K, H, W, KH, KW, UP, SIDE
        )
        sums = tl.dot(taps, tl.trans(by_output), sums, input_precision=PRECISION)
    places = o[None, :] * K + k[:, None]
    tl.store(
        sums_of_parts + (client * parts + part) * (OUT * K) + places, sums, mask=(o < OUT)[None, :] & (k < K)[:, None]
    )


@torch.library.custom_op("fedloom::convolve", mutates_args=())
def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, up: int, side: int, precision: str) -> Tensor:
    """(clients, batch, inputs, ...) and (clients, outputs, inputs, high, wide) -> (clients, batch, outputs, ...).

    ``bias``: (clients, outputs).
    """
    (clients, batch, inputs, height, width), (_, outputs, _, high, wide) = x.shape, weight.shape
    y: Tensor = _convolved(x, weight, bias, up, side, precision)
    pixels, each, tile = y[0, :, 0].numel(), 64, _tile(outputs)
    # the fastest of 16 ways for a LeNet's layers with 1, 10 and 50 clients; 64 channels need four warps' registers
    busy = clients * pixels >= FILLED * each
    warps = 2 if busy and x.dtype == torch.float32 and tile <= 32 else 4
    _convolve[(triton.cdiv(pixels, each), clients, triton.cdiv(outputs, tile))](
        x.contiguous(), weight.contiguous(), weight if bias is None else bias.contiguous(), y, batch, inputs, height,
        width, outputs, high, wide, up, side, precision, BIASED=bias is not None, PIXELS=each, OUTPUTS=tile,
        TAPS=16 if busy else 32, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return y


@convolve.register_fake
def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, up: int, side: int, precision: str) -> Tensor:
    height, width = x.shape[3] + 2 * up - weight.shape[3] + 1, x.shape[4] + 2 * side - weight.shape[4] + 1
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[1], height, width)


@torch.library.custom_op("fedloom::convolve_by_weight", mutates_args=())
def convolve_by_weight(x: Tensor, grad: Tensor, up: int, side: int, precision: str) -> Tensor:
    """The parts (clients, parts, outputs, inputs, high, wide) whose sum is the gradient by the weights."""
    (clients, batch, inputs, height, width), outputs = x.shape, grad.shape[2]
    sums: Tensor = _parts(x, grad, up, side, precision)
    parts, (high, wide) = sums.shape[1], sums.shape[4:]
    pixels = triton.cdiv(triton.cdiv(grad[0, :, 0].numel(), parts), PIXELS) * PIXELS
    _by_weight[(parts, clients, _tiles(outputs, inputs * high * wide))](
        x.contiguous(), grad.contiguous(), sums, parts, pixels, batch, inputs, height, width, outputs, high, wide,
        up, side, precision, PIXELS=PIXELS, TAPS=TAPS, OUTPUTS=_tile(outputs), num_warps=2, num_stages=3,
    )  # fmt: skip
    return sums


@convolve_by_weight.register_fake
def _parts(x: Tensor, grad: Tensor, up: int, side: int, precision: str) -> Tensor:
    high, wide = x.shape[3] + 2 * up - grad.shape[3] + 1, x.shape[4] + 2 * side - grad.shape[4] + 1
    clients, inputs, outputs, pixels = len(x), x.shape[2], grad.shape[2], grad[0, :, 0].numel()
    programs = min(FILLED, 8 * FILLED // clients)  # of a client: many parts are many to add
    most = max(1, programs // _tiles(outputs, inputs * high * wide))
    each = triton.cdiv(triton.cdiv(pixels, min(most, triton.cdiv(pixels, PIXELS))), PIXELS) * PIXELS
    return x.new_empty(clients, triton.cdiv(pixels, each), outputs, inputs, high, wide, dtype=torch.float32)


def _tile(outputs: int) -> int:
    """Channels at a time: more need more memory than a processor has."""
    return max(16, min(64, 1 << (outputs - 1).bit_length()))


def _tiles(outputs: int, taps: int) -> int:
    number: int = triton.cdiv(outputs, _tile(outputs)) * triton.cdiv(taps, TAPS)
    return number


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, up: int, side: int, precision: str) -> Tensor:
    """``conv2d`` with stride 1 for one client; under ``vmap``, for a stack of them at once."""
    biases = None if bias is None else bias[None]
    y: Tensor = _Stacked.apply(x[None], weight[None], biases, up, side, precision)[0]
    return y


class _Stacked(torch.autograd.Function):
    """Of stacks. Another ``vmap`` makes them longer, so that the result can be differentiated and mapped again."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
        y: Tensor = convolve(x, weight, bias, *how)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, _, *ctx.how = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_x = _back(grad, weight, *ctx.how) if ctx.needs_input_grad[0] else None
        by_weight = _ByWeight.apply(x, grad, *ctx.how) if ctx.needs_input_grad[1] else None
        by_bias = grad.sum((1, 3, 4)) if ctx.needs_input_grad[2] else None
        return by_x, by_weight, by_bias, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> tuple[Tensor, int]:
        biases = None if bias is None else _stacked(bias, dims[2], info)
        y = _Stacked.apply(_stacked(x, dims[0], info), _stacked(weight, dims[1], info), biases, *how)
        return y.unflatten(0, (info.batch_size, -1)), 0


class _ByWeight(torch.autograd.Function):
    """The gradient of ``_Stacked`` by its weights."""

    @staticmethod
    def forward(x: Tensor, grad: Tensor, *how: Any) -> Tensor:
        y: Tensor = convolve_by_weight(x, grad, *how).sum(1).to(x.dtype)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, grad, *ctx.how = inputs
        ctx.save_for_backward(x, grad)

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> Any:
        x, grad = ctx.saved_tensors
        by_x = _back(grad, weight, *ctx.how) if ctx.needs_input_grad[0] else None
        by_grad = _Stacked.apply(x, weight, None, *ctx.how) if ctx.needs_input_grad[1] else None
        return by_x, by_grad, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, grad: Tensor, *how: Any) -> tuple[Tensor, int]:
        y = _ByWeight.apply(_stacked(x, dims[0], info), _stacked(grad, dims[1], info), *how)
        return y.unflatten(0, (info.batch_size, -1)), 0


def _back(grad: Tensor, weight: Tensor, up: int, side: int, precision: str) -> Tensor:
    """The gradient by the input."""
    turned = weight.flip(3, 4).transpose(1, 2)
    y: Tensor = _Stacked.apply(grad, turned, None, weight.shape[3] - 1 - up, weight.shape[4] - 1 - side, precision)
    return y


def _stacked(value: Tensor, dim: int | None, info: Any) -> Tensor:
    value = value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
    return value.flatten(0, 1)
