# SPDX-License-Identifier: Apache-2.0
"""The server's half of a Flower app: the same rounds, records and checkpoints as in a simulation, over a network.

A ``Deployment`` is a ``Trainer`` whose clients come and go. It is entered in one of three ways, as the settings say:

    start     wait until ``nodes`` participants are connected; have them tell how raw samples are prepared; train; give
              everybody who is connected the model that it is to use
    resume    take clients, state and round from the last checkpoint; wait until so many are back; go on
    admit     take the checkpoint that newcomers are served from; give those that are connected their models

Before every round it looks who is there. A client that came after the beginning becomes a participant where the
method's state has room for one more (``roster.grown``), else a newcomer. A round that too few answer is done again,
``repeats`` times, then the run stops with its last checkpoint intact.

What a checkpoint has to do with clients on other machines:

- Their memories stay there, in numbered versions (``deploy.engine``). A checkpoint names the version of each client
  that it counts on, and clients keep those until no checkpoint does (``count_on``). It is written after every round, or
  a server that was killed would ask for versions that are gone.
- It names the clients, because later ones may have joined since: whoever resumes takes the roster from there.
- The replies of a round can be finite and leave a state from which no round can begin. ``proven`` is the last round
  from which one began. Where the next one fails for everybody, the checkpoint after that round is removed (``_run``).
"""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedloom import algorithms
from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm, Ask, Sent, Setup
from fedloom.core.errors import ConfigError, DivergedError, FedloomError, NeedsError, RoundError, RunError
from fedloom.core.task import Task
from fedloom.core.tokens import Tokens
from fedloom.core.trees import ClientId, PerClient, Tree
from fedloom.data.preparation import Preparation
from fedloom.deploy.bounds import believed, sums_of
from fedloom.deploy.codec import pack, refusal
from fedloom.deploy.collecting import SpentRound
from fedloom.deploy.engine import VERSION, Flower, Rules
from fedloom.deploy.keys import clients_by_key
from fedloom.deploy.lobby import Greeting, Lobby
from fedloom.deploy.options import Settings, read
from fedloom.deploy.roster import check_model, federation_of, grown, in_order, roster_of
from fedloom.engines.memories import Memories
from fedloom.programs.evaluation import EVALUATION, Score
from fedloom.programs.preparing import preparing
from fedloom.progress import Display, display
from fedloom.runs.directory import CONFIG, RunDirectory
from fedloom.runs.environment import environment
from fedloom.runs.files import to_json, write_file
from fedloom.training.account import Account
from fedloom.training.config import algorithm_of, flat_config
from fedloom.training.loop import save, train
from fedloom.training.machine import device_of
from fedloom.training.server import Server
from fedloom.training.server_data import Form, ServerSamples, share_is_refused
from fedloom.training.server_data import read as read_samples
from fedloom.training.trainer import Trainer

OTHER_NETWORK = "has another network than the others; the method needs one for all"

PAUSE = 2.0
"""Seconds between looks for nodes."""

Tell = Callable[[str], None]
"""Takes a text for whoever watches: what is waited for."""


def server_app() -> ServerApp:
    """The app of the server."""
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        try:
            serve(grid, read(context.run_config), display("plain"))
        except FedloomError as error:
            sys.stderr.write(f"fedloom: {error}\n")  # the one line that whoever reads the log is to find
            raise  # after sys.exit, Flower would drop the rest of the log and wait a minute

    app.main()(main)
    return app


def serve(grid: Grid, settings: Settings, shown: Display) -> None:
    """Train, go on with training, or admit newcomers, as the settings say."""
    directory = Path(settings.deploy.out)
    if settings.deploy.admit:
        admit(grid, settings, RunDirectory.open(directory), shown)
    elif settings.deploy.resume:
        resume(grid, settings, _begun(directory), shown)
    else:
        start(grid, settings, directory, shown)


def _begun(path: Path) -> RunDirectory:
    """A run that has a checkpoint, from which it can go on."""
    if not (path / CONFIG).is_file():
        raise RunError(f"There is no run in {path} to go on with; leave resume out to begin one.")
    directory = RunDirectory.open(path)
    if not directory.checkpoints():
        raise RunError(
            f"{path} was stopped before its first checkpoint; remove it, and leave resume out to begin again."
        )
    return directory


def start(grid: Grid, settings: Settings, out: Path, shown: Display) -> None:
    """A new run, with the clients that are there when enough are."""
    lobby = lobby_of(grid, settings, secrets.token_hex(8))
    same = algorithm_of(settings.method, settings.run).needs.same_model
    wait_for(lobby, settings.deploy.nodes, settings.deploy.wait, shown.wait, same_model=same)
    greetings = [lobby.greetings[client] for client in in_order(list(lobby.nodes))]
    deployment = Deployment(settings, lobby, greetings)
    deployment.prepare()
    server = deployment.server
    resolved = flat_config(settings.method, server.options, settings.config)
    directory = RunDirectory.create(out, resolved, need_bytes=4 * server.checkpoint_bytes())
    with directory.lock():
        directory.write_roster(server.roster)
        _note(directory, deployment)
        save(deployment, directory, best=False)  # so that a server that is killed now can go on, too
        _run(deployment, directory, shown)


def resume(grid: Grid, settings: Settings, directory: RunDirectory, shown: Display) -> None:
    """Go on from the last sound checkpoint with the clients that it names, as soon as enough of them are back."""
    with directory.lock():
        deployment = reopened(grid, settings, directory, "last")
        directory.update_config(rounds=settings.run.rounds)
        directory.rewind(deployment.server.round)
        wait_for(deployment.lobby, settings.deploy.nodes, settings.deploy.wait, shown.wait)
        _run(deployment, directory, shown)


def admit(grid: Grid, settings: Settings, directory: RunDirectory, shown: Display) -> None:
    """Give the newcomers that are connected their models, and change nothing else."""
    which: Any = "last" if directory.best_round() is None else algorithms.get(settings.method).newcomers_at
    deployment = reopened(grid, settings, directory, which)
    end = time.monotonic() + settings.deploy.wait
    deployment.look()
    if not deployment.newcomers:
        shown.wait("for newcomers; none is connected")
    while not deployment.newcomers:
        if time.monotonic() > end:
            refused = f" Refused: {'; '.join(deployment.lobby.refused[-3:])}." if deployment.lobby.refused else ""
            raise RoundError(
                f"No newcomer came within {settings.deploy.wait:g} seconds.{refused} Start its node, then try again."
            )
        time.sleep(PAUSE)
        deployment.look()
    with closing(Account(deployment, directory)):
        deployment.deliver_to_newcomers()
    _note_delivery(directory, deployment)
    if not deployment.delivered:
        reasons = "; ".join(f"{client} {reason}" for client, reason in deployment.undelivered.items())
        raise RoundError(f"No newcomer got a model: {reasons or 'the method admits none'}.")


def reopened(grid: Grid, settings: Settings, directory: RunDirectory, which: Any) -> Deployment:
    """The deployment of a checkpoint, with its clients, connected or not."""
    checkpoint = directory.load(which)
    kept = checkpoint.meta.get("deployment")
    if kept is None:
        raise RunError(f"{directory.path} was not run over a network; use `fedloom resume {directory.path}`.")
    if directory.config.get("method") != settings.method:
        raise ConfigError(f"{directory.path} is a run of {directory.config.get('method')}, not of {settings.method}.")
    greetings = [greeting_from(one) for one in kept["roster"]]
    lobby = lobby_of(grid, settings, kept["run"])
    lobby.greetings = {one.client: one for one in greetings}
    deployment = Deployment(settings, lobby, greetings)
    deployment.prepare_by(directory.roster().preparation)
    deployment.server.restore(checkpoint)
    deployment.proven = checkpoint.meta.get("proven", 0)
    for round in directory.checkpoints():
        deployment.count_on(round, directory.load(round).memory)
    return deployment


def greeting_from(kept: dict[str, Any]) -> Greeting:
    """What a checkpoint kept of a client."""
    model = kept["model"] and (kept["model"][0], _tuples(kept["model"][1]))
    return Greeting(**{**kept, "splits": tuple(kept["splits"]), "model": model})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def lobby_of(grid: Grid, settings: Settings, run: str) -> Lobby:
    """The lobby of a run; with keys, clients are who their keys say."""
    folder = settings.deploy.node_keys
    return Lobby(grid, run, clients_by_key(Path(folder)) if folder else None, check_of(settings))


def check_of(settings: Settings) -> Callable[[Greeting], None]:
    """Fails where a client cannot be served."""
    known, algorithm = Known.of(settings), algorithm_of(settings.method, settings.run)

    def check(one: Greeting) -> None:
        check_model(one, algorithm.told, settings.deploy.largest, known.shape, known.outputs, known.networks,
                    known.tokens)  # fmt: skip
        alone = known.federation([one._replace(role="participant")])
        setup = Setup(settings.config, alone.participants, alone.models, known.task, 0, known.device, known.dtype)
        violations = algorithm.needs.of_clients.violations(setup, algorithm.name)
        if violations:
            raise NeedsError(" ".join(violations))

    return check


class Known(NamedTuple):
    """What the server knows of clients before they come."""

    shape: tuple[int, ...]
    outputs: int
    networks: list[str]
    task: Task
    device: torch.device
    dtype: torch.dtype
    tokens: Tokens | None

    @classmethod
    def of(cls, settings: Settings) -> Known:
        """From the app's table."""
        options, deploy = settings.run, settings.deploy
        networks = [name for name in deploy.networks.split(",") if name]
        device, dtype = device_of(options.device), getattr(torch, options.dtype)
        return cls(deploy.shape, deploy.num_outputs, networks, settings.task, device, dtype, settings.tokens)

    @property
    def classes(self) -> int:
        """How many classes there are; 0 for a task without any."""
        return self.outputs if self.task.class_scores or self.task.per_token else 0

    def federation(self, greetings: Sequence[Greeting]) -> Federation:
        """A federation of those who told of themselves."""
        return federation_of(greetings, *self)

    def server_samples(self, settings: Settings) -> ServerSamples | None:
        """What the server has of its own, with labels only if the method needs them."""
        options, labelled = settings.run, algorithms.get(settings.method).needs.server_data == "labelled"
        share_is_refused(options.server_data)
        if not isinstance(options.server_data, str):
            return None
        if settings.preparation:
            raise ConfigError("server-data is for samples that are not raw, and the clients' are; leave it out.")
        targets = () if self.classes or self.outputs == 1 else (self.outputs,)
        names = settings.deploy.class_names if self.classes else ()
        form = Form(self.shape, self.classes, self.shape if self.task.per_token else targets, names,
                    tokens=self.tokens)  # fmt: skip
        return read_samples(options.server_data, options.data_root, form, labelled=labelled)


def wait_for(lobby: Lobby, number: int, seconds: float, tell: Tell, *, same_model: bool = False) -> None:
    """Until so many participants are connected; ``same_model``: with one network, the commonest. Others are refused."""
    end, said = time.monotonic() + seconds, (-1, 0)
    while True:
        lobby.refresh()
        there = [client for client in lobby.nodes if lobby.greetings[client].role == "participant"]
        if same_model and there:
            networks = [lobby.greetings[client].model for client in in_order(there)]
            common = max(networks, key=networks.count)  # the first of equals
            there = [client for client in there if lobby.greetings[client].model == common]
        if len(there) >= number:
            for client in in_order([c for c in lobby.nodes if same_model and lobby.greetings[c].model != common]):
                lobby.refuse(client, OTHER_NETWORK)
            return
        if time.monotonic() > end:
            advice = "Start more nodes, or set nodes lower."
            if lobby.refused:
                advice = f"Refused: {'; '.join(lobby.refused[-3:])}. See to them, or set nodes lower."
            other = sum(lobby.greetings[client].role == "participant" for client in lobby.nodes) > len(there)
            alike = " with one network, which the method needs," if other else ""
            raise RoundError(
                f"{len(there)} clients{alike} are connected, and {number} are needed; waited {seconds:g} seconds."
                f" {advice}"
            )
        if (len(there), len(lobby.refused)) != said:
            said = (len(there), len(lobby.refused))
            latest = f"; refused: {lobby.refused[-1]}" if lobby.refused else ""
            tell(f"for {number} clients; {_are_connected(len(there))}{latest}")
        time.sleep(PAUSE)


def _are_connected(number: int) -> str:
    return f"{number or 'none'} {'is' if number < 2 else 'are'} connected"


class Deployment(Trainer):
    """A federation of machines in training."""

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
        self._admitted: Sent | None = None
        self.delivered: list[ClientId] = []
        self.undelivered: dict[ClientId, str] = {}
        """Who got no model in the end, and why."""
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
        """One round with those who are connected; done again where too few answer."""
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
                self.tell(f"{PAUSE:g} seconds, then does round {self.server.round + 1} again: {error}")
                time.sleep(PAUSE)
                continue
            self.proven = self.server.round - 1
            refused, self.lobby.refused = self.lobby.refused, []
            more = {"repeated": failures, "refused": refused}
            return {**record, **{name: texts for name, texts in more.items() if texts}}

    def evaluate(
        self, split: str, clients: Sequence[ClientId] | None = None, *, plain: bool = False
    ) -> dict[ClientId, Score]:
        """As ``Trainer.evaluate``, of what clients say as much as counts."""
        return self._believed(split, super().evaluate(split, clients, plain=plain))

    def _tried(
        self, algorithm: Algorithm, sent: Sent, split: str, ask: Ask, name: str = EVALUATION
    ) -> dict[ClientId, Score]:
        return self._believed(split, super()._tried(algorithm, sent, split, ask, name))

    def _believed(self, split: str, scores: Mapping[ClientId, Score]) -> dict[ClientId, Score]:
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
        sent, memory = self._admit_each(there, memory)
        if not len(sent.mine):
            reasons = "; ".join(f"{client} {self.undelivered.get(client, 'is gone')}" for client in newcomers)
            raise RoundError(f"No newcomer could be admitted: {reasons}.")
        self._admitted = sent
        return sent, memory

    def _admit_each(self, newcomers: Sequence[ClientId], memory: Memories) -> tuple[Sent, Memories]:
        """Admit all at once; where that fails one by one, so that nobody's fault is another's."""
        session = self.session("admission", memory)
        try:
            sent = self.server.admit(session, newcomers)
        except Exception as error:
            if len(newcomers) == 1:
                reason = str(error) if isinstance(error, FedloomError) else f"({type(error).__name__})"
                self.undelivered[newcomers[0]] = f"could not be admitted: {reason}"
                return Sent({}, PerClient.empty(())), memory
            parts = []
            for client in newcomers:
                part, memory = self._admit_each([client], memory)
                parts.append(part)
            # what is shared is the run's, whoever is admitted
            shared = next((part.shared for part in parts if len(part.mine)), {})
            mine = PerClient.of({client: part.mine[client] for part in parts for client in part.mine})
            return Sent(shared, mine), memory
        why = {one.client: one.reason for one in session.stats.dropped}
        self.undelivered |= {c: why.get(c, "was not admitted") for c in newcomers if c not in set(sent.mine)}
        return sent, session.memory

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
        return {versions[client] for versions in self._versions.values() if client in versions}

    def look(self) -> None:
        """See who is there, and take in who is new."""
        self.lobby.refresh()
        known = {one.client for one in self.greetings}
        for client in in_order([client for client in self.lobby.nodes if client not in known]):
            self._take_in(self.lobby.greetings[client])

    def _gather(self) -> None:
        end, said = time.monotonic() + self.deploy.wait, -1
        self.look()
        while len(self.present) + 1e-9 < (need := max(1, self.deploy.quorum * self.server.options.cohort)):
            there, number = len(self.present), self.server.round + 1
            if there != said:
                said = there
                self.tell(f"for {math.ceil(need - 1e-9)} clients in round {number}; {_are_connected(there)}")
            if time.monotonic() > end:
                raise RoundError(
                    f"{there} of {len(self.server.setup.clients)} clients are connected, too few for a round; "
                    f"waited {self.deploy.wait:g} seconds. The last checkpoint is intact: start nodes, then resume."
                )
            time.sleep(PAUSE)
            self.look()

    def _take_in(self, one: Greeting) -> None:
        """A client that came after the beginning: as a participant if the method has room, else as a newcomer."""
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
        federation = self.known.federation(greetings)
        return replace(self.server.setup, clients=federation.participants, models=federation.models)

    def _enlist(self, greetings: Sequence[Greeting], state: Any = None) -> None:
        """Have these clients from now on; ``state`` is that for them, if it is another one."""
        self.greetings = list(greetings)
        federation, now, settled = self.known.federation(greetings), self.now, self.server.settled
        self.server.setup = self._setup_for(greetings)
        preparation = self.server.roster.preparation
        self.server.roster = roster_of(federation, greetings, *self.server.roster[2:4])
        clients = len(federation.participants)
        cohort = self.settings.run.cohort_of(clients, self.server.algorithm.cohort)
        self.server.options = replace(self.server.options, clients=clients, cohort=cohort)
        self.server.now, self.server.settled = now if state is None else now._replace(state=state), settled
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
            self._deliver(self.server.send(self.present))
        self.deliver_to_newcomers()

    def deliver_to_newcomers(self) -> None:
        """The newcomers that are connected are admitted, and get their models."""
        if self.server.algorithm.admit is None:
            return
        admitted = [self._admitted] if self._admitted else []
        done = {client for sent in admitted for client in sent.mine}
        rest = [client for client in self.newcomers if client not in done]
        for sent in admitted:
            self._deliver(sent)
        if rest:
            sent, memory = self._admit_each(rest, self.now.memory)
            self._deliver(sent, memory)

    def _deliver(self, sent: Sent, memory: Memories | None = None) -> None:
        known = self.now.memory if memory is None else memory
        versions = {client: known.get(client, {VERSION: 0})[VERSION] for client in sent.mine}
        contents = {
            client: pack(
                {
                    "run": self.lobby.run,
                    "client": client,
                    "from_version": int(versions[client]),
                    "preparation": self.preparation,
                },
                shared=sent.shared,
                mine=sent.mine[client],
            )
            for client in sent.mine
        }
        for client, answer in self.lobby.exchange("query.deploy", contents, self.deploy.timeout).items():
            reason = refusal(answer)
            if reason is None:
                self.delivered.append(client)
                self.undelivered.pop(client, None)
            else:
                self.undelivered[client] = reason


def _run(deployment: Deployment, directory: RunDirectory, shown: Display) -> None:
    deployment.tell = shown.wait
    try:
        train(deployment, directory, shown)
    except DivergedError as error:
        last, before = deployment.server.round, _before_unsound(deployment, directory)
        if before is None:
            raise
        directory.rewind(before)
        raise RoundError(
            f"{str(error).partition(' The last checkpoint')[0]} No round could begin from the checkpoint of round "
            f"{last}, so it was removed; that of round {before} is intact: see to the clients, then resume."
        ) from error
    if deployment.deploy.deliver:
        with closing(Account(deployment, directory)):
            deployment.deliver()
        _note_delivery(directory, deployment)


def _before_unsound(deployment: Deployment, directory: RunDirectory) -> int | None:
    """The checkpoint before a last one from which no round could begin, if there is one that was sound."""
    last, saved = deployment.server.round, directory.checkpoints()
    if deployment.proven < last and saved[-1:] == [last] and any(round <= deployment.proven for round in saved[:-1]):
        return max(round for round in saved if round < last)
    return None


def _note_delivery(directory: RunDirectory, deployment: Deployment) -> None:
    found = {"delivered": deployment.delivered, "failed": deployment.undelivered}
    write_file(directory.path / "delivery.json", to_json(found, indent=2))


def _note(directory: RunDirectory, deployment: Deployment) -> None:
    server = deployment.server
    found = environment(server.options.seed, server.options.device)
    models = [str(model.spec) for model in server.setup.architectures.values()]
    directory.write_environment({**found, "clients": list(server.setup.clients), "models": models})
