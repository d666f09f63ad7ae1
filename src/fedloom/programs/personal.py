# SPDX-License-Identifier: Apache-2.0
"""A model of the client's own beside the one that it is sent: a personal one, a tuned one, the one of last time.

It is a branch of the client's memory, and training of the model that was sent does not read it. Until it is trained for
the first time, the model that is sent stands in for it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fedloom.core.contract import Home, Model, Seeds, composed
from fedloom.core.training import Training
from fedloom.core.trees import Tree, tree_map


def untrained(model: Model, seed: int) -> dict[str, Any]:
    """A model with the parameters of that seed, marked as not trained yet."""
    not_yet = torch.zeros((), dtype=model.dtype, device=model.device)
    return {"params": model.init(seed), "buffers": model.fresh_buffers(), "trained": not_yet}


def keep(training: Training, before: Tree) -> dict[str, Any]:
    """The model as training left it, in the place of the one ``before``."""
    now = torch.ones_like(before["trained"])
    return {**before, "params": training.params, "buffers": training.buffers, "trained": now}


def kept_or(kept: Tree, other: Tree) -> dict[str, Any]:
    """The kept model's parameters and buffers; until it is trained, those of the other one."""
    pick = partial(torch.where, kept["trained"] > 0)
    return {part: tree_map(pick, kept[part], other[part]) for part in ("params", "buffers")}


def first_memory(model: Model, config: Any, seeds: Seeds) -> Tree:
    """A personal model that starts where the global one does."""
    return {"personal": untrained(model, seeds.common)}


def deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> dict[str, Any]:
    """The personal model; what was sent, where the client has not trained one."""
    return kept_or(memory["personal"], composed(home, shared, mine, memory))
