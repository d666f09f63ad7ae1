# SPDX-License-Identifier: Apache-2.0
"""Raw samples, from a table or bytes to a prediction: they are prepared by training data, the same way everywhere."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch

import fedloom
from fedloom import api
from fedloom.core.errors import DataError
from fedloom.data.own import from_arrays
from fedloom.data.preparation import Preparation
from fedloom.runs.directory import RunDirectory
from fedloom.serving.bundle import Bundle, make_bundle

TINY: dict[str, Any] = {"rounds": 2, "local_steps": 5, "model": "mlp:hidden=8", "progress": "quiet"}


def patients(rows: int = 120, seed: int = 0) -> dict[str, np.ndarray]:
    """Columns as text, some entries missing; ill follows from pressure and ward."""
    rng = np.random.default_rng(seed)
    pressure, ward = rng.normal(140, 20, rows), rng.choice(["east", "north"], rows)
    ill = np.where((pressure > 140) ^ (ward == "east"), "yes", "no")
    texts = np.array([f"{one:.1f}" for one in pressure])
    texts[::9], ward[5::11] = "", ""
    return {"pressure": texts, "ward": ward, "age": rng.integers(20, 80, rows).astype(str), "ill": ill,
            "client": rng.choice(list("abcd"), rows)}  # fmt: skip


def write_csv(path: Path, columns: dict[str, np.ndarray], order: list[str]) -> Path:
    lines = [",".join(order), *(",".join(row) for row in zip(*(columns[name] for name in order)))]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def table_run(tmp_path_factory: pytest.TempPathFactory) -> fedloom.Run:
    """A run on a table. Not to be changed."""
    folder = tmp_path_factory.mktemp("table")
    file = write_csv(folder / "patients.csv", patients(), ["age", "ward", "pressure", "client", "ill"])
    more = {"target": "ill", "unseen": 1, "dtype": "float64"}
    return fedloom.run("pfedhn", dataset=file, out=folder / "run", **TINY, **more)


def test_a_table_is_prepared_by_participants_training_data_alone(table_run: fedloom.Run) -> None:
    simulation = table_run.simulation
    rows = np.concatenate([client.train for client in simulation.partition.participants])
    ages = patients()["age"][rows].astype(float)
    (age, ward, _) = table_run.server.roster.preparation.columns
    assert (age.name, ward.categories) == ("age", ("east", "north"))
    np.testing.assert_allclose([age.mean, age.scale], [ages.mean(), ages.std()])
    x = simulation.federation.x[rows].numpy()
    assert x.shape[1:] == table_run.server.roster.input_shape == (4,)
    np.testing.assert_allclose(x[:, 0].mean(), 0, atol=1e-6)
    np.testing.assert_allclose(x[:, 0].std(), 1, atol=1e-6)


def test_a_table_is_read_by_name(table_run: fedloom.Run, tmp_path: Path) -> None:
    columns = patients(30, seed=1)
    file = write_csv(tmp_path / "new.csv", columns, ["ward", "pressure", "age"])
    other = write_csv(tmp_path / "other.csv", columns, ["pressure", "ill", "age", "client", "ward"])
    run = api.load(table_run.path)
    outputs = run.predict("a" if "a" in run.clients else "b", file)
    client = "a" if "a" in run.clients else "b"
    assert torch.equal(outputs, run.predict(client, other))
    assert torch.equal(outputs, run.predict(client, columns))
    names = run.classify(client, file)
    assert set(names) <= {"yes", "no"} and len(names) == 30
    with pytest.raises(DataError, match="The table has no column 'age'"):
        run.predict(client, write_csv(tmp_path / "less.csv", columns, ["ward", "pressure"]))
    with pytest.raises(DataError, match="The table has the unknown column 'blood'"):
        run.predict(client, {**columns, "blood": columns["age"]})
    with pytest.raises(DataError, match=r"expected a table with the columns age, ward, pressure, by name"):
        run.predict(client, np.zeros((2, len(columns) - 2)))  # as many, but who knows in which order
    for given in (columns, other):  # with the labels that are in it
        assert run.admit(given).predict(file).shape == (30, 2)


@pytest.mark.parametrize("form", ["safetensors", "pt2", "onnx"])
def test_an_exported_model_prepares_its_samples(table_run: fedloom.Run, tmp_path: Path, form: str) -> None:
    if form == "onnx":
        pytest.importorskip("onnxruntime", reason="pip install 'fedloom[onnx]'")
    client, columns = table_run.clients[0], patients(40, seed=2)
    preparation = table_run.server.roster.preparation
    raw = torch.from_numpy(preparation.encoded(columns, "The table"))
    expected = table_run.predict(client, columns)
    path = table_run.export(client, tmp_path, form)
    with torch.no_grad():
        if form == "safetensors":
            with safetensors.safe_open(path, "pt") as file:
                kept = file.metadata()
            assert Preparation.of_text(kept["preparation"]) == preparation
            outputs = runpy.run_path(str(path.with_suffix(".py")))["model"](raw)
        elif form == "pt2":
            outputs = torch.export.load(path).module()(raw)
        else:
            import onnxruntime

            session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
            outputs = torch.from_numpy(session.run(None, {"x": raw.numpy()})[0])
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(table_run.model(client)(raw), expected)


def test_a_bundle_has_the_preparation(table_run: fedloom.Run, tmp_path: Path) -> None:
    bundle = Bundle(make_bundle(table_run, tmp_path / "b.fedloom"))
    assert bundle.frame.roster.preparation == table_run.server.roster.preparation
    assert bundle.newcomers.roster.preparation == table_run.server.roster.preparation
    assert bundle.card["samples"]["prepared"].startswith("raw: a table with the columns age, ward, pressure")


def test_a_damaged_preparation_is_refused(table_run: fedloom.Run) -> None:
    from fedloom.core.errors import RunError
    from fedloom.runs.roster import Roster

    content = RunDirectory.open(table_run.path).roster().as_json()
    for changed in ({"columns": []}, {"columns": content["preparation"]["columns"][:1]}, {"kind": "code"}):
        with pytest.raises(RunError, match="damaged"):
            Roster.of_json({**content, "preparation": {**content["preparation"], **changed}}, "roster.json")


def test_other_data_are_prepared_as_the_runs_were(table_run: fedloom.Run, tmp_path: Path) -> None:
    columns = patients(60, seed=3)
    columns["age"] = np.array([str(int(age) + 1000) for age in columns["age"]])
    file = write_csv(tmp_path / "later.csv", columns, ["ill", "ward", "age", "pressure", "client"])
    loaded = api.load(table_run.path, dataset=file, force=True)
    assert loaded.simulation.preparation == table_run.server.roster.preparation
    assert float(loaded.simulation.federation.x[:, 0].min()) > 10


def pictures(number: int = 160) -> tuple[np.ndarray, np.ndarray]:
    """Dark pictures of bytes, a class brighter than the other in one channel."""
    rng = np.random.default_rng(0)
    y = np.arange(number) % 2
    x = rng.integers(0, 40, (number, 8, 8, 3)).astype(np.uint8)
    x[y == 1, :, :, 0] += 10
    return x, y


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_images_of_bytes_are_centred_and_scaled(engine: str, tmp_path: Path) -> None:
    x, y = pictures()
    given = {**TINY, "model": "lenet:kernels=4", "clients": 2, "partition": "iid", "unseen": 1, "engine": engine}
    run = fedloom.run("fedavg", dataset=(x, y), out=tmp_path / "run", **given)
    rows = np.concatenate([client.train for client in run.simulation.partition.participants])
    inside = run.simulation.federation.x[torch.from_numpy(rows)]
    torch.testing.assert_close(inside.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(inside.std((0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)
    again = api.load(run.path)
    first = np.ascontiguousarray(np.moveaxis(x, -1, 1))
    outputs = again.predict("0", x)
    assert torch.equal(outputs, again.predict("0", first))
    assert torch.equal(outputs, again.predict("0", torch.from_numpy(first).float()))
    with pytest.raises(DataError, match="images of bytes, from 0 to 255, which it centres and scales itself"):
        again.predict("0", first / np.float32(255))
    path = again.export("0", tmp_path / "out")
    with torch.no_grad():
        loaded = runpy.run_path(str(path.with_suffix(".py")))["model"](torch.from_numpy(first))
    torch.testing.assert_close(loaded, outputs)
    assert again.admit(x[:10]).predict(x[:3]).shape == (3, 2)


def test_shifted_images_of_bytes_go_from_black_to_white(tmp_path: Path) -> None:
    x, y = pictures()
    given = {**TINY, "clients": 2, "partition": "iid", "unseen": 1, "unseen_shift": "brightness"}
    run = fedloom.run("fedavg", dataset=(x, y), out=tmp_path / "run", unseen_shift_strength=100.0, **given)
    held = next(client for client in run.simulation.partition.clients if client.unseen)
    _, white = run.server.roster.preparation.ends
    found = run.simulation.federation.x[torch.from_numpy(held.test)].amax((0, 2, 3))
    np.testing.assert_allclose(found, white, rtol=1e-5)


def test_bytes_in_a_federation_of_other_images_are_shares_of_white(tmp_path: Path) -> None:
    x, y = pictures()
    shares = np.moveaxis(x, -1, 1).astype(np.float32) / 255
    run = fedloom.run("fedavg", dataset=(shares, y), out=tmp_path / "run", clients=2, partition="iid", **TINY)
    assert run.server.roster.preparation is None
    assert torch.equal(run.predict("0", x), run.predict("0", shares))


def test_server_data_are_prepared_as_the_clients_are(tmp_path: Path) -> None:
    x, y = pictures()
    np.savez(tmp_path / "own.npz", x=x[:20])
    given = {**TINY, "clients": 2, "partition": "iid", "server_steps": 2}
    run = fedloom.run(
        "feddf", dataset=from_arrays(x, y), out=tmp_path / "run", server_data=str(tmp_path / "own.npz"), **given
    )
    own = run.simulation.server_samples
    expected = run.server.roster.preparation.apply(np.moveaxis(x[:20], -1, 1))
    np.testing.assert_allclose(own.x, expected)
    table = write_csv(tmp_path / "p.csv", patients(), ["age", "ward", "pressure", "client", "ill"])
    given = {**given, "clients": None, "partition": "auto", "target": "ill"}
    for share in (0.2, str(write_csv(tmp_path / "q.csv", patients(20), ["pressure", "age", "ward"]))):
        run = fedloom.run(
            "feddf", dataset=table, out=tmp_path / f"run-{type(share).__name__}", server_data=share, **given
        )
        assert run.simulation.server_samples.x.shape[1] == 4
