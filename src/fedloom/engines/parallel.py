# SPDX-License-Identifier: Apache-2.0
"""Clients side by side: the other engines, in processes with one operator thread each, on all cores of a CPU.

Which process runs a client, and how many there are, changes no bit of what it gives. What is asked of a client is
prepared, checked and remembered by the parent as on every engine; a process only runs the client's program.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.func import vmap

from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm, Batch, Program
from fedloom.core.trees import ClientId, PerClient, Tree, stack
from fedloom.engines.capture import Step
from fedloom.engines.engine import AbstractEngine, Dropped, Outcome
from fedloom.engines.memories import Memories
from fedloom.engines.sequential import Sequential
from fedloom.engines.traced import Traces
from fedloom.engines.vectorised import Facts, Vectorised
from fedloom.engines.workers import Lost, Workers, cores, possible

EVEN = 4
"""A group of more parts than this has a multiple of it, so that two and four cores come to an end together."""

PART_BYTES = 1 << 22
"""Of parameters in a part: a step also has their gradients, and all that should stay in a cache."""

FEW, SEVERAL, MANY = 4, 8, 32
"""Clients in a part: never fewer, no more where that would leave cores without work, and never more."""

PROGRAMS = 8
"""Programs that workers are kept for; one more, and they are forked anew."""


class AbstractParallel(AbstractEngine):
    """Another engine's ``run_group``, for parts of the group side by side."""

    def __init__(self, federation: Federation, algorithm: Algorithm, config: Any, seed: int) -> None:
        super().__init__(federation, algorithm, config, seed)
        self.processes = cores()
        self._workers: Workers | None = None
        self._programs: list[Program] = []
        self._worker_data: Federation | None = None
        self._at_work = False
        """Whether parts are being run, here or in a worker's copy, which are not divided again."""

    @abc.abstractmethod
    def part_size(self, clients: Sequence[ClientId]) -> int:
        """The most clients in a part of this group; the same on every machine, and so are the bits that it gives."""

    @abc.abstractmethod
    def run_part(self, program: Program, clients: Sequence[ClientId], shared: Tree, mine: PerClient) -> Outcome:
        """The other engine's ``run_group``."""

    def ask(self, program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        """As ``AbstractEngine.ask``, with one thread: parts that run here give the bits of a worker's, and threads that
        wait for an operator would take cores from the workers."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return super().ask(program, shared, mine)
        finally:
            torch.set_num_threads(before)

    def run_group(self, program: Program, clients: Sequence[ClientId], shared: Tree, mine: PerClient) -> Outcome:
        """As ``AbstractEngine.run_group``; where workers run, clients that fail are written down here."""
        if self._at_work:
            return self.run_part(program, clients, shared, mine)
        number = -(-len(clients) // self.part_size(clients))
        if number > EVEN:
            number = min(-(-number // EVEN) * EVEN, len(clients))
        # the larger parts first, or they would all be one worker's
        smaller, larger = divmod(len(clients), number)
        cuts = [smaller * i + min(i, larger) for i in range(number + 1)]
        parts = [clients[start:stop] for start, stop in pairwise(cuts)]
        workers = self._ready(program) if len(parts) > 1 else None
        if workers:
            outcomes = self._everywhere(workers, program, parts, shared, mine)
        elif len(parts) > 1:
            outcomes = self._here(program, parts, shared, mine)
        else:
            outcomes = iter([self.run_part(program, clients, shared, mine)])
        replies: list[tuple[Sequence[ClientId], Tree]] = []
        memories: list[tuple[Sequence[ClientId], Tree]] = []
        for outcome in outcomes:
            replies += outcome.replies.groups
            memories += outcome.memories.groups
        return Outcome(self._merge(replies), self._merge(memories))

    def _here(
        self, program: Program, parts: Sequence[Sequence[ClientId]], shared: Tree, mine: PerClient
    ) -> Iterator[Outcome]:
        """The outcomes of the parts, run in this process as in a worker: a part that fails leaves the others alone."""
        self._at_work = True
        try:
            for part in parts:
                yield from self.attempt(program, list(part), shared, mine)
        finally:
            self._at_work = False

    def _everywhere(
        self, workers: Workers, program: Program, parts: Sequence[Sequence[ClientId]], shared: Tree, mine: PerClient
    ) -> Iterator[Outcome]:
        """The outcomes of the parts. A part whose worker is lost is tried again client by client, then given up."""

        def prepare(part: Sequence[ClientId]) -> tuple[Any, Tree]:
            memory = stack([self.recall(client) for client in part])
            note = (self._programs.index(program), self._stage, self._asks, tuple(part))
            return note, {"shared": shared, "mine": mine.pick(part), "memory": memory}

        again: list[Sequence[ClientId]] = []
        for part, result in workers.run(parts, prepare):
            if not isinstance(result, Lost):
                (members, dropped, notes), tree = result
                self.books.dropped += [Dropped(*fields) for fields in dropped]
                for text in notes:
                    self._note(text)
                yield _received(members, tree)
            elif len(part) > 1:
                again += [(client,) for client in part]
            else:
                self.books.dropped.append(Dropped(part[0], program.name, result.why))
        if again:
            yield from self._everywhere(workers, program, again, shared, mine)

    def _ready(self, program: Program) -> Workers | None:
        """Workers that know the program and the data; None where there cannot be any."""
        if self.processes == 1 or not possible():
            return None
        known = program in self._programs and self._worker_data is self.federation
        if self._workers is None or self._workers.closed or not known:
            if self._workers is not None:
                self._workers.close()
            if program not in self._programs:
                self._programs = [*self._programs[1 - PROGRAMS :], program]
            self._worker_data = self.federation
            try:
                # a weak reference: workers end when the engine is forgotten
                self._workers = Workers(self.processes, partial(_work, weakref.ref(self)))
            except OSError as error:
                self.processes = 1
                self.notes.append(f"clients run one after another, in this process: {error}")
                return None
        return self._workers


def _work(owner: weakref.ref[AbstractParallel], note: Any, tree: Tree) -> tuple[Any, Tree]:
    """What a worker does with a part, in its own copy of the engine."""
    engine = owner()
    assert engine is not None
    which, stage, asks, part = note
    engine._at_work = True
    engine.begin(stage)
    remembered = PerClient([(part, tree["memory"])])
    engine.memory = Memories({client: remembered[client] for client in part})
    engine._asks, engine.notes = asks, []
    mine = PerClient([(part, tree["mine"])])
    outcomes = engine.attempt(engine._programs[which], list(part), tree["shared"], mine)
    members, stacks = _sent(outcomes)
    return (members, [tuple(dropped) for dropped in engine.books.dropped], engine.notes), stacks


class Parallel(AbstractParallel, Sequential):
    """One client at a time on every core; the bits are those of ``sequential`` with one operator thread."""

    name = "parallel"

    def part_size(self, clients: Sequence[ClientId]) -> int:
        """As ``AbstractParallel.part_size``."""
        return 1

    def run_part(self, program: Program, clients: Sequence[ClientId], shared: Tree, mine: PerClient) -> Outcome:
        """As ``AbstractParallel.run_part``."""
        return Sequential.run_group(self, program, clients, shared, mine)


class ParallelVectorised(AbstractParallel, Vectorised):
    """One batched part of the cohort at a time on every core, small enough to stay in a core's cache."""

    name = "parallel_vectorised"

    def __init__(self, federation: Federation, algorithm: Algorithm, config: Any, seed: int) -> None:
        super().__init__(federation, algorithm, config, seed)
        self._traces = Traces()
        self._step_of: Hashable = None

    def part_size(self, clients: Sequence[ClientId]) -> int:
        """As ``AbstractParallel.part_size``: as many as have room in a cache, of small models not too many."""
        one = max(1, self.federation.roster[clients[0]].model.size * self.federation.dtype.itemsize)
        return max(FEW, min(PART_BYTES // one, MANY, max(SEVERAL, -(-len(clients) // EVEN))))

    def run_part(self, program: Program, clients: Sequence[ClientId], shared: Tree, mine: PerClient) -> Outcome:
        """As ``AbstractParallel.run_part``."""
        self._step_of = (program, self.federation.roster[clients[0]].model.spec)
        return Vectorised.run_group(self, program, clients, shared, mine)

    def batched(self, step: Step, shared: Tree, facts: Facts, carry: Any, batches: Iterable[Batch]) -> Any:
        """As ``Vectorised.batched``, traced when there is enough of it."""

        def stepped(fixed: tuple[Tree, Facts], carry: Any, batch: Batch) -> Any:
            return vmap(partial(step, fixed[0]))(fixed[1], carry, Batch(*batch))

        return self._traces.steps(self._step_of, stepped, (shared, facts), carry, batches)


def _sent(outcomes: Sequence[Outcome]) -> tuple[dict[str, list[tuple[ClientId, ...]]], Tree]:
    """Outcomes as a worker sends them: who is in which stack, and the stacks."""
    kinds = {"replies": [o.replies for o in outcomes], "memories": [o.memories for o in outcomes]}
    groups = {kind: [group for per_client in found for group in per_client.groups] for kind, found in kinds.items()}
    members = {kind: [clients for clients, _ in found] for kind, found in groups.items()}
    stacks = {kind: {str(i): tree for i, (_, tree) in enumerate(found)} for kind, found in groups.items()}
    return members, stacks


def _received(members: dict[str, list[tuple[ClientId, ...]]], stacks: Tree) -> Outcome:
    """What ``_sent`` was given, as one outcome."""
    found = {
        kind: PerClient((clients, stacks.get(kind, {}).get(str(i), {})) for i, clients in enumerate(groups))
        for kind, groups in members.items()
    }
    return Outcome(found["replies"], found["memories"])
