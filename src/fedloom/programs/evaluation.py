# SPDX-License-Identifier: Apache-2.0
"""Federated evaluation: each client tries what it would deploy on its own data and tells sums.

It is an ask like any other: it runs on every engine, and it knows of a method only its predictor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.contract import Algorithm, Ask, Batch, Batches, Home, Model, Program, Sent
from fedloom.core.random import fold, normal
from fedloom.core.task import Task, labelled
from fedloom.core.trees import ClientId, Tree

EVALUATION, PLAIN, GLOBAL, MIXED = "evaluate", "evaluate_plain", "evaluate_global", "evaluate_mixed"
"""How programs are named that try a client's model, an adapted method without its adaptation, a global model, and one
client's output layer on another's body."""

BOUND = 10.0
"""The largest loss of a sample that counts in a noised evaluation."""

BATCH = 256
"""Samples that are tried at a time."""

DIVERGED = 1e30
"""The loss of a sample whose prediction is not a number."""


class Score(NamedTuple):
    """A client's result on a split: means over its samples, or over their tokens where each has a label."""

    loss: float
    metric: float
    samples: int
    """Or labelled tokens."""


def evaluate(
    algorithm: Algorithm,
    sent: Callable[[Sequence[ClientId]], Sent],
    clients: Sequence[ClientId],
    split: str,
    ask: Ask,
    *,
    name: str = EVALUATION,
    batch_size: int = BATCH,
    at_once: int = 100,
    higher_is_better: bool = True,
) -> dict[ClientId, Score]:
    """The scores of ``clients``, which must have samples in ``split``; ``sent(clients)`` is what they deploy.

    ``at_once`` bounds how many models exist at a time. A client that gives no usable reply scores the worst there is:
    a method must not gain by losing its hard clients.
    """
    program = evaluation_program(algorithm, split, batch_size, name)
    scores: dict[ClientId, Score] = {}
    for start in range(0, len(clients), at_once):
        shared, mine = sent(clients[start : start + at_once])
        for members, reply in ask(program, shared, mine).groups:
            columns = (reply[name].tolist() for name in ("loss", "metric", "samples"))
            for client, loss, metric, samples in zip(members, *columns):
                if samples < 1:  # no sum of anything
                    continue
                scores[client] = Score(loss / samples, metric / samples, round(samples))
    return {client: scores.get(client, worst(higher_is_better=higher_is_better)) for client in clients}


def worst(*, higher_is_better: bool) -> Score:
    """The score of a client that gave no usable reply."""
    return Score(DIVERGED, 0.0 if higher_is_better else DIVERGED, 1)


def with_network(algorithm: Algorithm, network: Model) -> Algorithm:
    """``algorithm`` with all clients deploying a network that is not their own: its global model."""
    return replace(algorithm, client_deploy=partial(_deploy, network), predict=partial(_predict, network))


def _deploy(network: Model, home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    return {"params": shared["params"], "buffers": memory.get("global_buffers", network.fresh_buffers())}


def _predict(network: Model, home: Home, deployed: Tree, x: Tensor) -> Tensor:
    return network(deployed["params"], deployed["buffers"], x)


def evaluation_program(algorithm: Algorithm, split: str, batch_size: int = BATCH, name: str = EVALUATION) -> Program:
    """One pass over a split, nothing changed."""
    batches = Batches(split, batch_size, epochs=1, shuffle=False)
    init, step = partial(_init, algorithm), partial(_step, algorithm)
    return Program(f"{name}.{split}", init, step, _final, batches, _expects)


def noised(program: Program, noise: float) -> Program:
    """An evaluation whose sums hide any one sample: each counts at most ``BOUND``, and Gaussian noise is added.

    ``noise`` is its deviation in units of what one sample can change.
    """
    assert isinstance(program.step, partial)
    step = partial(_bounded_step, *program.step.args)
    return replace(program, step=step, final=partial(_noised_final, noise))


def _bounded_step(algorithm: Algorithm, home: Home, shared: Tree, carry: _Sums, batch: Batch) -> _Sums:
    task = home.task

    def bounded(measure: Callable[[Tensor, Tensor], Tensor], most: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda outputs, y: measure(outputs, y).nan_to_num(most, most, 0).clamp(0, most)

    loss, metric = bounded(task.loss, BOUND), bounded(task.metric, _most(task))
    held = replace(home, task=replace(task, loss=loss, metric=metric, per_token=False))  # a sample counts once
    return _step(algorithm, held, shared, carry, batch, (BOUND, _most(task)))


def _most(task: Task) -> float:
    """What a sample can change of the sum of the metric."""
    return 1.0 if task.metric_is_share else BOUND


def _noised_final(noise: float, home: Home, shared: Tree, carry: _Sums, memory: Tree) -> tuple[Tree, Tree]:
    spread = {"loss": noise * BOUND, "metric": noise * _most(home.task), "samples": noise}
    found = {
        name: getattr(carry, name) + deviation * normal(fold(home.key, i), (), carry.loss.dtype)
        for i, (name, deviation) in enumerate(spread.items())
    }
    samples = found["samples"].round().clamp(min=1)
    metric = found["metric"].clamp(min=0)
    metric = torch.minimum(metric, samples) if home.task.metric_is_share else metric
    return {"loss": found["loss"].clamp(min=0), "metric": metric, "samples": samples}, memory


class _Sums(NamedTuple):
    deployed: Tree
    loss: Tensor
    metric: Tensor
    samples: Tensor


def _init(algorithm: Algorithm, home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Sums:
    zero = torch.zeros_like(home.num_samples)
    return _Sums(algorithm.client_deploy(home, shared, mine, memory), zero, zero, zero)


def _step(
    algorithm: Algorithm, home: Home, shared: Tree, carry: _Sums, batch: Batch, most: tuple[float, float] | None = None
) -> _Sums:
    """``most``: the loss and, where less is better, the metric of a sample whose prediction is not a number."""
    outputs = algorithm.predict(home, carry.deployed, batch.x)
    loss, metric = home.task.loss(outputs, batch.y), home.task.metric(outputs, batch.y)
    most_loss, most_metric = most or (DIVERGED, DIVERGED)
    worst = 0.0 if home.task.higher_is_better else most_metric
    fine = outputs.isfinite().flatten(1).all(1) & loss.isfinite()
    loss, metric = torch.where(fine, loss, most_loss), torch.where(fine, metric, worst)
    samples = batch.mask.sum()
    if home.task.per_token:
        tokens = labelled(batch.y)
        loss, metric, samples = loss * tokens, metric * tokens, batch.sum(tokens)
    return carry._replace(
        loss=carry.loss + batch.sum(loss),
        metric=carry.metric + batch.sum(metric),
        samples=carry.samples + samples,
    )


def _final(home: Home, shared: Tree, carry: _Sums, memory: Tree) -> tuple[Tree, Tree]:
    return {"loss": carry.loss, "metric": carry.metric, "samples": carry.samples}, memory


def _expects(shared: Tree, mine: Tree) -> Tree:
    number = torch.empty(())
    return {"loss": number, "metric": number, "samples": number}
