# SPDX-License-Identifier: Apache-2.0
"""The server's half of a Flower app: the same rounds, records and checkpoints as in a simulation, over a network."""

from __future__ import annotations

import math
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedloom import algorithms, api
from fedloom.clients.federation import Federation
from fedloom.core.contract import Sent, Setup
from fedloom.core.errors import ConfigError, FedloomError, NeedsError, RoundError, RunError
from fedloom.core.task import Task
from fedloom.core.trees import ClientId, PerClient
from fedloom.deploy.keys import clients_by_key
from fedloom.deploy.options import Settings, read
from fedloom.deploy.roster import check_model, federation_of, grown, in_order
from fedloom.engines.flower.codec import pack, refusal
from fedloom.engines.flower.engine import VERSION, Flower, Rules
from fedloom.engines.flower.lobby import Lobby, Told
from fedloom.metrics.evaluation import Score
from fedloom.progress import Display, display
from fedloom.runs.directory import CONFIG, RunDirectory
from fedloom.runs.environment import environment
from fedloom.runs.files import to_json, write_file
from fedloom.runs.machine import device_of, set_precision, task_named
from fedloom.runs.rounds import Mark
from fedloom.runs.simulation import flat_config
from fedloom.runs.trainer import Trainer, algorithm_of

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
    told = [lobby.told[client] for client in in_order(list(lobby.nodes))]
    deployment = Deployment(settings, lobby, told)
    resolved = flat_config(settings.method, deployment.options, settings.config)
    directory = RunDirectory.create(out, resolved, need_bytes=4 * deployment.checkpoint_bytes())
    with directory.lock():
        _note(directory, deployment)
        api.save(deployment, directory, best=False)  # so that a server that is killed now can go on, too
        _run(deployment, directory, shown)


def resume(grid: Grid, settings: Settings, directory: RunDirectory, shown: Display) -> None:
    """Go on from the last checkpoint with the clients that it names, as soon as enough of them are back."""
    with directory.lock():
        deployment = reopened(grid, settings, directory, "last")
        directory.update_config(rounds=settings.run.rounds)
        directory.rewind(deployment.round)
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
    deployment.deliver_to_newcomers()
    _note_delivery(directory, deployment)
    if not deployment.delivered:
        told = "; ".join(f"{client} {reason}" for client, reason in deployment.undelivered.items())
        raise RoundError(f"No newcomer got a model: {told or 'the method admits none'}.")


def reopened(grid: Grid, settings: Settings, directory: RunDirectory, which: Any) -> Deployment:
    """The deployment of a checkpoint, with its clients, connected or not."""
    checkpoint = directory.load(which)
    kept = checkpoint.meta.get("deployment")
    if kept is None:
        raise RunError(f"{directory.path} was not run over a network; use `fedloom resume {directory.path}`.")
    if directory.config.get("method") != settings.method:
        raise ConfigError(f"{directory.path} is a run of {directory.config.get('method')}, not of {settings.method}.")
    told = [told_from(one) for one in kept["roster"]]
    lobby = lobby_of(grid, settings, kept["run"])
    lobby.told = {one.client: one for one in told}
    deployment = Deployment(settings, lobby, told)
    deployment.restore(checkpoint.round, checkpoint.state, checkpoint.memory)
    deployment.saved()
    return deployment


def told_from(kept: dict[str, Any]) -> Told:
    """What a checkpoint kept of a client."""
    model = kept["model"] and (kept["model"][0], _tuples(kept["model"][1]))
    return Told(**{**kept, "splits": tuple(kept["splits"]), "model": model})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def lobby_of(grid: Grid, settings: Settings, run: str) -> Lobby:
    """The lobby of a run; with keys, clients are who their keys say."""
    folder = settings.deploy.node_keys
    return Lobby(grid, run, clients_by_key(Path(folder)) if folder else None, check_of(settings))


def check_of(settings: Settings) -> Callable[[Told], None]:
    """Fails where a client cannot be served."""
    known, algorithm = Known.of(settings), algorithm_of(settings.method, settings.run)

    def check(one: Told) -> None:
        check_model(one, algorithm.told, settings.deploy.largest, known.shape, known.outputs, known.networks)
        alone = known.federation([one._replace(role="participant")])
        setup = Setup(settings.config, alone.participants, alone.models, known.task, 0, known.device, known.dtype)
        violations = algorithm.needs.violations(setup, algorithm.name)
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

    @classmethod
    def of(cls, settings: Settings) -> Known:
        """From the app's table."""
        options, deploy = settings.run, settings.deploy
        task = task_named(options.task if options.task != "auto" else "classification")
        networks = [name for name in deploy.networks.split(",") if name]
        device, dtype = device_of(options.device), getattr(torch, options.dtype)
        return cls(deploy.shape, deploy.num_outputs, networks, task, device, dtype)

    def federation(self, roster: Sequence[Told]) -> Federation:
        """A federation of those who told of themselves."""
        return federation_of(roster, *self)


def wait_for(lobby: Lobby, number: int, seconds: float, tell: Tell, *, same_model: bool = False) -> None:
    """Until so many participants are connected; ``same_model``: with one network, the commonest. Others are refused."""
    end, told = time.monotonic() + seconds, (-1, 0)
    while True:
        lobby.refresh()
        there = [client for client in lobby.nodes if lobby.told[client].role == "participant"]
        if same_model and there:
            networks = [lobby.told[client].model for client in in_order(there)]
            common = max(networks, key=networks.count)  # the first of equals
            there = [client for client in there if lobby.told[client].model == common]
        if len(there) >= number:
            for client in in_order([c for c in lobby.nodes if same_model and lobby.told[c].model != common]):
                lobby.refuse(client, OTHER_NETWORK)
            return
        if time.monotonic() > end:
            advice = "Start more nodes, or set nodes lower."
            if lobby.refused:
                advice = f"Refused: {'; '.join(lobby.refused[-3:])}. See to them, or set nodes lower."
            other = sum(lobby.told[client].role == "participant" for client in lobby.nodes) > len(there)
            alike = " with one network, which the method needs," if other else ""
            raise RoundError(
                f"{len(there)} clients{alike} are connected, and {number} are needed; waited {seconds:g} seconds."
                f" {advice}"
            )
        if (len(there), len(lobby.refused)) != told:
            told = (len(there), len(lobby.refused))
            latest = f"; refused: {lobby.refused[-1]}" if lobby.refused else ""
            tell(f"for {number} clients; {_are_connected(len(there))}{latest}")
        time.sleep(PAUSE)


def _are_connected(number: int) -> str:
    return f"{number or 'none'} {'is' if number < 2 else 'are'} connected"


class Deployment(Trainer):
    """A federation of machines in training."""

    saves_every_round = True

    def __init__(self, settings: Settings, lobby: Lobby, told: Sequence[Told]) -> None:
        method, options, config, deploy = settings
        self.lobby, self.deploy, self.roster = lobby, deploy, list(told)
        if options.threads:
            torch.set_num_threads(options.threads)
        set_precision(options.precision)
        algorithm = algorithm_of(method, options)
        self.known = Known.of(settings)
        federation = self.known.federation(self.roster)
        clients, self._asked = len(federation.participants), partial(options.cohort_of, papers=algorithm.cohort)
        options = replace(
            options,
            dataset="clients",
            partition="clients",
            clients=clients,
            cohort=self._asked(clients),
            engine=Flower.name,
            device=str(self.known.device),
            threads=torch.get_num_threads(),
        )
        rules = Rules(deploy.timeout, deploy.quorum)
        plain = algorithms.get(method)
        engine = Flower(federation, algorithm, config, options.seed, plain, lobby.run, lobby.exchange, rules)
        super().__init__(method, algorithm, options, config, federation, engine, "clients are other machines")
        self.engine: Flower = engine
        self._admitted: Sent | None = None
        self.delivered: list[ClientId] = []
        self.undelivered: dict[ClientId, str] = {}
        """Who got no model in the end, and why."""
        self._dropped: list[dict[str, Any]] = []
        self._scores: dict[tuple[str, ClientId], Score] = {}
        self._settled = -1
        self.tell: Tell = lambda text: None

    @property
    def present(self) -> tuple[ClientId, ...]:
        """The participants that are connected."""
        return tuple(client for client in self.setup.clients if client in self.lobby.nodes)

    @property
    def newcomers(self) -> tuple[ClientId, ...]:
        """The newcomers that are connected."""
        return tuple(client for client in self.federation.unseen if client in self.lobby.nodes)

    def train_round(self) -> dict[str, Any]:
        """One round with those who are connected; done again where too few answer."""
        failures: list[str] = []
        self._scores = {}
        while True:
            self._gather()
            before = self.engine.memory.copy()
            try:
                record = super().train_round()
            except RoundError as error:
                self.engine.memory = before
                failures.append(str(error))
                if len(failures) > self.deploy.repeats:
                    raise
                self.tell(f"{PAUSE:g} seconds, then does round {self.round + 1} again: {error}")
                time.sleep(PAUSE)
                continue
            self._dropped = record["dropped"]
            refused, self.lobby.refused = self.lobby.refused, []
            told = {"repeated": failures, "refused": refused}
            return {**record, **{name: texts for name, texts in told.items() if texts}}

    def evaluate(self, split: str, clients: Sequence[ClientId] | None = None) -> dict[ClientId, Score]:
        """The scores of the participants that are connected. Each is asked once a round."""
        wanted = self.setup.clients if clients is None else clients
        missing = [c for c in wanted if c in self.lobby.nodes and (split, c) not in self._scores]
        if missing:
            self._scores |= {(split, c): score for c, score in super().evaluate(split, missing).items()}
            self._dropped += [one._asdict() for one in self.engine.books.dropped]  # into the round's record
        return {client: self._scores[split, client] for client in wanted if (split, client) in self._scores}

    def settle(self) -> None:
        """As ``Trainer.settle``, once a round. Where nobody answers, the state stays as it was, and the run goes on."""
        if self._settled == self.round:
            return
        try:
            super().settle()
            self._settled = self.round
        except RoundError:
            self._dropped += [one._asdict() for one in self.engine.books.dropped]  # into the round's record

    def admit_with(self, newcomers: Sequence[ClientId], samples: int) -> Sent:
        """Admission; what was sent is kept for delivery."""
        sent = self._admit_each(newcomers)
        if not len(sent.mine):
            told = "; ".join(f"{client} {self.undelivered[client]}" for client in newcomers)
            raise RoundError(f"No newcomer could be admitted: {told}.")
        self._admitted = sent
        return sent

    def _admit_each(self, newcomers: Sequence[ClientId]) -> Sent:
        """Admit all at once; where that fails one by one, so that nobody's fault is another's."""
        before = self.engine.memory.copy()
        try:
            sent = self.admit(newcomers)
        except Exception as error:
            self.engine.memory = before
            if len(newcomers) == 1:
                reason = str(error) if isinstance(error, FedloomError) else f"({type(error).__name__})"
                self.undelivered[newcomers[0]] = f"could not be admitted: {reason}"
                return Sent({}, PerClient.empty(()))
            parts = [self._admit_each([client]) for client in newcomers]
            # what is shared is the run's, whoever is admitted
            shared = next((part.shared for part in parts if len(part.mine)), {})
            return Sent(shared, PerClient.of({client: part.mine[client] for part in parts for client in part.mine}))
        why = {one.client: one.reason for one in self.engine.books.dropped}
        self.undelivered |= {c: why.get(c, "was not admitted") for c in newcomers if c not in set(sent.mine)}
        return sent

    def meta(self) -> dict[str, Any]:
        """Who the clients are: a server that goes on must not take them for new ones."""
        return {"deployment": {"run": self.lobby.run, "roster": [one._asdict() for one in self.roster]}}

    def saved(self) -> None:
        """Clients must keep the memories that this checkpoint counts on."""
        self.engine.saved = {client: int(tree[VERSION]) for client, tree in self.engine.memory.items()}

    def _first_memory(self, model: Any) -> dict[str, torch.Tensor]:
        return {VERSION: torch.zeros((), dtype=torch.int64)}

    def look(self) -> None:
        """See who is there, and take in who is new."""
        self.lobby.refresh()
        known = {one.client for one in self.roster}
        for client in in_order([client for client in self.lobby.nodes if client not in known]):
            self._take_in(self.lobby.told[client])

    def _gather(self) -> None:
        end, told = time.monotonic() + self.deploy.wait, -1
        self.look()
        while len(self.present) + 1e-9 < (need := max(1, self.deploy.quorum * self.options.cohort)):
            if len(self.present) != told:
                told = len(self.present)
                self.tell(f"for {math.ceil(need - 1e-9)} clients in round {self.round + 1}; {_are_connected(told)}")
            if time.monotonic() > end:
                raise RoundError(
                    f"{len(self.present)} of {len(self.setup.clients)} clients are connected, too few for a round; "
                    f"waited {self.deploy.wait:g} seconds. The last checkpoint is intact: start nodes, then resume."
                )
            time.sleep(PAUSE)
            self.look()

    def _take_in(self, one: Told) -> None:
        """A client that came after the beginning: as a participant if the method has room, else as a newcomer."""
        common = next(other.model for other in self.roster if other.role == "participant")
        if self.algorithm.needs.same_model and one.model != common:
            self.lobby.refuse(one.client, OTHER_NETWORK)
            return
        try:
            state = self._room_for(one) if one.role == "participant" else None
            self._enlist([*self.roster, one if state is not None else one._replace(role="newcomer")])
        except Exception as error:  # whatever a stranger made of it; the others go on
            self.lobby.refuse(one.client, f"cannot be taken in ({type(error).__name__})")
            return
        if state is not None:
            self.state = state

    def _room_for(self, one: Told) -> Any:
        federation = self.known.federation([*self.roster, one])
        setup = replace(self.setup, clients=federation.participants, models=federation.models)
        try:
            fresh = self.algorithm.init(setup)
        except NeedsError:
            return None
        if self.algorithm.needs.violations(setup, self.algorithm.name):
            return None
        before, after = len(self.setup.clients), len(setup.clients)
        state = grown(self.state._asdict(), fresh._asdict(), before, after)
        return None if state is None else self.algorithm.state(**state)

    def mark(self) -> Mark:
        """As ``Trainer.mark``, with the clients of this moment."""
        self._marked = list(self.roster)
        return super().mark()

    def go_back(self, mark: Mark) -> None:
        """As ``Trainer.go_back``, to the last mark: who came since then is to come again."""
        super().go_back(mark)
        self._enlist(self._marked)

    def _enlist(self, roster: Sequence[Told]) -> None:
        self.roster = list(roster)
        self.federation = self.known.federation(self.roster)
        self.engine.enlist(self.federation)
        self.setup = replace(self.setup, clients=self.federation.participants, models=self.federation.models)
        clients = len(self.setup.clients)
        self.options = replace(self.options, clients=clients, cohort=self._asked(clients))

    def deliver(self) -> None:
        """Everybody who is connected gets what it is to use."""
        if self.present:
            self._deliver(self._personal(self.present))
        self.deliver_to_newcomers()

    def deliver_to_newcomers(self) -> None:
        """The newcomers that are connected are admitted, and get their models."""
        if self.algorithm.admit is None:
            return
        admitted = [self._admitted] if self._admitted else []
        done = {client for sent in admitted for client in sent.mine}
        rest = [client for client in self.newcomers if client not in done]
        for sent in [*admitted, self._admit_each(rest)] if rest else admitted:
            self._deliver(sent)

    def _deliver(self, sent: Sent) -> None:
        contents = {
            client: pack(
                {"run": self.lobby.run, "client": client, "from_version": int(self.engine.recall(client)[VERSION])},
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
    api.train(deployment, directory, shown)
    if deployment.deploy.deliver:
        deployment.deliver()
        _note_delivery(directory, deployment)


def _note_delivery(directory: RunDirectory, deployment: Deployment) -> None:
    found = {"delivered": deployment.delivered, "failed": deployment.undelivered}
    write_file(directory.path / "delivery.json", to_json(found, indent=2))


def _note(directory: RunDirectory, deployment: Deployment) -> None:
    found = environment(deployment.options.seed, deployment.options.device)
    models = [str(model.spec) for model in deployment.setup.architectures.values()]
    directory.write_environment({**found, "clients": list(deployment.setup.clients), "models": models})
