# SPDX-License-Identifier: Apache-2.0
"""Heads of a loom in Ray's actors: runs come to the same, go on where they were stopped, and say what failed."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from conftest import play, small_federation
from fedloom import algorithms
from fedloom.core.errors import ConfigError, NeedsError, RunError
from fedloom.core.sharded import dealt, gathered, is_sharded
from fedloom.core.trees import flatten
from fedloom.engines.machine import Machine
from fedloom.engines.shards import RayShards
from fedloom.runs.checkpoint import Checkpoint
from fedloom.training.server import Server
from fedloom.training.simulation import Simulation

pytestmark = pytest.mark.usefixtures("ray_cluster")

CPU = torch.device("cpu")
LOOM = {"chunk": 64, "embed_dim": 4, "hidden": 6, "admit_rounds": 2}
RUN: dict[str, Any] = {
    **LOOM, "model": "mlp:hidden=5,mlp:hidden=9", "clients": 5, "unseen": 1, "cohort": 3, "rounds": 4, "eval_every": 2,
    "dtype": "float64", "engine": "ray", "workers": 2, "progress": "quiet",
}  # fmt: skip


def two() -> RayShards:
    return RayShards(Machine(workers=2), CPU, 2)


def state_file(path: Path, number: int = 4) -> bytes:
    return (path / "checkpoints" / f"round-{number:06d}" / "state.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["mh_pfedhn", "pfedhn"])
def test_two_actors_learn_what_one_process_does(method: str) -> None:
    federation, shards = small_federation(("mlp:hidden=5", "mlp:hidden=9")), two()
    assert len({os.getpid(), *(actor.process for actor in shards._actors)}) == 3
    options = LOOM if method == "mh_pfedhn" else {"embed_dim": 4, "hidden": 6}
    here = play(algorithms.get(method), federation, **options)
    there = play(algorithms.get(method), federation, shards=shards, **options)
    assert is_sharded(there.state._asdict())
    first, second = flatten(here.state._asdict()), flatten(gathered(there.state._asdict()))
    exact = method == "mh_pfedhn"  # pFedHN's trunk learns from a sum over shards
    assert all(
        torch.equal(leaf, second[path]) if exact else torch.allclose(leaf, second[path], rtol=1e-12, atol=1e-14)
        for path, leaf in first.items()
    )


def test_a_run_that_was_resumed_has_the_checkpoints_of_a_loom_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, restore, train_round = [], Server.restore, Simulation.train_round

    def noted(self: Server, checkpoint: Checkpoint) -> None:
        heads = {path: leaf for path, leaf in flatten(checkpoint.state).items() if "/head." in path}
        read[:] = [weakref.ref(leaf) for leaf in heads.values() if leaf.dim()]  # but for the count of steps
        restore(self, checkpoint)

    def alone(self: Simulation) -> Any:
        assert not any(leaf() is not None for leaf in read)  # the server has nothing of the heads
        return train_round(self)

    monkeypatch.setattr(Server, "restore", noted)
    monkeypatch.setattr(Simulation, "train_round", alone)
    here = fedloom.run("mh_pfedhn", out=tmp_path / "here", **RUN)
    begun = fedloom.run("mh_pfedhn", out=tmp_path / "there", loom_shards=2, **{**RUN, "rounds": 2})
    assert any("divided over 2 processes" in note for note in begun.summary["notes"])
    there = fedloom.resume(tmp_path / "there", rounds=4, progress="quiet")
    assert read and state_file(tmp_path / "there") == state_file(tmp_path / "here")
    assert there.summary["best"] == here.summary["best"]
    assert there.evaluate() == here.evaluate()
    assert there.evaluate_unseen() == here.evaluate_unseen()
    assert there.export("0", tmp_path / "model") is not None


@pytest.mark.slow
def test_a_shard_that_dies_costs_no_more_than_what_was_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Simulation.train_round

    def deadly(self: Simulation) -> Any:
        if self.server.round == 3:
            shards = self.server.setup.shards
            assert isinstance(shards, RayShards)
            os.kill(shards._actors[1].process, signal.SIGKILL)
        return train(self)

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "train_round", deadly)
        with pytest.raises(RunError, match=r"A shard of the loom failed.*resume the run"):
            fedloom.run("mh_pfedhn", out=tmp_path / "run", loom_shards=2, **RUN)
    fedloom.resume(tmp_path / "run", progress="quiet")
    fedloom.run("mh_pfedhn", out=tmp_path / "here", **RUN)
    assert state_file(tmp_path / "run") == state_file(tmp_path / "here")


def test_what_fails_unseen_is_said_when_somebody_waits() -> None:
    shards = two()
    there = dealt(shards, torch.ones(4, 2), CPU)
    shards.run(_fail, [there], (), answers=False)
    with pytest.raises(RunError, match="A shard of the loom failed: ValueError: it is too much"):
        there.whole()


def _fail(part: torch.Tensor) -> Any:
    raise ValueError("it is too much")


def test_shards_end_with_their_loom() -> None:
    shards = two()
    processes = [actor.process for actor in shards._actors]
    dealt(shards, torch.ones(4, 2), CPU).whole()
    del shards
    gc.collect()
    for process in processes:
        for _ in range(100):
            if not Path(f"/proc/{process}").exists():
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"process {process} is still there")


@pytest.mark.parametrize("method", ["fedavg", "mh_pfedhn"])
def test_where_there_are_no_heads_it_is_refused(method: str) -> None:
    given = {**RUN, "heads": "single"} if method == "mh_pfedhn" else {n: v for n, v in RUN.items() if n not in LOOM}
    with pytest.raises(NeedsError, match=r"has no heads here that 2 processes could hold.*Leave out --loom-shards"):
        fedloom.run(method, loom_shards=2, **{**given, "model": "mlp:hidden=5"})


def test_what_does_not_go_with_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="--loom-shards is about --engine ray; the engine is auto"):
        fedloom.run("mh_pfedhn", loom_shards=2)
    with pytest.raises(ConfigError, match="--aggregate and --loom-shards do not go together"):
        fedloom.run("pfedhn", loom_shards=2, engine="ray", aggregate="median", server_step="cohort_mean")
