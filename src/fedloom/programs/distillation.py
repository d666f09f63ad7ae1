# SPDX-License-Identifier: Apache-2.0
"""Learning from another model's answers: a guest on the client, with running statistics of the client's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.contract import Home, Model
from fedloom.core.task import Task
from fedloom.core.trees import Tree
from fedloom.core.vectors import from_vector


def guest_of(home: Home) -> Model:
    """The network that the program brought."""
    assert home.guest is not None
    return home.guest


def statistics_of(guest: Model, memory: Tree) -> Tree:
    """The client's running statistics for the guest."""
    found: Tree = memory["global_buffers"] if "global_buffers" in memory else guest.fresh_buffers()
    return found


def teacher_in(home: Home, memory: Tree, *, corrected: bool) -> dict[str, Any]:
    """The guest with the parameters that the client has kept as ``teacher``; nothing if it has none.

    ``corrected``: with the logarithms of the client's class shares, by the labels that it has counted.
    """
    if "teacher" not in memory:
        return {}
    guest = guest_of(home)
    teacher = {"params": from_vector(memory["teacher"], guest.shapes), "buffers": statistics_of(guest, memory)}
    return {**teacher, "offset": log_shares(memory["label_counts"], home.num_samples)} if corrected else teacher


def answers_of(network: Model, teacher: Tree, x: Tensor) -> Tensor:
    """The teacher's scores; a corrected one's with its offset."""
    scores = network(teacher["params"], teacher.get("buffers", {}), x)
    return scores + teacher["offset"] if "offset" in teacher else scores


def log_shares(counts: Tensor, num_samples: Tensor) -> Tensor:
    """(classes,) the logarithms of a client's class shares, by how often it has met each label.

    One sample more is spread over all classes, so that those it has not are improbable, and not impossible.
    """
    known = counts * (num_samples / counts.sum().clamp(min=1)).to(counts.dtype)
    return torch.log((known + 1 / len(counts)) / (known.sum() + 1))


def distilled(task: Task, answers: Tensor, weight: float, temperature: float) -> Task:
    """The task with the loss (1 - a) L + a T^2 KL(teacher || student), both softened by T."""
    taught = F.log_softmax(answers / temperature, dim=-1)

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        learned = F.log_softmax(outputs / temperature, dim=-1)
        divergence = (taught.exp() * (taught - learned)).sum(-1)  # (batch,)
        return (1 - weight) * task.loss(outputs, y) + weight * temperature**2 * divergence

    return replace(task, loss=loss)
