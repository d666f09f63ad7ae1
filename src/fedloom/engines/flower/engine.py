# SPDX-License-Identifier: Apache-2.0
"""``ask`` over Flower's Grid: one message per client, all at once; late, missing and bad replies are left out by name.

Clients keep their memory themselves, in numbered versions. The engine knows the number of each client's present
version, and nothing of what is in it: an ask says which version to start from and which to write, and only a reply that
is used makes what was written the present one. No number is given twice, and later ones are greater. So a client that
still works on an earlier round when the next has begun, or a server that was killed and goes on from its last
checkpoint, leaves no client with a memory that the server does not count on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from flwr.app import RecordDict

from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm, Program
from fedloom.core.errors import RoundError
from fedloom.core.task import Task
from fedloom.core.trees import ClientId, PerClient, Tree, leaves, num_bytes
from fedloom.engines.engine import AbstractEngine, Dropped, Outcome
from fedloom.engines.flower.codec import Malformed, describe, facts_of, pack, tree_of

ASK = "train"
"""Flower's type of the messages."""

EVALUATION = "evaluate."
"""How the names of programs that try a model begin."""

VERSION = "version"

Exchange = Callable[[str, Mapping[ClientId, RecordDict], float], Mapping[ClientId, RecordDict | str]]
"""(type, contents, timeout in seconds) -> for each client its reply, or why there is none."""


class Rules(NamedTuple):
    """When a round counts."""

    timeout: float = 600.0
    """Seconds to wait for replies."""
    quorum: float = 0.0
    """Share of the clients asked that must give a usable reply."""


class Flower(AbstractEngine):
    """Clients behind a network. ``memory`` holds the number of each client's present memory, ``{"version"}``."""

    name = "flower"

    def __init__(
        self, federation: Federation, algorithm: Algorithm, config: Any, seed: int, plain: Algorithm, run: str,
        exchange: Exchange, rules: Rules,
    ) -> None:  # fmt: skip
        super().__init__(federation, algorithm, config, seed)
        self.plain, self.run, self.exchange, self.rules = plain, run, exchange, rules
        self.saved: dict[ClientId, int] = {}
        """The versions in the last checkpoint, which clients must not forget."""
        self._newest = 0

    def ask(self, program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        """As ``AbstractEngine.ask``; an ask of a round with fewer usable replies than the quorum does not count.

        An evaluation that nobody answers stops nothing: training goes on, and the scores are the worst there are.
        """
        try:
            replies = super().ask(program, shared, mine)
        except RoundError:
            if not program.name.startswith(EVALUATION):
                raise
            return PerClient.empty(())
        if isinstance(self._stage, int) and len(replies) + 1e-9 < self.rules.quorum * len(mine):  # 0.28 of 25 is 7
            raise RoundError(
                f"{len(replies)} of {len(mine)} clients gave a usable reply to {program.name}, fewer than the quorum "
                f"of {self.rules.quorum:.0%}. The last checkpoint is intact: see to the clients, then resume."
            )
        return replies

    def enlist(self, federation: Federation) -> None:
        """The roster has grown."""
        self.federation = federation
        self._position = {client: row for row, client in enumerate(federation.roster)}

    def recall(self, client: ClientId) -> Tree:
        """The number of the client's present memory; 0: it begins."""
        return self.memory.get(client, {VERSION: torch.zeros((), dtype=torch.int64)})

    def groups(self, mine: PerClient) -> list[list[ClientId]]:
        """All at once, in the roster's order."""
        return [sorted(mine, key=self._position.__getitem__)]

    def run_group(self, program: Program, clients: Sequence[ClientId], shared: Tree, mine: PerClient) -> Outcome:
        raise NotImplementedError("clients of a network answer one by one: attempt")

    def attempt(self, program: Program, group: list[ClientId], shared: Tree, mine: PerClient) -> list[Outcome]:
        """Ask all, and take each answer by itself: nobody's fault is another's."""
        told, new = describe(program, self.plain, self.algorithm), self._new_version()
        contents = {client: self._content(told, client, new, shared, mine[client]) for client in group}
        answers = self.exchange(ASK, contents, self.rules.timeout)
        outcomes = []
        for client in group:
            expected = program.expects(shared, mine[client])
            try:
                outcomes.append(self._outcome(program, client, new, expected, answers.get(client, "is gone")))
            except Malformed as fault:
                self.books.dropped.append(Dropped(client, program.name, str(fault)))
            except Exception as error:  # whatever a stranger made of it
                reason = f"sent a reply that cannot be used ({type(error).__name__})"
                self.books.dropped.append(Dropped(client, program.name, reason))
        return outcomes

    def _new_version(self) -> int:
        """Greater than all before, also than those that an earlier server gave after its last checkpoint."""
        known = [int(tree[VERSION]) for tree in self.memory.values()]
        self._newest = max([time.time_ns() // 1000, self._newest + 1, *(version + 1 for version in known)])
        return self._newest

    def _content(self, told: str, client: ClientId, new: int, shared: Tree, own: Tree) -> RecordDict:
        facts: dict[str, str | int] = {
            **self._ticket(client),
            "program": told,
            "from_version": int(self.recall(client)[VERSION]),
            "to_version": new,
            "saved_version": self.saved.get(client, 0),
        }
        return pack(facts, shared=shared, mine=own)

    def _ticket(self, client: ClientId) -> dict[str, str | int]:
        """What an ask and its reply have in common."""
        return {"run": self.run, "client": client, "stage": self._stage, "ask": self._asks}

    def _outcome(
        self, program: Program, client: ClientId, new: int, expected: Tree, answer: RecordDict | str
    ) -> Outcome:
        if isinstance(answer, str):
            raise Malformed(answer)
        facts = facts_of(answer)
        if "error" in facts:
            raise Malformed(str(facts["error"]))
        for name, value in self._ticket(client).items():
            if facts.get(name) != value:
                raise Malformed(f"replied for {name} {facts.get(name)!r}; asked was {value!r}")
        reply = tree_of(answer, "reply", self.federation.device, most=2 * num_bytes(expected) + (1 << 20))
        self._check_types(expected, reply)
        if program.name.startswith(EVALUATION):
            _check_sums(reply, self.federation.task)
        before = self.recall(client)
        after = {VERSION: torch.full_like(before[VERSION], new)} if facts.get("remembers") is True else before
        return Outcome(PerClient.of({client: reply}), PerClient.of({client: after}))

    def _check_types(self, expected: Tree, reply: Tree) -> None:
        """Numbers are of the federation's type where a reply's form has fractions, else of the form's own."""
        wanted = {
            path: self.federation.dtype if leaf.is_floating_point() else leaf.dtype for path, leaf in leaves(expected)
        }
        for path, leaf in leaves(reply):
            if leaf.dtype != wanted.get(path, leaf.dtype):  # a path too many is refused with the shapes
                raise Malformed(f"replied with numbers of type {leaf.dtype} for {path}; expected {wanted[path]}")


def _check_sums(reply: Tree, task: Task) -> None:
    """An evaluation's sums must be those of some samples."""
    samples, metric = float(reply["samples"]), float(reply["metric"])
    if not (samples >= 1 and samples.is_integer()):
        raise Malformed(f"says that it tried {samples:g} samples")
    if task.metric_name == "accuracy" and not 0 <= metric <= samples:
        raise Malformed(f"says that {metric:g} of {samples:g} samples were right")
