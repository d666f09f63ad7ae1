# SPDX-License-Identifier: Apache-2.0
"""What an engine is: an implementation of ``ask`` and nothing else.

An engine answers a ``Job``. A ``Session`` is one stage of a run, a round, an evaluation or an admission: it gets the
clients' memory, offers ``ask``, checks the replies, and has the memory and the stage's stats afterwards. An engine
keeps nothing from one session to the next but what it built for speed.
"""

from __future__ import annotations

import abc
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm, Batch, Home, Program, Seeds, call
from fedloom.core.errors import DivergedError, RoundError
from fedloom.core.memory import is_full, why_full
from fedloom.core.random import key, seed_of
from fedloom.core.trees import ClientId, PerClient, Tree, faults, leaves, num_bytes, signature, tree_map
from fedloom.engines.acceptance import NOT_FINITE, SPOILT, finite, refusals
from fedloom.engines.allocator import keep_freed_memory
from fedloom.engines.job import ClientFault, Dropped, Job, Means, Moment, Outcome
from fedloom.engines.machine import Machine
from fedloom.engines.memories import Memories
from fedloom.engines.sums import Block, can_be_added, mean_of
from fedloom.privacy.sample_level import check

SENT = "sent"
"""Where a client keeps a message that it has not been asked about yet."""

Part = tuple[Sequence[ClientId], Tree]
"""Clients and their trees, stacked."""


@dataclass
class Stats:
    """What happened in a session: refusals, bytes, and when (``time.perf_counter``)."""

    dropped: list[Dropped] = field(default_factory=list)
    down: Counter[ClientId] = field(default_factory=Counter)
    """Bytes by client."""
    up: Counter[ClientId] = field(default_factory=Counter)
    told: dict[str, Counter[str]] = field(default_factory=dict)
    """What clients replied: bytes by program and by branch of the reply."""
    seconds: Counter[ClientId] = field(default_factory=Counter)
    """How long clients took, of those of whom the engine knows."""
    asked: int = 0
    first_ask: float = 0.0
    last_answer: float = 0.0
    asking: float = 0.0

    @property
    def bytes_down(self) -> int:
        """To all clients."""
        return self.down.total()

    @property
    def bytes_up(self) -> int:
        """From all clients."""
        return self.up.total()


class AbstractEngine(abc.ABC):
    """Clients of a federation, and a way to have them run a program.

    All that an engine of another kind must have is ``answer``. It may give the outcomes of a job in any parts and any
    order, as they come: the session brings replies into the roster's order, so that no sum depends on it. What it may
    not do is fail for all because of one: a client that cannot be run is in ``Outcome.dropped``, with the reason.
    """

    name: str

    adds_up = False
    """Replies of a job of means come added up, an outcome at a time."""

    def __init__(
        self, federation: Federation, algorithm: Algorithm, config: Any, seed: int, machine: Machine | None = None
    ) -> None:
        self.federation, self.algorithm, self.config, self.seed = federation, algorithm, config, seed
        self.machine = machine or Machine()
        self.notes: list[str] = []
        """What users should know of how clients are run; each is said once."""
        if federation.device.type == "cpu":
            keep_freed_memory()

    @abc.abstractmethod
    def answer(self, job: Job) -> Iterable[Outcome]:
        """Have the clients of the job run its program."""

    def samples_of(self, client: ClientId) -> int:
        """How many training samples a client has; 0 where that is not known."""
        return len(self.federation.roster[client].rows["train"])

    def check_hidden(self, job: Job) -> None:  # noqa: B027
        """Refuse a job that is to hide samples and does not; here clients do that, on machines of their own."""

    def session(
        self,
        stage: int | str,
        memory: Memories,
        *,
        federation: Federation | None = None,
        rounds_left: int = 0,
        trusting: bool = False,
        secret_noise: bool = False,
        asks: int = 0,
        before_ask: Callable[[Job], None] | None = None,
    ) -> Session:
        """A stage of a run begins. ``stage`` is part of the name of every random stream.

        Args:
            memory: What clients remember; it is left as it is, the session has a copy.
            federation: Other data than the engine's own, e.g. with labels hidden.
            rounds_left: How many rounds are still to come: whether building something for speed pays.
            trusting: Replies are taken to be finite; whether they are goes to the session's ``checks``.
            secret_noise: Noise for privacy does not follow from the seed.
            asks: Which ask of the stage came before, for a client that hears of one ask alone.
            before_ask: Called with each ask, before anybody is asked.
        """
        self.machine.take_over(self.federation.device)
        return Session(self, stage, memory.copy(), federation or self.federation, rounds_left, trusting, secret_noise,
                       asks, before_ask)  # fmt: skip

    def first_memory(self, federation: Federation, client: ClientId) -> Tree:
        """What a client remembers before its first ask."""
        model = federation.roster[client].model
        seeds = Seeds(seed_of(self.seed, client, "memory"), seed_of(self.seed, "global model"))
        return {"buffers": model.fresh_buffers(), **self.algorithm.first_memory(model, self.config, seeds)}

    def check_enough(self, session: Session, program: Program, asked: int, replies: PerClient) -> None:
        """Raise ``RoundError`` where too few clients answered: here, nobody."""
        if asked and not replies:
            last = session.stats.dropped[-1]
            reasons = [one.reason for one in session.stats.dropped if one.program == program.name]
            kind = DivergedError if any(NOT_FINITE in reason for reason in reasons) else RoundError
            raise kind(
                f"No client of {asked} gave a usable reply to {program.name} ({session.stage_name}); the last one, "
                f"{last.client}, {last.reason}. The last checkpoint is intact: mend the cause, then resume; other "
                "rates need a new run."
            )

    def replay(self, name: Hashable, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(*arguments)``, perhaps by a faster way: the ``replay`` of a server's ``Setup``."""
        return call(name, function, *arguments)

    def free_memory(self) -> bool:
        """Give back memory that was kept for speed; whether there was any."""
        return False

    def note(self, text: str) -> None:
        """Write down something that users should know, once."""
        if text not in self.notes:
            self.notes.append(text)


class Session:
    """One stage of a run. ``memory`` is what clients remember so far, ``stats`` what happened, ``asks`` how often.

    Nobody else writes into its memory. Whoever began it takes ``memory`` from it if the stage is to count, and leaves
    it if not: what it was given is as it was.
    """

    def __init__(
        self,
        engine: AbstractEngine,
        stage: int | str,
        memory: Memories,
        federation: Federation,
        rounds_left: int,
        trusting: bool,
        secret_noise: bool,
        asks: int,
        before_ask: Callable[[Job], None] | None,
    ) -> None:
        self.engine, self.stage, self.memory, self.federation = engine, stage, memory, federation
        self.stats = Stats()
        self.checks: list[Tensor] = []
        """Of a trusting session: () bool each, whether replies were finite, for the caller to read later."""
        self._rounds_left, self.trusting, self._secret_noise, self.asks = rounds_left, trusting, secret_noise, asks
        self._before_ask = before_ask

    def ask(
        self, program: Program, shared: Tree, mine: Mapping[ClientId, Tree], means: Means | None = None
    ) -> PerClient:
        """Have the clients in ``mine`` run ``program``; give the usable replies, in the roster's order.

        A reply is usable if it has the shapes that ``program.expects`` says and is finite, memory included; others are
        dropped, by name and with a reason, and their memory stays what it was. A trusting session only notes whether
        numbers are finite (``checks``). Where too few are left, the engine's ``check_enough`` raises a ``RoundError``.

        ``means``: whoever asks uses the mean of these branches of replies and nothing else. Where the engine adds
        replies up, and they have no others, one reply then stands for all.
        """
        mine = PerClient.of(mine)
        wrong = faults(shared, "shared") + [f for _, tree in mine.groups for f in faults(tree, "mine")]
        if wrong:
            raise TypeError(f"{program.name} sends something that is not a tree of tensors: {'; '.join(wrong[:3])}")
        self.asks += 1
        start = time.perf_counter()
        stats = self.stats
        stats.first_ask = stats.first_ask or start
        stats.asked += len(mine)
        common = num_bytes(shared)
        for clients, tree in mine.groups:
            stats.down.update(dict.fromkeys(clients, common + num_bytes(tree) // len(clients)))
        usable: list[Part] = []
        blocks: list[Block] = []
        job = self.job(program, shared, mine)
        if means and self.engine.adds_up and can_be_added(means, program.expects(shared, mine[job.clients[0]])):
            job = replace(job, means=means)
        if job.hides_samples:
            self.engine.check_hidden(job)
        if self._before_ask:
            self._before_ask(job)
        for outcome in self.engine.answer(job):
            stats.dropped += outcome.dropped
            stats.seconds.update(outcome.seconds)
            if outcome.total is not None:
                blocks.append(self._accept_total(program, outcome, outcome.total))
            elif job.means:
                accepted = merged(self._accept(program, shared, mine, outcome), self.federation)
                blocks += [Block.of(job.means, *group) for group in accepted.groups]
            else:
                usable += self._accept(program, shared, mine, outcome)
        stats.last_answer = time.perf_counter()
        stats.asking += stats.last_answer - start
        replies = mean_of(job.means, blocks) if job.means else merged(usable, self.federation)
        self.engine.check_enough(self, program, len(mine), replies)
        return replies

    def job(self, program: Program, shared: Tree, mine: PerClient) -> Job:
        """The ask as the engine gets it."""
        clients = in_order(mine, self.federation)
        memories = {client: self.recall(client) for client in clients}
        return Job(
            program, tuple(clients), shared, mine, memories, self.federation, self.engine.config,
            Moment(self.engine.seed, self.stage, self.asks), self._rounds_left, self._secret_noise,
        )  # fmt: skip

    def recall(self, client: ClientId) -> Tree:
        """The client's memory, begun at its first ask."""
        if client not in self.memory:
            self.memory[client] = self.engine.first_memory(self.federation, client)
        return self.memory[client]

    def deliver(self, client: ClientId, message: Tree) -> None:
        """Have a client keep a message that it is asked about later, in this session or in another."""
        self.memory[client] = {**self.recall(client), SENT: message}

    def collect(self, client: ClientId) -> Tree | None:
        """The message that a client has kept, which it keeps no longer; None if there is none."""
        memory = dict(self.recall(client))
        message: Tree | None = memory.pop(SENT, None)
        if message is not None:
            self.memory[client] = memory
        return message

    def _accept(self, program: Program, shared: Tree, mine: PerClient, outcome: Outcome) -> list[Part]:
        """Keep the usable replies and the memory that goes with them; write down the others.

        Whether numbers are finite is one question for the whole stack, since reading an answer has the host wait for a
        GPU. Only where it is no are clients looked at one by one.
        """
        usable: list[Part] = []
        device = self.federation.device
        for clients, replies in outcome.replies.groups:
            self.stats.up.update(dict.fromkeys(clients, outcome.masked or num_bytes(replies) // len(clients)))
            expected = program.expects(shared, mine[clients[0]])
            kept, number = outcome.memories.pick(clients), len(clients)
            reasons = refusals(expected, replies, number, self.federation.dtype)
            if not any(reasons):
                found = self.engine.replay(("finite", number), partial(finite, number, device), replies, kept)
                if self.trusting:
                    self.checks.append(found.all())
                elif not bool(found.all()):  # or finite numbers with too large a sum
                    fine, sound = finite(number, device, replies, kept, exactly=True).tolist()
                    reasons = [
                        None if f and s else SPOILT if f else f"replied with {NOT_FINITE}" for f, s in zip(fine, sound)
                    ]
            good = [c for c, reason in zip(clients, reasons) if reason is None]
            self.stats.dropped += [Dropped(c, program.name, r) for c, r in zip(clients, reasons) if r is not None]
            self.memory.update((client, outcome.memories[client]) for client in good)
            if good:
                usable.append((good, outcome.replies.pick(good)))
                told = self.stats.told.setdefault(program.name, Counter())
                branches = {name: num_bytes({name: branch}) for name, branch in usable[-1][1].items()}
                told.update({"masked": outcome.masked * len(good)} if outcome.masked else branches)
        return usable

    def _accept_total(self, program: Program, outcome: Outcome, total: Tree) -> Block:
        """Keep what was added up, and the memory that goes with it: it was looked at where it was added up."""
        ((clients, told),) = outcome.replies.groups
        of_one = {name: num_bytes({name: branch}) for name, branch in total.items()}
        of_all = {name: leaf.numel() * leaf.element_size() for name, leaf in told.items()}
        self.stats.up.update(dict.fromkeys(clients, sum(of_one.values()) + num_bytes(told) // len(clients)))
        heard = self.stats.told.setdefault(program.name, Counter())
        heard.update({**{name: size * len(clients) for name, size in of_one.items()}, **of_all})
        self.memory.update((client, outcome.memories[client]) for client in clients)
        return Block(clients, told, total)

    @property
    def stage_name(self) -> str:
        """For people."""
        return f"round {self.stage}" if isinstance(self.stage, int) else str(self.stage)


def in_order(clients: Iterable[ClientId], federation: Federation) -> list[ClientId]:
    """In the roster's order."""
    return sorted(clients, key=federation.position.__getitem__)


def merged(parts: list[Part], federation: Federation) -> PerClient:
    """Trees of one shape as one stack in the roster's order, so that no sum depends on how clients were run."""
    alike: dict[Any, list[Part]] = {}
    position = federation.position
    for clients, tree in parts:
        shape = tuple((path, tuple(leaf.shape[1:])) for path, leaf in leaves(tree))
        alike.setdefault(shape, []).append((clients, tree))
    found = []
    for some in alike.values():
        some.sort(key=lambda part: position[part[0][0]])  # mostly that is the order already
        members = [client for clients, _ in some for client in clients]
        tree = some[0][1] if len(some) == 1 else tree_map(lambda *t: torch.cat(t), *(t for _, t in some))
        order = sorted(range(len(members)), key=lambda row: position[members[row]])
        if order != list(range(len(members))):
            members, tree = [members[row] for row in order], tree_map(lambda leaf, order=order: leaf[order], tree)
        found.append((members, tree))
    return PerClient(found)


def joined(outcomes: Sequence[Outcome], federation: Federation) -> Outcome:
    """The outcomes of parts of a job as one, with stacks in the roster's order: as if it had not been divided."""
    return Outcome(
        merged([group for outcome in outcomes for group in outcome.replies.groups], federation),
        merged([group for outcome in outcomes for group in outcome.memories.groups], federation),
        [one for outcome in outcomes for one in outcome.dropped],
        {client: taken for outcome in outcomes for client, taken in outcome.seconds.items()},
    )


class AbstractLocalEngine(AbstractEngine):
    """Clients in this process: a job is divided into groups of one architecture, and each group is run."""

    def __init__(
        self, federation: Federation, algorithm: Algorithm, config: Any, seed: int, machine: Machine | None = None
    ) -> None:
        super().__init__(federation, algorithm, config, seed, machine)
        self._hidden: set[tuple[Program, Hashable]] = set()
        """Of which it is known that samples are hidden."""
        self._room: dict[tuple[str, Hashable], int] = {}
        """How many clients fit into memory at a time, by program and architecture, where not all do."""

    @abc.abstractmethod
    def run_group(self, job: Job) -> Outcome:
        """Run clients whose model, ``mine`` and memory have the same shapes. It may fail: ``attempt`` then divides."""

    def check_hidden(self, job: Job) -> None:
        """As ``AbstractEngine.check_hidden``: each program is tried out once for each architecture."""
        data = job.federation
        for client in job.clients:
            model = data.roster[client].model
            if (job.program, model.spec) in self._hidden:
                continue
            unused = key("trial of what is hidden").to(data.device)
            home = Home(model, data.task, job.config, job.num_samples([client])[0], unused, job.program.guest)
            zero = torch.zeros((), dtype=torch.int64, device=data.device)
            like = Batch(data.x[:0], data.y[:0], torch.ones(0, dtype=torch.bool), zero, zero, unused)
            check(self.algorithm.name, job.program, home, job.shared, job.mine[client], job.memories[client], like)
            self._hidden.add((job.program, model.spec))

    def answer(self, job: Job) -> Iterable[Outcome]:
        """As ``AbstractEngine.answer``: group by group, each as large as memory has room for."""
        for group in groups(job):
            for part in self._parts(group):
                yield from self.attempt(part)

    def attempt(self, job: Job) -> Iterable[Outcome]:
        """Run a group; if it is too large for memory run its halves, if it fails otherwise its clients one by one."""
        program, clients = job.program, job.clients
        try:
            return [self._with_room(job)]
        except Exception as error:
            if is_full(error):
                reason = f"does not fit into memory: {why_full(error)}"
                parts = self._halves(job)
            else:
                reason = str(error) if isinstance(error, ClientFault) else f"raised {type(error).__name__}: {error}"
                parts = [[client] for client in clients] if len(clients) > 1 else []
                if parts:
                    self.note(f"{program.name} failed for {len(clients)} clients at once, who ran one by one: {reason}")
        # outside of the handlers, so that the error no longer holds on to tensors
        if not parts:
            nothing = PerClient.empty(())
            return [Outcome(nothing, nothing, [Dropped(clients[0], program.name, reason)])]
        return [outcome for part in parts for outcome in self.attempt(job.of(part))]

    def _with_room(self, job: Job) -> Outcome:
        """``run_group``; where memory is full, once more with what was kept there for speed given back."""
        try:
            return self.run_group(job)
        except Exception as error:
            if not is_full(error):
                raise
            reason = str(error)
        if not self.free_memory():
            raise torch.OutOfMemoryError(reason)
        return self.run_group(job)

    def _parts(self, job: Job) -> list[Job]:
        """The group in equal parts that memory has room for, as far as is known."""
        clients = job.clients
        number = -(-len(clients) // self._room.get(self._kind(job), len(clients)))
        size = -(-len(clients) // number)
        return [job.of(clients[start : start + size]) for start in range(0, len(clients), size)]

    def _halves(self, job: Job) -> list[Sequence[ClientId]]:
        """Both halves of a group that was too large, which is remembered; nothing of a single client."""
        clients = job.clients
        if len(clients) == 1:
            return []
        room = (len(clients) + 1) // 2
        self._room[self._kind(job)] = room
        self.note(f"{job.program.name} runs at most {room} clients at a time: memory has no room for {len(clients)}")
        return [clients[:room], clients[room:]]

    def _kind(self, job: Job) -> tuple[str, Hashable]:
        return job.program.name, job.spec


def groups(job: Job) -> list[Job]:
    """The job by clients that can run as one stack, in the roster's order."""
    alike: dict[Any, list[ClientId]] = {}
    for number, (clients, _) in enumerate(job.mine.groups):
        for client in in_order(clients, job.federation):
            shape = (number, job.federation.roster[client].model.spec, signature(job.memories[client]))
            alike.setdefault(shape, []).append(client)
    return [job.of(clients) for clients in alike.values()]
