# SPDX-License-Identifier: Apache-2.0
"""One step of a cohort, recorded once as a CUDA graph and replayed for every step of every round.

A small model's step is hundreds of kernels of a few microseconds, and launching them costs more than running them. A
graph launches all of them at once. It reads and writes fixed places in memory, so everything that changes from ask to
ask is copied there first: what was sent, the carry, and the schedule, through which a counter on the device walks.
Where a step is replayed often enough to pay for it, ``torch.compile`` fuses its kernels before they are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fedloom.clients.batching import PaddedSchedule
from fedloom.core.contract import Batch
from fedloom.core.device import copy_all, to_device
from fedloom.core.random import fold
from fedloom.engines.cache import FastForms, Way
from fedloom.engines.convolution import faster_for, why_no_kernels
from fedloom.engines.graphs import Pool, Slots, warm_up
from fedloom.engines.job import Job

Step = Callable[[Any, Any, Any, Batch], Any]
"""(shared, facts, carry, batch) -> carry, for one client."""


MIN_RECORDED_STEPS = 8
"""Recording a graph costs about four steps. Shorter asks are recorded when they come again, unless of a single step."""

CAPACITY = 64
"""Graphs are made for multiples of this many steps, so that asks of nearly equal length share one."""

MIN_COMPILED_STEPS = 200_000
"""Compiling costs 10 to 30 seconds: it is for steps of which this many, of one client each, are still to come."""

BUNDLE = 10
"""Steps that one graph has where the carry is small: they pass it on without a copy, and with fewer launches."""

MAX_BUNDLED_BYTES = 1 << 28
"""Of the carry: within a bundle there are two of it at a time."""

OWN = "compiled with kernels of our own"

KEPT = 16
"""Kinds of asks whose graphs are kept at a time: each has memory for what goes in and out."""


class Recordings:
    """The recorded steps of a run, by kind of ask. ``notes`` is told of steps that cannot be recorded or compiled."""

    def __init__(self, notes: list[str], pool: Pool) -> None:
        self._notes, self._pool = notes, pool
        self._forms: FastForms[CapturedSteps] = FastForms(notes, KEPT)
        self._pays: dict[Any, bool] = {}
        """Kinds of which it is known how often they come: whether to compile them."""
        self._rounds: dict[int | str, None] = {}
        """The rounds in which steps were run."""

    def run(self, job: Job, plan: PaddedSchedule, step: Step, facts: Any, carry: Any, own_kernels: bool) -> Any:
        """The carry after every step of ``plan``; None where the steps are few or cannot be recorded.

        The job's program, its models and the shapes must fix what ``step`` does. A kind is recorded when it has many
        steps or comes again; from the third round on it is known how often it comes, and where enough steps are still
        to come it is compiled as well, once.
        """
        steps, data = len(plan.active), (job.federation.x, job.federation.y)
        if not steps:
            return None
        if isinstance(job.moment.stage, int):
            self._rounds[job.moment.stage] = None
        width, capacity, ragged = plan.rows.shape[2], -(-steps // CAPACITY) * CAPACITY, plan.active[-1] < len(facts[0])
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in pytree.tree_leaves((job.shared, facts, carry)))
        # steps read the data where they lie: other data are another kind
        kind = (job.program, job.spec, tuple(map(id, data)), shapes, width, capacity, bool(ragged))
        uses = self._forms.seen(kind)
        if steps < MIN_RECORDED_STEPS and (steps == 1 or uses == 1):
            return None
        rounds = len(self._rounds)
        if uses >= 3 and rounds >= 3 and kind not in self._pays:  # how often it comes is known
            expected = uses * job.rounds_left / rounds  # more uses; asks of mixed cohorts are seldom alike
            self._pays[kind] = expected * steps * len(facts[0]) >= MIN_COMPILED_STEPS
            if self._pays[kind]:
                self._forms.forget(kind)  # to be built anew

        def captured(*, compiled: bool, own_kernels: bool) -> CapturedSteps:
            made = CapturedSteps(
                step, job.shared, facts, carry, data, self._pool, width, capacity,
                ragged=bool(ragged), compiled=compiled, own_kernels=own_kernels,
            )  # fmt: skip
            made.prepare(len(plan.active))
            return made

        def ways() -> Iterator[Way]:
            if self._pays.get(kind):
                self._pays[kind] = False  # once: if it is dropped, compiling again would take longer than it saves
                if own_kernels and self._has_kernels(data[0]):
                    yield Way(OWN, partial(captured, compiled=True, own_kernels=True))
                yield Way("compiled", partial(captured, compiled=True, own_kernels=False))
            yield Way("recorded", partial(captured, compiled=False, own_kernels=False))

        made = self._forms.get(kind, job.program.name, ways)
        return None if made is None else made.run(plan, job.shared, facts, carry)

    def clear(self) -> None:
        """Forget all recorded steps."""
        self._forms.clear()

    def _has_kernels(self, x: Tensor) -> bool:
        """Whether kernels of our own may help on this device; a note if they cannot."""
        if x.device.type != "cuda" or x.dtype != torch.float32:
            return False
        missing = why_no_kernels(x.device)
        note = f"convolutions are the library's: {missing}"
        if missing and note not in self._notes:
            self._notes.append(note)
        return not missing


class CapturedSteps:
    """The steps of one kind of ask: same program, same shapes, at most ``capacity`` steps.

    It lives in fixed places of the GPU's memory. ``_given`` holds what was sent and the facts, ``_carry`` the carry,
    ``table`` the schedule, (steps, clients, rows and two numbers), and ``counter`` the step that comes next. ``run``
    fills them and replays; a replay reads the row of the table that the counter points at, writes the carry over the
    one before, and counts on.

    ``ragged``: some clients may have fewer steps than others; they keep their carry when they are done.
    ``own_kernels``: compiled steps may have convolutions by kernels of our own.
    """

    def __init__(
        self,
        step: Step,
        shared: Any,
        facts: Any,
        carry: Any,
        data: tuple[Tensor, Tensor],
        pool: Pool,
        width: int,
        capacity: int,
        *,
        ragged: bool = True,
        compiled: bool = False,
        own_kernels: bool = False,
    ) -> None:
        device, clients = data[0].device, len(facts[0])
        self.step, self.pool, self.ragged, self.compiled, self.width = step, pool, ragged, compiled, width
        # for each step every client's rows, and its number of samples and pass; trial runs meet one sample each
        self.table = torch.zeros(capacity, clients, width + 2, dtype=torch.int64, device=device)
        self.table[:, :, -2] = 1
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        given, self._carry_structure = pytree.tree_flatten((shared, facts)), pytree.tree_structure(carry)
        self._given, self._carry = Slots(given[0]), Slots(pytree.tree_leaves(carry))
        self._given.fill(given[0])
        self._carry.fill(pytree.tree_leaves(carry))
        inputs = (
            *pytree.tree_unflatten(self._given.places, given[1]),
            pytree.tree_unflatten(self._carry.places, self._carry_structure),
        )
        self._everything, self._structure = pytree.tree_flatten((inputs, self.table, self.counter, data))
        self._changes = self._find_changes()
        changing = [place for place, changed in zip(self._carry.places, self._changes) if changed]
        self._at = [next(i for i, leaf in enumerate(self._everything) if leaf is p) for p in [*changing, self.counter]]
        self._compiled: Callable[..., list[Tensor]] | None = None
        if compiled:
            # traced down to plain operators first, so that the compiler meets neither vmap nor grad
            with faster_for(clients, own_kernels):
                traced = make_fx(self._next)(*self._everything)
            self._compiled = torch.compile(traced, dynamic=False, fullgraph=True)
        small = sum(leaf.nbytes for leaf in changing) <= MAX_BUNDLED_BYTES
        self._bundle = BUNDLE if small and capacity > BUNDLE else 1
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by number of steps

    def run(self, plan: PaddedSchedule, shared: Any, facts: Any, carry: Any) -> Any:
        """Every step of ``plan``; the carry at the end."""
        number, clients, width = plan.rows.shape
        self._given.fill(pytree.tree_leaves((shared, facts)))
        self._carry.fill(pytree.tree_leaves(carry))
        rows = np.zeros((number, clients, self.width + 2), dtype=np.int64)
        rows[:, :, :width], rows[:, :, -2], rows[:, :, -1] = plan.rows, plan.sizes, plan.epochs
        self.table[:number].copy_(to_device(rows, self.counter.device))
        self.counter.zero_()
        bundles, single = divmod(number, self._bundle)
        for steps in [self._bundle] * bundles + [1] * single:
            self._advance(steps)
        return pytree.tree_unflatten(self._carry.copies(), self._carry_structure)

    def _advance(self, steps: int) -> None:
        """The next steps, recorded when their number comes for the first time."""
        if not self.counter.is_cuda:
            self._take(steps)
            return
        if steps not in self.graphs:
            self._capture(steps)
        self.graphs[steps].replay()

    def prepare(self, steps: int) -> None:
        """Record what so many steps take; fails where they cannot be recorded."""
        if not self.counter.is_cuda:
            self._once(*self._everything)
        for part in {self._bundle, 1} if steps % self._bundle else {self._bundle}:
            if self.counter.is_cuda and part <= steps:
                self._capture(part)

    def _capture(self, steps: int) -> None:
        """Record ``_take``."""
        if not self.graphs:
            warm_up(lambda: self._once(*self._everything))
        with self.pool.recording() as graph:
            self._take(steps)
        self.graphs[steps] = graph

    def _take(self, steps: int) -> None:
        """The next steps; the carry they start from and the counter are overwritten by those they end with."""
        now = list(self._everything)
        for _ in range(steps):
            for place, value in zip(self._at, self._once(*now)):
                now[place] = value
        places, values = ([leaves[place] for place in self._at] for leaves in (self._everything, now))
        # a step may hand on what the carry had in another place, which is about to be overwritten
        written = {place.untyped_storage().data_ptr() for place in places}
        copy_all(places, [v.clone() if v.untyped_storage().data_ptr() in written else v for v in values])

    def _once(self, *everything: Tensor) -> list[Tensor]:
        """``_next``, compiled or not. A method: an attribute would make this object and its memory a cycle."""
        return self._next(*everything) if self._compiled is None else self._compiled(*everything)

    def _next(self, *everything: Tensor) -> list[Tensor]:
        """The leaves of the carry that a step changes after the step that the counter points at, and the next count."""
        (shared, facts, carry), table, counter, data = pytree.tree_unflatten(everything, self._structure)

        def step(facts: Any, carry: Any, batch: Batch, working: Tensor) -> list[Tensor]:
            before = pytree.tree_leaves(carry)
            after = pytree.tree_leaves(self.step(shared, facts, carry, batch))
            pairs = [(new, old) for new, old, changes in zip(after, before, self._changes) if changes]
            return [torch.where(working, new, old) if self.ragged else new for new, old in pairs]

        batch = _batch(table, counter, facts[1], data)
        changed: list[Tensor] = vmap(step)(facts, carry, batch, batch.mask.any(1))
        # laid out as what they replace, which compiled code relies on
        return [*(leaf.contiguous() for leaf in changed), counter + 1]

    def _find_changes(self) -> list[bool]:
        """Which leaves of the carry a step changes; the others need not be copied."""
        (shared, facts, carry), table, counter, data = pytree.tree_unflatten(self._everything, self._structure)
        found: list[bool] = []

        def step(facts: Any, carry: Any, batch: Batch) -> Tensor:
            after = self.step(shared, facts, carry, batch)
            if pytree.tree_structure(after) != self._carry_structure:
                raise TypeError("a step must leave the carry as it is built")
            found.extend(new is not old for new, old in zip(pytree.tree_leaves(after), pytree.tree_leaves(carry)))
            return batch.step

        vmap(step)(facts, carry, _batch(table, counter, facts[1], data))
        return found


def _batch(table: Tensor, counter: Tensor, keys: Tensor, data: tuple[Tensor, Tensor]) -> Batch:
    """The batches of all clients in the step that the counter points at; nothing but padding for who is done."""
    now = table.index_select(0, counter)[0]  # (clients, width + 2)
    rows, sizes, epochs = now[:, :-2], now[:, -2], now[:, -1]
    real = torch.arange(rows.shape[1], device=rows.device) < sizes[:, None]
    return Batch(data[0][rows], data[1][rows], real, counter.expand(len(rows)), epochs, fold(keys, counter))
