# SPDX-License-Identifier: Apache-2.0
"""The task: a loss and a metric, both per sample, so that padded samples can be left out and sums stay exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Task:
    """What the clients' models are for.

    ``loss(outputs, y)`` and ``metric(outputs, y)`` give one number per sample, of shape (batch,). A user's own task
    is such an object, named by import path: ``--task package.module:OBJECT``.
    """

    name: str
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: Callable[[Tensor, Tensor], Tensor]
    metric_name: str
    higher_is_better: bool = True
    class_scores: bool = False
    """The outputs are one score per class: label shares, priors and the like make sense."""


def _cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def _hit(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(-1) == y).to(outputs.dtype)


def _squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y.reshape(outputs.shape)).square().flatten(1).mean(1)


def _absolute_error(outputs: Tensor, y: Tensor) -> Tensor:
    return torch.abs(outputs - y.reshape(outputs.shape)).flatten(1).mean(1)


CLASSIFICATION = Task("classification", _cross_entropy, _hit, "accuracy", class_scores=True)
REGRESSION = Task("regression", _squared_error, _absolute_error, "absolute_error", higher_is_better=False)
