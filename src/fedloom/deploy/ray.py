# SPDX-License-Identifier: Apache-2.0
"""``--engine flower-sim``: a simulated federation whose clients run on Ray, on this machine or a cluster, by Flower.

The app is the one of a deployment, except that a client's data and model are those that a simulation would give it.
It is written into a temporary folder, with the options of the run in its client file, and submitted to a link on this
machine, which starts Flower's simulation. Each process of Ray deals the federation anew, once, from these options and
the seed; node i is the i-th client of the roster. The nodes' folders, with their memories, lie in the temporary folder
and are removed in the end. Models are not delivered: the run directory has what is needed to make them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom import algorithms
from fedloom.clients.federation import Federation
from fedloom.clients.partition import Partition
from fedloom.core.config import build
from fedloom.core.errors import ConfigError
from fedloom.core.task import TASKS
from fedloom.data.arrays import Arrays
from fedloom.data.registry import load
from fedloom.deploy.client import answer
from fedloom.deploy.local import LINK, App, LocalFederation, follow
from fedloom.deploy.options import SHARED, check_name, code_in, read
from fedloom.deploy.processes import wait_for_port
from fedloom.deploy.template import write_app
from fedloom.deploy.trial import Trial
from fedloom.progress import Display
from fedloom.runs.directory import RunDirectory
from fedloom.runs.files import file_name
from fedloom.runs.options import RunOptions
from fedloom.training.server_data import share_is_refused
from fedloom.training.simulation import federation_of, fitted, resolve, split

CLIENT = '''\
"""Clients of a simulation."""

from fedloom.deploy.ray import simulated_app

app = simulated_app({options!r}, {folder!r})
'''


def run_on_ray(method: str, options: RunOptions, config: Any, out: Path, shown: Display) -> RunDirectory:
    """Train ``method`` with clients on Ray; the run directory is ``out``.

    The partition is made here once, to know who the clients are, and again in every process that runs some.
    """
    share_is_refused(options.server_data)
    arrays = load(options.dataset, options.data_root, options.roles)
    options = resolve(options, arrays)
    parts = split(options, arrays)
    for one in parts.clients:
        check_name(one.id)
    folder = Path(mkdtemp(prefix="fedloom-ray-"))
    try:
        app = _app(folder / "app", method, options, config, arrays, parts)
        given = {name: value for name, value in asdict(options).items() if name != "engine" and value is not None}
        (app.folder / "federation" / "client.py").write_text(
            CLIENT.format(options=given, folder=str(folder / "nodes")), encoding="utf-8"
        )
        _run(app, out, len(parts.clients), len(parts.participants), shown)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return RunDirectory.open(out)


def _app(folder: Path, method: str, options: RunOptions, config: Any, arrays: Arrays, parts: Partition) -> App:
    """The app of the federation, with the settings that follow from its data."""
    given = fitted(arrays, parts)
    if given and (options.client_shift or options.unseen_shift):
        raise ConfigError("--engine flower-sim does not shift images of bytes. Give them as numbers, or leave it out.")
    if any("," in name for name in arrays.class_names):
        raise ConfigError("A class has a comma in its name, which separates names in an app of Flower's; rename it.")
    federation = federation_of(options, arrays, parts, given)
    model = next(iter(federation.models.values()))
    about = {
        "input_shape": "x".join(map(str, federation.x.shape[1:])),
        "num_outputs": model.num_outputs,
        "task": next((name for name, task in TASKS.items() if task is federation.task), options.task),
        "classes": ",".join(arrays.class_names),
        "preparation": given.form.as_text() if given else "",
        "vocabulary": model.tokens.vocabulary if model.tokens else 0,
        "networks": ",".join(name for name in _names(options) if ":" in name),
        "quorum": 0.0,
        "max_weight": options.max_weight,
        "deliver": False,
    }
    shared = {name: getattr(options, name) for name in SHARED if getattr(options, name) is not None}
    for name in ("data_root", "server_data"):  # the server is started in another folder
        if isinstance(shared.get(name), str) and Path(shared[name]).expanduser().exists():
            shared[name] = str(Path(shared[name]).expanduser().absolute())
    write_app(folder, method, {**shared, **asdict(config), **about}, {})
    table = {"method": method, **{n.replace("_", "-"): v for n, v in {**shared, **asdict(config), **about}.items()}}
    return App(folder, read(table), Trial())


def _names(options: RunOptions) -> list[str]:
    """The networks that ``--model`` names, without the options that they are given."""
    return [name.split("=")[0].rpartition(":")[0] if "=" in name else name for name in options.model.split(",")]


def _run(app: App, out: Path, nodes: int, participants: int, shown: Display) -> None:
    """Start a link with Flower's simulation behind it, submit the app, and follow the run to its end."""
    federation = LocalFederation(app, out=out.absolute())
    with federation.processes as processes:
        note = f'[superlink.{LINK}]\naddress = "127.0.0.1:{federation.port}"\ninsecure = true\n'
        (app.local / "flower" / "config.toml").write_text(note)
        command = ["flower-superlink", "--simulation", "--insecure", "--host", "127.0.0.1"]
        processes.start("link", [*command, "--port", str(federation.port), "--disable-runtime-dependency-installation"])
        wait_for_port(federation.port, processes, "link")
        changes = {"out": str(out.absolute()), "nodes": participants}
        federation.start_run(
            changes, extra=["--federation-config", f"num-supernodes={nodes} client-resources-num-cpus=1"]
        )
        follow(federation, shown)


def simulated_app(options: Mapping[str, Any], folder: str) -> ClientApp:
    """The app of the clients of a simulation: node i is the i-th of its roster."""
    app = ClientApp()

    def respond(message: Message, context: Context) -> Message:
        federation, x = _federation(tuple(sorted(options.items())))
        one = list(federation.roster.values())[int(context.node_config["partition-id"])]
        role = "newcomer" if one.unseen else "participant"
        own = f"{folder}/{file_name(one.id)}"
        node = {"client": one.id, "folder": own, "role": role, "device": str(federation.device), "min-batch": 1}
        settings = read(context.run_config)
        node |= code_in(settings)
        blind = one.unseen and not algorithms.get(settings.method).needs_labels(settings.config)

        def data(node: Any) -> Any:
            parts = {split: (x[rows], federation.y[rows]) for split, rows in one.rows.items()}
            return {**parts, "train": (parts["train"][0], None)} if blind else parts

        about: Any = SimpleNamespace(run_config=context.run_config, node_config=node)
        kind, spec = message.metadata.message_type, str(one.model.spec)
        return Message(answer(kind, message.content, about, data, lambda node: spec), reply_to=message)

    app.query("hello")(respond)
    app.query("deploy")(respond)
    app.train()(respond)
    return app


@cache  # workers of Ray live on
def _federation(items: tuple[tuple[str, Any], ...]) -> tuple[Federation, Any]:
    """The simulation, and the samples as its nodes have them: raw ones are prepared as the server says."""
    options = build(RunOptions, dict(items))
    arrays = load(options.dataset, options.data_root, options.roles)
    parts = split(options, arrays)
    given = fitted(arrays, parts)
    federation = federation_of(options, arrays, parts, given)
    if given is None or arrays.preparation is None:
        return federation, federation.x
    return federation, arrays.preparation.translated(arrays.x, given)
