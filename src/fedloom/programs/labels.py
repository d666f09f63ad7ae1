# SPDX-License-Identifier: Apache-2.0
"""A client counts the labels of its training data: to tell their shares, or to know them for itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.core.contract import Ask, Batch, Batches, Home, Noise, Program, Setup
from fedloom.core.random import fold, normal
from fedloom.core.trees import ClientId, PerClient, Tree


def ask_label_shares(
    setup: Setup[Any], clients: list[ClientId] | tuple[ClientId, ...], ask: Ask, noise: float = 0.0
) -> PerClient:
    """``{"shares": (classes,), "num_samples": ()}`` of each client, over its training data.

    ``noise`` is the deviation of the Gaussian noise that each client adds to its shares.
    """
    return ask(label_shares(noise), _template(setup, clients), PerClient.empty(clients))


def have_labels_counted(setup: Setup[Any], clients: Sequence[ClientId], ask: Ask) -> list[ClientId]:
    """Have clients count their labels and keep the counts, as ``memory["label_counts"]``; those that have done so."""
    return list(ask(label_counts(), _template(setup, clients), PerClient.empty(clients)))


def _template(setup: Setup[Any], clients: Sequence[ClientId]) -> Tree:
    classes = setup.models[clients[0]].num_outputs
    return {"classes": torch.zeros(classes, dtype=setup.dtype, device=setup.device)}


def label_counts() -> Program:
    """The program of a client that tells nothing of its labels."""
    return replace(label_shares(), name="label_counts", final=_keep, expects=_nothing)


def label_shares(noise: float = 0.0) -> Program:
    """The program; the client also keeps its exact counts, as ``memory["label_counts"]`` if it has such a place."""
    batches = Batches("train", 512, epochs=1, shuffle=False)
    told = Noise("gaussian", noise) if noise else None
    return Program(
        "label_shares", _init, _step, partial(_final, noise), batches, _expects, noise=told, of_data_alone=True
    )


def _init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tensor:
    # as many as the client's own network tells apart: whatever number came is the server's claim
    counts: Tensor = shared["classes"].new_zeros(home.model.num_outputs)
    return counts


def _step(home: Home, shared: Tree, carry: Tensor, batch: Batch) -> Tensor:
    return add_labels(carry, batch)


def add_labels(counts: Tensor, batch: Batch) -> Tensor:
    """(classes,) ``counts`` with the labels of a batch."""
    classes = torch.arange(counts.shape[0], device=counts.device)
    real = batch.mask.reshape(-1, *[1] * batch.y.dim())  # of tokens each has a label
    return counts + ((batch.y[..., None] == classes) & real).flatten(0, -2).sum(0)


def _final(noise: float, home: Home, shared: Tree, carry: Tensor, memory: Tree) -> tuple[Tree, Tree]:
    told = carry / carry.sum().clamp(min=1)
    if noise:  # shares have norm at most 1: the bound of this reply
        told = told + noise * normal(fold(home.key, 1), tuple(told.shape), told.dtype)
    kept = {"label_counts": carry} if "label_counts" in memory else {}
    return {"shares": told, "num_samples": home.num_samples}, {**memory, **kept}


def _keep(home: Home, shared: Tree, carry: Tensor, memory: Tree) -> tuple[Tree, Tree]:
    return {}, {**memory, "label_counts": carry}


def _nothing(shared: Tree, mine: Tree) -> Tree:
    return {}


def _expects(shared: Tree, mine: Tree) -> Tree:
    return {"shares": shared["classes"], "num_samples": torch.empty(())}
