# SPDX-License-Identifier: Apache-2.0
"""Every method behind Flower's records gives the bits of the sequential engine, and sends what it says it sends."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from conftest import few, models_for, play, server_data_like, small_federation
from deploy.nearby import deployed
from fedloom import algorithms
from fedloom.clients.federation import Federation
from fedloom.core.contract import Cohort
from fedloom.core.trees import flatten
from fedloom.core.wire import decode
from fedloom.deploy.codec import facts_of, pack
from fedloom.deploy.engine import VERSION
from fedloom.deploy.store import Store
from fedloom.programs.evaluation import evaluate

METHODS = algorithms.names()
SMALL = ("lenet:kernels=2", "mlp:hidden=5")
NETWORKS = [
    pytest.param(SMALL, id="plain"),
    pytest.param(("testnets:Normed",), id="batchnorm", marks=pytest.mark.slow),
]


def options(method: str) -> dict[str, Any]:
    """What a method needs where its server knows only sizes, and where two rounds are to see all of it."""
    return {**few(algorithms.get(method)), **({"global_model": "mlp:hidden=5"} if method == "mh_pfedhn_gd" else {})}


def alike(method: str, federation: Federation, folder: Path) -> dict[str, Any]:
    """The settings with which a server does what the one in ``play`` does: it has the same samples, and few steps."""
    if algorithms.get(method).needs.server_data == "none":
        return options(method)
    own = server_data_like(federation)
    np.savez(folder / "server.npz", x=own.x.float().numpy(), y=own.y.numpy())
    return {**options(method), "server_data": str(folder / "server.npz")}


def same(one: Any, other: Any) -> bool:
    a, b = flatten(one), flatten(other)
    return list(a) == list(b) and all(a[k].dtype == b[k].dtype and a[k].equal(b[k]) for k in a)


@pytest.mark.parametrize("models", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_the_network_gives_the_bits_of_sequential(method: str, models: tuple[str, ...], tmp_path: Path) -> None:
    algorithm = algorithms.get(method)
    federation = small_federation(models_for(algorithm, *models))
    played = play(algorithm, federation, rounds=2, **options(method))
    if algorithm.needs.violations(played.setup, algorithm.name):
        pytest.skip(f"{algorithm.name} refuses these models")
    ours = deployed(method, federation, tmp_path, rounds=2, **alike(method, federation, tmp_path))
    for _ in range(2):
        record = ours.train_round()
        assert record["dropped"] == []
    assert same(ours.server.state._asdict(), played.state._asdict())
    assert record["bytes"]["up"] == played.stats.bytes_up
    for client in federation.participants:
        there = Store(tmp_path / client).load("run", int(ours.now.memory[client][VERSION]))
        assert there is None or same(there, played.memory[client])
    session = played.session("evaluation after round 2")
    personal = lambda clients: algorithm.send(played.setup, played.state, clients)  # noqa: E731
    assert ours.evaluate("test") == evaluate(algorithm, personal, federation.participants, "test", session.ask)


@pytest.mark.parametrize("models", NETWORKS)
@pytest.mark.parametrize("method", [m for m in METHODS if algorithms.get(m).admit])
def test_newcomers_get_over_the_network_what_they_get_in_a_simulation(
    method: str, models: tuple[str, ...], tmp_path: Path
) -> None:
    algorithm = algorithms.get(method)
    federation = small_federation(models_for(algorithm, *models), unseen=2)
    short = {"admit_rounds": 2} if hasattr(algorithm.config, "admit_rounds") else {}
    played = play(algorithm, federation, rounds=1, **options(method), **short)
    if algorithm.needs.violations(played.setup, algorithm.name):
        pytest.skip(f"{algorithm.name} refuses these models")
    ours = deployed(method, federation, tmp_path, **alike(method, federation, tmp_path), **short)
    ours.train_round()
    session, setup = played.session("admission"), played.setup
    expected = algorithm.admit(setup, played.state, Cohort(1, federation.unseen), session.ask)
    sent, _ = ours.admission(federation.unseen, ours.now.memory)
    assert same({"s": sent.shared, "m": dict(sent.mine)}, {"s": expected.shared, "m": dict(expected.mine)})


@pytest.mark.parametrize("method", [m for m in METHODS if algorithms.get(m).settle])
def test_settling_over_the_network_gives_what_it_gives_in_a_simulation(method: str, tmp_path: Path) -> None:
    algorithm = algorithms.get(method)
    federation = small_federation(models_for(algorithm, "testnets:Normed"))
    played = play(algorithm, federation, rounds=1, **options(method))
    ours = deployed(method, federation, tmp_path, rounds=1, **options(method))
    ours.train_round()
    ours.settle()
    session = played.session("settling after round 1")
    state = algorithm.settle(played.setup, played.state, session.ask)
    assert ours.server.settled == 1 and same(ours.server.state._asdict(), state._asdict())
    for client in federation.participants:
        there = Store(tmp_path / client).load("run", int(ours.now.memory[client][VERSION]))
        assert there is None or same(there, session.memory[client])


WORDS = {
    "params": "parameters|body|loom|adapter|gate", "vector": "vector", "encoder": "encoder", "embedding": "embedding",
    "control": "control variate", "delta": "change", "num_samples": "number of samples", "loss": "loss",
    "body": "body", "descriptor": "descriptor", "control_delta": "control variate", "buffers": "running statistics",
    "cloud": "cloud model", "own_loss": "loss", "samples": "number of validation samples",
    "effective_steps": "number of steps",
    "prototypes": "prototypes", "counts": "counts", "known": "known|trained yet",
    "classes": "classes", "shares": "shares", "common": "common expert", "gate": "gate", "which": "which they are",
    "own": "its own", "slope": "slope", "gradient": "gradient",
}  # fmt: skip
"""How a method's head calls what its trees call so."""


def declared(method: str, way: str) -> str:
    text = inspect.getdoc(inspect.getmodule(algorithms.get(method).round)) or ""
    found = re.search(rf"^Sent {way}:(.*?)^(Sent|Kept)", text, re.M | re.S)
    assert found
    return " ".join(found[1].split())


@pytest.mark.parametrize("method", METHODS)
def test_nothing_crosses_that_the_method_does_not_declare(method: str, tmp_path: Path) -> None:
    algorithm = algorithms.get(method)
    federation = small_federation(["mlp:hidden=5" if algorithm.needs.no_batchnorm else "testnets:Normed"])
    ours = deployed(method, federation, tmp_path, **alike(method, federation, tmp_path))
    for _ in range(2):
        ours.train_round()
    letters = [letter for letter in ours.lobby.letters if letter[0] == "train"]
    assert letters
    for _, client, asked, reply in letters:
        down, up = dict(asked["trees"]), dict(reply["trees"])
        assert (
            set(asked) == set(reply) == {"facts", "trees"} and set(down) == {"shared", "mine"} and set(up) == {"reply"}
        )
        told = {"program", "run", "client", "stage", "ask"}
        assert set(asked["facts"]) == told | {"from_version", "to_version", "kept_versions"}
        assert set(reply["facts"]) == told - {"program"} | {"remembers"}
        for way, trees in (("down", down), ("up", up)):
            for name in [name for array in trees.values() for name in decode(array.data)]:
                assert re.search(WORDS[name], declared(method, way)), f"{method} sends {name} {way} and does not say so"
        crossing = b"".join(array.data for array in [*down.values(), *up.values()])
        assert Store(tmp_path / client).secret.encode() not in crossing
        assert federation.x[federation.roster[client].rows["train"][0]].numpy().tobytes() not in crossing
    hellos = [reply for kind, _, _, reply in ours.lobby.letters if kind == "query.hello"]
    told_of_model = "size" if algorithm.told == "size" else "model"
    assert all(
        set(reply["facts"]) == {"client", "mark", "role", "splits", "samples", told_of_model} for reply in hellos
    )
    assert not any(dict(reply["trees"]) for reply in hellos)
    if not algorithm.needs.no_batchnorm:
        check_that_more_brings_no_more(ours, federation.roster["0"].model)


def check_that_more_brings_no_more(ours: Any, network: Any) -> None:
    """Neither a whole network nor running statistics in a message bring back a head or statistics of the client's."""
    for _, client, asked, reply in [one for one in ours.lobby.letters if one[:2] == ("train", "0")]:
        forged: dict[str, Any] = {}
        for way in ("shared", "mine"):
            sent = decode(asked["trees"][way].data)
            params = {**network.init(5), **sent.get("params", {})}
            forged[way] = {"buffers": network.fresh_buffers(), **sent, "params": params}
        told = ours.lobby._answer("train", client, pack(facts_of(asked), **forged))
        if "error" not in facts_of(told):
            got, honest = (set(flatten(decode(one["trees"]["reply"].data))) for one in (told, reply))
            assert got == honest, facts_of(asked)["program"]


@pytest.mark.parametrize("method", ["fedper", "pfedhn_pc"])
def test_a_head_that_a_client_keeps_never_crosses(method: str, tmp_path: Path) -> None:
    federation = small_federation(["mlp:hidden=5"])
    ours = deployed(method, federation, tmp_path)
    ours.train_round()
    ours.evaluate("test")
    head = federation.roster["0"].model.head
    crossed = {
        path.rpartition("/")[2]
        for _, _, *contents in ours.lobby.letters
        for content in contents
        for array in dict(content["trees"]).values()
        for path in flatten(decode(array.data))
    }
    assert head and not crossed & head
