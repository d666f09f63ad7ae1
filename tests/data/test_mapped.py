# SPDX-License-Identifier: Apache-2.0
"""Samples on disk: what a folder may hold, what is refused, and that a run on it is that on the same arrays."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.errors import DataError, RunError
from fedloom.core.trees import leaves
from fedloom.data.mapped import from_mapped
from fedloom.data.registry import load
from fedloom.engines.job import Job, Outcome
from fedloom.engines.vectorised import Vectorised
from fedloom.runs.directory import RunDirectory
from fedloom.training.config import parse_options
from fedloom.training.simulation import Simulation

SMALL = {"partition": "group:client", "clients": 4, "unseen": 1, "cohort": 2, "rounds": 3, "local_steps": 2,
         "batch_size": 4, "model": "mlp:hidden=4", "progress": "quiet"}  # fmt: skip


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 6)).astype(np.float32)
    return {"x": x, "y": np.array(list("abca"))[np.arange(100) % 4], "client": np.repeat(list("pqrst"), 20)}


def folder(path: Path, **given: np.ndarray) -> Path:
    path.mkdir(exist_ok=True)
    for name, array in {**arrays(), **given}.items():
        np.save(path / f"{name}.npy", array)
    return path


def test_samples_stay_on_disk_and_the_rest_is_as_in_a_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "same.npz", **arrays(), group_room=arrays()["y"])
    mapped, read = load(folder(tmp_path / "data", group_room=arrays()["y"])), load(tmp_path / "same.npz")
    assert isinstance(mapped.x, np.memmap) and mapped.x.filename == tmp_path / "data" / "x.npy"
    assert (mapped.class_names, mapped.notes) == (("a", "b", "c"), ()) and set(mapped.groups) == {"client", "room"}
    assert mapped.digest() == read.digest()


def test_a_run_is_that_on_the_same_arrays_and_can_be_resumed(tmp_path: Path) -> None:
    np.savez(tmp_path / "same.npz", **arrays())
    data = folder(tmp_path / "data")
    one = fedloom.run("pfedhn", dataset=str(tmp_path / "same.npz"), out=tmp_path / "one", **SMALL)
    fedloom.run("pfedhn", dataset=str(data), out=tmp_path / "other", **{**SMALL, "rounds": 2})
    fedloom.resume(tmp_path / "other", rounds=3, progress="quiet")
    states = [dict(leaves(RunDirectory.open(tmp_path / name).load("last").state)) for name in ("one", "other")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert fedloom.load(tmp_path / "other").evaluate() == one.evaluate()
    np.save(data / "x.npy", arrays()["x"] + 1)
    with pytest.raises(RunError, match="The data were changed since round 3"):
        fedloom.resume(tmp_path / "other", rounds=4, progress="quiet")


def test_no_sample_is_copied_on_the_way_to_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = parse_options("fedavg", {**{n: v for n, v in SMALL.items() if n != "progress"}, "engine": "vectorised"})
    built = Simulation("fedavg", *given, load(folder(tmp_path / "data")))
    federation = built.federation
    assert federation.file == tmp_path / "data" / "x.npy"
    assert federation.x.data_ptr() == built.arrays.x.ctypes.data
    seen = []

    def run_group(self: Vectorised, job: Job) -> Outcome:
        seen.append(job.federation.x)
        return original(self, job)

    original = Vectorised.run_group
    monkeypatch.setattr(Vectorised, "run_group", run_group)
    built.train_round()
    assert seen[0] is federation.x
    changed = federation.joined_by("new", next(iter(federation.models.values())), torch.zeros(1, 6), torch.zeros(1))
    assert changed.file is None


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: (path / "y.npy").unlink(), "has the files client.npy, x.npy; expected x.npy and y.npy"),
        (lambda path: np.save(path / "z.npy", np.zeros(3)), "has the files client.npy, x.npy, y.npy, z.npy; expected"),
        (lambda path: np.save(path / "x.npy", np.zeros((100, 6))), "x of type float64 .*expected float32, row by row"),
        (
            lambda path: np.save(path / "x.npy", np.zeros((6, 100), np.float32).T),
            r"\(100, 6\), column by column; expec",
        ),
        (lambda path: np.save(path / "x.npy", np.zeros(100, np.float32)), r"shape \(100,\); expected float32"),
        (lambda path: np.save(path / "x.npy", np.zeros((99, 6), np.float32)), "99 samples in x but y has shape"),
        (lambda path: np.save(path / "x.npy", np.full((100, 6), np.nan, np.float32)), "NaN or infinite values in x"),
        (lambda path: np.save(path / "x.npy", np.zeros((0, 6), np.float32)), "."),
        (lambda path: (path / "x.npy").write_bytes((path / "x.npy").read_bytes()[:-1]), "cannot be read as a plain"),
        (lambda path: (path / "y.npy").write_bytes(pickle.dumps([1])), "y.npy cannot be read as a plain array"),
        (lambda path: np.save(path / "y.npy", np.array([{}] * 100), allow_pickle=True), "y.npy cannot be read"),
        (lambda path: np.save(path / "y.npy", np.array(3)), "y.npy has no array with axes"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, spoil: Callable[[Path], object], said: str) -> None:
    path = folder(tmp_path / "data")
    spoil(path)
    with pytest.raises(DataError, match=said):
        from_mapped(path)
