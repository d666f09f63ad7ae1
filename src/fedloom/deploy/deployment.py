# SPDX-License-Identifier: Apache-2.0
"""A federation of machines in training: a ``Trainer`` whose clients come and go.

Before every round it looks who is there. A client that came after the beginning becomes a participant where the
method's state has room for one more (``roster.grown``), else a newcomer. A round that too few answer is done again,
``repeats`` times, then the run stops with its last checkpoint intact.

What a checkpoint has to do with clients on other machines:

- Their memories stay there, in numbered versions (``deploy.engine``). A checkpoint names the version of each client
  that it counts on, and clients keep those until no checkpoint does (``count_on``). It is written after every round, or
  a server that was killed would ask for versions that are gone.
- It names the clients, because later ones may have joined since: whoever resumes takes the roster from there.
- The replies of a round can be finite and leave a state from which no round can begin. ``proven`` is the last round
  from which one began. Where the next one fails for everybody, ``deploy.server`` removes the checkpoint after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from fedloom.clients.federation import Federation
from fedloom.core.contract import Sent, Setup
from fedloom.core.errors import NeedsError, RoundError
from fedloom.core.trees import ClientId, PerClient, Tree
from fedloom.data.preparation import Preparation
from fedloom.deploy import waiting
from fedloom.deploy.bounds import believed, sums_of
from fedloom.deploy.collecting import SpentRound
from fedloom.deploy.delivery import Delivery
from fedloom.deploy.engine import VERSION, Flower, Rules
from fedloom.deploy.known import Known
from fedloom.deploy.lobby import Greeting, Lobby
from fedloom.deploy.options import Settings
from fedloom.deploy.roster import grown, in_order, roster_of
from fedloom.deploy.waiting import OTHER_NETWORK, Tell, are_connected
from fedloom.engines.memories import Memories
from fedloom.programs.evaluation import Score
from fedloom.programs.preparing import preparing
from fedloom.training.config import algorithm_of
from fedloom.training.server import Server
from fedloom.training.trainer import Trainer


class Deployment(Trainer):
    """A federation of machines in training: rounds, evaluations and admissions are those of ``Trainer``.

    What differs is that clients come and go (``present``, ``look``), that a round can be done again (``train_round``),
    that what clients say of themselves is believed within bounds (``_counted``), and that a checkpoint says who the
    clients are (``meta``, ``saved``, ``mark``, ``go_back``).
    """

    saves_every_round = True
    secret = True
    engine: Flower

    def __init__(self, settings: Settings, lobby: Lobby, greetings: Sequence[Greeting]) -> None:
        self.settings, self.lobby, self.deploy = settings, lobby, settings.deploy
        self.greetings = list(greetings)
        options = settings.run
        if options.threads:
            torch.set_num_threads(options.threads)
        self.known = Known.of(settings)
        self.preparation = ""
        """How clients are to prepare raw samples, as JSON."""
        self.server_samples = self.known.server_samples(settings)
        self._versions: dict[int, dict[ClientId, int]] = {}
        """The clients' memories that each kept checkpoint counts on, by round."""
        self.proven = 0
        """The last round whose state another round has begun from soundly."""
        federation = self.known.federation(self.greetings)
        super().__init__(self._server(federation), self._engine(federation), "clients are other machines")
        weight = self.server.weight
        self.notes = [one.note for one in (weight, self.server_samples, settings.sums) if one]
        self.delivery = Delivery(lobby, self.deploy.timeout)
        self.tell: Tell = lambda text: None

    def _server(self, federation: Federation) -> Server:
        """A server for these clients, before any round."""
        method, options, config, deploy = self.settings
        algorithm, known = algorithm_of(method, options, secret=True), self.known
        clients = len(federation.participants)
        options = replace(
            options,
            dataset="clients",
            partition="clients",
            clients=clients,
            cohort=options.cohort_of(clients, algorithm.cohort),
            engine=Flower.name,
            device=str(known.device),
            threads=torch.get_num_threads(),
        )
        own = self.server_samples and self.server_samples.on(known.device, known.dtype)
        setup = Setup(
            config, federation.participants, federation.models, known.task, options.seed, known.device, known.dtype,
            options.rounds, own,
        )  # fmt: skip
        roster = roster_of(federation, self.greetings, known.classes, deploy.class_names)
        return Server(method, algorithm, options, roster, setup, memories_here=False)

    def _engine(self, federation: Federation) -> Flower:
        """The way to these clients."""
        method, options, config, deploy = self.settings
        rules = Rules(deploy.timeout, deploy.quorum, deploy.max_norm, deploy.max_weight, self.settings.sums,
                      hides_clients=bool(options.dp_noise))  # fmt: skip
        told = {one.client: one.samples for one in self.greetings if one.role == "participant"}
        return Flower(
            federation, algorithm_of(method, options), config, options.seed, self.lobby.run, self.lobby.exchange, rules,
            told, self._kept_versions, lambda: self.preparation, lambda: self.lobby.waited,
        )  # fmt: skip

    @property
    def present(self) -> tuple[ClientId, ...]:
        """The participants that are connected."""
        return tuple(client for client in self.server.setup.clients if client in self.lobby.nodes)

    @property
    def newcomers(self) -> tuple[ClientId, ...]:
        """The newcomers that are connected."""
        return tuple(client for client in self.federation.unseen if client in self.lobby.nodes)

    def prepare(self) -> None:
        """Have participants tell what raw samples are prepared by, where they are raw."""
        given = self.settings.preparation
        if given is None:
            return
        session = self.session("preparation", self.now.memory)
        replies = session.ask(preparing(given), {}, PerClient.empty(self.present))
        found = sums_of(dict(replies), self.engine.weights, missing=given.kind == "table")
        self.prepare_by(given.fitted(found))

    def prepare_by(self, preparation: Preparation | None) -> None:
        """Have clients prepare raw samples in that way."""
        self.server.roster = self.server.roster._replace(preparation=preparation)
        self.preparation = preparation.as_text() if preparation else ""

    def train_round(self) -> dict[str, Any]:
        """One round with those who are connected; done again where too few answer.

        A repetition is the same round from the same state: what the first attempt trained is forgotten. Only a secure
        sum that was unmasked cannot be repeated, and the number of the round moves on (``SpentRound``). The record has
        the reasons, and who was refused meanwhile.
        """
        failures: list[str] = []
        while True:
            self._gather()
            try:
                record = super().train_round()
            except RoundError as error:
                failures.append(str(error))
                if len(failures) > self.deploy.repeats:
                    raise
                if isinstance(error, SpentRound):
                    self.server.now = self.now._replace(round=error.last)
                self.tell(f"{waiting.PAUSE:g} seconds, then does round {self.server.round + 1} again: {error}")
                waiting.pause()
                continue
            self.proven = self.server.round - 1
            refused, self.lobby.refused = self.lobby.refused, []
            more = {"repeated": failures, "refused": refused}
            return {**record, **{name: texts for name, texts in more.items() if texts}}

    def _counted(self, split: str, scores: dict[ClientId, Score]) -> dict[ClientId, Score]:
        """As much of what clients say as is believed."""
        deploy = self.deploy
        found, notes = believed(scores, self.server.setup.task, deploy.max_norm, deploy.max_weight)
        for text in notes:
            self.engine.note(f"On {split} data {text}: it is far above the median")
        return found

    def settle(self) -> None:
        """As ``Trainer.settle``. Where nobody answers, the state stays as it was, and the run goes on."""
        with suppress(RoundError):
            super().settle()

    def admission(self, newcomers: Sequence[ClientId], memory: Memories, samples: int = 0) -> tuple[Sent, Memories]:
        """Admission of those who are connected; what was sent is kept for delivery."""
        there = [client for client in newcomers if client in self.lobby.nodes]
        sent, memory = self.delivery.admit(self, there, memory)
        if not len(sent.mine):
            why_not = self.delivery.undelivered
            reasons = "; ".join(f"{client} {why_not.get(client, 'is gone')}" for client in newcomers)
            raise RoundError(f"No newcomer could be admitted: {reasons}.")
        self.delivery.admitted = sent
        return sent, memory

    def meta(self) -> dict[str, Any]:
        """Who the clients are, so that a server that goes on does not take them for new ones; which round is sound."""
        roster = [one._asdict() for one in self.greetings]
        kept = {"run": self.lobby.run, "roster": roster}
        # the roster grows: which part of it this checkpoint has is in "deployment"
        return {**super().meta(), "proven": self.proven, "deployment": kept, "digests": {"roster": None}}

    def saved(self, rounds: Sequence[int]) -> None:
        """Clients must keep the memories that kept checkpoints count on."""
        self.count_on(self.server.round, self.now.memory)
        self._versions = {round: versions for round, versions in self._versions.items() if round in rounds}

    def count_on(self, round: int, memory: Mapping[ClientId, Tree]) -> None:
        """A checkpoint of that round counts on these memories."""
        self._versions[round] = {client: int(tree[VERSION]) for client, tree in memory.items()}

    def _kept_versions(self, client: ClientId) -> set[int]:
        """Those of a client's memory that it must not delete yet."""
        return {versions[client] for versions in self._versions.values() if client in versions}

    def look(self) -> None:
        """See who is there, and take in who is new."""
        self.lobby.refresh()
        known = {one.client for one in self.greetings}
        for client in in_order([client for client in self.lobby.nodes if client not in known]):
            self._take_in(self.lobby.greetings[client])

    def _gather(self) -> None:
        """Wait until as many participants are there as a round needs; fails when the time is up."""
        end, said = time.monotonic() + self.deploy.wait, -1
        self.look()
        while len(self.present) + 1e-9 < (need := max(1, self.deploy.quorum * self.server.options.cohort)):
            there, number = len(self.present), self.server.round + 1
            if there != said:
                said = there
                self.tell(f"for {math.ceil(need - 1e-9)} clients in round {number}; {are_connected(there)}")
            if time.monotonic() > end:
                raise RoundError(
                    f"{there} of {len(self.server.setup.clients)} clients are connected, too few for a round; "
                    f"waited {self.deploy.wait:g} seconds. The last checkpoint is intact: start nodes, then resume."
                )
            waiting.pause()
            self.look()

    def _take_in(self, one: Greeting) -> None:
        """A client that came after the beginning: as a participant if the method has room, else as a newcomer.

        Where anything fails the client is refused, and the federation is what it was.
        """
        common = next(other.model for other in self.greetings if other.role == "participant")
        if self.server.algorithm.needs.same_model and one.model != common:
            self.lobby.refuse(one.client, OTHER_NETWORK)
            return
        try:
            with_it = None if one.role == "newcomer" else self._grown([*self.greetings, one])
            has_room = with_it is not None  # a state can be empty
            self._enlist([*self.greetings, one if has_room else one._replace(role="newcomer")], with_it)
        except Exception as error:  # whatever a stranger made of it; the others go on
            self.lobby.refuse(one.client, f"cannot be taken in ({type(error).__name__})")

    def _grown(self, greetings: Sequence[Greeting]) -> Any:
        """The state for these clients, of whom the last is new; None if the method has no room for it."""
        before, setup = self.server.setup, self._setup_for(greetings)
        try:
            fresh = self.server.algorithm.init(setup)
        except NeedsError:
            return None
        if self.server.algorithm.needs.violations(setup, self.server.algorithm.name):
            return None
        state = grown(self.server.state._asdict(), fresh._asdict(), len(before.clients), len(setup.clients))
        return None if state is None else self.server.algorithm.state(**state)

    def _setup_for(self, greetings: Sequence[Greeting]) -> Setup[Any]:
        """The run's setup, with these clients as its roster."""
        federation = self.known.federation(greetings)
        return replace(self.server.setup, clients=federation.participants, models=federation.models)

    def _enlist(self, greetings: Sequence[Greeting], state: Any = None) -> None:
        """Have these clients from now on; ``state`` is that for them, if it is another one.

        Setup, roster, cohort and engine follow from who the clients are, and are made anew together.
        """
        federation, setup = self.known.federation(greetings), self._setup_for(greetings)  # which can fail
        self.greetings, self.server.setup = list(greetings), setup
        preparation = self.server.roster.preparation
        self.server.roster = roster_of(federation, greetings, *self.server.roster[2:4])
        clients = len(federation.participants)
        cohort = self.settings.run.cohort_of(clients, self.server.algorithm.cohort)
        self.server.options = replace(self.server.options, clients=clients, cohort=cohort)
        if state is not None:
            self.server.now = self.now._replace(state=state)
        self.engine = self._engine(federation)
        self.prepare_by(preparation)
        self.roster_is_new = True

    def mark(self) -> Any:
        """As ``Trainer.mark``, with the clients of this moment."""
        return super().mark(), list(self.greetings)

    def go_back(self, mark: Any) -> None:
        """As ``Trainer.go_back``: who came since then is to come again."""
        moment, greetings = mark
        super().go_back(moment)
        if greetings != self.greetings:
            self._enlist(greetings)

    def deliver(self) -> None:
        """Everybody who is connected gets what it is to use."""
        if self.present:
            self.delivery.hand_over(self.server.send(self.present), self.now.memory, self.preparation)
        self.deliver_to_newcomers()

    def deliver_to_newcomers(self) -> None:
        """The newcomers that are connected are admitted, and get their models."""
        if self.server.algorithm.admit is None:
            return
        admitted = self.delivery.admitted
        if len(admitted.mine):
            self.delivery.hand_over(admitted, self.now.memory, self.preparation)
        done = set(admitted.mine)
        rest = [client for client in self.newcomers if client not in done]
        if rest:
            sent, memory = self.delivery.admit(self, rest, self.now.memory)
            self.delivery.hand_over(sent, memory, self.preparation)
