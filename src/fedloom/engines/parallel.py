# SPDX-License-Identifier: Apache-2.0
"""Other engines side by side: parts of a group run in processes of one operator thread each, one per core.

How a group is divided depends on the group alone, never on the number of processes: no bit depends on it.

Workers are forked with the data, the models and the programs in their memory, so that a part is sent as a few names and
the trees of its clients. A program that they do not know yet, or other data, means new workers. Clients whose worker
died are asked once more, each in a part of its own: so one that kills its process costs nobody else's reply.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm, Program
from fedloom.core.trees import ClientId, PerClient, Tree, stack
from fedloom.engines.engine import AbstractLocalEngine, joined
from fedloom.engines.job import Dropped, Job, Moment, Outcome
from fedloom.engines.machine import Machine
from fedloom.engines.sequential import Sequential
from fedloom.engines.vectorised import Vectorised
from fedloom.engines.workers import Lost, Workers, cores, possible

EVEN = 4
"""A group of more parts than this has a multiple of it, so that two and four cores come to an end together."""

PART_BYTES = 1 << 22
"""Of parameters in a part: a step also has their gradients, and all that should stay in a cache."""

FEW, SEVERAL, MANY = 4, 8, 32
"""Clients in a part: never fewer, no more where that would leave cores without work, and never more."""

PROGRAMS = 8
"""Programs that workers are kept for; one more, and they are forked anew."""


class AbstractParallel(AbstractLocalEngine):
    """Parts of a group, each run by an ``inner`` engine in a worker process.

    The same parts are run, by the same inner engine, where there are no workers: on one core, or on a system without
    fork. A kind says how large a part is (``part_size``).
    """

    inner: AbstractLocalEngine

    def __init__(
        self, federation: Federation, algorithm: Algorithm, config: Any, seed: int, machine: Machine | None = None
    ) -> None:
        super().__init__(federation, algorithm, config, seed, machine)
        self._processes = self.machine.workers or cores()
        self._workers: Workers | None = None
        self._programs: list[Program] = []
        self._worker_data: Federation | None = None

    def part_size(self, job: Job) -> int:
        """The most clients in a part of this group; it must not depend on the machine, as bits depend on it."""
        raise NotImplementedError

    def answer(self, job: Job) -> Iterable[Outcome]:
        """As ``AbstractLocalEngine.answer``, with one operator thread.

        Parts that run here then give the bits of a worker's, and idle threads take no cores from the workers.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield from super().answer(job)
        finally:
            torch.set_num_threads(before)

    def run_group(self, job: Job) -> Outcome:
        """As ``AbstractLocalEngine.run_group``."""
        parts = self.divided(job)
        if len(parts) == 1:
            return self.inner.run_group(job)
        workers = self._ready(job)
        if workers:
            outcomes = list(self._everywhere(workers, parts))
        else:
            outcomes = [outcome for part in parts for outcome in self.inner.attempt(part)]
        self._take_notes(self.inner.notes)
        return joined(outcomes, job.federation)

    def divided(self, job: Job) -> list[Job]:
        """The parts of a group: equally large but for one client, at most ``part_size``, the larger ones first."""
        clients = job.clients
        number = -(-len(clients) // self.part_size(job))
        if number > EVEN:
            number = min(-(-number // EVEN) * EVEN, len(clients))
        # the larger parts first, or they would all be one worker's
        smaller, larger = divmod(len(clients), number)
        cuts = [smaller * i + min(i, larger) for i in range(number + 1)]
        return [job.of(clients[start:stop]) for start, stop in pairwise(cuts)]

    def _everywhere(self, workers: Workers, parts: Sequence[Job], *, again: bool = True) -> Iterator[Outcome]:
        """The outcomes of the parts. Clients whose worker is lost are asked once more, one by one, then dropped."""

        def prepare(part: Job) -> tuple[Any, Tree]:
            clients, which = part.clients, self._programs.index(part.program)
            memory = stack([part.memories[client] for client in clients])
            note = (which, tuple(part.moment), clients, part.secret_noise)
            return note, {"shared": part.shared, "mine": part.mine.pick(clients), "memory": memory}

        lost: list[Job] = []
        for part, result in workers.run(parts, prepare):
            if not isinstance(result, Lost):
                (members, dropped, seconds, notes), tree = result
                self._take_notes(notes)
                yield received(members, tree, [Dropped(*fields) for fields in dropped], seconds)
            elif again:
                lost += [part.of([client]) for client in part.clients]
            else:
                nothing = PerClient.empty(())
                yield Outcome(nothing, nothing, [Dropped(part.clients[0], part.program.name, result.why)])
        if lost:
            yield from self._everywhere(workers, lost, again=False)

    def _take_notes(self, notes: Sequence[str]) -> None:
        for text in notes:
            self.note(text)

    def _ready(self, job: Job) -> Workers | None:
        """Workers that know the program and the data; None where there cannot be any.

        They are forked anew as seldom as can be, so they know the programs that came before, ``PROGRAMS`` of them.
        """
        if self._processes == 1 or not possible():
            return None
        program = job.program
        known = program in self._programs and self._worker_data is job.federation
        if self._workers is None or self._workers.closed or not known:
            if self._workers is not None:
                self._workers.close()
            if program not in self._programs:
                self._programs = [*self._programs[1 - PROGRAMS :], program]
            self._worker_data = job.federation
            try:
                # a weak reference: workers end when the engine is forgotten
                self._workers = Workers(self._processes, partial(_work, weakref.ref(self)))
            except OSError as error:
                self._processes = 1
                self.note(f"clients run one after another, in this process: {error}")
                return None
        return self._workers

    def work(self, note: Any, tree: Tree) -> tuple[Any, Tree]:
        """What a worker does with a part, in its own copy of the engine.

        ``note`` and ``tree`` are what ``prepare`` of ``_everywhere`` made; what goes back is taken apart there.
        """
        which, moment, clients, secret_noise = note
        self.machine.take_over(self.federation.device)
        remembered = PerClient([(clients, tree["memory"])])
        assert self._worker_data is not None
        job = Job(
            self._programs[which], clients, tree["shared"], PerClient([(clients, tree["mine"])]),
            {client: remembered[client] for client in clients}, self._worker_data, self.config, Moment(*moment),
            secret_noise=secret_noise,
        )  # fmt: skip
        self.inner.notes.clear()
        outcomes = list(self.inner.attempt(job))
        members, stacks = sent(outcomes)
        dropped = [tuple(one) for outcome in outcomes for one in outcome.dropped]
        seconds = {client: taken for outcome in outcomes for client, taken in outcome.seconds.items()}
        return (members, dropped, seconds, self.inner.notes), stacks


def _work(owner: weakref.ref[AbstractParallel], note: Any, tree: Tree) -> tuple[Any, Tree]:
    engine = owner()
    assert engine is not None
    return engine.work(note, tree)


class Parallel(AbstractParallel):
    """One client at a time on every core; the bits are those of ``sequential`` with one operator thread."""

    name = "parallel"

    def __init__(
        self, federation: Federation, algorithm: Algorithm, config: Any, seed: int, machine: Machine | None = None
    ) -> None:
        super().__init__(federation, algorithm, config, seed, machine)
        self.inner = Sequential(federation, algorithm, config, seed, machine)

    def part_size(self, job: Job) -> int:
        """As ``AbstractParallel.part_size``."""
        return 1


class ParallelVectorised(AbstractParallel):
    """One batched part of the cohort at a time on every core, small enough to stay in a core's cache."""

    name = "parallel_vectorised"

    def __init__(
        self, federation: Federation, algorithm: Algorithm, config: Any, seed: int, machine: Machine | None = None
    ) -> None:
        super().__init__(federation, algorithm, config, seed, machine)
        self.inner = Vectorised(federation, algorithm, config, seed, machine, traced=True)

    def part_size(self, job: Job) -> int:
        """As ``AbstractParallel.part_size``: as many as have room in a cache, of small models not too many."""
        clients, federation = job.clients, job.federation
        one = max(1, federation.roster[clients[0]].model.size * federation.dtype.itemsize)
        return max(FEW, min(PART_BYTES // one, MANY, max(SEVERAL, -(-len(clients) // EVEN))))


def sent(outcomes: Sequence[Outcome]) -> tuple[dict[str, list[tuple[ClientId, ...]]], Tree]:
    """Outcomes as a worker sends them: who is in which stack, and the stacks."""
    kinds = {"replies": [o.replies for o in outcomes], "memories": [o.memories for o in outcomes]}
    groups = {kind: [group for per_client in found for group in per_client.groups] for kind, found in kinds.items()}
    members = {kind: [clients for clients, _ in found] for kind, found in groups.items()}
    stacks = {kind: {str(i): tree for i, (_, tree) in enumerate(found)} for kind, found in groups.items()}
    return members, stacks


def received(
    members: dict[str, list[tuple[ClientId, ...]]], stacks: Tree, dropped: list[Dropped], seconds: dict[ClientId, float]
) -> Outcome:
    """What ``sent`` was given, as one outcome."""
    found = {
        kind: PerClient((clients, stacks.get(kind, {}).get(str(i), {})) for i, clients in enumerate(groups))
        for kind, groups in members.items()
    }
    return Outcome(found["replies"], found["memories"], dropped, seconds)
