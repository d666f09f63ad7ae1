# SPDX-License-Identifier: Apache-2.0
"""The server's half of a Flower app: the same rounds, records and checkpoints as in a simulation, over a network.

A run is entered in one of three ways, as the settings say; what goes on in it is ``deploy.deployment``:

    start     wait until ``nodes`` participants are connected; have them tell how raw samples are prepared; train; give
              everybody who is connected the model that it is to use
    resume    take clients, state and round from the last checkpoint; wait until so many are back; go on
    admit     take the checkpoint that newcomers are served from; give those that are connected their models
"""

from __future__ import annotations

import secrets
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedloom import algorithms
from fedloom.core.errors import ConfigError, DivergedError, FedloomError, RoundError, RunError
from fedloom.core.trees import ClientId
from fedloom.deploy.deployment import Deployment
from fedloom.deploy.keys import clients_by_key
from fedloom.deploy.known import check_of
from fedloom.deploy.lobby import Greeting, Lobby
from fedloom.deploy.options import Settings, read
from fedloom.deploy.roster import in_order
from fedloom.deploy.waiting import wait_for, wait_for_newcomers
from fedloom.progress import Display, display
from fedloom.runs.directory import CONFIG, RunDirectory
from fedloom.runs.environment import environment
from fedloom.training.account import Account
from fedloom.training.config import algorithm_of, flat_config
from fedloom.training.loop import save, train


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
    """A new run, with the clients that are there when enough are.

    The directory is made only then: a server that waited in vain leaves nothing behind. Its first checkpoint is that of
    round 0, since only a checkpoint says who the clients are.
    """
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

    def look() -> tuple[ClientId, ...]:
        deployment.look()
        return deployment.newcomers

    wait_for_newcomers(deployment.lobby, look, settings.deploy.wait, shown.wait)
    with closing(Account(deployment, directory)):
        deployment.deliver_to_newcomers()
    deployment.delivery.write(directory)
    if not deployment.delivery.delivered:
        reasons = "; ".join(f"{client} {reason}" for client, reason in deployment.delivery.undelivered.items())
        raise RoundError(f"No newcomer got a model: {reasons or 'the method admits none'}.")


def reopened(grid: Grid, settings: Settings, directory: RunDirectory, which: Any) -> Deployment:
    """The deployment of a checkpoint, with its clients, connected or not.

    Clients are told to keep the memories of all checkpoints that are there, not of this one alone: a run may go on from
    an earlier one.
    """
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


def _run(deployment: Deployment, directory: RunDirectory, shown: Display) -> None:
    """Train to the end, then deliver.

    Where no client can begin from the last checkpoint, and others began from the one before, the last is removed: its
    round looked sound, and whoever resumed from it would fail in the same way.
    """
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
        deployment.delivery.write(directory)


def _before_unsound(deployment: Deployment, directory: RunDirectory) -> int | None:
    """The checkpoint before a last one from which no round could begin, if there is one that was sound."""
    last, saved = deployment.server.round, directory.checkpoints()
    if deployment.proven < last and saved[-1:] == [last] and any(round <= deployment.proven for round in saved[:-1]):
        return max(round for round in saved if round < last)
    return None


def _note(directory: RunDirectory, deployment: Deployment) -> None:
    """Write down what the server runs on, who its clients are and which networks they have."""
    server = deployment.server
    found = environment(server.options.seed, server.options.device)
    models = [str(model.spec) for model in server.setup.architectures.values()]
    directory.write_environment({**found, "clients": list(server.setup.clients), "models": models})
