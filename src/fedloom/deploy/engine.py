# SPDX-License-Identifier: Apache-2.0
"""``ask`` over Flower's Grid: one message per client, all at once; late, missing and bad replies are left out by name.

Clients keep their memory themselves, in numbered versions. The server knows the number of each client's present
version, and nothing of what is in it: an ask says which version to start from and which to write, and only a reply that
is used makes what was written the present one. No number is given twice, and later ones are greater. So a client that
still works on an earlier round when the next has begun, or a server that was killed and goes on from its last
checkpoint, leaves no client with a memory that the server does not count on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from flwr.app import RecordDict

from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm, Program
from fedloom.core.errors import RoundError
from fedloom.core.trees import ClientId, PerClient, Tree, num_bytes, tree_map
from fedloom.deploy.bounds import (
    as_shares,
    believed_losses,
    count_fault,
    shares_fault,
    statistics_fault,
    sums_fault,
    too_far,
    weight_fault,
    weights_of,
)
from fedloom.deploy.codec import Malformed, facts_of, pack, tree_of
from fedloom.deploy.collecting import Collector
from fedloom.deploy.options import Sums
from fedloom.engines.acceptance import refusals
from fedloom.engines.engine import AbstractEngine, Session
from fedloom.engines.job import Dropped, Job, Outcome
from fedloom.programs.evaluation import EVALUATION

log = logging.getLogger(__name__)

ASK = "train"
"""Flower's type of the messages."""

VERSION = "version"
"""All that the server has of a client's memory: the number of the version that the client keeps."""

Exchange = Callable[[str, Mapping[ClientId, RecordDict], float], Mapping[ClientId, RecordDict | str]]
"""(type, contents, timeout in seconds) -> for each client its reply, or why there is none."""


class Rules(NamedTuple):
    """When a round counts, and what a reply may be."""

    timeout: float = 600.0
    """Seconds to wait for replies."""
    quorum: float = 0.0
    """Share of the clients asked that must give a usable reply."""
    max_norm: float = 0.0
    """How many times the usual norm a reply may have; 0: no bound."""
    max_weight: float = 0.0
    """How many times the median number of samples a client may count for; 0: no bound."""
    sums: Sums | None = None
    """How changes are added up before they are seen; None: each is told by itself."""
    hides_clients: bool = False
    """The server shortens what a round brings, each reply by itself, and noise hides so much of it. To compare replies
    would let one client decide whether others count: more than noise hides."""


class Flower(AbstractEngine):
    """Clients behind a network. A session's ``memory`` holds the number of each client's present memory.

    ``samples`` are the participants' numbers of samples as they told them when they joined; ``weights`` are those
    numbers as they count, whatever replies claim. ``kept(client)`` are the versions that checkpoints count on, which
    the client must not forget. ``preparation()`` says as JSON how clients are to prepare raw samples, ``waited()`` how
    long each client's last reply took.
    """

    name = "flower"

    def __init__(
        self,
        federation: Federation,
        algorithm: Algorithm,
        config: Any,
        seed: int,
        run: str,
        exchange: Exchange,
        rules: Rules,
        samples: Mapping[ClientId, int],
        kept: Callable[[ClientId], Iterable[int]],
        preparation: Callable[[], str],
        waited: Callable[[], Mapping[ClientId, float]] = dict,
    ) -> None:
        super().__init__(federation, algorithm, config, seed)
        self.run, self.exchange, self.rules, self.kept, self.waited = run, exchange, rules, kept, waited
        self.preparation = preparation
        self.samples, self.weights = samples, weights_of(samples, rules.max_weight)
        self._newest = 0

    def check_enough(self, session: Session, program: Program, asked: int, replies: PerClient) -> None:
        """As ``AbstractEngine.check_enough``; a round with fewer usable replies than the quorum does not count.

        An evaluation that nobody answers stops nothing: training goes on, and the scores are the worst there are.
        """
        if program.name.startswith(EVALUATION):
            return
        super().check_enough(session, program, asked, replies)
        in_round = isinstance(session.stage, int)
        if in_round and len(replies) + 1e-9 < self.rules.quorum * asked:  # 0.28 of 25 is 7
            raise RoundError(
                f"{len(replies)} of {asked} clients gave a usable reply to {program.name}, fewer than the quorum "
                f"of {self.rules.quorum:.0%}. The last checkpoint is intact: see to the clients, then resume."
            )

    def samples_of(self, client: ClientId) -> int:
        """As it told when it joined; newcomers do not tell."""
        return self.samples.get(client, 0)

    def first_memory(self, federation: Federation, client: ClientId) -> Tree:
        """Version 0: the client begins."""
        return {VERSION: torch.zeros((), dtype=torch.int64)}

    def answer(self, job: Job) -> Iterable[Outcome]:
        """Ask all, and take each answer by itself: nobody's fault is another's."""
        new = self._new_version(job)
        if self.rules.sums and job.clients:
            wanted = job.program.expects(job.shared, job.mine[job.clients[0]])
            if not wanted.keys().isdisjoint(self.algorithm.means):
                return [Collector(self, job, new).outcome()]
        return self._answers(job, new)

    def _answers(self, job: Job, new: int) -> Iterable[Outcome]:
        """The replies that count, each by itself. What a reply may be is looked at in two steps.

        First alone (``_read``): its ticket, its size, its shapes, and that what it claims can be. Then beside others
        (``too_far``, ``believed_losses``): how far it is from the usual. Evaluations are compared where all clients'
        are there (``Deployment._counted``).
        """
        contents = {client: self.content(job, client, new) for client in job.clients}
        answers = self.exchange(ASK, contents, self.rules.timeout)
        replies: dict[ClientId, Tree] = {}
        memories: dict[ClientId, Tree] = {}
        dropped: list[Dropped] = []
        for client in job.clients:
            try:
                replies[client], memories[client] = self._read(job, client, new, answers.get(client, "is gone"))
            except Malformed as fault:
                dropped.append(Dropped(client, job.program.name, str(fault)))
            except Exception as error:  # whatever a stranger made of it
                reason = f"sent a reply that cannot be used ({type(error).__name__})"
                dropped.append(Dropped(client, job.program.name, reason))
        if not job.program.name.startswith(EVALUATION):
            in_round = isinstance(job.moment.stage, int)
            most = 0.0 if self.rules.hides_clients and in_round else self.rules.max_norm
            for client, reason in too_far(job, replies, most).items():
                log.warning("Client %s %s", client, reason)
                dropped.append(Dropped(client, job.program.name, reason))
                del replies[client], memories[client]
            replies, notes = believed_losses(replies, self.rules.max_norm)
            for note in notes:
                self.note(note)
        seconds = {client: taken for client, taken in self.waited().items() if client in replies}
        yield Outcome(PerClient.empty(()), PerClient.empty(()), dropped, seconds)
        for client, reply in replies.items():  # each by itself: a stranger's trees may have any shape
            yield Outcome(PerClient.of({client: reply}), PerClient.of({client: memories[client]}))

    def _new_version(self, job: Job) -> int:
        """Greater than all before, also than those that an earlier server gave after its last checkpoint."""
        known = [int(tree[VERSION]) for tree in job.memories.values()]
        self._newest = max([time.time_ns() // 1000, self._newest + 1, *(version + 1 for version in known)])
        return self._newest

    def content(self, job: Job, client: ClientId, new: int, **more: str | int) -> RecordDict:
        """An ask. The client begins from one version of its memory, and keeps what it then remembers as ``new``."""
        preparation = self.preparation()
        facts: dict[str, str | int] = {
            **self.ticket(job, client),
            **more,
            "program": job.program.name,
            "from_version": int(job.memories[client][VERSION]),
            "to_version": new,
            **({"preparation": preparation} if preparation else {}),
            "kept_versions": " ".join(map(str, sorted(self.kept(client)))),
        }
        return pack(facts, shared=job.shared, mine=job.mine[client])

    def ticket(self, job: Job, client: ClientId) -> dict[str, str | int]:
        """What an ask and its reply have in common."""
        return {"run": self.run, "client": client, "stage": job.moment.stage, "ask": job.moment.ask}

    def facts_of(self, job: Job, client: ClientId, answer: RecordDict) -> dict[str, Any]:
        """The facts of a reply that is one to this ask."""
        facts = facts_of(answer)
        if "error" in facts:
            raise Malformed(str(facts["error"]))
        for name, value in self.ticket(job, client).items():
            if facts.get(name) != value:
                raise Malformed(f"replied for {name} {facts.get(name)!r}; asked was {value!r}")
        return facts

    def memory_after(self, job: Job, client: ClientId, new: int, facts: Mapping[str, Any]) -> Tree:
        """The memory that goes with a reply: the new version, if the client says that it has kept one."""
        before = job.memories[client]
        return {VERSION: torch.full_like(before[VERSION], new)} if facts.get("remembers") is True else before

    def _read(self, job: Job, client: ClientId, new: int, answer: RecordDict | str) -> tuple[Tree, Tree]:
        """A reply and the memory that goes with it."""
        if isinstance(answer, str):
            raise Malformed(answer)
        facts = self.facts_of(job, client, answer)
        expected = job.program.expects(job.shared, job.mine[client])
        found = tree_of(answer, "reply", self.federation.device, most=2 * num_bytes(expected) + (1 << 20))
        reply = self._checked(job.program, client, found)
        (reason,) = refusals(expected, tree_map(lambda leaf: leaf[None], reply), 1, self.federation.dtype)
        if reason:  # nothing of it may meet the others' replies
            raise Malformed(reason)
        return reply, self.memory_after(job, client, new, facts)

    def _checked(self, program: Program, client: ClientId, reply: Tree) -> Tree:
        """The reply with what counts of what it claims."""
        if program.name.startswith(EVALUATION):
            fault = sums_fault(reply, self.federation.task)
        else:
            adapted = self.algorithm.base is not None  # for which nodes may have noise of their own on what they tell
            fault = weight_fault(reply) or count_fault(reply, self.samples.get(client), noised=adapted)
            if adapted and "shares" in reply:
                reply = {**reply, "shares": as_shares(reply["shares"])}
            fault = fault or shares_fault(reply) or statistics_fault(reply)
        if fault:
            raise Malformed(fault)
        return self._weighed(client, reply)

    def _weighed(self, client: ClientId, reply: Tree) -> Tree:
        """The reply with the number of samples that counts for this client."""
        weight = self.weights.get(client)
        if "num_samples" not in reply or not weight:
            return reply
        claimed = round(float(reply["num_samples"]))
        if claimed != weight:
            self.note(f"client {client} says that it has {claimed} samples and counts as one with {weight}")
        return {**reply, "num_samples": torch.full_like(reply["num_samples"], weight)}
