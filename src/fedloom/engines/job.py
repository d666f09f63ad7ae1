# SPDX-License-Identifier: Apache-2.0
"""One ask as an engine gets it: who runs which program on what, and where its random numbers come from.

A session makes a job of an ask. A local engine divides it into jobs of one architecture and one shape of memory, and
perhaps those into parts (``Job.of``); the outcomes of all of them go back to the session, which decides what is
accepted. Nothing is written into a job. Dividing it changes no random number, because streams are named by client.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.clients.batching import Schedule, drawn_one_by_one, schedule
from fedloom.clients.federation import Federation
from fedloom.core.contract import Home, Program
from fedloom.core.device import to_device
from fedloom.core.noised import hides_samples
from fedloom.core.random import Fresh, secret_stream, seed_of, stream
from fedloom.core.trees import ClientId, PerClient, Tree

TRIED = ("val", "test")
"""Splits that nothing is trained on: their samples are tried, and not hidden."""


class Moment(NamedTuple):
    """When a client is asked: part of the name of every random stream. Methods are compared on equal draws."""

    seed: int
    stage: int | str
    """The number of a round, or the name of an evaluation or an admission."""
    ask: int
    """Which ask of the stage this is, from 1."""


@dataclass(frozen=True)
class Job:
    """Clients whose models, ``mine`` and memories can be run one by one, or stacked where their shapes allow it."""

    program: Program
    clients: tuple[ClientId, ...]
    shared: Tree
    """The same for all: its leaves have no dimension for clients."""
    mine: PerClient
    """What is sent to each client alone; may hold more clients than the job has, after ``of``."""
    memories: Mapping[ClientId, Tree]
    """What each client remembers; likewise."""
    federation: Federation
    config: Any
    moment: Moment
    rounds_left: int = 0
    secret_noise: bool = False
    """Noise for privacy comes from the operating system, not from the seed, which others may know."""
    drawn: list[int] | None = None
    """Gets the size of each draw of such noise, if there is one."""
    means: Means | None = None
    """Of what in the replies nothing but a mean is used, so that they may come added up."""

    @property
    def spec(self) -> Hashable:
        """The architecture of the clients, where they have one."""
        return self.federation.roster[self.clients[0]].model.spec

    @property
    def hides_samples(self) -> bool:
        """Whether the program goes through training data of which each sample is to be hidden."""
        batches = self.program.batches
        return hides_samples(self.config) and batches is not None and batches.split not in TRIED

    def of(self, clients: Sequence[ClientId]) -> Job:
        """The same for some of the clients."""
        return replace(self, clients=tuple(clients))

    def home(self, client: ClientId, num_samples: Tensor, key: Tensor) -> Home:
        """The surroundings of a client; under ``vmap`` the two tensors stand for those of the whole group."""
        federation = self.federation
        drawn = Fresh(federation.device, self.drawn) if self.secret_noise else key
        model = federation.roster[client].model
        return Home(model, federation.task, self.config, num_samples, drawn, self.program.guest)

    def num_samples(self, clients: Sequence[ClientId]) -> Tensor:
        """The sizes of the clients' training data, in the type that weights are computed in."""
        counts = [len(self.federation.roster[client].rows["train"]) for client in clients]
        return to_device(counts, self.federation.device, self.federation.dtype)

    def keys(self, clients: Sequence[ClientId]) -> Tensor:
        """The keys for draws inside this ask."""
        seeds = [seed_of(*self._name(client), "draws") for client in clients]
        return to_device(seeds, self.federation.device, torch.int64)

    def schedule(self, client: ClientId) -> Schedule:
        """The client's batches in this ask."""
        batches = self.program.batches
        rows = self.federation.roster[client].of(batches.split if batches else "train")
        name = self._name(client)
        if batches and batches.name:
            name = (*name[:-1], batches.name)
        if batches and self.hides_samples:
            # who is drawn is part of what hides a sample
            return drawn_one_by_one(rows, batches, secret_stream() if self.secret_noise else stream(*name, "batches"))
        return schedule(rows, batches, stream(*name, "batches"))

    def _name(self, client: ClientId) -> tuple[int | str, ...]:
        """Streams are named by who, when and which ask, not by method."""
        return (self.moment.seed, self.moment.stage, client, self.moment.ask)


class Means(NamedTuple):
    """Branches of replies of which nothing but the mean over clients is used."""

    branches: tuple[str, ...]
    weight: str | None
    """The number in a reply by which its client counts; None: all count the same."""


class Dropped(NamedTuple):
    """A client whose reply was not used, and why."""

    client: ClientId
    program: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What the clients of a job gave: replies and new memories of those that got through, and who did not."""

    replies: PerClient
    memories: PerClient
    dropped: list[Dropped] = field(default_factory=list)
    seconds: Mapping[ClientId, float] = field(default_factory=dict)
    """How long each client took, where that is known: not of clients that run as one stack."""
    masked: int = 0
    """Bytes of a reply as it came, where replies came under masks and these were made of their sum; else 0."""
    total: Tree | None = None
    """The weighted sum of the branches of ``Job.means``, which ``replies`` are then without: of these clients alone."""


class ClientFault(Exception):
    """A client's program failed; the text says in which stage, why and on what."""
