# SPDX-License-Identifier: Apache-2.0
"""A whole cohort as one client: programs run under ``torch.func.vmap``, clients of one architecture stacked.

Clients are ordered by their number of steps, and those that are done leave the stack, so that a step costs what the
clients still at work cost and none is masked away. Batches that are not full are padded, and a mask says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from fedloom.clients.batching import PaddedSchedule
from fedloom.core.contract import Batch, Home, Program
from fedloom.core.random import fold
from fedloom.core.trees import ClientId, PerClient, Tree, stack
from fedloom.engines.engine import AbstractEngine, Outcome


class Vectorised(AbstractEngine):
    """All clients of an architecture in one batched operation after another."""

    name = "vectorised"

    def run_group(self, program: Program, clients: Sequence[ClientId], shared: Tree, mine: PerClient) -> Outcome:
        """As ``AbstractEngine.run_group``."""
        schedules = {client: self.schedule(program, client) for client in clients}
        clients = sorted(clients, key=lambda client: -len(schedules[client].rows))
        plan = PaddedSchedule.of([schedules[client] for client in clients])
        facts = (self.num_samples(clients), self.keys(program, clients))
        own, memory = mine.pick(clients), stack([self.recall(client) for client in clients])

        def home(num_samples: Tensor, key: Tensor) -> Home:
            return self.home(clients[0], num_samples, key)

        def init(facts: Any, own: Tree, memory: Tree) -> Any:
            return program.init(home(*facts), shared, own, memory)

        def step(facts: Any, carry: Any, batch: Batch) -> Any:
            return program.step(home(*facts), shared, carry, batch)

        def final(facts: Any, carry: Any, memory: Tree) -> Any:
            return program.final(home(*facts), shared, carry, memory)

        carry = vmap(init)(facts, own, memory)
        carry = self._steps(plan, step, facts, carry, len(clients))
        reply, after = vmap(final)(facts, carry, memory)
        return Outcome(PerClient([(clients, reply)]), PerClient([(clients, after)]))

    def _steps(self, plan: PaddedSchedule, step: Any, facts: tuple[Tensor, Tensor], carry: Any, size: int) -> Any:
        """Every step of every client; the carries of those that are done are set aside."""
        device = self.federation.device
        rows, sizes = torch.from_numpy(plan.rows).to(device), torch.from_numpy(plan.sizes).to(device)
        epochs = torch.from_numpy(plan.epochs).to(device)
        done: list[Any] = []
        working = size
        for t, active in enumerate(plan.active.tolist()):
            if active < working:
                done.append(_rows(carry, active, working))
                carry, facts, working = _rows(carry, 0, active), _rows(facts, 0, active), active
            width = int(plan.sizes[t, :active].max())
            index = rows[t, :active, :width]
            number = torch.tensor(t, device=device)
            batch = Batch(
                self.federation.x[index],
                self.federation.y[index],
                torch.arange(width, device=device) < sizes[t, :active, None],
                number.expand(active),
                epochs[t, :active],
                fold(facts[1], number),
            )
            carry = vmap(step)(facts, carry, batch)
        done.append(carry)
        return pytree.tree_map(lambda *parts: torch.cat(parts), *reversed(done)) if len(done) > 1 else carry


def _rows(tree: Any, start: int, stop: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[start:stop], tree)
