# SPDX-License-Identifier: Apache-2.0
"""MH-pFedHNGD's corrected teacher and mixture on machines of their own: the bits of a simulation, told and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from conftest import play, small_federation
from deploy.nearby import deployed
from fedloom import algorithms
from fedloom.core.contract import Cohort
from fedloom.core.trees import flatten
from fedloom.core.wire import decode
from fedloom.deploy.engine import VERSION
from fedloom.deploy.store import Store
from fedloom.programs.evaluation import evaluate

METHOD = "mh_pfedhn_gd"
SMALL = ("lenet:kernels=2", "mlp:hidden=5")
MIXED: dict[str, Any] = {
    "chunk": 100, "embed_dim": 4, "hidden": 6, "teacher": "corrected", "deploy": "mixture",
    "global_model": "mlp:hidden=5", "admit_rounds": 2,
}  # fmt: skip


def same(one: Any, other: Any) -> bool:
    a, b = flatten(one), flatten(other)
    return list(a) == list(b) and all(a[path].equal(b[path]) for path in a)


def test_rounds_evaluations_and_newcomers_have_the_bits_of_a_simulation(tmp_path: Path) -> None:
    algorithm, federation = algorithms.get(METHOD), small_federation(SMALL, unseen=1)
    played = play(algorithm, federation, rounds=2, **MIXED)
    ours = deployed(METHOD, federation, tmp_path, rounds=2, **MIXED)
    for _ in range(2):
        assert ours.train_round()["dropped"] == []
    assert same(ours.server.state._asdict(), played.state._asdict())
    for client in federation.participants:
        there = Store(tmp_path / client).load("run", int(ours.now.memory[client][VERSION]))
        assert there is not None and same(there, played.memory[client])
    session = played.session("evaluation after round 2")
    send = lambda clients: algorithm.send(played.setup, played.state, clients)  # noqa: E731
    assert ours.evaluate("test") == evaluate(algorithm, send, federation.participants, "test", session.ask)
    ask = played.session("admission").ask
    expected = algorithm.admit(played.setup, played.state, Cohort(2, federation.unseen), ask)
    sent, _ = ours.admission(federation.unseen, ours.now.memory)
    assert same({"s": sent.shared, "m": dict(sent.mine)}, {"s": expected.shared, "m": dict(expected.mine)})


def test_no_count_of_labels_leaves_a_client(tmp_path: Path) -> None:
    ours = deployed(METHOD, small_federation(SMALL), tmp_path, **MIXED)
    ours.train_round()
    up = {
        path.rpartition("/")[2]
        for kind, _, _, reply in ours.lobby.letters
        if kind == "train"
        for array in dict(reply["trees"]).values()
        for path in flatten(decode(array.data))
    }
    assert up == {"delta", "num_samples", "loss"}
