# SPDX-License-Identifier: Apache-2.0
"""The task: a loss and a metric, both per sample, so that padded samples can be left out and sums stay exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.tokens import UNLABELLED


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
    per_token: bool = False
    """Labels are one per token, (batch, length), -1 for none; outputs (batch, length, classes). A sample's loss and
    metric are means over its labelled tokens, and evaluations count tokens."""

    @property
    def metric_is_share(self) -> bool:
        """The metric lies between 0 and 1."""
        return TASKS.get(self.name) is self and self.metric_name in ("accuracy", "f1")


def _cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def _hit(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(-1) == y).to(outputs.dtype)


def _squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y.reshape(outputs.shape)).square().flatten(1).mean(1)


def _absolute_error(outputs: Tensor, y: Tensor) -> Tensor:
    return torch.abs(outputs - y.reshape(outputs.shape)).flatten(1).mean(1)


def _binary_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, y.to(outputs.dtype), reduction="none").flatten(1).mean(1)


def _f1(outputs: Tensor, y: Tensor) -> Tensor:
    """Twice the labels that are rightly said to hold, by those that hold and those that are said to; 1 if none are."""
    said, true = (outputs > 0).to(outputs.dtype), y.to(outputs.dtype)
    both, either = (said * true).flatten(1).sum(1), (said + true).flatten(1).sum(1)
    return torch.where(either > 0, 2 * both / either.clamp(min=1), torch.ones_like(either))


def labelled(y: Tensor) -> Tensor:
    """How many tokens of each sample have a label: (batch, length) -> (batch,)."""
    return (y != UNLABELLED).sum(-1)


def _cross_entropy_per_token(outputs: Tensor, y: Tensor) -> Tensor:
    # a label that is out of range must fail, or give NaN, as it does in a classification
    of_tokens = F.nll_loss(
        torch.log_softmax(outputs, -1).flatten(0, 1), y.flatten(), ignore_index=UNLABELLED, reduction="none"
    )
    return of_tokens.reshape(y.shape).sum(-1) / labelled(y).clamp(min=1)


def _hits_per_token(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(-1) == y).sum(-1).to(outputs.dtype) / labelled(y).clamp(min=1)


CLASSIFICATION = Task("classification", _cross_entropy, _hit, "accuracy", class_scores=True)
REGRESSION = Task("regression", _squared_error, _absolute_error, "absolute_error", higher_is_better=False)
MULTILABEL = Task("multilabel", _binary_cross_entropy, _f1, "f1")
"""Of several labels any number may hold; each output above 0 says that one does."""
SEQUENCE = Task("seq", _cross_entropy_per_token, _hits_per_token, "accuracy", per_token=True)
TASKS = {task.name: task for task in (CLASSIFICATION, MULTILABEL, REGRESSION, SEQUENCE)}
"""fedloom's own tasks by name."""
