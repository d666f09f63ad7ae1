# SPDX-License-Identifier: Apache-2.0
"""A whole cohort as one client: programs run under ``torch.func.vmap``, clients of one architecture stacked.

Clients are ordered by their number of steps, and those that are done leave the stack, so that a step costs what the
clients still at work cost and none is masked away. Batches that are not full are padded, and a mask says so.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from fedloom.clients.batching import PaddedSchedule
from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm, Batch, Home, Program
from fedloom.core.random import fold
from fedloom.core.trees import ClientId, PerClient, Tree, stack
from fedloom.engines.capture import Recordings, Step
from fedloom.engines.engine import AbstractEngine, Outcome

Facts = tuple[Tensor, Tensor]
"""The numbers of samples and the keys of a group."""


class Vectorised(AbstractEngine):
    """All clients of an architecture in one batched operation after another."""

    name = "vectorised"
    own_kernels = True
    """Whether compiled steps on a GPU may have convolutions by kernels of our own."""

    def __init__(self, federation: Federation, algorithm: Algorithm, config: Any, seed: int) -> None:
        super().__init__(federation, algorithm, config, seed)
        self._recordings = Recordings((federation.x, federation.y), self.notes, self.replay.pool)

    def run_group(self, program: Program, clients: Sequence[ClientId], shared: Tree, mine: PerClient) -> Outcome:
        """As ``AbstractEngine.run_group``."""
        schedules = {client: self.schedule(program, client) for client in clients}
        clients = sorted(clients, key=lambda client: -len(schedules[client].rows))
        plan = PaddedSchedule.of([schedules[client] for client in clients])
        facts = (self.num_samples(clients), self.keys(clients))
        own, memory = mine.pick(clients), stack([self.recall(client) for client in clients])

        def home(facts: Facts) -> Home:
            return self.home(clients[0], *facts, program.guest)

        def init(shared: Tree, facts: Facts, own: Tree, memory: Tree) -> Any:
            return vmap(lambda facts, own, memory: program.init(home(facts), shared, own, memory))(facts, own, memory)

        def step(shared: Tree, facts: Facts, carry: Any, batch: Batch) -> Any:
            return program.step(home(facts), shared, carry, batch)

        def final(shared: Tree, facts: Facts, carry: Any, memory: Tree) -> Any:
            return vmap(lambda f, carry, memory: program.final(home(f), shared, carry, memory))(facts, carry, memory)

        kind = (program, self.federation.roster[clients[0]].model.spec)
        carry = self.replay(("init", kind), init, shared, facts, own, memory)
        carry = self._all_steps(kind, plan, step, shared, facts, carry)
        reply, after = self.replay(("final", kind), final, shared, facts, carry, memory)
        return Outcome(PerClient([(clients, reply)]), PerClient([(clients, after)]))

    def free_memory(self) -> bool:
        """Forget the recorded steps, and what is left of failed ones, which may hold on to itself."""
        if self.federation.device.type != "cuda":
            return False
        self._recordings.kept.clear()
        for replay in self.replays:
            replay.kept.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return True

    def _all_steps(
        self, kind: tuple[Program, Hashable], plan: PaddedSchedule, step: Step, shared: Tree, facts: Facts, carry: Any
    ) -> Any:
        """Every step of every client: replayed from a graph where that is possible and pays, else one by one."""
        if self.federation.device.type == "cuda":
            rounds, own = (self.rounds_begun, self.rounds_left), self.own_kernels
            after = self._recordings.run(kind[0].name, kind, plan, step, shared, facts, carry, rounds, own)
            if after is not None:
                return after
        return self._steps(plan, step, shared, facts, carry)

    def batched(self, step: Step, shared: Tree, facts: Facts, carry: Any, batches: Iterable[Batch]) -> Any:
        """The steps of clients that all have these batches: the carry at the end."""
        stepped = vmap(partial(step, shared))
        for batch in batches:
            carry = stepped(facts, carry, batch)
        return carry

    def _steps(self, plan: PaddedSchedule, step: Step, shared: Tree, facts: Facts, carry: Any) -> Any:
        """Step by step; the carries of clients that are done are set aside."""
        device = self.federation.device
        rows, sizes = torch.from_numpy(plan.rows).to(device), torch.from_numpy(plan.sizes).to(device)
        real = torch.arange(rows.shape[2], device=device) < sizes[:, :, None]
        epochs = torch.from_numpy(plan.epochs).to(device)
        numbers = torch.arange(len(rows), device=device)[:, None].expand_as(epochs)
        keys = fold(facts[1], numbers)
        y = _gather(self.federation.y, rows)
        widths = plan.sizes.max(1, initial=0).tolist()

        def batches(start: int, stop: int, active: int) -> Iterator[Batch]:
            # taken apart at once: slicing step by step would take 20 µs of each
            parts = zip(*(whole[start:stop, :active].unbind() for whole in (rows, y, real, numbers, epochs, keys)))
            for width, own in zip(widths[start:stop], parts):
                if width < rows.shape[2]:
                    own = (*(whole[:, :width] for whole in own[:3]), *own[3:])
                yield Batch(_gather(self.federation.x, own[0]), *own[1:])

        done: list[Any] = []
        start, working = 0, len(facts[0])
        for active, steps in groupby(plan.active.tolist()):
            if active < working:
                done.append(_rows(carry, active, working))
                carry, facts, working = _rows(carry, 0, active), _rows(facts, 0, active), active
            stop = start + len(list(steps))
            carry = self.batched(step, shared, facts, carry, batches(start, stop, active))
            start = stop
        done.append(carry)
        return pytree.tree_map(lambda *parts: torch.cat(parts), *reversed(done)) if len(done) > 1 else carry


def _gather(data: Tensor, index: Tensor) -> Tensor:
    """``data[index]``; on a CPU this copies whole samples, in a quarter of the time."""
    return data.index_select(0, index.reshape(-1)).reshape(*index.shape, *data.shape[1:])


def _rows(tree: Any, start: int, stop: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[start:stop], tree)
