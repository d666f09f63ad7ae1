# SPDX-License-Identifier: Apache-2.0
"""Networks and federations small enough for sums on paper, and ears on what is sent; named ``tiny:Line`` in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedloom.clients.batching import Schedule
from fedloom.clients.federation import Client, Federation
from fedloom.core.contract import Program
from fedloom.core.task import CLASSIFICATION, REGRESSION
from fedloom.core.trees import PerClient, Tree, flatten
from fedloom.models.model import Model
from fedloom.models.spec import parse

HAND = {
    "local_epochs": 1,
    "batch_size": 99,
    "local_lr": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "clip": 0.0,
}
"""One full-batch step of plain gradient descent: local training on paper."""

POINTS = (((1, 3),), ((1, 1), (1, 0), (2, 1)))
"""(x, y) of two clients. For y = w x at w = 1 the gradient of the mean squared error is -4 and 2.

First client: 2 (1 - 3) 1 = -4. Second: residuals 0, 1, 1 times 2 x are 0, 2, 4; their mean is 2.
"""


class Line(nn.Module):
    """y = w x, from w = 1."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.line = nn.Linear(input_shape[0], num_outputs, bias=False)
        nn.init.constant_(self.line.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


class BodyAndHead(nn.Module):
    """y = h b x, from b = 1 and h = 2."""

    head = "top"

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.body, self.top = nn.Linear(input_shape[0], 1, bias=False), nn.Linear(1, num_outputs, bias=False)
        nn.init.constant_(self.body.weight, 1.0)
        nn.init.constant_(self.top.weight, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.body(x))


class NormedLine(nn.Module):
    """BatchNorm of one value, then a line."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(input_shape[0])
        self.line = nn.Linear(input_shape[0], num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(self.norm(x))


def lines(
    points: Sequence[Sequence[tuple[float, float]]] = POINTS, model: str = "tiny:Line", unseen: int = 0
) -> Federation:
    """A regression of one value on one value: ``points[i]`` are the training samples of client i."""
    built = Model(parse(model, (1,), 1), dtype=torch.float64)
    cuts = np.cumsum([0, *(len(own) for own in points)])
    flat = torch.tensor([point for own in points for point in own], dtype=torch.float64)
    return Federation(flat[:, :1].clone(), flat[:, 1:].clone(), REGRESSION, _roster(built, cuts, unseen))


def labels(
    points: Sequence[Sequence[tuple[float, int]]], model: str = "tiny:BodyAndHead", classes: int = 2, unseen: int = 0
) -> Federation:
    """A classification by one value: ``points[i]`` are the training samples of client i.

    By ``BodyAndHead`` a sample's feature is x, and all classes have the score 2 x: each is as likely.
    """
    built = Model(parse(model, (1,), classes), dtype=torch.float64)
    cuts = np.cumsum([0, *(len(own) for own in points)])
    flat = torch.tensor([point for own in points for point in own], dtype=torch.float64)
    return Federation(flat[:, :1].clone(), flat[:, 1].long(), CLASSIFICATION, _roster(built, cuts, unseen))


def _roster(model: Model, cuts: np.ndarray, unseen: int) -> dict[str, Client]:
    nothing, number = np.arange(0), len(cuts) - 1
    return {
        str(i): Client(str(i), model, {"train": np.arange(a, b), "val": nothing, "test": nothing}, i >= number - unseen)
        for i, (a, b) in enumerate(pairwise(cuts))
    }


def headless(federation: Federation) -> Federation:
    """The federation, its models without an output layer apart."""
    for client in federation.roster.values():
        client.model.head = frozenset()
    return federation


class Ears:
    """Stands between a method and an engine and notes everything: use as ``play(..., wrap=ears)``."""

    def __init__(self) -> None:
        self.programs: list[str] = []
        self.asked: list[list[str]] = []
        self.replies: list[dict[str, Tree]] = []
        self.plans: list[dict[str, Schedule]] = []
        self.down: set[str] = set()
        self.up: set[str] = set()

    def __call__(self, ask: Any) -> Callable[..., PerClient]:
        session = ask.__self__

        def heard(program: Program, shared: Tree, mine: Any) -> PerClient:
            replies = ask(program, shared, mine)
            self.programs.append(program.name)
            self.asked.append(list(mine))
            self.replies.append({client: replies[client] for client in replies})
            job = session.job(program, shared, PerClient.of(mine))
            self.plans.append({client: job.schedule(client) for client in mine})
            self.down |= {path for client in mine for path in [*flatten(shared), *flatten(mine[client])]}
            self.up |= {path for client in replies for path in flatten(replies[client])}
            return replies

        return heard


class Replayed:
    """In the place of a recording, where there is no GPU: the function of the first call, on copies of new values."""

    def __init__(self, function: Any, leaves: Any, structure: Any, pool: Any) -> None:
        self.function, self.structure = function, structure

    def __call__(self, leaves: Any) -> Any:
        return self.function(*pytree.tree_unflatten([leaf.clone() for leaf in leaves], self.structure))


def torch_steps(
    module: nn.Module, optimisers: Sequence[torch.optim.Optimizer], federation: Federation, plan: Schedule, clip: float
) -> float:
    """Train ``module`` on the batches of ``plan`` the ordinary way, clipping for the first optimiser; the mean loss."""
    total = 0.0
    for rows in plan.rows:
        index = torch.as_tensor(rows)
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss = federation.task.loss(module(federation.x[index]), federation.y[index]).mean()
        loss.backward()
        if clip:
            first = [p for group in optimisers[0].param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(first, clip)
        for optimiser in optimisers:
            optimiser.step()
        total += float(loss.detach())
    return total / len(plan.rows)
