# SPDX-License-Identifier: Apache-2.0
"""Combining replies: means over clients, weighted by a number that each reply carries."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from fedloom.core.trees import PerClient, Tree, tree_map


def weighted_sum(tree: Tree, weights: torch.Tensor) -> Any:
    """The sum of a stack's rows, each times its weight: row after row, so that no bit depends on where they lie."""

    def one(leaf: torch.Tensor) -> torch.Tensor:
        terms = (row.to(weights.dtype) * weight for row, weight in zip(leaf, weights))
        total: torch.Tensor = reduce(torch.add, terms)
        return total

    return tree_map(one, tree)


def weighted_mean(replies: PerClient, branch: str, weight: str | None = "num_samples") -> Any:
    """The mean over clients of ``reply[branch]``, a tree or a tensor, weighted by ``reply[weight]``; None: equally."""
    weights = [tree[weight] if weight else torch.ones_like(tree["num_samples"]) for _, tree in replies.groups]
    total = torch.stack([own.sum() for own in weights]).sum()
    total = torch.where(total > 0, total, torch.ones_like(total))  # clients without samples change nothing

    def one(*leaves: torch.Tensor) -> torch.Tensor:
        parts = [torch.tensordot(own / total, leaf.to(own.dtype), dims=1) for leaf, own in zip(leaves, weights)]
        return torch.stack(parts).sum(0)

    return tree_map(one, *(tree[branch] for _, tree in replies.groups))


def mean_buffers(replies: PerClient, before: Tree, weight: str | None = "num_samples") -> Any:
    """The mean of the running statistics in ``replies``, of the types that they had ``before``."""
    # counters are whole numbers: to the nearest one, as weights may add up to a little less than 1
    return tree_map(
        lambda new, old: (new if old.is_floating_point() else new.round()).to(old.dtype),
        weighted_mean(replies, "buffers", weight),
        before,
    )


def mean_loss(replies: PerClient) -> torch.Tensor:
    """The clients' mean training loss, each client counted once: (), on the device, which is not waited for."""
    return torch.cat([tree["loss"] for _, tree in replies.groups]).mean()
