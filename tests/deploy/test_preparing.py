# SPDX-License-Identifier: Apache-2.0
"""Raw samples on clients' own machines: the preparation is found by sums, the one that all data together would give."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from deploy.nearby import deployed, table_of
from fedloom.clients.federation import Client, Federation
from fedloom.core.errors import ConfigError
from fedloom.core.task import CLASSIFICATION
from fedloom.core.trees import Tree
from fedloom.data.preparation import Column, Preparation, images
from fedloom.data.registry import load
from fedloom.deploy import ray
from fedloom.deploy.bounds import sums_of
from fedloom.deploy.client import answer
from fedloom.deploy.codec import facts_of, pack
from fedloom.deploy.options import read
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.training.config import parse_options
from fedloom.training.simulation import split

GIVEN = Preparation("table", (Column("when"), Column("ward", categories=("east", "north")), Column("flag")), ("y",))
TABLE = {"preparation": GIVEN.as_text(), "input_shape": "4"}


def raw_table(rows: int = 90) -> np.ndarray:
    """Seconds since 1970, whose mean is a hundred million times their deviation; wards; a flag; some are missing."""
    rng = np.random.default_rng(0)
    raw = np.stack([1.7e9 + rng.normal(0, 9, rows), rng.integers(0, 2, rows), rng.integers(0, 2, rows)], 1)
    raw[rng.random(raw.shape) < 0.1] = np.nan
    return raw


def federation(x: np.ndarray, shape: tuple[int, ...], clients: int = 3, unseen: int = 0) -> Federation:
    model = Model(parse("mlp:hidden=4", shape, 2), dtype=torch.float64)
    parts = np.array_split(np.arange(len(x)), clients)
    roster = {
        f"c{i}": Client(f"c{i}", model, {"train": own[6:], "val": own[:3], "test": own[3:6]}, i >= clients - unseen)
        for i, own in enumerate(parts)
    }
    return Federation(torch.from_numpy(x), torch.arange(len(x)) % 2, CLASSIFICATION, roster)


def trained(given: Federation) -> np.ndarray:
    return np.concatenate([client.rows["train"] for client in given.roster.values() if not client.unseen])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_sums_give_what_all_training_data_together_would(dtype: str, tmp_path: Path) -> None:
    x = raw_table()
    ours = deployed("fedavg", federation(x, (4,)), tmp_path, dtype=dtype, **TABLE)
    ours.prepare()
    found, expected = ours.server.roster.preparation, GIVEN.fit(x[trained(ours.lobby.federation)])
    for here, there in zip(found.columns, expected.columns):
        assert (here.name, here.categories, here.fill) == (there.name, there.categories, there.fill)
        np.testing.assert_allclose([here.mean, here.scale], [there.mean, there.scale], rtol=1e-6)
    np.testing.assert_allclose(found.columns[0].mean, expected.columns[0].mean, atol=1e-4)
    record = ours.train_round()
    assert record["dropped"] == []
    (kept,) = {facts_of(asked).get("preparation") for kind, _, asked, _ in ours.lobby.letters[-3:]}
    assert Preparation.of_text(str(kept)) == found


def test_images_of_bytes_are_prepared_by_sums(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 200, (60, 2, 4, 4)).astype(np.uint8)
    given = images(2)
    ours = deployed(
        "fedavg", federation(x, (2, 4, 4)), tmp_path, preparation=given.as_text(), input_shape="2x4x4", dtype="float64"
    )
    ours.prepare()
    expected = given.fit(x[trained(ours.lobby.federation)])
    for here, there in zip(ours.server.roster.preparation.columns, expected.columns):
        np.testing.assert_allclose([here.mean, here.scale], [there.mean, there.scale])
    assert ours.train_round()["dropped"] == []
    ours.deliver()
    assert len(ours.delivery.delivered) == 3


def test_one_client_cannot_decide(tmp_path: Path) -> None:
    """It may move means by what is usual, and no scale to nothing; its counts count for its samples."""
    rng = np.random.default_rng(0)
    honest = {f"c{i}": told(rng.normal(0, 0.1, 2), rng.uniform(0.9, 1.1, 2)) for i in range(4)}
    weights = dict.fromkeys([*honest, "e"], 50)
    plain = sums_of(honest, weights, missing=True)
    evil = told([1e30, -1e30], [1e30, 1e30], number=1e12, categories=1e12)
    found = sums_of({**honest, "e": evil}, weights, missing=True)
    assert np.abs(found.mean - plain.mean).max() < 3
    assert np.sqrt(found.variance).max() < 10
    assert found.number.tolist() == [250, 250] and found.categories.tolist() == [90.0]
    assert sums_of({"e": told([1.0, 2.0], [-5.0, 4.0])}, weights, missing=True).variance.tolist() == [0, 4]


def test_nodes_of_a_simulation_have_raw_samples_too(tmp_path: Path) -> None:
    """With categories as training data have them, and the classes' names in the app."""
    rows = [f"{40 + row % 9},{'north' if row % 2 else 'south'},{'ny'[row % 2]}" for row in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["age,ward,ill", *rows]))
    given = {"dataset": str(tmp_path / "a.csv"), "target": "ill", "partition": "iid", "clients": 2, "model": "mlp"}
    federation, x = ray._federation(tuple(given.items()))
    options, config = parse_options("fedavg", given)
    arrays = load(options.dataset, None, options.roles)
    parts = split(options, arrays)
    settings = ray._app(tmp_path / "app", "fedavg", options, config, arrays, parts).settings
    assert settings.preparation is not None
    expected = settings.preparation.fitted(settings.preparation.sums(x[trained(federation)])).apply(x)
    np.testing.assert_allclose(expected, federation.x.numpy(), rtol=1e-5, atol=1e-6)
    assert settings.deploy.class_names == ("n", "y")


def told(mean: Any, variance: Any, number: float = 50, categories: float = 10) -> Tree:
    tensors = {"number": [number] * 2, "mean": mean, "rest": [0, 0], "variance": variance, "categories": [categories]}
    return {"sums": {name: torch.as_tensor(np.array(one, dtype=np.float64)) for name, one in tensors.items()}}


def asked(tmp_path: Path, content: dict[str, Any], data: Any = None, **node: Any) -> dict[str, Any]:
    table = table_of("fedavg", federation(raw_table(), (4,)), **TABLE)
    context: Any = SimpleNamespace(
        run_config=table, node_config={"folder": str(tmp_path / "node"), "client": "c0", "min-batch": 1, **node}
    )
    raw = raw_table(20)
    parts = data or {"train": (raw, np.arange(20) % 2)}
    kind = "train" if "program" in content else "query.hello"
    ticket = {"run": "r", "client": "c0", "stage": 1, "ask": 0, "from_version": 0, "to_version": 1, "kept_versions": ""}
    sent = pack({**ticket, **content}, shared={}, mine={})
    return facts_of(answer(kind, sent, context, lambda node: parts, lambda node: "mlp:hidden=4"))


def test_a_node_prepares_by_what_its_own_config_has_and_tells_nothing_but_sums(tmp_path: Path) -> None:
    fitted = GIVEN.fit(raw_table())
    assert asked(tmp_path, {"program": "train"})["error"] == "was not told how its samples are prepared."
    other = {**json.loads(fitted.as_text()), "targets": []}
    told = asked(tmp_path, {"program": "train", "preparation": json.dumps(other)})
    assert told["error"] == "was told to prepare its samples in another way than its own config has."
    told = asked(tmp_path, {"program": "train", "preparation": "{"})
    assert told["error"].startswith("failed with DataError")
    assert asked(tmp_path, {"program": "preparing"})["remembers"] is False
    told = asked(tmp_path, {"program": "preparing"}, role="newcomer")
    assert "does not allow a newcomer" in told["error"]
    told = asked(tmp_path, {"program": "preparing"}, **{"min-batch": 30, "batch-size": 30})
    assert "fewer train samples than its own min-batch" in told["error"]


def test_a_nodes_table_has_its_columns_in_any_order_and_its_labels(tmp_path: Path, caplog: Any) -> None:
    columns = {"flag": [0, 1], "y": [1, 0], "ward": ["north", None], "when": [1.7e9, 1.6e9]}
    assert asked(tmp_path, {}, {"train": (columns, None)})["samples"] == 2
    told = asked(tmp_path, {}, {"train": ({**columns, "when": ["Mr Smith", "x"]}, None)})
    assert told["error"] == "has train samples that are no such raw ones as the federation's; see its log."
    assert "Mr Smith" in caplog.text  # in its own log


def test_settings_of_raw_samples_must_fit() -> None:
    table = table_of("fedavg", federation(raw_table(), (4,)), **TABLE)
    assert read(table).preparation == GIVEN
    with pytest.raises(ConfigError, match="input-shape is 5, and preparation makes 4; give that"):
        read({**table, "input-shape": "5"})
