# SPDX-License-Identifier: Apache-2.0
"""The client's side: what it checks, what it tells, what it keeps."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from conftest import small_federation
from engines.flower.nearby import deployed, table_of
from fedloom.core.errors import DataError, RoundError, RunError
from fedloom.deploy.client import answer, own_config
from fedloom.deploy.options import read
from fedloom.deploy.store import Refusal, Store, write_private
from fedloom.engines.flower.codec import facts_of, pack

X, Y = np.zeros((4, 1, 6, 6)), np.array([0, 1, 2, 0])


def hello(tmp_path: Path, data: Any, model: Any = "mlp:hidden=5", **node: Any) -> dict[str, Any]:
    table = table_of("fedavg", small_federation())
    context: Any = SimpleNamespace(run_config=table, node_config={"folder": str(tmp_path / "node"), **node})
    load = data if callable(data) else lambda node: data
    return facts_of(answer("query.hello", pack({"run": "r"}), context, load, lambda node: model))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ((X[:, :, :5], Y), "has train samples of shape (1, 5, 6); this federation's have (1, 6, 6)."),
        ((X + np.nan, Y), "has train samples with NaN or infinite values."),
        ((X, Y[:3]), "has another number of train labels than of train samples."),
        ((X, Y + 1), "has train labels outside of 0 to 2."),
        ({"train": (X[:0], Y[:0])}, "has no samples: load_data gave none."),
    ],
)
def test_data_that_do_not_fit_are_refused_in_a_sentence(data: Any, reason: str, tmp_path: Path) -> None:
    assert hello(tmp_path, data) == {"error": reason}


def test_an_error_in_a_users_function_says_nothing_of_the_data(tmp_path: Path, capsys: Any) -> None:
    def load(node: Any) -> Any:
        raise KeyError("patient Smith")

    assert hello(tmp_path, load) == {"error": "failed with KeyError in query.hello; its own log says why"}
    assert "patient Smith" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [ValueError, DataError])
def test_an_error_in_training_says_its_type_and_its_stage_and_nothing_of_the_data(
    kind: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    ours = deployed("fedavg", small_federation(["mlp:hidden=5"]), tmp_path)

    def leak(self: Any, params: Any, buffers: Any, x: torch.Tensor, *_: Any) -> Any:
        raise kind(f"bad sample {x.flatten()[:3].tolist()}")

    monkeypatch.setattr("fedloom.models.model.Model.train", leak)
    monkeypatch.setattr("fedloom.deploy.server.PAUSE", 0.0)
    with pytest.raises(RoundError) as error:
        ours.train_round()
    reasons = {d.reason for d in ours.engine.books.dropped}
    assert reasons == {f"raised {kind.__name__} in step; its own log says why"} and "bad sample" not in str(error.value)
    assert "bad sample [" in capsys.readouterr().err


def test_a_readers_error_is_not_told_even_if_it_is_fedlooms(tmp_path: Path, capsys: Any) -> None:
    def load(node: Any) -> Any:
        raise DataError("patient Smith")

    assert hello(tmp_path, load) == {"error": "failed with DataError in query.hello; its own log says why"}
    assert "patient Smith" in capsys.readouterr().err


def test_a_folder_is_one_clients(tmp_path: Path) -> None:
    assert hello(tmp_path, (X, Y), client="a")["client"] == "a"
    refusal = {"error": "has a folder that belongs to another client; give each node a folder of its own."}
    assert hello(tmp_path, (X, Y), client="b") == refusal
    assert hello(tmp_path, (X, Y), client="a")["client"] == "a"


def test_what_is_private_is_so_from_the_first_byte(tmp_path: Path, monkeypatch: Any) -> None:
    modes: list[int] = []
    real = os.fsync

    def seen(descriptor: int) -> None:
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        real(descriptor)

    monkeypatch.setattr("os.fsync", seen)
    assert write_private(tmp_path / "secret", b"one") and not write_private(tmp_path / "secret", b"two")
    assert (tmp_path / "secret").read_bytes() == b"one" and set(modes) == {0o600}
    assert [file.name for file in tmp_path.iterdir()] == ["secret"]


def test_a_client_tells_its_name_its_network_and_its_splits(tmp_path: Path) -> None:
    told = hello(tmp_path, {"train": (X, Y), "test": (X, Y)}, client="clinic")
    assert told["client"] == "clinic" and told["splits"] == "train test" and told["role"] == "participant"
    assert told["model"] == '["mlp", [["hidden", 5]]]'
    unnamed = hello(tmp_path / "other", (X, None), role="newcomer")
    assert unnamed["client"].startswith("client-") and unnamed["role"] == "newcomer"
    assert hello(tmp_path / "other", (X, None))["client"] == unnamed["client"]  # it stays


def test_a_node_can_have_options_of_its_own_but_not_other_privacy() -> None:
    table = table_of("it_pfl_hn", small_federation())
    plain, private = (read({**table, "descriptor-epsilon": e}).config for e in (0.0, 1.0))
    assert own_config(private, {"descriptor-epsilon": 0.5, "client": "a"}).descriptor_epsilon == 0.5
    assert own_config(plain, {"local-lr": 0.5}).local_lr == 0.5 and own_config(plain, {}) == plain
    with pytest.raises(Refusal, match="made for one of the two"):
        own_config(plain, {"descriptor-epsilon": 0.5})


@pytest.mark.parametrize("option", [{"preset": "code"}, {"local-epochs": 5}, {"batch-size": 1, "local-steps": 3}])
def test_what_is_the_same_for_all_is_not_quietly_left_out_of_a_nodes_options(option: dict[str, Any]) -> None:
    config = read(table_of("mh_pfedhn", small_federation())).config
    with pytest.raises(Refusal, match=f"was given {', '.join(option)}, which is the same for the whole federation"):
        own_config(config, option)


def test_a_store_keeps_what_it_is_told_to_keep(tmp_path: Path) -> None:
    store = Store(tmp_path / "node")
    assert store.load("run", 0) is None
    for version in (1, 2, 3, 4):
        store.save("run", version, {"a": torch.tensor(float(version))}, {1, version - 1})
    assert sorted(file.name for file in (tmp_path / "node" / "run").iterdir()) == [
        f"memory-{version}.safetensors" for version in (1, 3, 4)
    ]
    again = Store(tmp_path / "node")
    found = again.load("run", 3)
    assert found is not None and float(found["a"]) == 3
    assert (again.secret, again.name, again.mark("run")) == (store.secret, store.name, store.mark("run"))
    assert again.mark("other") != again.mark("run") and store.secret not in again.mark("run")
    assert (tmp_path / "node" / "secret").stat().st_mode & 0o77 == 0
    with pytest.raises(RunError, match="has no version 2"):
        store.load("run", 2)
    for name in ("../escape", "a/b", "", "x" * 65):
        with pytest.raises(RunError, match="which is no name of a folder"):
            store.of_run(name)


def test_a_write_that_is_cut_short_leaves_the_version_before(tmp_path: Path, monkeypatch: Any) -> None:
    store = Store(tmp_path / "node")
    store.save("run", 1, {"a": torch.ones(1)}, set())

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", cut)
    monkeypatch.setattr(Path, "replace", cut)
    with pytest.raises(KeyboardInterrupt):
        store.save("run", 2, {"a": torch.zeros(1)}, {1})
    monkeypatch.undo()
    found = Store(tmp_path / "node").load("run", 1)
    assert found is not None and float(found["a"]) == 1
