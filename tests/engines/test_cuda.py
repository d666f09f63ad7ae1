# SPDX-License-Identifier: Apache-2.0
"""The fast path on a GPU gives what the plain loop on the CPU gives, for every method."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import fedloom
from conftest import Played, models_for, needed, play, small_federation
from fedloom import algorithms
from fedloom.core.trees import flatten
from fedloom.data.registry import load
from fedloom.engines import capture, convolution
from fedloom.training.config import parse_options
from fedloom.training.simulation import Simulation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("method", algorithms.names())
@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed", "testnets:Dropping"])
def test_recorded_steps_on_a_gpu_give_what_the_plain_loop_gives(
    method: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MIN_RECORDED_STEPS", 1)
    fast = _compare(method, models_for(algorithms.get(method), model, "mlp:hidden=5"), rounds=3)
    assert fast.engine.notes == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own affairs
@pytest.mark.parametrize("method", algorithms.names())
def test_compiled_steps_on_a_gpu_give_what_the_plain_loop_gives(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MIN_RECORDED_STEPS", 1)
    monkeypatch.setattr(capture, "MIN_COMPILED_STEPS", 0)
    monkeypatch.setattr(convolution, "MIN_INPUTS", 1)  # of this small network too
    fast = _compare(method, models_for(algorithms.get(method), "lenet:kernels=2"), rounds=5)
    assert fast.engine.notes == [] and any(
        captured.compiled for captured in fast.engine._recordings._forms.kept.values()
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_network_with_batch_norm_on_a_gpu_gives_what_the_plain_loop_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capture, "MIN_RECORDED_STEPS", 1)
    monkeypatch.setattr(capture, "MIN_COMPILED_STEPS", 0)
    fast = _compare("fedavg", ["testnets:Normed"], rounds=5)
    assert fast.engine.notes == [] and any(
        captured.compiled for captured in fast.engine._recordings._forms.kept.values()
    )


def _compare(method: str, models: Sequence[str], rounds: int) -> Played:
    """A few rounds in both ways; equal to rounding."""
    algorithm = algorithms.get(method)
    plain = play(algorithm, small_federation(models), "sequential", rounds=rounds)
    fast = play(algorithm, small_federation(models, device="cuda"), "vectorised", rounds=rounds)
    assert fast.engine._recordings._forms.kept
    assert all(captured.graphs for captured in fast.engine._recordings._forms.kept.values())
    one, other = flatten(plain.state._asdict()), flatten(fast.state._asdict())
    for path in one:
        torch.testing.assert_close(other[path].cpu(), one[path], rtol=0, atol=1e-8)
    return fast


@pytest.mark.parametrize("method", algorithms.names())
def test_a_run_on_a_gpu_trains_evaluates_and_is_loaded_again(method: str, tmp_path: Path) -> None:
    given = {"dataset": "digits", "model": "mlp:hidden=5", "clients": 5, "cohort": 3, "rounds": 4, "local_steps": 3}
    given["eval_every"] = 4  # rounds before an evaluation are begun ahead
    given |= needed(algorithms.get(method))
    if "local_epochs" in {field.name for field in dataclasses.fields(algorithms.get(method).config)}:
        given["local_epochs"] = 0
    run = fedloom.run(method, **given, device="cuda", out=tmp_path / "run", progress="quiet")
    assert all(record["dropped"] == [] and record["notes"] == [] for record in run.records)
    again = fedloom.load(tmp_path / "run", which="last").simulation
    assert {"round": 4, **again.evaluation().metrics} == pytest.approx(run.summary["last"], abs=1e-6)


def test_a_client_with_bad_numbers_is_left_out_on_a_gpu_too() -> None:
    given = {"model": "mlp:hidden=5", "clients": 4, "cohort": 2, "rounds": 6, "local_steps": 3, "eval_every": 6}
    careful, ahead = (
        Simulation("pfedhn", *parse_options("pfedhn", {**given, "device": "cuda"}), load("digits", None))
        for _ in range(2)
    )
    careful._ahead = None
    for built in (careful, ahead):
        built.federation.x[built.federation.roster["1"].rows["train"]] = float("nan")
    dropped = []
    for _ in range(6):
        usual, record = careful.train_round(), ahead.train_round()
        assert record["dropped"] == usual["dropped"]
        dropped += record["dropped"]
    assert dropped
    one, other = flatten(careful.server.state._asdict()), flatten(ahead.server.state._asdict())
    for path in one:
        torch.testing.assert_close(other[path], one[path])
