# SPDX-License-Identifier: Apache-2.0
"""Clients on Ray: parts of a cohort run in actors, on the cores or GPUs of this machine or of a cluster.

On CPUs a cohort is divided as the parallel engines divide it, which depends on the cohort alone: no bit depends on the
number of actors, and results are those of the engine that ``auto`` chooses. On GPUs it is divided by their number.

Data, models, programs and the trees that all clients share go through Ray's object store, once to each machine; an
actor keeps what it got last. Samples on disk stay there, and an actor reads those of its clients. With a part goes what
is its clients' own: the rows of their samples, what they are sent and what they remember. The roster goes nowhere, so
that an ask costs what its clients cost. Where the server needs only a mean of replies, one tree comes back for each
part, which is then several of those (``engines.sums``).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.clients.federation import Client, Federation
from fedloom.core.contract import Algorithm
from fedloom.core.errors import ConfigError, DataError, NeedsError
from fedloom.core.trees import ClientId, PerClient, Tree, stack, tree_map
from fedloom.data.mapped import opened
from fedloom.data.parquet import here
from fedloom.engines import packed, workers
from fedloom.engines.cluster import Actor, Cluster, first_line
from fedloom.engines.engine import AbstractEngine, AbstractLocalEngine, groups, joined
from fedloom.engines.job import Dropped, Job, Means, Moment, Outcome
from fedloom.engines.machine import Machine
from fedloom.engines.parallel import MANY, AbstractParallel, Parallel, ParallelVectorised, received, sent
from fedloom.engines.sequential import Sequential
from fedloom.engines.sums import added_up
from fedloom.engines.vectorised import Vectorised
from fedloom.engines.workers import Lost, cores, cpu_time

MOST = {"engine": 4, "program": 8, "model": 64, "tensor": 4, "file": 4, "shared": 1}
"""How many of a kind of thing an actor keeps: those used last."""

SUMS = 32
"""So many sums or fewer come of a group, unless one would be of more than ``MANY`` clients."""

Packed = tuple[list[packed.Place], np.ndarray]
"""A tree as it travels."""


class Thing(NamedTuple):
    """Something that goes to an actor once: it has it by its number, or gets it from the object store."""

    kind: str
    number: int
    place: Any


class Part(NamedTuple):
    """Clients of one architecture and what they are asked, without trees."""

    engine: Thing
    program: Thing
    model: Thing
    x: Thing
    y: Thing
    shared: Thing
    rows: dict[ClientId, Mapping[str, np.ndarray]]
    sizes: tuple[int, ...]
    """How many clients run at once: so many, then so many of the others."""
    moment: Moment
    rounds_left: int
    secret_noise: bool
    means: Means | None


class Load(NamedTuple):
    """What an actor gets at once: clients of one architecture, and how many of them run at once, as in ``Part``."""

    job: Job
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, parts: Sequence[Job]) -> Load:
        """Parts of a group, one after another."""
        clients = [client for part in parts for client in part.clients]
        return cls(parts[0].of(clients), tuple(len(part.clients) for part in parts))


class Ray(AbstractEngine):
    """Parts of a cohort in Ray's actors."""

    name = "ray"
    adds_up = True

    def __init__(
        self, federation: Federation, algorithm: Algorithm, config: Any, seed: int, machine: Machine | None = None
    ) -> None:
        super().__init__(federation, algorithm, config, seed, machine)
        from fedloom.engines.auto import choose  # which knows this engine too

        device, machine = federation.device.type, self.machine
        if machine.gpus and device == "cpu":
            raise ConfigError(
                f"--gpus is {machine.gpus}, and clients run on the CPU. Give --device cuda, or leave it out."
            )
        inner = choose("auto", federation.device, federation.models.values(), cohort=2, workers=2)[0]
        if device == "cpu":
            inner = ParallelVectorised.name if inner == ParallelVectorised.name else Parallel.name
        self._device, self._inner = device, inner
        self._local = _engine(inner, algorithm, config, seed, machine, federation)
        gpus = 0 if device == "cpu" else machine.gpus or torch.cuda.device_count()
        self._cluster = Cluster.at(machine.ray_address, machine.workers or cores(), gpus)
        there = self._cluster.number("CPU" if device == "cpu" else "GPU")
        if not there:
            raise NeedsError(f"Ray has nothing to run clients on: it has no {'cores' if device == 'cpu' else 'GPUs'}.")
        self._number = machine.workers or machine.gpus or there
        self._gpus = 0.0 if device == "cpu" else min(1.0, (machine.gpus or there) / self._number)
        self._things: dict[str, OrderedDict[Hashable, tuple[Any, Thing]]] = {kind: OrderedDict() for kind in MOST}
        self._known: dict[tuple[str, int], set[Hashable]] = {}
        """What each actor has run: programs and architectures."""
        self._still: dict[int, tuple[int, int]] = {}
        """By process: the time that it had used when it was last looked at, and how often that was the same before."""
        _send_by_value(algorithm.round.__module__)

    def answer(self, job: Job) -> Iterable[Outcome]:
        """As ``AbstractEngine.answer``: the parts of all groups side by side, the largest first."""
        parts = dict(enumerate(self.loads(job)))
        if job.means:
            self.note(f"{self.algorithm.name} needs only a mean of replies: they are added up where clients run")
        found: dict[int, list[Outcome]] = {}
        lost: dict[int, Lost] = {}
        # what is put into the object store stays there as long as it is referred to
        shared = self._put("shared", _pack(job.shared))
        for number, result in self._run(parts, shared):
            if isinstance(result, Lost):
                lost[number] = result
            else:
                found[number] = [result]
        # clients whose actor is lost are asked once more, one by one, then dropped
        alone = [(number, client) for number in lost for client in parts[number].job.clients]
        again = {at: Load.of([parts[number].job.of([client])]) for at, (number, client) in enumerate(alone)}
        for at, result in self._run(again, shared):
            number, client = alone[at]
            if isinstance(result, Lost):
                nothing = PerClient.empty(())
                result = Outcome(nothing, nothing, [Dropped(client, job.program.name, result.why)])
            found.setdefault(number, []).append(result)
        # in the order of parts, so that no sum depends on who was done first
        return [one[0] if len(one) == 1 else joined(one, job.federation) for _, one in sorted(found.items())]

    def check_hidden(self, job: Job) -> None:
        """As ``AbstractEngine.check_hidden``, by the engine that actors run, in this process."""
        self._local.check_hidden(job)

    def actors(self) -> list[Actor]:
        """The processes that clients run in, started when they are first needed."""
        return self._cluster.actors(Host, self._device, self._number, self._gpus)

    def loads(self, job: Job) -> list[Load]:
        """The job as it is divided."""
        if isinstance(self._local, AbstractParallel):
            divided = map(self._local.divided, groups(job))
            return [load for parts in divided for load in (blocks(parts) if job.means else map(Load.of, zip(parts)))]
        return [Load.of([part]) for part in self._parts(groups(job))]

    def _parts(self, groups: Sequence[Job]) -> list[Job]:
        """The groups as GPUs get them."""
        # each actor compiles the architectures that it gets, so that a group goes to no more than have time for it
        share = max(1, sum(map(cost, groups)) / self._number)
        found = []
        for group in groups:
            number = max(1, min(len(group.clients), round(cost(group) / share)))
            cuts = [len(group.clients) * i // number for i in range(number + 1)]
            found += [group.of(group.clients[start:stop]) for start, stop in pairwise(cuts)]
        return found

    def _run(self, parts: Mapping[int, Load], shared: Thing) -> Iterator[tuple[int, Outcome | Lost]]:
        """Each part's outcome as it comes. If the caller stops in between, by whatever exception, the actors end."""
        if not parts:
            return
        cluster, waiting = self._cluster, sorted(parts, key=lambda number: -cost(parts[number].job))
        actors = self.actors()
        at: dict[Any, tuple[Actor, int]] = {}

        def deal() -> None:
            idle = [actor for actor in actors if all(actor != other for other, _ in at.values())]
            for actor, number in self._dealt(idle, waiting, parts):
                at[self._begin(actor, parts[number], shared)] = actor, number

        try:
            deal()
            while at:
                done, _ = cluster.ray.wait(list(at), timeout=1.0)
                if not done and cluster.local:
                    self._end_stuck([actor for actor, _ in at.values()])
                ended = [(answer, *at.pop(answer)) for answer in done]
                results = [(number, self._result(answer, actor, actors)) for answer, actor, number in ended]
                deal()  # before results are read, so that nobody is idle meanwhile
                for number, result in results:
                    yield number, result if isinstance(result, Lost) else self._read(result)
        except BaseException:
            cluster.dismiss(actors)
            raise

    def _end_stuck(self, busy: Sequence[Actor]) -> None:
        """End processes of this machine that stand still. Called once a second."""
        for process in (actor.process for actor in busy):
            used, still = cpu_time(process, main_thread=True), self._still.get(process, (-1, 0))  # Ray's others go on
            self._still[process] = used, still[1] + 1 if used == still[0] else 0
            if self._still[process][1] >= workers.STILL_SECONDS:
                self.note(f"process {process} of Ray's stood still for {workers.STILL_SECONDS} seconds and was ended")
                os.kill(process, signal.SIGKILL)

    def _dealt(self, idle: list[Actor], waiting: list[int], parts: Mapping[int, Load]) -> Iterator[tuple[Actor, int]]:
        """Who does what: first the largest part of a kind that an actor has run before, else the largest."""
        for familiar in (True, False):
            for actor in list(idle):
                known = self._known.setdefault((actor.node, actor.process), set())
                kinds = {number: (parts[number].job.program, parts[number].job.spec) for number in waiting}
                number = next((number for number in waiting if not familiar or kinds[number] in known), None)
                if number is not None:
                    known.add(kinds[number])
                    waiting.remove(number)
                    idle.remove(actor)
                    yield actor, number

    def _begin(self, actor: Actor, load: Load, shared: Thing) -> Any:
        """Have an actor run a part; Ray's reference to the answer."""
        job = load.job
        federation, clients = job.federation, job.clients
        roster, task = federation.roster, federation.task
        engine = (self._inner, self.algorithm, self.config, self.seed, self.machine)
        y, model = federation.y, roster[clients[0]].model
        part = Part(
            self._thing("engine", (), None, lambda: engine),
            self._thing("program", job.program, None, lambda: job.program),
            self._thing("model", (id(model), id(task)), (model, task), lambda: (model, task)),
            self._samples(federation),
            self._thing("tensor", (id(y), y._version), y, lambda: _pack({"data": y})),
            shared,
            {client: roster[client].rows for client in clients},
            load.sizes,
            job.moment,
            job.rounds_left,
            job.secret_noise,
            job.means,
        )
        memory = stack([job.memories[client] for client in clients])
        return actor.handle.work.remote(part, _pack({"mine": job.mine.pick(clients), "memory": memory}))

    def _samples(self, federation: Federation) -> Thing:
        """The federation's samples; of those on disk only where they lie, for actors to read what they need."""
        x, file = federation.x, federation.file
        name = id(x), x._version
        if file:
            return self._thing("file", name, x, lambda: (str(file), tuple(x.shape)))
        return self._thing("tensor", name, x, lambda: _pack({"data": x}))

    def _thing(self, kind: str, name: Hashable, owner: Any, make: Callable[[], Any]) -> Thing:
        """What goes to actors once. ``name`` tells it from others as long as ``owner`` lives, which is kept here."""
        kept = self._things[kind]
        if name not in kept:
            kept[name] = owner, self._put(kind, make())
            if len(kept) > MOST[kind]:
                kept.popitem(last=False)
        kept.move_to_end(name)
        return kept[name][1]

    def _put(self, kind: str, what: Any) -> Thing:
        return Thing(kind, next(_numbers), self._cluster.ray.put(what))

    def _result(self, answer: Any, actor: Actor, actors: list[Actor]) -> Any:
        """What an actor gave, or ``Lost``; another one takes the place of an actor that died."""
        errors = self._cluster.ray.exceptions
        try:
            return self._cluster.ray.get(answer)
        except errors.RayTaskError as error:  # beside the clients' programs, whose errors are outcomes
            cause = error.cause or error
            return Lost(f"raised {type(cause).__name__}: {first_line(cause)}")
        except errors.RayError as error:
            why = f"its process {actor.process} ended: {first_line(error)}"
        self.note(f"process {actor.process} of Ray's ended; its clients were asked again")
        if not self._cluster.replace(actors, actor, Host, self._device, self._gpus):
            self.note(f"Ray has no place for another process like {actor.process}, which ended; {len(actors)} go on")
        return Lost(why)

    def _read(self, result: tuple[Any, Packed]) -> Outcome:
        (members, dropped, seconds, notes), (where, memory) = result
        for text in notes:
            self.note(text)
        device = self.federation.device
        tree = tree_map(lambda leaf: leaf.to(device), packed.taken(where, _bytes(memory)))
        found = received(members, tree, [Dropped(*fields) for fields in dropped], seconds)
        return replace(found, total=tree.get("total"))


class Host:
    """An actor: it runs parts for all engines of the process that began it."""

    def __init__(self, path: Sequence[str], device: str) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]
        torch.set_num_threads(1)
        self._device = device
        self._kept: dict[str, OrderedDict[int, Any]] = {kind: OrderedDict() for kind in MOST}

    def greet(self) -> tuple[int, str, str]:
        """The process, its machine, and what keeps it from working."""
        try:
            torch.zeros(1, device=self._device)
            fault = ""
        except (RuntimeError, AssertionError) as error:
            fault = f"it has no {self._device}: {first_line(error)}"
        return os.getpid(), socket.gethostname(), fault

    def work(self, part: Part, own: Packed) -> tuple[Any, Packed]:
        """Have the clients of a part run its program."""
        x, y, shared = self._get(part.x), self._get(part.y), self._get(part.shared)
        model, task = self._get(part.model)
        federation = Federation(x, y, task, {c: Client(c, model, rows) for c, rows in part.rows.items()})
        engine = self._get(part.engine, federation)
        tree, clients = self._here(packed.taken(own[0], _bytes(own[1]))), tuple(part.rows)
        remembered = PerClient([(clients, tree["memory"])])
        job = Job(
            self._get(part.program), clients, shared, PerClient([(clients, tree["mine"])]),
            {client: remembered[client] for client in clients}, federation, engine.config, Moment(*part.moment),
            part.rounds_left, part.secret_noise, means=part.means,
        )  # fmt: skip
        engine.machine.take_over(x.device)
        engine.notes.clear()
        stops = list(accumulate(part.sizes, initial=0))
        outcomes = [one for start, stop in pairwise(stops) for one in engine.attempt(job.of(clients[start:stop]))]
        total: Tree = {}
        if part.means:
            outcomes = [added_up(job, joined(outcomes, federation))]
            total = {"total": outcomes[0].total} if outcomes[0].total else {}
        members, stacks = sent(outcomes)
        dropped = [tuple(one) for outcome in outcomes for one in outcome.dropped]
        seconds = {client: taken for outcome in outcomes for client, taken in outcome.seconds.items()}
        return (members, dropped, seconds, list(engine.notes)), _pack({**stacks, **total})

    def _get(self, thing: Thing, *about: Any) -> Any:
        """A thing as it is used here: kept, or from the object store."""
        kept = self._kept[thing.kind]
        if thing.number not in kept:
            import ray

            found = ray.get(thing.place)
            if thing.kind == "tensor":  # on a CPU where it is, in memory that all actors of a machine map
                found = self._here(packed.seen(found[0], _bytes(found[1])))["data"]
            elif thing.kind == "file":
                found = self._here({"data": _of_file(*found)})["data"]
            elif thing.kind == "shared":
                found = self._here(packed.taken(found[0], _bytes(found[1])))
            elif thing.kind == "engine":
                made = _engine(*found, *about)
                found = made.inner if isinstance(made, AbstractParallel) else made
            kept[thing.number] = found
            if len(kept) > MOST[thing.kind]:
                kept.popitem(last=False)
        kept.move_to_end(thing.number)
        return kept[thing.number]

    def _here(self, tree: Tree) -> Any:
        return tree_map(lambda leaf: leaf.to(self._device), tree)


def blocks(parts: Sequence[Job]) -> Iterator[Load]:
    """Parts of a group, several together where their replies are added up: as the number of clients has it."""
    clients = sum(len(part.clients) for part in parts)
    number = min(len(parts), -(-clients // min(MANY, -(-clients // SUMS))))
    cuts = [len(parts) * i // number for i in range(number + 1)]
    return (Load.of(parts[start:stop]) for start, stop in pairwise(cuts))


def cost(job: Job) -> float:
    """About how much work a job is, in samples times parameters."""
    batches, roster = job.program.batches, job.federation.roster

    def samples(client: ClientId) -> int:
        if batches is None:
            return 1
        own = len(roster[client].of(batches.split))
        return own * batches.epochs if batches.epochs else min(own, batches.size) * batches.steps

    return float(sum(max(1, samples(client)) * max(1, roster[client].model.size) for client in job.clients))


def _engine(
    name: str, algorithm: Algorithm, config: Any, seed: int, machine: Machine, federation: Federation
) -> AbstractLocalEngine:
    """The engine of that name."""
    kinds: tuple[type[AbstractLocalEngine], ...] = (Parallel, ParallelVectorised, Sequential, Vectorised)
    return next(kind for kind in kinds if kind.name == name)(federation, algorithm, config, seed, machine)


def _send_by_value(module: str) -> None:
    """Have what a package defines travel itself, not by name, where no other process could import it.

    That is so for methods of the user's folders, whose package has no file.
    """
    from ray import cloudpickle

    package = sys.modules.get(module.partition(".")[0])
    if package is not None and package.__name__ != "__main__" and getattr(package, "__file__", None) is None:
        cloudpickle.register_pickle_by_value(package)


def _pack(tree: Tree) -> Packed:
    where, size = packed.places(tree)
    memory = torch.empty(size, dtype=torch.uint8)
    packed.put(tree, where, memory)
    return where, memory.numpy()


def _of_file(file: str, shape: tuple[int, ...]) -> Tensor:
    """Samples on a disk that this machine has too."""
    x = opened(here(Path(file)))
    if x.shape != shape:
        raise DataError(f"{file} has samples of shape {x.shape} here and {shape} where the run is. Give it one file.")
    return torch.from_numpy(x)


def _bytes(memory: np.ndarray) -> Tensor:
    """Memory of the object store, which must not be written to, as a tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(memory)


_numbers = count(1)
