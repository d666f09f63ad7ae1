# SPDX-License-Identifier: Apache-2.0
"""A whole federation on this machine: link, nodes and run, as separate processes on loopback.

Everything of it lies in the app's folder, and nothing of it is sent with the app::

    APP/local/
      roster.json       who takes part, for ``deploy resume``
      run/              the run directory, as on a server
      nodes/NAME/       what a client has on its machine: data.npz, secret, memory, model
      flower/           Flower's own: where the link is, its database
      logs/             one log for each process

One process holds a trial at a time (``alone``); it first ends whatever an earlier one left behind. Stopping is the
context managers' work: however a trial ends, its processes end with it.
"""

from __future__ import annotations

import json
import shutil
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fedloom import algorithms
from fedloom.core.config import build
from fedloom.core.errors import ConfigError, NeedsError, RunError
from fedloom.deploy.options import Settings, code_in, in_toml, read
from fedloom.deploy.processes import Processes, free_port, wait_for_port
from fedloom.deploy.store import write_private
from fedloom.deploy.trial import Trial, deal, network
from fedloom.progress import WAITS, Display, Headline
from fedloom.runs.directory import CONFIG, RunDirectory
from fedloom.runs.files import file_name, read_file, to_json, write_file
from fedloom.runs.lock import locked
from fedloom.training.config import algorithm_of
from fedloom.training.machine import task_named

LINK = "loopback"
"""The link's name in Flower's config."""


class App(NamedTuple):
    """An app's folder, and what its pyproject says."""

    folder: Path
    settings: Settings
    trial: Trial

    @property
    def local(self) -> Path:
        """Where everything of a trial lies; no part of the app."""
        return self.folder / "local"

    @property
    def out(self) -> Path:
        """The run directory of a trial."""
        return self.local / "run"


def app_in(folder: Path) -> App:
    """The app in a folder."""
    file = folder / "pyproject.toml"
    try:
        table = tomllib.loads(read_file(file).decode())
        config, trial = table["tool"]["flwr"]["app"]["config"], table["tool"].get("fedloom", {})
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{file} is not that of a fedloom app; make one with `fedloom deploy init`.") from error
    return App(folder.absolute(), read(config), build(Trial, trial))


class LocalFederation:
    """Link and nodes of an app on loopback. Enter it to start them; leaving it stops whatever runs."""

    def __init__(self, app: App, keys: Path | None = None, out: Path | None = None) -> None:
        self.app, self.keys, self.out = app, keys, out or app.out
        self.processes = Processes(app.local / "logs", app.local / "flower")
        self.port = self.entry = free_port()
        """Where the link listens; where nodes find it, which is elsewhere with a proxy in between."""
        self._database = app.local / "flower" / "link.db"
        self._registered = False

    def start_link(self) -> None:
        """The link, and Flower's note of where it is. With keys, it speaks TLS and knows its nodes.

        Started again, it knows them from its database, and nodes that still run go on with it.
        """
        keys, way = self.keys, ["--insecure"]
        trust = "insecure = true"
        if keys:
            trust = f"root-certificates = {in_toml(str(keys / 'ca.pem'))}"
            way = ["--ssl-certfile", f"{keys}/server.pem", "--ssl-keyfile", f"{keys}/server.key"]
            way += ["--ssl-ca-certfile", f"{keys}/ca.pem", "--enable-supernode-auth"]
        note = f'[superlink.{LINK}]\naddress = "127.0.0.1:{self.port}"\n{trust}\n'
        (self.app.local / "flower" / "config.toml").write_text(note, encoding="utf-8")
        if not self._registered:  # a link of an earlier trial would take its nodes for running
            for left in self._database.parent.glob(f"{self._database.name}*"):
                left.unlink()
            write_private(self._database, b"")
        command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port), *way]
        command += ["--database", str(self._database)]
        self.processes.start("link", [*command, "--disable-runtime-dependency-installation"])
        wait_for_port(self.port, self.processes, "link")
        for file in sorted((keys / "clients").glob("*.pub")) if keys and not self._registered else ():
            self.processes.call(["flwr", "supernode", "register", str(file), LINK])
        self._registered = True

    def start_node(self, client: str, config: Mapping[str, Any]) -> None:
        """A node, with its own folder."""
        folder = self.app.local / "nodes" / file_name(client)
        told = {"client": client, "folder": str(folder), "data": str(folder / "data.npz"), **config}
        told |= code_in(self.app.settings)  # who tries an app here means what it names
        words = " ".join(f"{name}={in_toml(value)}" for name, value in told.items())
        way = ["--insecure"]
        if self.keys:
            way = ["--root-certificates", f"{self.keys}/ca.pem"]
            way += ["--auth-supernode-private-key", str(self.keys / "nodes" / file_name(client))]
        command = ["flower-supernode", *way, "--superlink", f"127.0.0.1:{self.entry}", "--host", "127.0.0.1"]
        self.processes.start(f"node-{client}", [*command, "--port", str(free_port()), "--node-config", words])

    def start_run(self, changes: Mapping[str, Any], folder: Path | None = None, extra: Sequence[str] = ()) -> None:
        """Submit the app, or the one in another folder; the process ends when the run does."""
        keys = {"node-keys": f"{self.keys}/clients"} if self.keys else {}
        words = " ".join(f"{key}={in_toml(value)}" for key, value in {**keys, **changes}.items())
        command = ["flwr", "run", str(folder or self.app.folder), LINK, "--run-config", words, "--stream"]
        self.processes.start("run", [*command, *extra])


class TrialRoster(NamedTuple):
    """Who takes part in a trial, the participants first. Kept in a file, so that a trial goes on as it was begun."""

    clients: list[str]
    nodes: int
    tls: bool

    @staticmethod
    def file(app: App) -> Path:
        """Where it is kept."""
        return app.local / "roster.json"

    @classmethod
    def read(cls, app: App) -> TrialRoster:
        """As the trial was begun."""
        file = cls.file(app)
        try:
            return cls(**json.loads(read_file(file)))
        except (OSError, ValueError, TypeError) as error:
            raise RunError(
                f"{file} is missing or damaged, and it says who takes part; remove {app.local}, "
                "then begin again with `fedloom deploy local`."
            ) from error

    def keys(self, app: App) -> Path | None:
        """The keys beside the app, if this trial has any: one for every node."""
        if not self.tls:
            return None
        keys = app.folder / "keys"
        for client in self.clients:
            if not (keys / "nodes" / file_name(client)).is_file():
                raise RunError(f"{keys} holds no key for node {client}; make keys for all: `fedloom deploy keys`.")
        return keys


@contextmanager
def alone(app: App) -> Iterator[None]:
    """Hold the app's trial. Whatever runs of it then was left behind by a process that was killed, and is ended."""
    app.local.mkdir(parents=True, exist_ok=True)
    with locked(app.local):
        LocalFederation(app).processes.stop()
        yield


@contextmanager
def running(app: App, roster: TrialRoster) -> Iterator[LocalFederation]:
    """Link and nodes, with the data in the nodes' folders."""
    federation, told = LocalFederation(app, roster.keys(app)), {}
    for number, client in enumerate(roster.clients):
        model = {"model": network(app.trial, number, app.settings.deploy.shape, app.settings.tokens)}
        takes_part = number < roster.nodes
        more = _identity(app.settings, federation.keys, client) if takes_part else {"role": "newcomer"}
        told[client] = model | more
    with federation.processes:
        federation.start_link()
        for client, config in told.items():
            federation.start_node(client, config)
        yield federation


def _identity(settings: Settings, keys: Path | None, client: str) -> dict[str, str]:
    """What a node signs by, where sums are signed."""
    if not (settings.sums and settings.sums.signed):
        return {}
    if keys is None:
        raise ConfigError(
            "secure-aggregation is signed, and nodes have no keys without --tls; make some with `fedloom deploy keys`, "
            "then give --tls, or set secure-aggregation to unsigned."
        )
    return {"identity": str(keys / "nodes" / file_name(client)), "peers": str(keys / "clients")}


@contextmanager
def started(app: App, nodes: int, newcomers: int = 0, *, tls: bool = False) -> Iterator[LocalFederation]:
    """Link and nodes with the trial's data, running."""
    with alone(app):
        files = deal(app.trial, nodes, newcomers, app.settings.run.seed, app.local / "nodes")
        roster = TrialRoster(list(files), nodes, tls)
        write_file(TrialRoster.file(app), to_json(roster._asdict()))
        with running(app, roster) as federation:
            yield federation


def local(app: App, nodes: int, newcomers: int, shown: Display, *, tls: bool = False) -> RunDirectory:
    """Run an app with so many nodes from beginning to end, and show its progress; ``tls``: with the keys beside it."""
    if app.out.exists():
        raise RunError(f"{app.out} holds a run; go on with `fedloom deploy resume`, or remove it to begin again.")
    if newcomers:
        _check_newcomers(app.settings)
    with started(app, nodes, newcomers, tls=tls) as federation:
        federation.start_run({"out": str(app.out), "nodes": nodes})
        follow(federation, shown)
    return RunDirectory.open(app.out)


def _check_newcomers(settings: Settings) -> None:
    """Refuse newcomers whom the method cannot serve without labels, which a trial deals them none."""
    algorithm = algorithm_of(settings.method, settings.run)
    if algorithm.admit is None:
        raise NeedsError(
            f"{algorithm.name} has no model for clients that took no part; leave --newcomers out, or choose a method "
            "that admits newcomers: `fedloom methods`."
        )
    if algorithm.needs_labels(settings.config):
        raise NeedsError(
            f"{algorithm.name} admits newcomers by training on their labelled samples, and --newcomers deals samples "
            "without labels; leave it out, or choose a method that needs none: `fedloom methods`."
        )


def resume(app: App, shown: Display) -> RunDirectory:
    """Go on with a trial from its last round, with the nodes and the data that it was begun with.

    One that was stopped before its first checkpoint begins again, with those nodes and data.
    """
    if not app.local.exists():
        raise RunError(f"{app.folder} holds no trial yet; begin one with `fedloom deploy local {app.folder}`.")
    roster = TrialRoster.read(app)
    with alone(app):
        begun = _checkpointed(app.out)
        with running(app, roster) as federation:
            federation.start_run({"out": str(app.out), "nodes": roster.nodes, "resume": begun})
            follow(federation, shown)
    return RunDirectory.open(app.out)


def _checkpointed(out: Path) -> bool:
    """Whether there is a run to go on with; what was begun without coming to a checkpoint is removed."""
    if not out.exists():
        return False
    if (out / CONFIG).is_file():
        directory = RunDirectory.open(out)
        with directory.lock():  # refuses what somebody else works on before anything is started
            if directory.checkpoints():
                return True
    shutil.rmtree(out)
    return False


def follow(federation: LocalFederation, shown: Display) -> None:
    """Show a run that another process writes, until it ends."""
    processes, path = federation.processes, federation.out
    with shown as screen:
        begun, told, waits = False, 0, 0
        while True:
            over = not processes.alive("run")
            processes.check("link")
            lines = [line.partition(WAITS)[2] for line in processes.said("run").split("\n")[:-1] if WAITS in line]
            for text in lines[waits:]:
                screen.wait(text)
            waits = len(lines)
            if (path / "environment.json").is_file():
                directory = RunDirectory.open(path)
                if not begun:
                    begun, told = True, _begin(directory, screen)
                for record in directory.records():
                    if record["round"] > told:
                        told = record["round"]
                        screen.update(record)
            if over:
                break
            time.sleep(0.5)
        summary = RunDirectory.open(path).summary() if (path / "config.yaml").is_file() else None
        if not (summary and summary["finished"]):
            raise RunError(_reason(federation))
        screen.end(RunDirectory.open(path))


def _begin(directory: RunDirectory, screen: Display) -> int:
    """Show the head of a run; the rounds that it has done already."""
    config, noted = directory.config, directory.environment() or {}
    done = directory.checkpoints()[-1] if directory.checkpoints() else 0
    task = task_named(config["task"] if config["task"] != "auto" else "classification")
    screen.begin(
        Headline(
            name=algorithms.get(config["method"]).name,
            dataset=config["dataset"],
            clients=config["clients"],
            cohort=int(config["cohort"]),
            unseen=0,
            models=tuple(noted.get("models", ())),
            engine=config["engine"],
            device=config["device"],
            engine_reason="clients are other machines",
            notes=(),
            metric=task.metric_name,
            round=done,
            rounds=config["rounds"],
        )
    )
    return done


def _reason(federation: LocalFederation) -> str:
    """Why a run did not finish, in its own words."""
    log, lines = federation.processes.log("run"), federation.processes.said("run").splitlines()
    told = [line.partition("fedloom: ")[2] for line in lines if "fedloom: " in line]
    return f"{told[-1]} The whole log: {log}." if told else f"The run did not finish; its log is {log}."
