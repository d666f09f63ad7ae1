# SPDX-License-Identifier: Apache-2.0
"""One step of a cohort, recorded once as a CUDA graph and replayed for every step of every round.

A small model's step is hundreds of kernels of a few microseconds, and launching them costs more than running them. A
graph launches all of them at once. It reads and writes fixed places in memory, so everything that changes from ask to
ask is copied there first: what was sent, the carry, and the schedule, through which a counter on the device walks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from fedloom.clients.batching import PaddedSchedule
from fedloom.core.contract import Batch
from fedloom.core.random import fold

Step = Callable[[Any, Any, Any, Batch], Any]
"""(shared, facts, carry, batch) -> carry, for one client."""


class CapturedSteps:
    """The steps of one kind of ask: same program, same shapes, at most ``capacity`` steps."""

    def __init__(self, step: Step, shared: Any, facts: Any, carry: Any, data: tuple[Tensor, Tensor], width: int,
                 capacity: int) -> None:  # fmt: skip
        device, clients = data[0].device, len(facts[0])
        self.capacity, self.width = capacity, width
        self.step, self.data = step, data
        self.inputs = pytree.tree_map(torch.clone, (shared, facts, carry))
        self.rows = torch.zeros(capacity, clients, width, dtype=torch.int64, device=device)
        self.sizes, self.epochs = torch.ones(2, capacity, clients, dtype=torch.int64, device=device)
        self.steps = torch.full((clients,), capacity, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, plan: PaddedSchedule, shared: Any, facts: Any, carry: Any) -> Any:
        """Every step of ``plan``; the carry at the end, which is overwritten by the next run."""
        number = len(plan.active)
        _copy(self.inputs, (shared, facts, carry))
        self.rows[:number, :, : plan.rows.shape[2]].copy_(torch.from_numpy(plan.rows))
        self.sizes[:number].copy_(torch.from_numpy(plan.sizes))
        self.epochs[:number].copy_(torch.from_numpy(plan.epochs))
        self.steps.copy_(torch.from_numpy((plan.sizes > 0).sum(0)))
        self.counter.zero_()
        if self.graph is None and self.counter.is_cuda:
            self.graph = self._capture()
        for _ in range(number):
            if self.graph is None:
                self._advance()
            else:
                self.graph.replay()
        return pytree.tree_map(torch.clone, self.inputs[2])

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Record ``_advance``; two trial runs on a stream of their own let libraries make their choices first."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._next()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        return graph

    def _advance(self) -> None:
        _copy(self.inputs[2], self._next())
        self.counter.add_(1)

    def _next(self) -> Any:
        """The carry after the step that the counter points at; a client that is done keeps its carry."""
        shared, facts, carry = self.inputs
        rows, sizes, epochs = (t.index_select(0, self.counter)[0] for t in (self.rows, self.sizes, self.epochs))
        number = self.counter[0]
        batch = Batch(
            self.data[0][rows],
            self.data[1][rows],
            torch.arange(self.width, device=rows.device) < sizes[:, None],
            number.expand(len(rows)),
            epochs,
            fold(facts[1], number),
        )
        working = self.steps > number

        def step(facts: Any, carry: Any, batch: Batch, working: Tensor) -> Any:
            after = self.step(shared, facts, carry, batch)
            return pytree.tree_map(lambda new, old: torch.where(working, new, old), after, carry)

        return vmap(step)(facts, carry, batch, working)


def _copy(places: Any, values: Any) -> None:
    """Copy a tree of values into the places of a tree of the same structure."""
    into, new = pytree.tree_leaves(places), pytree.tree_leaves(values)
    if into:
        torch._foreach_copy_(into, new)
