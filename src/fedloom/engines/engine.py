# SPDX-License-Identifier: Apache-2.0
"""What all engines share: who is asked, their memory, which replies are usable, and the books.

An engine runs a *group* of clients of one architecture; the rest is here.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.clients.batching import Schedule, schedule
from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm, Home, Model, Program
from fedloom.core.errors import RoundError
from fedloom.core.random import seed_of, stream
from fedloom.core.recording import Replayer, to_device
from fedloom.core.trees import ClientId, PerClient, Tree, faults, leaves, num_bytes, signature, tree_map
from fedloom.engines.allocator import keep_freed_memory
from fedloom.engines.memories import Memories

FEW = 1 << 24
"""Numbers that a GPU puts side by side to look through them at once: fewer kernels than tensor by tensor."""

SPOILT = "would keep NaN or Inf in its memory; it keeps what it had"


class Dropped(NamedTuple):
    """A client whose reply was not used, and why."""

    client: ClientId
    program: str
    reason: str


@dataclass
class Books:
    """What an engine saw since the round began: refusals, bytes, and when (``time.perf_counter``)."""

    dropped: list[Dropped] = field(default_factory=list)
    bytes_down: int = 0
    bytes_up: int = 0
    asked: int = 0
    first_ask: float = 0.0
    last_answer: float = 0.0
    asking: float = 0.0


class Outcome(NamedTuple):
    """What the programs of a group gave: replies and new memory of the clients that got through."""

    replies: PerClient
    memories: PerClient


class ClientFault(Exception):
    """A client's program failed; the text says in which stage, why and on what."""


class AbstractEngine(abc.ABC):
    """``ask``, in terms of ``run_group``."""

    name: str

    def __init__(self, federation: Federation, algorithm: Algorithm, config: Any, seed: int) -> None:
        self.federation = federation
        self.algorithm = algorithm
        self.config = config
        self.seed = seed
        if federation.device.type == "cpu":
            keep_freed_memory()
        self.memory = Memories()
        self.books = Books()
        self.notes: list[str] = []
        self.take_over: Callable[[], None] = lambda: None
        """Sets what belongs to the process and not to a run, such as the precision: other runs set it too."""
        self.rounds_left = self.rounds_begun = 0
        self.trusting = False
        """Replies are taken to be finite; whether they are goes to ``doubts``, for others to read later."""
        self.doubts: list[Tensor] = []
        self.replay = Replayer(self.notes)
        self.replays = [self.replay]
        """Recordings besides those of steps, the server's too: what ``free_memory`` can give back."""
        self._room: dict[tuple[str, Hashable], int] = {}
        self._position = {client: row for row, client in enumerate(federation.roster)}
        self._stage: int | str = 0
        self._asks = 0

    def begin(self, stage: int | str, asks: int = 0) -> None:
        """A round (or an evaluation, an admission) begins: its name is part of the name of every random stream.

        ``asks``: which ask of it this is, for a client that hears of one ask alone.
        """
        self.take_over()
        self.books, self.doubts = Books(), []
        self._stage, self._asks = stage, asks
        self.rounds_begun += isinstance(stage, int)

    def ask(self, program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        """Have the clients in ``mine`` run ``program``; give the usable replies, in the roster's order."""
        mine = PerClient.of(mine)
        wrong = faults(shared, "shared") + [f for _, tree in mine.groups for f in faults(tree, "mine")]
        if wrong:
            raise TypeError(f"{program.name} sends something that is not a tree of tensors: {'; '.join(wrong[:3])}")
        self._asks += 1
        start = time.perf_counter()
        self.books.first_ask = self.books.first_ask or start
        self.books.asked += len(mine)
        self.books.bytes_down += num_bytes(shared) * len(mine) + sum(num_bytes(tree) for _, tree in mine.groups)
        usable: list[tuple[Sequence[ClientId], Tree]] = []
        for group in self.groups(mine):
            for part in self._parts(program, group):
                for outcome in self.attempt(program, part, shared, mine):
                    usable += self._accept(program, shared, mine, outcome)
        self.books.last_answer = time.perf_counter()
        self.books.asking += self.books.last_answer - start
        if mine and not usable:
            last = self.books.dropped[-1]
            raise RoundError(
                f"No client of {len(mine)} gave a usable reply to {program.name} ({self._stage_name()}); the last one, "
                f"{last.client}, {last.reason}. The last checkpoint is intact: mend the cause, then resume; other "
                "rates need a new run."
            )
        return self._merge(usable)

    @abc.abstractmethod
    def run_group(self, program: Program, clients: Sequence[ClientId], shared: Tree, mine: PerClient) -> Outcome:
        """Run the program for clients whose model, ``mine`` and memory have the same shapes."""

    def home(self, client: ClientId, num_samples: Tensor, key: Tensor, guest: Model | None = None) -> Home:
        """The surroundings of a client; under ``vmap`` the two tensors stand for those of the whole group."""
        return Home(self.federation.roster[client].model, self.federation.task, self.config, num_samples, key, guest)

    def num_samples(self, clients: Sequence[ClientId]) -> Tensor:
        """The sizes of the clients' training data, in the type that weights are computed in."""
        counts = [len(self.federation.roster[client].rows["train"]) for client in clients]
        return to_device(counts, self.federation.device, self.federation.dtype)

    def keys(self, clients: Sequence[ClientId]) -> Tensor:
        """The keys for draws inside this ask."""
        seeds = [seed_of(*self._name(client), "draws") for client in clients]
        return to_device(seeds, self.federation.device, torch.int64)

    def schedule(self, program: Program, client: ClientId) -> Schedule:
        """The client's batches in this ask."""
        split = program.batches.split if program.batches else "train"
        rows = self.federation.roster[client].of(split)
        return schedule(rows, program.batches, stream(*self._name(client), "batches"))

    def recall(self, client: ClientId) -> Tree:
        """The client's memory, begun at its first ask."""
        if client not in self.memory:
            model = self.federation.roster[client].model
            first = self.algorithm.first_memory(model, self.config, seed_of(self.seed, client, "memory"))
            self.memory[client] = {"buffers": model.fresh_buffers(), **first}
        return self.memory[client]

    def _name(self, client: ClientId) -> tuple[int | str, ...]:
        """Streams are named by who, when and which ask, not by method: methods are compared on equal draws."""
        return (self.seed, self._stage, client, self._asks)

    def groups(self, mine: PerClient) -> list[list[ClientId]]:
        """Clients that can run as one stack, in the roster's order."""
        alike: dict[Any, list[ClientId]] = {}
        for number, (clients, _) in enumerate(mine.groups):
            for client in sorted(clients, key=self._position.__getitem__):
                shape = (number, self.federation.roster[client].model.spec, signature(self.recall(client)))
                alike.setdefault(shape, []).append(client)
        return list(alike.values())

    def _parts(self, program: Program, group: list[ClientId]) -> list[list[ClientId]]:
        """The group in equal parts that memory has room for, as far as is known."""
        number = -(-len(group) // self._room.get(self._kind(program, group), len(group)))
        size = -(-len(group) // number)
        return [group[start : start + size] for start in range(0, len(group), size)]

    def attempt(self, program: Program, group: list[ClientId], shared: Tree, mine: PerClient) -> list[Outcome]:
        """Run a group; if it is too large for memory run its halves, if it fails otherwise its clients one by one."""
        try:
            return [self._with_room(program, group, shared, mine)]
        except torch.OutOfMemoryError as error:
            reason = f"does not fit into memory: {str(error).partition('. ')[0]}"
            parts = self._halves(program, group)
        except Exception as error:
            reason = str(error) if isinstance(error, ClientFault) else f"raised {type(error).__name__}: {error}"
            parts = [[client] for client in group] if len(group) > 1 else []
            if parts:
                self._note(f"{program.name} failed for {len(group)} clients at once, who ran one by one: {reason}")
        # outside of the handlers, so that the error no longer holds on to tensors
        if not parts:
            self.books.dropped.append(Dropped(group[0], program.name, reason))
        return [outcome for part in parts for outcome in self.attempt(program, part, shared, mine)]

    def _with_room(self, program: Program, group: list[ClientId], shared: Tree, mine: PerClient) -> Outcome:
        """``run_group``; where memory is full, once more with what was kept there for speed given back."""
        try:
            return self.run_group(program, group, shared, mine)
        except torch.OutOfMemoryError as error:
            reason = str(error)
        if not self.free_memory():
            raise torch.OutOfMemoryError(reason)
        return self.run_group(program, group, shared, mine)

    def _halves(self, program: Program, group: list[ClientId]) -> list[list[ClientId]]:
        """Both halves of a group that was too large, which is remembered; nothing of a single client."""
        if len(group) == 1:
            return []
        room = (len(group) + 1) // 2
        self._room[self._kind(program, group)] = room
        self._note(f"{program.name} runs at most {room} clients at a time: memory has no room for {len(group)}")
        return [group[:room], group[room:]]

    def _kind(self, program: Program, group: list[ClientId]) -> tuple[str, Hashable]:
        return program.name, self.federation.roster[group[0]].model.spec

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def free_memory(self) -> bool:
        """Give back memory that was kept for speed; whether there was any."""
        return False

    def _accept(
        self, program: Program, shared: Tree, mine: PerClient, outcome: Outcome
    ) -> list[tuple[Sequence[ClientId], Tree]]:
        """Keep the usable replies and the memory that goes with them; write down the others."""
        usable: list[tuple[Sequence[ClientId], Tree]] = []
        for clients, replies in outcome.replies.groups:
            self.books.bytes_up += num_bytes(replies)
            expected = program.expects(shared, mine[clients[0]])
            kept, number = outcome.memories.pick(clients), len(clients)
            reasons = refusals(expected, replies, number)
            if not any(reasons):
                check = partial(_finite, number, self.federation.device)
                found = self.replay(("finite", number), check, replies, kept)
                if self.trusting:
                    self.doubts.append(found.all())
                elif not bool(found.all()):  # or finite numbers with too large a sum
                    fine, sound = _finite(number, self.federation.device, replies, kept, exactly=True).tolist()
                    reasons = [
                        None if f and s else SPOILT if f else "replied with NaN or Inf" for f, s in zip(fine, sound)
                    ]
            good = [c for c, reason in zip(clients, reasons) if reason is None]
            self.books.dropped += [Dropped(c, program.name, r) for c, r in zip(clients, reasons) if r is not None]
            self.memory.update((client, outcome.memories[client]) for client in good)
            if good:
                usable.append((good, outcome.replies.pick(good)))
        return usable

    def _merge(self, groups: list[tuple[Sequence[ClientId], Tree]]) -> PerClient:
        """Replies of one shape as one stack in the roster's order, so that no sum depends on how clients were run."""
        alike: dict[Any, list[tuple[Sequence[ClientId], Tree]]] = {}
        for clients, tree in groups:
            shape = tuple((path, tuple(leaf.shape[1:])) for path, leaf in leaves(tree))
            alike.setdefault(shape, []).append((clients, tree))
        merged = []
        for parts in alike.values():
            parts.sort(key=lambda part: self._position[part[0][0]])  # mostly that is the order already
            clients = [client for members, _ in parts for client in members]
            tree = parts[0][1] if len(parts) == 1 else tree_map(lambda *t: torch.cat(t), *(t for _, t in parts))
            order = sorted(range(len(clients)), key=lambda row: self._position[clients[row]])
            if order != list(range(len(clients))):
                clients, tree = [clients[row] for row in order], tree_map(lambda leaf, order=order: leaf[order], tree)
            merged.append((clients, tree))
        return PerClient(merged)

    def _stage_name(self) -> str:
        return f"round {self._stage}" if isinstance(self._stage, int) else str(self._stage)


def refusals(expected: Tree, replies: Tree, number: int) -> list[str | None]:
    """For each of a stack of replies why its form cannot be used, or None."""
    wrong = faults(replies, "reply")
    if wrong:
        return [f"replied with something that is not a tree of tensors: {wrong[0]}"] * number
    wanted = {path: tuple(leaf.shape) for path, leaf in leaves(expected)}
    got = {path: tuple(leaf.shape[1:]) for path, leaf in leaves(replies)}
    for path in [*wanted, *got]:
        if wanted.get(path) != got.get(path):
            return [f"replied with shape {got.get(path)} for {path}; expected {wanted.get(path)}"] * number
    return [None] * number


def _finite(number: int, device: torch.device, *trees: Tree, exactly: bool = False) -> Tensor:
    """In which of so many clients' rows each tree has finite numbers only: (trees, clients), read back at once.

    A sum is finite only if all of its numbers are; if they are, it can still be too large, unless each is first taken
    times zero, ``exactly``.
    """
    found = []
    for tree in trees:
        rows = [leaf.reshape(number, -1) for _, leaf in leaves(tree) if leaf.numel()]
        few = sum(row.numel() for row in rows) <= FEW and len({row.dtype for row in rows}) == 1
        if device.type == "cuda" and few:
            rows = [torch.cat(rows, 1)]
        sums = [(row.mul(0) if exactly else row).sum(1).double() for row in rows]
        found.append(torch.stack([torch.zeros(number, dtype=torch.float64, device=device), *sums]).sum(0).isfinite())
    return torch.stack(found)
