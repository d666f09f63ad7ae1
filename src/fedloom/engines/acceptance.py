# SPDX-License-Identifier: Apache-2.0
"""Which replies are usable: of the right form, of the right types, finite."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core.trees import Tree, faults, leaves

FEW = 1 << 24
"""Numbers that a GPU puts side by side to look through them at once: fewer kernels than tensor by tensor."""

NOT_FINITE = "NaN or Inf"
SPOILT = f"would keep {NOT_FINITE} in its memory; it keeps what it had"


def refusals(expected: Tree, replies: Tree, number: int, dtype: torch.dtype) -> list[str | None]:
    """For each of a stack of replies why its form cannot be used, or None.

    Fractions are of the federation's ``dtype``, whatever type stands for them in ``expected``; other numbers are of
    the type that ``expected`` has.
    """
    wrong = faults(replies, "reply")
    if wrong:
        return [f"replied with something that is not a tree of tensors: {wrong[0]}"] * number
    wanted = dict(leaves(expected))
    got = dict(leaves(replies))
    for path in [*wanted, *got]:
        here, there = wanted.get(path), got.get(path)
        shapes = None if here is None else tuple(here.shape), None if there is None else tuple(there.shape[1:])
        if here is None or there is None or shapes[0] != shapes[1]:
            return [f"replied with shape {shapes[1]} for {path}; expected {shapes[0]}"] * number
        kind = dtype if here.is_floating_point() else here.dtype
        if there.dtype != kind:
            return [f"replied with numbers of type {there.dtype} for {path}; expected {kind}"] * number
    return [None] * number


def finite(number: int, device: torch.device, *trees: Tree, exactly: bool = False) -> Tensor:
    """In which of so many clients' rows each tree has finite numbers only: (trees, clients), read back at once.

    A sum is finite only if all of its numbers are; if they are, it can still be too large, unless each is first taken
    times zero, ``exactly``.
    """
    found = []
    for tree in trees:
        rows = [leaf.reshape(number, -1) for _, leaf in leaves(tree) if leaf.numel()]
        few = sum(row.numel() for row in rows) <= FEW and len({row.dtype for row in rows}) == 1
        if device.type == "cuda" and few:
            rows = [torch.cat(rows, 1)]
        sums = [(row.mul(0) if exactly else row).sum(1).double() for row in rows]
        found.append(torch.stack([torch.zeros(number, dtype=torch.float64, device=device), *sums]).sum(0).isfinite())
    return torch.stack(found)
