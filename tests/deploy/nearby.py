# SPDX-License-Identifier: Apache-2.0
"""A network without a network: clients answer in this process, but only what crosses Flower's records reaches them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import RecordDict

from fedloom.clients.federation import Federation
from fedloom.deploy.client import answer
from fedloom.deploy.deployment import Deployment
from fedloom.deploy.known import check_of
from fedloom.deploy.lobby import Lobby
from fedloom.deploy.options import read

MUTE = "mute"
"""In the place of an answer: none."""

Fault = Callable[[str, RecordDict, RecordDict], RecordDict | str]
"""(type, what was asked, the honest reply) -> what the client sends instead."""


class Nearby(Lobby):
    """Clients by name, each with its own folder and data; everything that crosses is written down."""

    def __init__(self, federation: Federation, table: Mapping[str, Any], folder: Path) -> None:
        super().__init__(SimpleNamespace(get_nodes=self._infos), "run", None, check_of(read(table)))
        self.federation, self.table, self.folder = federation, dict(table), folder
        self.clients: dict[int, str] = {}
        self.node_config: dict[str, dict[str, Any]] = {}
        self.faults: dict[str, Fault] = {}
        self.letters: list[tuple[str, str, RecordDict, RecordDict | str]] = []
        self.answers: dict[str, RecordDict | str] = {}
        for client in federation.roster:
            self.connect(client)

    def connect(self, client: str, node: int | None = None, **config: Any) -> None:
        """A client's node comes, under a new number."""
        self.clients[node or 100 + 7 * len(self.clients)] = client
        self.node_config[client] = {"client": client, "folder": str(self.folder / client), "min-batch": 1, **config}
        if self.federation.roster[client].unseen:
            self.node_config[client].setdefault("role", "newcomer")

    def disconnect(self, client: str) -> None:
        """Its node goes."""
        self.clients = {node: name for node, name in self.clients.items() if name != client}

    def push(self, kind: str, contents: Mapping[int, RecordDict], timeout: float) -> dict[str, int]:
        sent = {f"{kind} {node} {len(self.letters)}": node for node in contents}
        for message, node in sent.items():
            self.answers[message] = self._answer(kind, self.clients[node], contents[node])
        return sent

    def pull(self, messages: list[str]) -> dict[str, RecordDict | str]:
        there = {message: self.answers[message] for message in messages}
        return {message: answer for message, answer in there.items() if answer != MUTE}

    def _infos(self) -> list[Any]:
        return [SimpleNamespace(node_id=node, public_key=b"") for node in self.clients]

    def _answer(self, kind: str, client: str, content: RecordDict) -> RecordDict | str:
        context = SimpleNamespace(run_config=self.table, node_config=self.node_config[client])
        reply: RecordDict | str = answer(kind, content, context, self._data(client), self._model(client))
        if client in self.faults:
            reply = self.faults[client](kind, content, reply)
        self.letters.append((kind, client, content, reply))
        return reply

    def _data(self, client: str) -> Any:
        own, all_of = self.federation.roster[client], self.federation
        parts = {split: (all_of.x[rows], all_of.y[rows]) for split, rows in own.rows.items()}
        return lambda node: parts

    def _model(self, client: str) -> Any:
        return lambda node: str(self.federation.roster[client].model.spec)


def table_of(method: str, federation: Federation, **changes: Any) -> dict[str, Any]:
    """An app's table for a small federation."""
    shape = "x".join(map(str, federation.x.shape[1:]))
    local = {"local-epochs": 2, "batch-size": 4, "local-lr": 0.05, "clip": 0.5}
    outputs = next(iter(federation.models.values())).num_outputs
    about = {"input-shape": shape, "num-outputs": outputs, "task": "classification", "device": "cpu"}
    rest = {
        "dtype": "float64",
        "threads": 1,
        "cohort": 99,
        "networks": "testnets:Normed,testnets:Endless",
        "wait": 0.0,
        "quorum": 0.0,
    }
    own = {name.replace("_", "-"): value for name, value in changes.items()}
    return {"method": method, **local, **about, **rest, **own}


def deployed(
    method: str,
    federation: Federation,
    folder: Path,
    *,
    faults: Mapping[str, Fault] | None = None,
    nodes: Mapping[str, Mapping[str, Any]] | None = None,
    **changes: Any,
) -> Deployment:
    """A federation of clients nearby, before round 1; ``nodes`` are what some have in their own config."""
    table = table_of(method, federation, **changes)
    lobby = Nearby(federation, table, folder)
    lobby.faults = dict(faults or {})
    for client, own in (nodes or {}).items():
        lobby.node_config[client] |= own
    lobby.refresh()
    assert not lobby.refused
    return Deployment(read(table), lobby, [lobby.greetings[client] for client in federation.roster])
