# SPDX-License-Identifier: Apache-2.0
"""The server's own samples: a share that no client gets, or another dataset, and what the records say of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom import algorithms
from fedloom.api import parse_options
from fedloom.core.contract import Algorithm, Needs
from fedloom.core.errors import ConfigError, DataError, NeedsError, RunError
from fedloom.data.arrays import Arrays
from fedloom.data.own import from_arrays
from fedloom.training.server_data import Form, read
from fedloom.training.simulation import Simulation, split

SMALL = {"clients": 5, "rounds": 1, "local_steps": 2, "model": "mlp:hidden=4", "batch_size": 8, "partition": "iid"}
FORM = Form((6,), 3, ())


def data(samples: int = 150, classes: int = 3, **fields: Any) -> Arrays:
    rng = np.random.default_rng(0)
    y = np.arange(samples) % classes
    return from_arrays((rng.standard_normal((samples, 6)) + y[:, None]).astype(np.float32), y, **fields)


@pytest.fixture(params=["unlabelled", "labelled"])
def needy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Algorithm:
    """FedAvg that asks for samples on the server."""
    plain = algorithms.get("fedavg")
    wants = dataclasses.replace(plain, needs=Needs(same_model=True, server_data=request.param))
    monkeypatch.setattr(algorithms, "get", lambda name, *_: wants)
    return wants


def simulation(arrays: Arrays | None = None, **options: Any) -> Simulation:
    return Simulation("fedavg", *parse_options("fedavg", {**SMALL, **options}), arrays or data())


def test_a_share_of_the_training_data_is_nobody_else_s(needy: Algorithm) -> None:
    """Of 120 published training samples a quarter is 30; the 30 for testing are left alone."""
    arrays = data(split=np.where(np.arange(150) < 120, "train", "test"))
    ours = simulation(arrays, server_data=0.25)
    own = ours.server.setup.server_data
    assert own is not None and own.x.shape == (30, 6)
    dealt = [rows for c in ours.partition.clients for rows in (c.train, c.val, c.test)]
    theirs = {arrays.x[row].tobytes() for row in np.concatenate(dealt)}
    held = {row.numpy().tobytes() for row in own.x}
    assert len(theirs) == 120 and len(held) == 30 and not theirs & held
    assert held <= {row.tobytes() for row in arrays.x[:120]}
    if needy.needs.server_data == "unlabelled":
        assert own.y is None
    else:
        of = {row.tobytes(): int(label) for row, label in zip(arrays.x, arrays.y)}
        assert [of[row.numpy().tobytes()] for row in own.x] == own.y.tolist()


def test_a_share_is_the_same_for_one_seed_and_another_for_another() -> None:
    arrays = data()
    used = [
        np.concatenate([c.train for c in split(parse_options("fedavg", {**SMALL, "server_data": 0.2, "seed": seed})[0],
                                               arrays).clients])
        for seed in (0, 0, 1)
    ]  # fmt: skip
    assert sorted(used[0]) == sorted(used[1]) != sorted(used[2])


@pytest.mark.parametrize("share", [0.001, 0.9])
def test_a_share_that_leaves_nobody_anything_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"--server-data 0\.\d+ of 3 training samples is [03]; give a share"):
        simulation(data(3), server_data=share, clients=1)


def test_another_dataset_is_all_the_servers(needy: Algorithm, tmp_path: Path) -> None:
    other = data(40)
    path = tmp_path / "public.npz"
    np.savez(path, x=other.x, y=other.y)
    ours = simulation(server_data=str(path))
    own = ours.server.setup.server_data
    assert own is not None and torch.equal(own.x, torch.from_numpy(other.x))
    assert (own.y is None) == (needy.needs.server_data == "unlabelled")
    assert own.y is None or own.y.tolist() == other.y.tolist()
    plain = split(parse_options("fedavg", SMALL)[0], data())
    for one, same in zip(ours.partition.clients, plain.clients, strict=True):
        assert one.train.tolist() == same.train.tolist()


def test_of_a_dataset_with_a_published_split_only_the_training_data(tmp_path: Path) -> None:
    other = data(40)
    np.savez(tmp_path / "public.npz", x=other.x, y=other.y, split=np.where(np.arange(40) < 25, "train", "test"))
    found = read(str(tmp_path / "public.npz"), None, FORM, labelled=True)
    assert found.x.tolist() == other.x[:25].tolist()


def test_a_dataset_by_name_and_a_folder(tmp_path: Path) -> None:
    assert len(read("digits", None, Form((1, 8, 8), 10, ()), labelled=True).x) == 1797
    for name in ("a", "b"):
        np.savez(tmp_path / f"{name}.npz", x=data(20).x, y=data(20).y)
    assert len(read(str(tmp_path), None, FORM, labelled=False).x) == 40


def test_samples_without_labels_are_enough_where_none_are_needed(tmp_path: Path) -> None:
    path = str(tmp_path / "public.npz")
    np.savez(path, x=data(40).x)
    assert read(path, None, FORM, labelled=False).y is None
    with pytest.raises(DataError, match="y"):
        read(path, None, FORM, labelled=True)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"x": np.zeros((9, 5), np.float32), "y": np.arange(9) % 3}, r"samples of shape \(5,\); the clients' have"),
        ({"x": np.zeros((9, 6), np.float32), "y": np.arange(9) % 4}, "has 4 classes; the clients have 3"),
        ({"x": np.zeros((9, 6), np.float32), "y": np.arange(9) / 7}, "has real-valued targets; the clients have class"),
        (
            {"x": np.zeros((9, 6), np.float32), "y": np.arange(9) % 3, "split": np.full(9, "test")},
            "has no training samples",
        ),
    ],
)
def test_data_that_do_not_fit_are_refused(content: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = str(tmp_path / "public.npz")
    np.savez(path, **content)
    with pytest.raises(DataError, match=sentence):
        read(path, None, FORM, labelled=True)


def test_samples_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "public.npz")
    np.savez(path, x=np.full((4, 6), np.nan, np.float32))
    with pytest.raises(DataError, match="NaN or infinite values in x"):
        read(path, None, FORM, labelled=False)


def test_targets_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "public.npz")
    np.savez(path, x=np.zeros((9, 6), np.float32), y=np.arange(9) / 7)
    with pytest.raises(DataError, match=r"has targets of shape \(\); the clients have targets of shape \(2,\)"):
        read(path, None, Form((6,), 0, (2,)), labelled=True)
    assert read(path, None, Form((6,), 0, ()), labelled=True).y.shape == (9,)


def test_a_name_that_is_no_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="Unknown dataset 'digit'; did you mean 'digits'"):
        simulation(server_data="digit")


def test_the_clients_own_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="--server-data is digits, the clients' own data, test data included"):
        parse_options("fedavg", {"dataset": "digits", "server_data": "digits"})


def test_without_any_a_method_that_needs_some_says_so(needy: Algorithm) -> None:
    with pytest.raises(NeedsError, match=f"FedAvg needs {needy.needs.server_data} data on the server; there are none"):
        simulation()


def test_the_records_say_how_many_and_a_run_opens_without_them(needy: Algorithm, tmp_path: Path) -> None:
    path = tmp_path / "public.npz"
    np.savez(path, x=data(40).x, y=data(40).y)
    kind = needy.needs.server_data
    for number, (given, source) in enumerate([(0.2, "0.2 of the training data"), (path, str(path))]):
        out = tmp_path / str(number)
        run = fedloom.run(
            "fedavg", dataset=(data().x, data().y), out=out, progress="quiet", server_data=given, device="cpu", **SMALL
        )
        count = (30, 40)[number]
        assert run.summary["server_samples"] == count
        assert f"the server has {count} {kind} samples of its own ({source})" in run.summary["notes"]
        assert fedloom.load(out).model("0") is not None  # needs no data on the server
    np.savez(path, x=data(40).x + 1, y=data(40).y)
    with pytest.raises(RunError, match="The server's data were changed since round 1"):
        fedloom.resume(out, dataset=(data().x, data().y), rounds=2, progress="quiet")


def test_a_run_without_any_has_none(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", dataset=(data().x, data().y), out=tmp_path / "run", progress="quiet", **SMALL)
    assert run.summary["server_samples"] == 0
    assert not any("server has" in note for note in run.summary["notes"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["server_samples"] == 0
