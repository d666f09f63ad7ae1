# SPDX-License-Identifier: Apache-2.0
"""A loop over clients. When a program fails it says in which stage, for whom and on what shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm, Batch, Program
from fedloom.core.random import fold
from fedloom.core.trees import ClientId, PerClient, Tree, signature
from fedloom.engines.engine import AbstractEngine, ClientFault, Outcome
from fedloom.engines.traced import Traces

Steps = Callable[[Callable[..., Any], Any, Any, Iterable[Batch]], Any]
"""(step, fixed, carry, batches) -> the carry after ``carry = step(fixed, carry, batch)`` for each of the batches."""


class Sequential(AbstractEngine):
    """One client after another, one step after another; on a CPU steps are traced when there are enough of them."""

    name = "sequential"

    def __init__(self, federation: Federation, algorithm: Algorithm, config: Any, seed: int) -> None:
        super().__init__(federation, algorithm, config, seed)
        self._single_steps = Traces(single=True)

    def run_group(self, program: Program, clients: Sequence[ClientId], shared: Tree, mine: PerClient) -> Outcome:
        """As ``AbstractEngine.run_group``."""
        kind = (program, self.federation.roster[clients[0]].model.spec)
        traced = self.federation.device.type == "cpu"
        steps = partial(self._single_steps.steps, kind) if traced else one_by_one
        replies, memories = {}, {}
        for client in clients:
            replies[client], memories[client] = run_client(self, program, client, shared, mine[client], steps)
        return Outcome(PerClient.of(replies), PerClient.of(memories))


def one_by_one(step: Callable[..., Any], fixed: Any, carry: Any, batches: Iterable[Batch]) -> Any:
    """All steps, as they are."""
    for batch in batches:
        carry = step(fixed, carry, batch)
    return carry


def run_client(
    engine: AbstractEngine, program: Program, client: ClientId, shared: Tree, mine: Tree, steps: Steps = one_by_one
) -> tuple[Tree, Tree]:
    """What the client itself would do on a machine of its own: its reply and its new memory."""
    data, device = engine.federation, engine.federation.device
    memory, facts = engine.recall(client), (engine.num_samples([client])[0], engine.keys([client])[0])
    home = engine.home(client, *facts, program.guest)
    carry = _stage("init", mine, [], program.init, home, shared, mine, memory)
    plan = engine.schedule(program, client)
    numbers, epochs = torch.arange(len(plan.rows), device=device), torch.tensor(plan.epochs, device=device)
    keys = fold(facts[1], numbers)
    last: list[Batch] = []

    def batches() -> Iterator[Batch]:
        for number, rows in enumerate(plan.rows):
            index = torch.as_tensor(rows, device=device)
            everything = torch.ones(len(rows), dtype=torch.bool, device=device)
            x, y = data.x.index_select(0, index), data.y.index_select(0, index)
            last[:] = [Batch(x, y, everything, numbers[number], epochs[number], keys[number])]
            yield last[0]

    def step(fixed: Any, carry: Any, batch: Batch) -> Any:
        shared, (num_samples, key) = fixed
        home = engine.home(client, num_samples, key, program.guest)
        return program.step(home, shared, carry, Batch(*batch))

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
