# SPDX-License-Identifier: Apache-2.0
"""A whole cohort as one client: programs run under ``torch.func.vmap``, clients of one architecture stacked.

Clients are ordered by their number of steps, and those that are done leave the stack, so that a step costs what the
clients still at work cost and none is masked away. Batches that are not full are padded, and a mask says so.

A group on its way: each client's schedule is padded into a plan of rows (steps, clients, size). ``init`` makes the
carry, a tree whose leaves have the clients first: parameters, momentum, whatever the program wants. In each step the
samples are gathered by row into x and y (clients, size, ...), with a mask (clients, size), and the step takes the carry
to the next one. ``final`` makes of the last carry the replies and the memories, stacked alike. ``facts`` are what a
program may know of a client besides: its number of samples and its key, (clients,) each.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from fedloom.clients.batching import PaddedSchedule
from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm, Batch, Home
from fedloom.core.random import fold
from fedloom.core.trees import PerClient, Tree, stack
from fedloom.engines.capture import Recordings, Step
from fedloom.engines.engine import AbstractLocalEngine
from fedloom.engines.graphs import Replayer
from fedloom.engines.job import Job, Outcome
from fedloom.engines.machine import Machine
from fedloom.engines.traced import Traces

# of an operation without a batched form torch takes one client after another, and would ask users to file an issue
torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]

Facts = tuple[Tensor, Tensor]
"""The numbers of samples and the keys of a group."""


class Vectorised(AbstractLocalEngine):
    """All clients of an architecture in one batched operation after another.

    On a GPU steps and the server's own functions are recorded as graphs; on a CPU steps can be ``traced``.
    """

    name = "vectorised"

    def __init__(
        self,
        federation: Federation,
        algorithm: Algorithm,
        config: Any,
        seed: int,
        machine: Machine | None = None,
        *,
        traced: bool = False,
    ) -> None:
        super().__init__(federation, algorithm, config, seed, machine)
        self._replayer = Replayer(self.notes)
        self._recordings = Recordings(self.notes, self._replayer.pool)
        self._traces = Traces(self.notes) if traced else None

    def replay(self, name: Hashable, function: Callable[..., Any], *arguments: Any) -> Any:
        """As ``AbstractEngine.replay``: on a GPU, recorded as a graph when it comes again."""
        return self._replayer(name, function, *arguments)

    def run_group(self, job: Job) -> Outcome:
        """As ``AbstractLocalEngine.run_group``: ``init``, all steps and ``final``, each for the whole stack at once.

        The functions inside take whatever differs from ask to ask as arguments, since a recording of them stands for
        all asks of its kind.
        """
        program = job.program
        # by name, not by place: the order of the stack is another one than that of the job
        schedules = {client: job.schedule(client) for client in job.clients}
        clients = sorted(job.clients, key=lambda client: -len(schedules[client].rows))
        plan = PaddedSchedule.of([schedules[client] for client in clients])
        facts = (job.num_samples(clients), job.keys(clients))
        own, memory = job.mine.pick(clients), stack([job.memories[client] for client in clients])

        def home(facts: Facts) -> Home:
            return job.home(clients[0], *facts)

        def init(shared: Tree, facts: Facts, own: Tree, memory: Tree) -> Any:
            return vmap(lambda facts, own, memory: program.init(home(facts), shared, own, memory))(facts, own, memory)

        def step(shared: Tree, facts: Facts, carry: Any, batch: Batch) -> Any:
            return program.step(home(facts), shared, carry, batch)

        def final(shared: Tree, facts: Facts, carry: Any, memory: Tree) -> Any:
            return vmap(lambda f, carry, memory: program.final(home(f), shared, carry, memory))(facts, carry, memory)

        kind = (program, job.spec)
        carry = self.replay(("init", kind), init, job.shared, facts, own, memory)
        after = None
        # a recorded step takes one without samples for none at all
        if job.federation.device.type == "cuda" and not job.hides_samples:
            after = self._recordings.run(job, plan, step, facts, carry, self.machine.own_kernels)
        carry = self._steps(job, plan, step, facts, carry) if after is None else after
        reply, kept = self.replay(("final", kind), final, job.shared, facts, carry, memory)
        return Outcome(PerClient([(clients, reply)]), PerClient([(clients, kept)]))

    def free_memory(self) -> bool:
        """Forget the recorded steps, and what is left of failed ones, which may hold on to itself."""
        if self.federation.device.type != "cuda":
            return False
        self._recordings.clear()
        self._replayer.clear()
        gc.collect()
        torch.cuda.empty_cache()
        return True

    def _batched(self, job: Job, step: Step, facts: Facts, carry: Any, batches: Iterable[Batch]) -> Any:
        """The steps of clients that all have these batches: the carry at the end."""

        def stepped(fixed: tuple[Tree, Facts], carry: Any, batch: Batch) -> Any:
            return vmap(partial(step, fixed[0]))(fixed[1], carry, Batch(*batch))

        if self._traces and not job.secret_noise:  # which a trace would draw once and for all
            kind, fixed = (job.program, job.spec), (job.shared, facts)
            return self._traces.steps(kind, job.program.name, stepped, fixed, carry, batches)
        for batch in batches:
            carry = stepped((job.shared, facts), carry, batch)
        return carry

    def _steps(self, job: Job, plan: PaddedSchedule, step: Step, facts: Facts, carry: Any) -> Any:
        """Step by step; the carries of clients that are done are set aside.

        Clients are sorted by their number of steps, the longest first, so that those at work are always the first rows
        of every stack: ``plan.active`` says how many there are in each step. At the end the parts are put together
        again, in that order.
        """
        data, device = job.federation, job.federation.device
        rows, sizes = torch.from_numpy(plan.rows).to(device), torch.from_numpy(plan.sizes).to(device)
        real = torch.arange(rows.shape[2], device=device) < sizes[:, :, None]
        epochs = torch.from_numpy(plan.epochs).to(device)
        numbers = torch.arange(len(rows), device=device)[:, None].expand_as(epochs)
        keys = fold(facts[1], numbers)
        y = _gather(data.y, rows)
        widths = plan.sizes.max(1, initial=1).tolist()

        def batches(start: int, stop: int, active: int) -> Iterator[Batch]:
            # taken apart at once: slicing step by step would take 20 µs of each
            parts = zip(*(whole[start:stop, :active].unbind() for whole in (rows, y, real, numbers, epochs, keys)))
            for width, own in zip(widths[start:stop], parts):
                if width < rows.shape[2]:
                    own = (*(whole[:, :width] for whole in own[:3]), *own[3:])
                yield Batch(_gather(data.x, own[0]), *own[1:])

        done: list[Any] = []
        start, working = 0, len(facts[0])
        for active, steps in groupby(plan.active.tolist()):
            if active < working:
                done.append(_rows(carry, active, working))
                carry, facts, working = _rows(carry, 0, active), _rows(facts, 0, active), active
            stop = start + len(list(steps))
            carry = self._batched(job, step, facts, carry, batches(start, stop, active))
            start = stop
        done.append(carry)
        return pytree.tree_map(lambda *parts: torch.cat(parts), *reversed(done)) if len(done) > 1 else carry


def _gather(data: Tensor, index: Tensor) -> Tensor:
    """``data[index]``; on a CPU this copies whole samples, in a quarter of the time."""
    return data.index_select(0, index.reshape(-1)).reshape(*index.shape, *data.shape[1:])


def _rows(tree: Any, start: int, stop: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[start:stop], tree)
