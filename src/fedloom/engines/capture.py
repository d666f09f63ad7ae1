# SPDX-License-Identifier: Apache-2.0
"""One step of a cohort, recorded once as a CUDA graph and replayed for every step of every round.

A small model's step is hundreds of kernels of a few microseconds, and launching them costs more than running them. A
graph launches all of them at once. It reads and writes fixed places in memory, so everything that changes from ask to
ask is copied there first: what was sent, the carry, and the schedule, through which a counter on the device walks.
Where a step is replayed often enough to pay for it, ``torch.compile`` fuses its kernels before they are recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fedloom.clients.batching import PaddedSchedule
from fedloom.core.contract import Batch
from fedloom.core.random import fold
from fedloom.core.recording import to_device
from fedloom.engines.convolution import products_for

Step = Callable[[Any, Any, Any, Batch], Any]
"""(shared, facts, carry, batch) -> carry, for one client."""


MIN_RECORDED_STEPS = 8
"""Recording a graph costs about four steps."""

CAPACITY = 64
"""Graphs are made for multiples of this many steps, so that asks of nearly equal length share one."""

MIN_COMPILED_STEPS = 200_000
"""Compiling costs 10 to 30 seconds: it is for steps of which this many, of one client each, are still to come."""

BUNDLE = 10
"""Steps that one graph has where the carry is small: they pass it on without a copy, and with fewer launches."""

MAX_BUNDLED_BYTES = 1 << 28
"""Of the carry: within a bundle there are two of it at a time."""

KEPT = 16
"""Kinds of asks whose graphs are kept at a time: each has memory of its own."""


class Recordings:
    """The recorded steps of a run, by kind of ask. ``notes`` is told of steps that cannot be recorded or compiled."""

    def __init__(self, data: tuple[Tensor, Tensor], notes: list[str]) -> None:
        self.data, self.notes = data, notes
        self.kept: dict[Any, CapturedSteps] = {}  # the one used last is last
        self._uses: Counter[Any] = Counter()
        self._ways: dict[Any, list[str]] = {}

    def run(
        self,
        label: str,
        name: Hashable,
        plan: PaddedSchedule,
        step: Step,
        shared: Any,
        facts: Any,
        carry: Any,
        rounds_left: int,
    ) -> Any:
        """The carry after every step of ``plan``; None where the steps are few or cannot be recorded.

        ``name`` and the shapes must fix what ``step`` does; ``label`` is for people.
        """
        steps = len(plan.active)
        if steps < MIN_RECORDED_STEPS:
            return None
        width, capacity, ragged = plan.rows.shape[2], -(-steps // CAPACITY) * CAPACITY, plan.active[-1] < len(facts[0])
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in pytree.tree_leaves((shared, facts, carry)))
        kind = (name, shapes, width, capacity, bool(ragged))
        ways = self._ways.setdefault(kind, ["recorded"])
        self._uses[kind] += 1
        if self._uses[kind] == 3 and ways and rounds_left * steps * len(facts[0]) >= MIN_COMPILED_STEPS:
            self.kept.pop(kind, None)  # to be recorded anew
            ways.insert(0, "compiled")
        while ways:
            made = self.kept.pop(kind, None)
            try:
                made = made or CapturedSteps(
                    step, shared, facts, carry, self.data, width, capacity,
                    ragged=bool(ragged), compiled=ways[0] == "compiled",
                )  # fmt: skip
                after = made.run(plan, shared, facts, carry)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                if made is not None and made.graphs:
                    raise
                self.notes.append(f"{label} cannot be {ways.pop(0)}: {str(error).splitlines()[0]}")
                continue
            self.kept[kind] = made
            for oldest in list(self.kept)[:-KEPT]:
                del self.kept[oldest]
            return after
        return None


class CapturedSteps:
    """The steps of one kind of ask: same program, same shapes, at most ``capacity`` steps.

    ``ragged``: some clients may have fewer steps than others; they keep their carry when they are done.
    """

    def __init__(
        self,
        step: Step,
        shared: Any,
        facts: Any,
        carry: Any,
        data: tuple[Tensor, Tensor],
        width: int,
        capacity: int,
        *,
        ragged: bool = True,
        compiled: bool = False,
    ) -> None:
        device, clients = data[0].device, len(facts[0])
        self.step, self.ragged = step, ragged
        self.rows = torch.zeros(capacity, clients, width, dtype=torch.int64, device=device)
        self.sizes, self.epochs, self.keys = torch.ones(3, capacity, clients, dtype=torch.int64, device=device)
        self.steps = torch.full((clients,), capacity, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.inputs = pytree.tree_map(_clone, (shared, facts, carry))
        tables = (self.rows, self.sizes, self.epochs, self.keys)
        self._everything, self._structure = pytree.tree_flatten((self.inputs, tables, self.steps, self.counter, data))
        self._changes = self._find_changes()
        changing = [p for p, changed in zip(pytree.tree_leaves(self.inputs[2]), self._changes) if changed]
        self._at = [next(i for i, leaf in enumerate(self._everything) if leaf is p) for p in [*changing, self.counter]]
        self._run: Callable[..., list[Tensor]] = self._next
        if compiled:
            # traced down to plain operators first, so that the compiler meets neither vmap nor grad
            with products_for(clients):
                traced = make_fx(self._next)(*self._everything)
            self._run = torch.compile(traced, dynamic=False, fullgraph=True)
        small = sum(leaf.nbytes for leaf in changing) <= MAX_BUNDLED_BYTES
        self._bundle = BUNDLE if small and capacity > BUNDLE else 1
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by number of steps

    def run(self, plan: PaddedSchedule, shared: Any, facts: Any, carry: Any) -> Any:
        """Every step of ``plan``; the carry at the end."""
        number = len(plan.active)
        _copy(self.inputs, (shared, facts, carry))
        device = self.counter.device
        self.rows[:number, :, : plan.rows.shape[2]].copy_(to_device(plan.rows, device))
        self.sizes[:number].copy_(to_device(plan.sizes, device))
        self.epochs[:number].copy_(to_device(plan.epochs, device))
        self.keys.copy_(fold(facts[1], torch.arange(len(self.keys), device=self.keys.device)[:, None]))
        self.steps.copy_(to_device((plan.sizes > 0).sum(0), device))
        self.counter.zero_()
        bundles, single = divmod(number, self._bundle)
        for steps in [self._bundle] * bundles + [1] * single:
            self._advance(steps)
        return pytree.tree_map(_clone, self.inputs[2])

    def _advance(self, steps: int) -> None:
        """The next steps, recorded when their number comes for the first time."""
        if not self.counter.is_cuda:
            self._take(steps)
            return
        if steps not in self.graphs:
            self._capture(steps)
        self.graphs[steps].replay()

    def _capture(self, steps: int) -> None:
        """Record ``_take``; two trial runs on a stream of their own let libraries make their choices first."""
        if not self.graphs:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._run(*self._everything)
            torch.cuda.current_stream().wait_stream(stream)
        pool = next((graph.pool() for graph in self.graphs.values()), None)  # they never run at the same time
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._take(steps)
        self.graphs[steps] = graph

    def _take(self, steps: int) -> None:
        """The next steps; the carry they start from and the counter are overwritten by those they end with."""
        now = list(self._everything)
        for _ in range(steps):
            for place, value in zip(self._at, self._run(*now)):
                now[place] = value
        _copy([self._everything[place] for place in self._at], [now[place] for place in self._at])

    def _next(self, *everything: Tensor) -> list[Tensor]:
        """The leaves of the carry that a step changes after the step that the counter points at, and the next count."""
        (shared, facts, carry), tables, steps, counter, data = pytree.tree_unflatten(everything, self._structure)

        def step(facts: Any, carry: Any, batch: Batch, working: Tensor) -> list[Tensor]:
            before = pytree.tree_leaves(carry)
            after = pytree.tree_leaves(self.step(shared, facts, carry, batch))
            pairs = [(new, old) for new, old, changes in zip(after, before, self._changes) if changes]
            return [torch.where(working, new, old) if self.ragged else new for new, old in pairs]

        changed: list[Tensor] = vmap(step)(facts, carry, _batch(tables, counter, data), steps > counter)
        # laid out as what they replace, which compiled code relies on
        return [*(leaf.contiguous() for leaf in changed), counter + 1]

    def _find_changes(self) -> list[bool]:
        """Which leaves of the carry a step changes; the others need not be copied."""
        (shared, facts, carry), tables, _, counter, data = pytree.tree_unflatten(self._everything, self._structure)
        found: list[bool] = []

        def step(facts: Any, carry: Any, batch: Batch) -> Tensor:
            after = self.step(shared, facts, carry, batch)
            found.extend(new is not old for new, old in zip(pytree.tree_leaves(after), pytree.tree_leaves(carry)))
            return batch.step

        vmap(step)(facts, carry, _batch(tables, counter, data))
        return found


def _batch(tables: tuple[Tensor, ...], counter: Tensor, data: tuple[Tensor, Tensor]) -> Batch:
    """The batches of all clients in the step that the counter points at."""
    rows, sizes, epochs, keys = (table.index_select(0, counter)[0] for table in tables)
    real = torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]
    return Batch(data[0][rows], data[1][rows], real, counter.expand(len(rows)), epochs, keys)


def _copy(places: Any, values: Any) -> None:
    """Copy a tree of values into the places of a tree of the same structure."""
    into, new = pytree.tree_leaves(places), pytree.tree_leaves(values)
    if into:
        torch._foreach_copy_(into, new)


def _clone(leaf: Tensor) -> Tensor:
    return leaf.clone(memory_format=torch.contiguous_format)
