# SPDX-License-Identifier: Apache-2.0
"""Newcomers and label shares on the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.data.registry import load as load_data
from fedloom.models.load import Shifted, load_model

TINY = {"clients": 5, "unseen": 2, "rounds": 15, "local_steps": 10, "model": "mlp:hidden=8", "local_lr": 0.05}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedloom.run("fedavg", out=tmp_path_factory.mktemp("admit") / "fedavg", progress="quiet", **TINY).path


def test_a_newcomer_without_labels_gets_a_model_with_its_prior(cli, trained: Path, tmp_path: Path) -> None:
    arrays = load_data("digits")
    mine = np.flatnonzero(arrays.y == 3)[:30]
    np.savez(tmp_path / "new.npz", x=arrays.x[mine])
    outcome = cli("admit", trained, "--data", tmp_path / "new.npz", "--adapt", "prior", "--out", tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*.safetensors")
    assert outcome.out.splitlines()[-1] == str(path) and not outcome.err
    plain = cli("admit", trained, "--data", tmp_path / "new.npz", "--out", tmp_path / "plain")
    assert "with --adapt prior it is fitted to the newcomer's classes" in plain.err
    written = json.loads(path.with_suffix(".json").read_text())
    assert outcome.out.startswith(written["sentence"]) and "30 unlabelled" in written["sentence"]
    assert written["samples"] == 30 and max(written["shares"], key=lambda share: share["share"])["name"] == "3"
    assert abs(sum(share["share"] for share in written["shares"]) - 1) < 1e-5
    assert all(share["low"] <= share["share"] <= share["high"] for share in written["shares"])
    model = load_model(path, "mlp:hidden=8", (1, 8, 8), 10)
    assert isinstance(model, Shifted)
    direct = fedloom.load(trained, adapt="prior").admit(arrays.x[mine])
    x = torch.as_tensor(arrays.x[mine])
    torch.testing.assert_close(model(x), direct.predict(x))
    assert int(direct.parameters["offset"].argmax()) == 3


def test_an_old_run_is_evaluated_and_exported_with_the_prior(cli, trained: Path, tmp_path: Path) -> None:
    plain, adapted = (
        json.loads(cli("evaluate", trained, "--json", *more).out)["metrics"]["deployed/participants/test/accuracy"]
        for more in ((), ("--adapt", "prior"))
    )
    assert adapted > plain
    cli("evaluate", trained, "--unseen", "--adapt", "prior")
    cli("export", trained, "--client", 0, "--adapt", "prior", "--out", tmp_path)
    assert isinstance(load_model(tmp_path / "client-0.safetensors", "mlp:hidden=8", (1, 8, 8), 10), Shifted)


def test_refusals(refused, trained: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "no-x.npz", y=np.zeros(3, int))
    assert "has the arrays y; expected x, optionally y" in refused("admit", trained, "--data", tmp_path / "no-x.npz")
    np.savez(tmp_path / "odd.npz", x=np.zeros((3, 4), np.float32))
    assert "Got samples of shape (3, 4)" in refused("admit", trained, "--data", tmp_path / "odd.npz")
    np.savez(tmp_path / "far.npz", x=load_data("digits").x[:3], y=[0, 10, -1])
    told = refused("admit", trained, "--data", tmp_path / "far.npz", "--adapt", "prior")
    assert "whole numbers from 0 to 9, as in this federation, or -1 where a label is not known." in told
    assert "Unknown value for --adapt 'priors'" in refused("evaluate", trained, "--adapt", "priors")
    assert "--adapt-noise needs --adapt-clip" in refused("run", "fedavg", "--adapt", "prior", "--adapt-noise", "1")
    assert "would count it twice" in refused("run", "pfedhn", "--adapt", "prior")


def test_what_cannot_be_written_is_refused_before_anything_is_told(refused, tmp_path: Path) -> None:
    few = {**TINY, "rounds": 1, "local_steps": 1}
    run = fedloom.run("hyperfedzero", out=tmp_path / "zero", progress="quiet", **few)
    np.savez(tmp_path / "new.npz", x=load_data("digits").x[:9])
    for more in ((), ("--adapt", "prior")):
        told = refused("admit", run.path, "--data", tmp_path / "new.npz", *more)
        assert "deploys more than one network, which no network alone can load; give --format onnx or pt2" in told


def test_some_labels_are_counted_and_the_others_estimated(trained: Path) -> None:
    arrays = load_data("digits")
    x, y = arrays.x[:40], arrays.y[:40].copy()
    y[20:] = -1
    run = fedloom.load(trained, adapt="prior")
    some, every = run.admit(x, y), run.admit(x, arrays.y[:40])
    counts = [one.newcomer.memory["label_counts"] for one in (some, every)]
    assert torch.equal(counts[1], torch.bincount(torch.as_tensor(arrays.y[:40]), minlength=10).float())
    assert bool((counts[0] >= torch.bincount(torch.as_tensor(y[:20]), minlength=10) - 1e-4).all())
    assert (some.report.labelled, every.report.labelled) == (20, 40)
    assert "20 labelled and 20 unlabelled samples" in some.report.sentence
    assert abs(float(counts[0].sum()) - (20 + 20 * some.report.weight)) < 1e-3


def test_a_newcomer_with_a_network_that_is_new(cli, refused, trained: Path, tmp_path: Path) -> None:
    """MH-pFedHN gives it a head of its own; the others say that they cannot."""
    arrays = load_data("digits")
    np.savez(tmp_path / "new.npz", x=arrays.x[:30], y=arrays.y[:30])
    quick = {**TINY, "rounds": 1, "local_steps": 1, "chunk": 256, "admit_rounds": 2}
    run = fedloom.run("mh_pfedhn", out=tmp_path / "mh", progress="quiet", **quick)
    new = ("--data", tmp_path / "new.npz", "--model", "mlp:hidden=20")
    outcome = cli("admit", run.path, *new)
    assert not outcome.err
    (path,) = outcome.out.split()
    assert load_model(Path(path), "mlp:hidden=20", (1, 8, 8), 10)(torch.as_tensor(arrays.x[:3])).shape == (3, 10)
    told = refused("admit", trained, *new)
    assert "FedAvg has one model for all clients, mlp:hidden=8; client newcomer has mlp:hidden=20" in told
    quick = {k: v for k, v in quick.items() if k != "chunk"}
    run = fedloom.run("pfedhn", out=tmp_path / "pfedhn", progress="quiet", **quick)
    assert "The loom weaves mlp:hidden=8; client newcomer has mlp:hidden=20" in refused("admit", run.path, *new)
