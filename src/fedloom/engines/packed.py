# SPDX-License-Identifier: Apache-2.0
"""A tree in one piece of memory: the form in which it passes between processes that trust each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.core.trees import flatten, tree_map, unflatten

ALIGNMENT = 64
"""Bytes: leaves begin at a multiple of it."""

Place = tuple[str, torch.dtype, tuple[int, ...], int]
"""A leaf's path, type and shape, and where it begins."""


def places(tree: Mapping[str, Any]) -> tuple[list[Place], int]:
    """Where the leaves of a tree go, and how many bytes they take."""
    found, offset = [], 0
    for path, leaf in flatten(tree).items():
        found.append((path, leaf.dtype, tuple(leaf.shape), offset))
        offset += -(-leaf.numel() * leaf.element_size() // ALIGNMENT) * ALIGNMENT
    return found, offset


def put(tree: Mapping[str, Any], where: Sequence[Place], memory: Tensor) -> None:
    """Copy a tree's leaves to their places in ``memory``, a tensor of bytes."""
    for (_, dtype, shape, start), leaf in zip(where, flatten(tree).values()):
        if leaf.numel():
            _at(memory, start, dtype, shape).copy_(leaf)


def seen(where: Sequence[Place], memory: Tensor) -> dict[str, Any]:
    """The tree that was put there, where it is."""
    return unflatten(
        {
            path: _at(memory, start, dtype, shape) if math.prod(shape) else torch.empty(shape, dtype=dtype)
            for path, dtype, shape, start in where
        }
    )


def taken(where: Sequence[Place], memory: Tensor) -> dict[str, Any]:
    """A copy of the tree that was put there."""
    copied: dict[str, Any] = tree_map(torch.clone, seen(where, memory))
    return copied


def end(where: Sequence[Place]) -> int:
    """The bytes of ``memory`` that hold these leaves."""
    return max((start + dtype.itemsize * math.prod(shape) for _, dtype, shape, start in where), default=0)


def _at(memory: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
