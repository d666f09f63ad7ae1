# SPDX-License-Identifier: Apache-2.0
"""A federation in training: a server, and an engine by which it reaches its clients.

It is the same for clients in this process (``Simulation``) and on other machines (``deploy.deployment``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedloom.adaptation.report import Report, report_of
from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm, Ask, Home, Program, Sent, Woven, predict_with_target
from fedloom.core.errors import ConfigError, NeedsError, RoundError
from fedloom.core.memory import is_full, why_full
from fedloom.core.random import secret_stream, stream
from fedloom.core.trees import ClientId, PerClient, Tree, flatten
from fedloom.engines.engine import AbstractEngine, Session
from fedloom.engines.job import Dropped, Job
from fedloom.engines.memories import Memories
from fedloom.metrics.handed_on import evaluate_handed_on
from fedloom.metrics.summary import Group, summarise
from fedloom.models.load import is_one_network
from fedloom.privacy.client_level import noise_on_replies
from fedloom.programs.evaluation import EVALUATION, GLOBAL, MIXED, PLAIN, Score, evaluate, with_network
from fedloom.robust.rules import check_cohort
from fedloom.runs.records import FEW, panel, short
from fedloom.training import cohorts
from fedloom.training.clock import AbstractClock
from fedloom.training.config import client_privacy
from fedloom.training.rounds import LookAhead, PendingRound, run_round
from fedloom.training.server import Mark, Server


class Evaluation(NamedTuple):
    """Named numbers, and the scores behind them by whose model, which clients and which split."""

    metrics: dict[str, float]
    scores: dict[Group, dict[ClientId, Score]]
    dropped: Sequence[Dropped] = ()
    """Clients that gave no usable reply."""
    notes: Sequence[str] = ()
    """What the engine noted meanwhile."""
    embeddings: Mapping[str, Mapping[ClientId, Sequence[float]]] = MappingProxyType({})
    """Of participants, and of unseen clients that were admitted: what their models were woven from."""
    estimates: Mapping[ClientId, Report] = MappingProxyType({})
    """What unseen clients found out about their label shares."""
    settling: float = 0.0
    """Seconds that it took to bring the state into the form in which it is used."""

    def joined_by(self, other: Evaluation) -> Evaluation:
        """Both as one."""
        return Evaluation(
            {**self.metrics, **other.metrics},
            {**self.scores, **other.scores},
            [*self.dropped, *other.dropped],
            [*self.notes, *other.notes],
            {**self.embeddings, **other.embeddings},
            {**self.estimates, **other.estimates},
            self.settling + other.settling,
        )


def estimates_line(round: int, estimates: Mapping[ClientId, Report]) -> dict[str, Any]:
    """What newcomers found out about their label shares: shares by class, with the bounds of their intervals."""
    found = list(estimates.values())
    columns = {
        name: [[short(getattr(s, name)) for s in one.shares] for one in found] for name in ("share", "low", "high")
    }
    told = {"samples": [r.samples for r in found], "labelled": [r.labelled for r in found]}
    why = {"decision": [r.decision for r in found], "weight": [short(r.weight) for r in found]}
    return {"round": round, "group": "unseen", "client": list(estimates), **told, **why, **columns}


class Curve:
    """Scores along rounds of an admission: of each of the first ten, of fewer and fewer later ones, of the last."""

    def __init__(self) -> None:
        self.points: list[dict[str, Any]] = []
        self._rounds = 0

    def wants_next(self) -> bool:
        """Whether the model from before the next round is to be tried."""
        number, self._rounds = self._rounds, self._rounds + 1
        return number % max(1, number // 10) == 0

    def add(self, scores: Mapping[ClientId, Score]) -> None:
        """The scores from before the round that comes."""
        self._add(self._rounds - 1, scores)

    def end(self, scores: Mapping[ClientId, Score]) -> None:
        """The scores after all rounds."""
        self._add(self._rounds, scores)

    def _add(self, number: int, scores: Mapping[ClientId, Score]) -> None:
        metrics = [short(score.metric) for score in scores.values()]
        self.points.append({"admission_round": number, "client": list(scores), "metric": metrics})


def _mixed_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """The model that ``Trainer.mixed`` put together, as it was sent."""
    return {"params": mine["params"], "buffers": mine.get("buffers", {})}


class Trainer:
    """Rounds, evaluations and admissions. All that changes is ``server.now``.

    Every stage is a ``Session`` of the engine: it gets the memories of this moment, and what it gives back counts only
    if the stage succeeds and is one that clients are to remember. A round that fails, an evaluation of newcomers or one
    of mixed models leaves everything as it was.

    A kind of federation says, by overriding: who can be asked now (``present``), when they answer (``clock``), what of
    their scores counts (``_counted``), how newcomers are admitted (``admission``), and what a checkpoint must say
    besides (``meta``, ``saved``, ``mark``, ``go_back``).
    """

    saves_every_round = False
    """A checkpoint after every round, not only when there is an evaluation."""

    also_tried: tuple[str, ...] = ()
    """Splits on which participants are tried at each evaluation, besides val and test."""

    tries_newcomers = False
    """Unseen clients are tried at each evaluation, not only at the end."""

    secret = False
    """Noise for privacy, and who is drawn where that is part of it, come from the operating system, not the seed."""

    roster_is_new = False
    """Clients have come since the roster was written down."""

    def __init__(
        self, server: Server, engine: AbstractEngine, engine_reason: str, *, looks_ahead: bool = False
    ) -> None:
        self.server, self.engine, self.engine_reason = server, engine, engine_reason
        if how := client_privacy(server.options):
            noise_on_replies(how, server.options.cohort)  # refuses cohorts that are too small for it
        if server.options.aggregate:
            check_cohort(server.options.aggregate, server.options.async_ or server.options.cohort)
        self.notes: Sequence[str] = server.algorithm.notes(server.setup)
        """What users should know of the federation."""
        self.before_ask: Callable[[Job], None] | None = None
        """Called with each ask of the run, before anybody is asked."""
        self._ahead = LookAhead(self) if looks_ahead else None
        self._noted: dict[int, list[str]] = {}
        """What the engine noted in rounds that have no record yet: it says it once, though a round is given up."""
        self._dropped: list[Dropped] = []
        self.last_round = server.options.rounds
        """After which training ends."""
        self._read = 0.0  # when the last round's numbers were there (``time.perf_counter``)

    @property
    def federation(self) -> Federation:
        """The clients as the engine has them."""
        return self.engine.federation

    @property
    def now(self) -> Mark:
        """The present moment."""
        return self.server.now

    @property
    def present(self) -> tuple[ClientId, ...]:
        """The participants that can be asked now."""
        return self.server.setup.clients

    @property
    def clock(self) -> AbstractClock | None:
        """Who answers when, in a simulation that says so (``--async``, ``--availability``)."""
        return None

    @property
    def eval_every(self) -> int:
        """Rounds between evaluations."""
        return self.server.options.eval_every or max(1, self.server.options.rounds // 20)

    def is_evaluated(self, round: int) -> bool:
        """Whether an evaluation follows on that round."""
        return round % self.eval_every == 0 or round >= self.last_round

    def session(self, stage: int | str, memory: Memories, **more: Any) -> Session:
        """A stage of the run begins: ``AbstractEngine.session``, with what this run does before each ask."""
        return self.engine.session(stage, memory, before_ask=self.before_ask, **more)

    def train_round(self) -> dict[str, Any]:
        """One round; its record, without metrics. Nothing has changed if the round fails.

        The seconds of a round begin where the one before was read: of rounds that were begun ahead of time, those parts
        that went on beside each other count once.
        """
        pending = self._ahead.round() if self._ahead else self.computed(self.now)
        self.server.now = pending.end
        since, self._read = max(pending.since, self._read), time.perf_counter()
        notes = self._noted.pop(self.server.round, [])
        if self._ahead and self._ahead.why_not not in ("", *self.engine.notes):
            self.engine.note(self._ahead.why_not)
            notes.append(self._ahead.why_not)
        return {**pending.record(self._read - since), "notes": notes}

    def computed(self, start: Mark, *, trusting: bool = False) -> PendingRound:
        """The round after ``start``; where the server's own steps want memory, that of what was kept for speed."""
        number, left = start.round + 1, self.server.options.rounds - start.round
        cohort, turn = self.cohort(number), self.clock.turn(number) if self.clock else None
        noted = self._noted.setdefault(number, [])
        for _ in range(2):
            before = len(self.engine.notes)
            try:
                session = self.session(number, start.memory, rounds_left=left, trusting=trusting)
                return run_round(self.server, session, start, cohort, turn)
            except Exception as error:
                if not is_full(error):
                    raise
                reason = why_full(error)
            finally:
                noted += self.engine.notes[before:]
            # outside of the handler, so that the error no longer holds on to tensors
            if not self.engine.free_memory():
                break
        raise RoundError(
            f"Round {number} does not fit into memory: {reason}. The last checkpoint is intact: "
            "take a smaller loom or cohort, or a device with more memory."
        )

    def cohort(self, number: int) -> tuple[ClientId, ...]:
        """Who is asked in the round of that number."""
        if self.clock:
            return self.clock.turn(number).came
        options, present = self.server.options, self.present
        hidden = self.secret and options.dp_noise  # else a server that goes on would ask others than it had asked
        draw = secret_stream() if hidden else stream(options.seed, number, "cohort")
        return tuple(present[row] for row in cohorts.drawn(draw, len(present), options.cohort, options.sampling))

    def settle(self) -> None:
        """Bring the state into the form in which it is evaluated and deployed."""
        session = self.session(f"settling after round {self.server.round}", self.now.memory)
        try:
            self.server.settle(session)
        finally:
            self._dropped += session.stats.dropped

    def evaluation(self) -> Evaluation:
        """The state, settled, on validation and test data of all participants, or of those that are drawn.

        Settling changes the state, once for each round. With an adaptation the plain method is tried too, on validation
        data, since its scores choose the best round. Newcomers are tried where that costs no training
        (``tries_newcomers``).
        """
        self._dropped, before, start = [], len(self.engine.notes), time.perf_counter()
        self.settle()
        settling = time.perf_counter() - start if self.server.algorithm.settle else 0.0
        clients, options = self.present, self.server.options
        if 0 < options.eval_clients < len(clients):
            draw = stream(options.seed, "evaluation")
            rows = np.sort(draw.choice(len(clients), options.eval_clients, replace=False))
            clients = tuple(clients[row] for row in rows)
        scores = {
            Group("deployed", "participants", split): self.evaluate(split, clients)
            for split in ("val", "test", *self.also_tried)
        }
        if self.server.algorithm.base:
            scores[Group("plain", "participants", "val")] = self.evaluate("val", clients, plain=True)
        found = self._summarised(scores)._replace(embeddings=self._embeddings())
        if self.tries_newcomers:
            found = found.joined_by(self.evaluation_of_unseen())
        return found._replace(notes=self.engine.notes[before:], settling=settling)

    def _embeddings(self) -> dict[str, dict[ClientId, list[float]]]:
        """Of participants, where the method has some; of so many clients as are written down."""
        server = self.server
        if server.base.embeddings is None:
            return {}
        clients = panel(server.setup.clients, FEW)
        table = server.base.embeddings(server.setup, server.plain(server.state), clients)
        return {"participants": dict(zip(clients, table.tolist()))}

    def evaluate(
        self, split: str, clients: Sequence[ClientId] | None = None, *, plain: bool = False
    ) -> dict[ClientId, Score]:
        """The scores of participants on a split of their own data; ``plain``: without the method's adaptation.

        Clients without samples in that split are left out; those that give no usable reply are, too, by name.
        """
        server = self.server
        chosen = self.federation.having(split, self.present if clients is None else clients)
        session = self.session(f"evaluation after round {server.round}", self.now.memory)
        state = server.plain(server.state)
        scores = evaluate(
            server.base if plain else server.algorithm,
            (lambda some: server.base.send(server.setup, state, some)) if plain else server.send,
            chosen,
            split,
            session.ask,
            name=PLAIN if plain else EVALUATION,
            higher_is_better=server.setup.task.higher_is_better,
        )
        self._dropped += session.stats.dropped
        server.now = server.now._replace(memory=session.memory)
        return self._counted(split, scores)

    def _counted(self, split: str, scores: dict[ClientId, Score]) -> dict[ClientId, Score]:
        """What counts of the scores that clients tell: all of it, where they cannot lie."""
        return scores

    def evaluate_global(self, split: str, *, unseen: bool = False) -> dict[ClientId, Score]:
        """The scores of the global model on a split of every participant's own data, or of every unseen client's.

        One with BatchNorm is tried by the participants that have trained it.
        """
        server = self.server
        network, params = server.global_model(for_others=unseen)
        clients = self.federation.having(split, self.federation.unseen if unseen else server.setup.clients)
        if network.fresh_buffers():  # who has not trained it has no running statistics for it
            clients = tuple(client for client in clients if "global_buffers" in self.now.memory.get(client, {}))
        return evaluate(
            with_network(server.base, network),
            lambda some: Sent({"params": params}, PerClient.empty(some)),
            clients,
            split,
            self.session(f"evaluation after round {server.round}", self.now.memory).ask,
            name=GLOBAL,
            higher_is_better=server.setup.task.higher_is_better,
        )

    def evaluation_of_unseen(self, split: str = "test", mode: str = "admit", samples: int = 0) -> Evaluation:
        """Unseen clients are admitted with their training data and tried on a split of their own data.

        ``all`` is their whole data, as zACC has it. ``samples``: at most so many samples of each are there to admit it;
        0: all. Modes other than ``admit`` hand participants' models on (``metrics.handed_on``). They come for the first
        time, each time: nothing of it is remembered.
        """
        server = self.server
        newcomers = self.federation.having(split, self.federation.having("train", self.federation.unseen))
        if not newcomers:
            return Evaluation({}, {})
        strangers = set(newcomers)
        memory = Memories({client: tree for client, tree in self.now.memory.items() if client not in strangers})
        if mode != "admit":
            if samples:
                raise ConfigError(f"A number of samples is for admission, not for the mode {mode}. Leave one out.")
            ask = self.session("evaluation of unseen clients", memory).ask
            scores = evaluate_handed_on(server.algorithm, server.setup, server.state, newcomers, split, mode, ask)
            return self._summarised({Group("deployed", "unseen", split): scores})
        if server.algorithm.admit and server.algorithm.needs_labels(server.config) and split in ("train", "all"):
            raise NeedsError(
                f"{server.algorithm.name} admits newcomers by training on their labelled samples, and on {split} data "
                "it would be tried on the same samples. Use the split test."
            )
        sent, memory = self.admission(newcomers, memory, samples)
        ask = self.session("evaluation of unseen clients", memory).ask
        scores = self._tried(server.algorithm, sent, split, ask)
        found = self._summarised({Group("deployed", "unseen", split): scores})
        if isinstance(sent, Woven):
            some = panel(list(sent.embeddings), FEW)
            found = found._replace(embeddings={"unseen": {client: sent.embeddings[client].tolist() for client in some}})
        return found._replace(estimates=self._estimates(memory, newcomers))

    def _estimates(self, memory: Memories, newcomers: Sequence[ClientId]) -> dict[ClientId, Report]:
        """What newcomers found out about their label shares, where they did, and where their memory is here."""
        server = self.server
        there = [client for client in panel(newcomers, FEW) if client in memory]
        samples = {member.id: member.samples["train"] for member in server.roster.members}
        found = {c: report_of(server.state, memory[c], samples[c], server.roster.classes) for c in there}
        return {client: one for client, one in found.items() if one}

    def admission(self, newcomers: Sequence[ClientId], memory: Memories, samples: int = 0) -> tuple[Sent, Memories]:
        """What clients of the roster that took no part are sent, and all memories afterwards."""
        session = self.session("admission", memory)
        return self.server.admit(session, newcomers), session.memory

    def mixed(self, split: str = "test", most: int = 50) -> dict[ClientId, dict[ClientId, Score]]:
        """Every participant's output layer on every participant's body: ``[whose layer][whose body]``.

        Each pair is tried on data of the client whose output layer it is (pFedHN, Fig. 3). ``most``: of so many
        participants, evenly from the roster.
        """
        server, base = self.server, self.server.base
        clients = panel(self.federation.having(split, server.setup.clients), most)
        if not clients:
            return {}
        self._check_mixable(clients)
        plain = server.plain(server.state)
        shared, mine = base.send(server.setup, plain, clients)
        whole = {c: base.client_deploy(server.home(c), shared, mine[c], server.recall(c)) for c in clients}
        tried = replace(base, client_deploy=_mixed_deploy, predict=predict_with_target)
        ask = self.session("evaluation of mixed models", self.now.memory).ask
        found: dict[ClientId, dict[ClientId, Score]] = {client: {} for client in clients}
        for body in clients:
            crossed = {
                client: {
                    "params": {
                        name: whole[client if name in server.setup.models[client].head else body]["params"][name]
                        for name in whole[client]["params"]
                    },
                    "buffers": whole[body]["buffers"],
                }
                for client in clients
            }
            scores = self._tried(tried, Sent({}, PerClient.of(crossed)), split, ask, MIXED)
            for client, score in scores.items():
                found[client][body] = score
        return found

    def _tried(
        self, algorithm: Algorithm, sent: Sent, split: str, ask: Ask, name: str = EVALUATION
    ) -> dict[ClientId, Score]:
        """The scores of clients with what they are sent, all at once."""
        clients, better = list(sent.mine), self.server.setup.task.higher_is_better
        scores = evaluate(
            algorithm, lambda _: sent, clients, split, ask, name=name, at_once=len(clients), higher_is_better=better
        )
        return self._counted(split, scores)

    def _check_mixable(self, clients: Sequence[ClientId]) -> None:
        """Refuse to exchange output layers where there is no such layer, or more than a network is deployed."""
        server = self.server
        models = {server.setup.models[client].spec: server.setup.models[client] for client in clients}
        (first, *others) = models.values()
        whole = server.memories_here and not is_one_network(server.module(clients[0]))
        if others or len(first.head) == len(first.shapes) or whole:
            raise NeedsError(
                "Output layers and bodies can be exchanged where all clients have one network, with a body, and deploy "
                f"nothing else; this run of {server.algorithm.name} has {', '.join(map(str, models))}. "
                "Train with one --model such as mlp or lenet."
            )
        if not server.memories_here:
            raise NeedsError("Clients on machines of their own keep their models; there is nothing to exchange here.")

    def admission_curve(self, split: str = "test") -> list[dict[str, Any]]:
        """How unseen clients fare while they are admitted, round of admission by round (MH-pFedHN, Fig. 3 to 5).

        What the server sends to train on is, in every such round, the model that the newcomer would have then.
        """
        server, points = self.server, Curve()
        newcomers = self.federation.having(split, self.federation.having("train", self.federation.unseen))
        if not newcomers:
            return []
        first = server.setup.clients[:1]
        common, own = server.send(first)
        like = [set(flatten(tree)) for tree in (common, own[first[0]])]
        session = self.session("admission", Memories())

        def scores(sent: Sent) -> dict[ClientId, Score]:
            ask = self.session("evaluation of unseen clients", session.memory).ask
            return self._tried(server.algorithm, sent, split, ask)

        def heard(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
            sent = Sent(shared, PerClient.of(mine))
            alike = [set(flatten(tree)) for tree in (shared, next(iter(sent.mine.values())))] == like
            if alike and points.wants_next():
                points.add(scores(sent))
            return session.ask(program, shared, mine)

        points.end(scores(server.admit(session, newcomers, heard)))
        return points.points

    def _summarised(self, scores: Mapping[Group, dict[ClientId, Score]]) -> Evaluation:
        """The scores with their means, by group."""
        metrics: dict[str, float] = {}
        for group, found in scores.items():
            metrics |= summarise(found, self.server.setup.task, group)
        return Evaluation(metrics, dict(scores), self._dropped)

    def meta(self) -> dict[str, Any]:
        """What a checkpoint says besides state and memory."""
        server = self.server
        return {
            "settled": server.settled,
            "as": server.algorithm.name,
            "adapted": server.algorithm.base is not None,
        }

    def saved(self, rounds: Sequence[int]) -> None:
        """A checkpoint of this moment is written; ``rounds`` are those of all checkpoints that are kept."""

    def mark(self) -> Any:
        """This moment, to go back to. Trees are values, so it is no copy of them."""
        return self.server.now, self.server.settled

    def go_back(self, mark: Any) -> None:
        """As it was at ``mark``, whatever has begun since."""
        self.server.now, self.server.settled = mark
