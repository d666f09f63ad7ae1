# SPDX-License-Identifier: Apache-2.0
"""PeFLL's encoder: IT-PFL-HN's without the pool, over samples and their labels, which are further planes of the input.

A client's descriptor is the mean of what the encoder makes of its samples. Two programs use it: one tells the
descriptor, the other pulls a slope of it back to the encoder's parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.contract import Batch, Batches, Home, Program
from fedloom.core.training import differentiate
from fedloom.core.trees import Params, Tree, tree_map
from fedloom.looms.encoder import descriptor_like, read_out, rows_of


def describe_labelled(params: Params, x: Tensor, y: Tensor, classes: int) -> Tensor:
    """One descriptor for each sample: (batch, embed_dim)."""
    return read_out(params, rows_of(params, with_labels(x, y, classes), private=False))


def with_labels(x: Tensor, y: Tensor, classes: int) -> Tensor:
    """Samples with one more channel for each class, of ones in that of the label: (batch, channels + classes, ...)."""
    planes = (y[:, None] == torch.arange(classes, device=y.device)).to(x.dtype)
    wide = planes.reshape(*planes.shape, *(1 for _ in x.shape[2:])).expand(*planes.shape, *x.shape[2:])
    return torch.cat([x, wide], dim=1)


def describing(batches: Batches, name: str = "pefll.describe") -> Program:
    """Reply with the mean of what the encoder makes of the samples."""
    return Program(name, _no_sum, _add_descriptors, _mean_descriptor, batches, _expects_descriptor)


def describing_all() -> Program:
    """The same for all training data."""
    return describing(Batches("train", 256, epochs=1, shuffle=False), "pefll.describe_all")


def learning(batches: Batches) -> Program:
    """Reply with the slope of the client's descriptor pulled back through the encoder."""
    return Program("pefll.learn", _no_gradient, _add_gradients, _mean_gradient, batches,
                   _expects_gradient)  # fmt: skip


class Described(NamedTuple):
    """The sum of descriptors so far, and of how many samples."""

    total: Tensor  # (embed_dim,)
    samples: Tensor  # ()


def _no_sum(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Described:
    return Described(torch.zeros_like(descriptor_like(shared["encoder"])), torch.zeros_like(home.num_samples))


def _sum(home: Home, encoder: Params, batch: Batch) -> Tensor:
    rows = describe_labelled(encoder, batch.x, batch.y, home.model.num_outputs)
    return torch.where(batch.mask[:, None], rows, 0).sum(0)


def _add_descriptors(home: Home, shared: Tree, carry: Described, batch: Batch) -> Described:
    return Described(carry.total + _sum(home, shared["encoder"], batch), carry.samples + batch.mask.sum())


def _mean_descriptor(home: Home, shared: Tree, carry: Described, memory: Tree) -> tuple[Tree, Tree]:
    return {"descriptor": carry.total / carry.samples.clamp(min=1)}, memory


def _expects_descriptor(shared: Tree, mine: Tree) -> Tree:
    return {"descriptor": descriptor_like(shared["encoder"])}


class Pulled(NamedTuple):
    """The slope of the descriptor, the encoder's gradient so far, and of how many samples."""

    slope: Tensor  # (embed_dim,)
    gradient: Params
    samples: Tensor  # ()


def _no_gradient(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Pulled:
    return Pulled(mine["slope"], tree_map(torch.zeros_like, shared["encoder"]), torch.zeros_like(home.num_samples))


def _add_gradients(home: Home, shared: Tree, carry: Pulled, batch: Batch) -> Pulled:
    def objective(encoder: Params) -> tuple[Tensor, tuple[Tensor, Tree]]:
        value = _sum(home, encoder, batch) @ carry.slope
        return value, (value, {})

    grads, _, _ = differentiate(objective, shared["encoder"])
    return carry._replace(gradient=tree_map(torch.add, carry.gradient, grads), samples=carry.samples + batch.mask.sum())


def _mean_gradient(home: Home, shared: Tree, carry: Pulled, memory: Tree) -> tuple[Tree, Tree]:
    return {"gradient": tree_map(lambda grad: grad / carry.samples.clamp(min=1), carry.gradient)}, memory


def _expects_gradient(shared: Tree, mine: Tree) -> Tree:
    return {"gradient": shared["encoder"]}
