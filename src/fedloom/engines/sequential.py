# SPDX-License-Identifier: Apache-2.0
"""A plain loop over clients. When a program fails it says in which stage, for whom and on what shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fedloom.core.contract import Batch, Program
from fedloom.core.random import fold
from fedloom.core.trees import ClientId, PerClient, Tree, signature
from fedloom.engines.engine import AbstractEngine, ClientFault, Outcome


class Sequential(AbstractEngine):
    """One client after another, one step after another."""

    name = "sequential"

    def run_group(self, program: Program, clients: Sequence[ClientId], shared: Tree, mine: PerClient) -> Outcome:
        """As ``AbstractEngine.run_group``."""
        replies, memories = {}, {}
        for client in clients:
            replies[client], memories[client] = run_client(self, program, client, shared, mine[client])
        return Outcome(PerClient.of(replies), PerClient.of(memories))


def run_client(
    engine: AbstractEngine, program: Program, client: ClientId, shared: Tree, mine: Tree
) -> tuple[Tree, Tree]:
    """What the client itself would do on a machine of its own: its reply and its new memory."""
    data, device = engine.federation, engine.federation.device
    memory, key = engine.recall(client), engine.keys([client])[0]
    home = engine.home(client, engine.num_samples([client])[0], key, program.guest)
    carry = _stage("init", client, mine, program.init, home, shared, mine, memory)
    plan = engine.schedule(program, client)
    numbers, epochs = torch.arange(len(plan.rows), device=device), torch.tensor(plan.epochs, device=device)
    keys = fold(key, numbers)
    for step, rows in enumerate(plan.rows):
        index = torch.as_tensor(rows, device=device)
        everything = torch.ones(len(rows), dtype=torch.bool, device=device)
        batch = Batch(data.x[index], data.y[index], everything, numbers[step], epochs[step], keys[step])
        carry = _stage("step", client, mine, program.step, home, shared, carry, batch)
    reply, memory = _stage("final", client, mine, program.final, home, shared, carry, memory)
    return reply, memory


def _stage(stage: str, client: ClientId, mine: Tree, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        batch = next((f" on x {tuple(a.x.shape)}, y {tuple(a.y.shape)}" for a in arguments if isinstance(a, Batch)), "")
        raise ClientFault(
            f"raised {type(error).__name__} in {stage}{batch}: {error} (mine: {dict(signature(mine))})"
        ) from error
