# SPDX-License-Identifier: Apache-2.0
"""A loop over clients. When a program fails it says in which stage, for whom and on what shapes.

``run_client`` is what a client does on a machine of its own: it is all that the other side of a network runs, and what
every other engine must agree with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm, Batch
from fedloom.core.random import fold
from fedloom.core.trees import ClientId, PerClient, Tree, signature
from fedloom.engines.engine import AbstractLocalEngine
from fedloom.engines.job import ClientFault, Job, Outcome
from fedloom.engines.machine import Machine
from fedloom.engines.traced import Traces

Steps = Callable[[Callable[..., Any], Any, Any, Iterable[Batch]], Any]
"""(step, fixed, carry, batches) -> the carry after ``carry = step(fixed, carry, batch)`` for each of the batches."""


class Sequential(AbstractLocalEngine):
    """One client after another, one step after another; on a CPU steps are traced when there are enough of them."""

    name = "sequential"

    def __init__(
        self, federation: Federation, algorithm: Algorithm, config: Any, seed: int, machine: Machine | None = None
    ) -> None:
        super().__init__(federation, algorithm, config, seed, machine)
        self._single_steps = Traces(self.notes, single=True)

    def run_group(self, job: Job) -> Outcome:
        """As ``AbstractLocalEngine.run_group``."""
        kind = (job.program, job.spec)
        # a trace would draw secret noise once and for all
        traced = job.federation.device.type == "cpu" and not job.secret_noise
        steps = partial(self._single_steps.steps, kind, job.program.name) if traced else one_by_one
        replies, memories, seconds = {}, {}, {}
        for client in job.clients:
            start = time.perf_counter()
            replies[client], memories[client] = run_client(job, client, job.shared, job.mine[client], steps)
            seconds[client] = time.perf_counter() - start
        # a GPU is still at work when the host is done
        known = job.federation.device.type == "cpu"
        return Outcome(PerClient.of(replies), PerClient.of(memories), seconds=seconds if known else {})


def one_by_one(step: Callable[..., Any], fixed: Any, carry: Any, batches: Iterable[Batch]) -> Any:
    """All steps, as they are."""
    for batch in batches:
        carry = step(fixed, carry, batch)
    return carry


def run_client(job: Job, client: ClientId, shared: Tree, mine: Tree, steps: Steps = one_by_one) -> tuple[Tree, Tree]:
    """What the client itself would do on a machine of its own: its reply and its new memory.

    Batches are gathered one at a time, when their step comes, with the random numbers that the job's moment and the
    client's name fix. ``steps`` runs them, by ``one_by_one`` or a faster way with the same bits. An error is a
    ``ClientFault`` that says in which function of the program it came up.
    """
    data, device, program = job.federation, job.federation.device, job.program
    memory, facts = job.memories[client], (job.num_samples([client])[0], job.keys([client])[0])
    home = job.home(client, *facts)
    carry = _stage("init", mine, [], program.init, home, shared, mine, memory)
    plan = job.schedule(client)
    numbers, epochs = torch.arange(len(plan.rows), device=device), torch.tensor(plan.epochs, device=device)
    keys = fold(facts[1], numbers)
    last: list[Batch] = []

    def batches() -> Iterator[Batch]:
        for number, (rows, size) in enumerate(zip(plan.rows, plan.sizes)):
            index = torch.as_tensor(rows, device=device)
            real = torch.full((len(rows),), bool(size), device=device)
            x, y = data.x.index_select(0, index), data.y.index_select(0, index)
            last[:] = [Batch(x, y, real, numbers[number], epochs[number], keys[number])]
            yield last[0]

    def step(fixed: Any, carry: Any, batch: Batch) -> Any:
        shared, (num_samples, key) = fixed
        return program.step(job.home(client, num_samples, key), shared, carry, Batch(*batch))

    carry = _stage("step", mine, last, steps, step, (shared, facts), carry, batches())
    reply, memory = _stage("final", mine, [], program.final, home, shared, carry, memory)
    return reply, memory


def _stage(stage: str, mine: Tree, batches: list[Batch], function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``; what is said if it fails names the last of ``batches``, which it may fill."""
    try:
        return function(*arguments)
    except Exception as error:
        batch = "".join(f" on x {tuple(b.x.shape)}, y {tuple(b.y.shape)}" for b in batches)
        raise ClientFault(
            f"raised {type(error).__name__} in {stage}{batch}: {error} (mine: {dict(signature(mine))})"
        ) from error
