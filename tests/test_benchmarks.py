# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, in a tiny case each and as far as a CPU goes. What they measure is in docs/performance.md."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from fedloom import algorithms
from fedloom.audit import invert
from fedloom.data.arrays import Arrays
from fedloom.engines import capture

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent.parent / "benchmarks"


def loaded(name: str) -> ModuleType:
    """A benchmark as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(FOLDER))  # as for a script: one benchmark may import from another
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


@pytest.fixture
def benchmark(request: pytest.FixtureRequest) -> ModuleType:
    """The benchmark that the test is named for."""
    return loaded(request.node.name.removeprefix("test_").partition("_")[0])


@pytest.fixture
def images() -> Arrays:
    """40 random images of each of ten classes, in the form of CIFAR-10."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((400, 3, 32, 32), dtype=np.float32), np.repeat(np.arange(10), 40)
    return Arrays("random", x, y, 10)


def run_main(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """Its command line. How many threads operators have is as before."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, *map(str, words)])
    try:
        benchmark.main()
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def on_cpu(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(benchmark, "STEPS", 2)
    monkeypatch.setattr(capture, "MIN_COMPILED_STEPS", capture.MIN_COMPILED_STEPS)  # which it sets


@pytest.mark.usefixtures("on_cpu")
def test_gpu_rounds(benchmark: ModuleType) -> None:
    """Rounds of a cohort, by the engine and by the plain loop."""
    one_round, engine = benchmark.fedloom_rounds(2, 4, compiled=False, registered=3)
    assert [one_round(number) > 0 for number in range(2)] == [True, True]
    assert not engine.notes
    assert benchmark.plain_rounds(1, 4)(0) == 0.0


@pytest.mark.usefixtures("on_cpu")
def test_gpu_schedule(
    benchmark: ModuleType, images: Arrays, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole training, with its evaluations."""
    monkeypatch.setattr(benchmark, "UPDATES", 12)
    monkeypatch.setattr(benchmark, "load", lambda name, root: images)
    benchmark.schedule(argparse.Namespace(data_root=None, cohorts=[1], ways=["recorded"]))
    assert "recorded" in capsys.readouterr().out


def test_engines(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_main(benchmark, monkeypatch, "--clients", 3, "--steps", 2, "--batch", 4, "--repeats", 1)
    out = capsys.readouterr().out
    assert out.count("<-") == 2  # which engine auto takes, for each network
    for way in ("plain loop", "sequential", "parallel", "vectorised", "parallel_vectorised"):
        assert f" {way} " in out


def test_rates(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = {"clients": 3, "cohort": 2, "rounds": 2, "eval_every": 1, "local_steps": 1}
    monkeypatch.setattr(benchmark, "SHARED", {**benchmark.SHARED, **small})
    monkeypatch.setattr(benchmark, "FACTORS", (1, 3))
    names = ("FedAvg, digits, IID", "MH-pFedHN, made-up sensors, a client per person")
    run_main(benchmark, monkeypatch, "--settings", *names, "--seeds", 0, 1, "--out", tmp_path / "auto.json")
    settings = json.loads((tmp_path / "auto.json").read_text(encoding="utf-8"))["settings"]
    for one in map(settings.get, names):
        assert [len(one[name]) for name in ("own", "auto", "tuned")] == [len(one["rates"]["auto"])] * 3 == [2] * 3
        assert one["rates"]["tuned"] in (one["rates"]["own"], pytest.approx(3 * one["rates"]["own"]))


def test_baselines(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "baselines.json"
    monkeypatch.setattr(benchmark, "LIMIT", 0.0)
    small = ("--clients", 2, "--steps", 20, "--batch", 4, "--hidden", 5, "--repeats", 2)
    run_main(benchmark, monkeypatch, *small, "--methods", "ditto,per_fedavg", "--out", out)
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert {row[0] for row in rows} == {"Ditto", "Per-FedAvg"}
    assert all(row[1].endswith("x") and row[2] for row in rows)
    with pytest.raises(SystemExit, match="for no reason of their equations: fedprox"):
        run_main(benchmark, monkeypatch, *small, "--methods", "fedprox")


def test_every_baseline_can_be_timed() -> None:
    """With options of its own for each, all of which it knows."""
    baselines = loaded("baselines")
    names = {name for name in algorithms.built_in() if name not in baselines.PAPERS}
    assert baselines.REASONS.keys() <= names and len(names) == 38
    for name in names:
        config = algorithms.get(name).config(**baselines.options_of(name, 20, 32))
        batches = config.batches()
        assert (batches.steps, batches.size) == (20, 32)


def test_dense(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_main(benchmark, monkeypatch, "--clients", 2, "--rounds", 1)
    assert capsys.readouterr().out.count(" µs") == 5


def test_serve(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "TURNS", 1)
    run_main(benchmark, monkeypatch, "weave", "--out", tmp_path)
    found = json.loads((tmp_path / "serve-weave.json").read_text(encoding="utf-8"))
    assert [row[0] for row in found["rows"]] == [1, 16, 64]
    assert all(len(row) == len(found["columns"]) for row in found["rows"])
    assert capsys.readouterr().out.count("models/s") == 3


def test_scale(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.one(60, 4, "cpu")
    assert "60 clients:" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["left-out", "inversion"])
def test_attacks_are_measured(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    federation = {**benchmark.FEDERATION, "dataset": "digits"}
    monkeypatch.setattr(benchmark, "FEDERATION", federation)
    monkeypatch.setattr(benchmark, "METHODS", {"pfedhn": {}})
    monkeypatch.setattr(benchmark, "ATTACKS", {name: benchmark.ATTACKS[name] for name in ("none", "backdoor")})
    monkeypatch.setattr(invert, "STEPS", 3)
    run_main(benchmark, monkeypatch, what, "--rounds", 2, "--out", tmp_path)
    rows = json.loads((tmp_path / f"{what}.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == (12 if what == "left-out" else 2)
    if what == "left-out":
        assert all("liars" in row["left_out"] for row in rows if row["attack"] == "backdoor")


def test_newcomers(benchmark: ModuleType, images: Arrays, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two rounds of everything, with both hypernetworks beside it."""
    small = benchmark.Setting("random", "random", "dirichlet:0.5", clients=10, unseen=2)
    monkeypatch.setitem(benchmark.SETTINGS, "cifar10-0.5", small)
    monkeypatch.setattr(benchmark, "load", lambda name, root: images)
    words = ["--out", tmp_path, "--settings", "cifar10-0.5", "--seeds", 0, "--model", "mlp:hidden=8", "--rounds", 2]
    more = [
        "--cohort",
        3,
        "--local-steps",
        2,
        "--repetitions",
        2,
        "--device",
        "cpu",
        "--pfedhn",
        "--it-pfl-hn",
        "paper",
    ]
    run_main(benchmark, monkeypatch, *words, *more)
    found = json.loads((tmp_path / "cifar10-0.5.json").read_text())
    assert set(found["curves"]) == {benchmark.RAW, benchmark.EM, benchmark.OURS, benchmark.UNCALIBRATED}
    assert benchmark.PFEDHN in found["levels"]
    assert found["title"] == "random" and found["seeds"] == [0] and found["made"]["hardware"] == "CPU"
    assert "--model mlp:hidden=8 --rounds 2 --cohort 3" in found["command"]


def test_peers(benchmark: ModuleType, tmp_path: Path) -> None:
    """Our own contender; the peers' have an environment of theirs."""
    x, y = np.random.default_rng(0).random((40, 1, 28, 28), dtype=np.float32), np.arange(40) % 10
    benchmark.write_data(Arrays("random", x, y, 10), tmp_path / "data.pt", 4, 8)
    about = {"clients": 4, "steps": 2, "batch": 4, "rounds": 3, "workers": 1, "rate": 0.05, "momentum": 0}
    work = [f"--{name}={value}" for name, value in about.items()]
    command = [sys.executable, benchmark.APPS / "with_fedloom.py", "--network=mlp", f"--data={tmp_path / 'data.pt'}"]
    seconds, loss = benchmark.one_start([*command, *work], {"PYTHONPATH": ":".join(filter(None, sys.path))})
    assert len(seconds) == 1 and loss > 0


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_every_benchmark_imports_what_there_is(name: str) -> None:
    assert loaded(name).main


@pytest.mark.slow
def test_actors(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Clients in Ray's processes: what they cost, and what happens when one of them dies."""
    run_main(benchmark, monkeypatch, "--rounds", 2, "--steps", 200, "--clients", 20, "--kill")
    out = capsys.readouterr().out
    assert out.count(": True") == 2 and ", 0 clients are dropped" in out
    added, singly = (
        re.search(rf"^{name} .* ([0-9.]+) MB come back", out, re.M)
        for name in ("ray, 2 actors ", "ray, 2 actors, singly")
    )
    assert 5 * float(added[1]) < float(singly[1])


@pytest.mark.slow
def test_shards(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_main(benchmark, monkeypatch, "--parameters", 2000, "--out", tmp_path)
    rows = json.loads((tmp_path / "shards.json").read_text(encoding="utf-8"))["rows"]
    ways = [["none", "server"], *(["2", process] for process in ("server", "shard 1", "shard 2"))]
    assert [row[:3] for row in rows] == [[name, *way] for name in ("pFedHN", "MH-pFedHN") for way in ways]


def test_asynchronous(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "asynchronous.json"
    monkeypatch.setattr(benchmark, "TRIED", 2)
    monkeypatch.setattr(benchmark, "TARGET", 0.0)
    monkeypatch.setattr(benchmark, "WAYS", [("FedAvg, late", "fedavg", {"cohort": 3, "async_": 1})])
    run_main(benchmark, monkeypatch, "--seeds", 1, "--replies", 4, "--out", out)
    ((name, seconds, replies, *_),) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert (name, replies) == ("FedAvg, late", "2") and float(seconds) > 0
    never = benchmark.Trained(None, None, 0.5, 100.0, 1.0)
    assert benchmark.row("x", [never, never]) == ["x", "never", "never", "50.0 ± 0.0", "100 ± 0", "1.0"]


def test_cost(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """10 clients on 2 GPUs, each 1 s and a fixed second, and half a second at the server: 6 and 5 s of a round."""
    setting = benchmark.Setting("two", 2, 1, 10, benchmark.LENET)
    found = benchmark.round_of(setting, benchmark.Line(1.0, 1.0), benchmark.Line(0.5, 0.0))
    assert found[3:8] == ["6.00", "0.01", "0.00", "5.00", "11.01"] and found[-1] == "training"
    run_main(benchmark, monkeypatch, "--registered", 2000, "--out", tmp_path)
    machines, phones = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("machines", "phones"))
    assert [row[-1] for row in machines["rows"]][-2:] == ["the network", "the server's memory"]
    assert phones["rows"][0][:2] == ["2,000", "2"] and float(phones["rows"][0][3]) > 0
