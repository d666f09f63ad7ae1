# SPDX-License-Identifier: Apache-2.0
"""Samples in Parquet: which files are some, what is refused, and that a run on them is that on the same arrays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.errors import DataError, NeedsError, RunError
from fedloom.core.trees import leaves
from fedloom.data import parquet
from fedloom.data.registry import load
from fedloom.data.tables import Roles
from fedloom.engines.ray import _of_file
from fedloom.runs.directory import RunDirectory

pyarrow = pytest.importorskip("pyarrow", reason="pip install 'fedloom[parquet]'")
from pyarrow.parquet import write_table, write_to_dataset  # noqa: E402

SMALL = {"partition": "group:client", "clients": 4, "unseen": 1, "cohort": 2, "rounds": 3, "local_steps": 2,
         "batch_size": 4, "model": "mlp:hidden=4", "progress": "quiet"}  # fmt: skip


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 6)).astype(np.float32)
    return {"x": x, "y": np.array(list("abca"))[np.arange(100) % 4], "client": np.repeat(list("pqrst"), 20)}


def columns(**given: Any) -> dict[str, Any]:
    return {**arrays(), "x": pyarrow.array(arrays()["x"].tolist(), pyarrow.list_(pyarrow.float32())), **given}


def written(path: Path, **given: Any) -> Path:
    table = pyarrow.table({name: column for name, column in columns(**given).items() if column is not None})
    write_table(table, path, row_group_size=30)
    return path


X = arrays()["x"]
FORMS: dict[str, Any] = {
    "lists": X.tolist(),
    "lists of one length": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(X.reshape(-1)), 6),
    "tensors": pyarrow.FixedShapeTensorArray.from_numpy_ndarray(X),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_column_of_lists_is_samples_that_stay_on_disk(form: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "same.npz", **arrays(), group_room=arrays()["y"])
    found = load(written(tmp_path / "data.parquet", x=FORMS[form], group_room=arrays()["y"]))
    read = load(tmp_path / "same.npz")
    assert isinstance(found.x, np.memmap) and found.x.filename == tmp_path / "data.parquet.x.npy"
    assert found.class_names == ("a", "b", "c") and set(found.groups) == {"client", "room"}
    assert found.digest() == read.digest()
    assert found.notes == (f"samples were unpacked into {found.x.filename}, which is read in their place",)


def test_images_are_lists_of_lists_of_lists(tmp_path: Path) -> None:
    images = np.arange(100 * 12, dtype=np.float32).reshape(100, 1, 3, 4)
    found = load(written(tmp_path / "data.parquet", x=images.tolist()))
    assert np.array_equal(found.x, images)


def test_files_of_a_folder_are_pieces_whose_client_a_folder_may_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load(written(tmp_path / "whole.parquet"))
    data = tmp_path / "seed=3" / "data"  # which is no column
    write_to_dataset(pyarrow.table(columns()), data, partition_cols=["client"])
    parts = load(data)
    assert parts.digest() == whole.digest() and parts.groups["client"].tolist() == arrays()["client"].tolist()
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    for i in range(2):
        write_table(pyarrow.table(columns()).slice(50 * i, 50), pieces / f"{i}.parquet")
    monkeypatch.chdir(pieces)
    assert load(".").digest() == whole.digest() and (tmp_path / "pieces.x.npy").is_file()


def test_a_run_is_that_on_the_same_arrays_and_can_be_resumed(tmp_path: Path) -> None:
    np.savez(tmp_path / "same.npz", **arrays())
    data = written(tmp_path / "data.parquet")
    fedloom.run("pfedhn", dataset=str(tmp_path / "same.npz"), out=tmp_path / "one", **SMALL)
    fedloom.run("pfedhn", dataset=str(data), out=tmp_path / "other", **{**SMALL, "rounds": 2})
    fedloom.resume(tmp_path / "other", rounds=3, progress="quiet")
    states = [dict(leaves(RunDirectory.open(tmp_path / name).load("last").state)) for name in ("one", "other")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    written(data, x=(X + 1).tolist())
    with pytest.raises(RunError, match="The data were changed since round 3"):
        fedloom.resume(tmp_path / "other", rounds=4, progress="quiet")


def test_samples_are_unpacked_once_and_again_when_they_have_changed(tmp_path: Path) -> None:
    path = written(tmp_path / "data.parquet")
    first = parquet.unpacked(path).stat().st_ino
    assert parquet.unpacked(path).stat().st_ino == first
    written(path, x=(X + 1).tolist())
    os.utime(path, (1, 1))  # older than what was unpacked
    assert np.array_equal(load(path).x, X + 1)


def test_another_machine_unpacks_its_own(tmp_path: Path) -> None:
    path = written(tmp_path / "data.parquet")
    file = parquet.unpacked(path)
    file.unlink()
    assert np.array_equal(_of_file(str(file), X.shape).numpy(), X)
    path.unlink()
    file.unlink()
    with pytest.raises(DataError, match="There is no file"):
        _of_file(str(file), X.shape)


def test_little_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 MB in pieces of 64 KiB."""
    x = np.random.default_rng(0).standard_normal((8000, 1000)).astype(np.float32)
    lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(x.reshape(-1)), 1000)
    write_table(pyarrow.table({"x": lists, "y": np.arange(8000) % 2}), tmp_path / "data.parquet", row_group_size=500)
    del lists
    sizes = []
    original = parquet._nested
    monkeypatch.setattr(parquet, "PIECE", 1 << 16)
    monkeypatch.setattr(
        parquet, "_nested", lambda *given: (sizes.append(pyarrow.total_allocated_bytes()), original(*given))[1]
    )
    before = pyarrow.total_allocated_bytes()
    assert np.array_equal(load(tmp_path / "data.parquet").x, x)
    assert len(sizes) > 400 and max(sizes) - before < 8 << 20


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"y": None}, r"data.parquet has the columns x, client; expected x and y, optionally client, split and group_"),
        ({"age": np.arange(100)}, "has the columns x, y, client, age; expected x and y"),
        ({"x": [[1.0] * 6] * 99 + [[1.0]]}, "lists of several lengths in the column 'x'"),
        ({"x": [[1.0] * 6] * 99 + [None]}, "lists of several lengths in the column 'x', or none"),
        ({"x": [[1.0] * 6] * 99 + [[1.0] * 5 + [None]]}, "has nothing in the place of a number in the column 'x'"),
        ({"x": [[1] * 6] * 100}, "has x of int64; expected floating-point numbers, prepared"),
        ({"x": [[float("nan")] * 6] * 100}, "NaN or infinite values in x"),
        ({"y": [1] * 99 + [None]}, "has nothing in the column 'y' of some samples"),
        ({"client": pyarrow.array([0] * 100, pyarrow.timestamp("s"))}, "column 'client' of type timestamp"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        load(written(tmp_path / "data.parquet", **given))
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_a_damaged_file_is_one_sentence(tmp_path: Path) -> None:
    path = written(tmp_path / "data.parquet")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match="cannot be read as a Parquet file"):
        load(path)


def test_where_there_is_no_room_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "data.parquet")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet, "_unpack", full)
    with pytest.raises(DataError, match=r"cannot be unpacked into .*x.npy \(No space left on device\); they need room"):
        load(path)


def test_it_needs_pyarrow_and_no_columns_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "data.parquet")
    with pytest.raises(DataError, match="--target and --groups are for tables"):
        load(path, roles=Roles(("y", "z")))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(NeedsError, match="Parquet files need pyarrow"):
        load(path)


def test_arrays_in_a_folder_go_before_parquet(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X[:10], y=arrays()["y"][:10])
    written(tmp_path / "data.parquet")
    assert len(load(tmp_path)) == 10
