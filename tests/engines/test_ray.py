# SPDX-License-Identifier: Apache-2.0
"""Clients in Ray's actors: the bits are those of this process, and what dies is replaced and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from conftest import Played, models_for, play, setup_of, small_federation
from fedloom import algorithms
from fedloom.clients.federation import OnDisk
from fedloom.core.contract import Algorithm, Cohort
from fedloom.core.errors import ConfigError, NeedsError, RoundError
from fedloom.core.trees import flatten
from fedloom.data.mapped import opened
from fedloom.engines import cluster as clusters
from fedloom.engines import sweep, workers
from fedloom.engines.cluster import Actor, Cluster
from fedloom.engines.job import Outcome
from fedloom.engines.machine import Machine
from fedloom.engines.memories import Memories
from fedloom.engines.parallel import ParallelVectorised
from fedloom.engines.ray import Host, Load, Ray, cost
from fedloom.engines.vectorised import Vectorised
from fedloom.runs.options import RunOptions

pytestmark = pytest.mark.usefixtures("ray_cluster")

FEDAVG = algorithms.get("fedavg")
DENSE, CONVOLVED = ("mlp:hidden=5", "mlp:hidden=6"), ("lenet:kernels=2", "testnets:Normed", "testnets:Dropping")
COHORTS = [["0", "1", "2"], ["1", "3", "4"], ["0", "2", "4"]]


def everything(played: Played) -> dict[str, torch.Tensor]:
    return flatten({"state": played.state._asdict(), "memory": dict(played.memory)})


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[path]) for path, value in one.items())


@pytest.fixture
def in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part has two clients, so that small federations have several."""
    monkeypatch.setattr(ParallelVectorised, "part_size", lambda *_: 2)


def check_bits(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch, *actors: int) -> None:
    """Those of the engine that ``auto`` chooses, whatever the number of actors."""
    for models, engine in ((DENSE, "parallel_vectorised"), (CONVOLVED, "parallel")):
        federation = small_federation(models_for(algorithm, *models), dtype=torch.float32)
        expected = everything(play(algorithm, federation, engine, rounds=3, cohorts=COHORTS))
        for number in actors:
            with monkeypatch.context() as patch:
                patch.setattr(Cluster, "number", lambda *_, number=number: number)
                played = play(algorithm, federation, "ray", rounds=3, cohorts=COHORTS)
            assert not played.stats.dropped
            assert same(expected, everything(played))


@pytest.mark.parametrize("method", ["fedavg", "pfedhn", "scaffold"])
def test_the_bits_are_those_of_this_process(method: str, in_pairs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_bits(algorithms.get(method), monkeypatch, 2)


@pytest.mark.slow
@pytest.mark.parametrize("method", algorithms.names())
def test_so_they_are_for_every_method_and_number_of_actors(
    method: str, in_pairs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bits(algorithms.get(method), monkeypatch, 1, 2)


def test_samples_on_disk_stay_there_and_actors_read_them(
    in_pairs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = small_federation(dtype=torch.float32)
    np.save(tmp_path / "x.npy", federation.x.numpy())
    x = torch.from_numpy(opened(tmp_path / "x.npy"))
    mapped = replace(federation, x=x, on_disk=OnDisk(x, tmp_path / "x.npy"))
    sent: list[str] = []
    put = Ray._put
    monkeypatch.setattr(Ray, "_put", lambda self, kind, what: (sent.append(kind), put(self, kind, what))[1])
    expected = everything(play(FEDAVG, federation, "parallel_vectorised", rounds=2))
    assert same(expected, everything(play(FEDAVG, mapped, "ray", rounds=2)))
    assert (sent.count("file"), sent.count("tensor")) == (1, 1)  # the latter are labels
    np.save(tmp_path / "x.npy", federation.x[1:].numpy())
    with pytest.raises(
        RoundError, match=r"raised DataError: .*x.npy has samples of shape .* here and .* where the run"
    ):
        play(FEDAVG, replace(mapped, on_disk=OnDisk(x, tmp_path / "x.npy")), "ray", rounds=1)


def killed_at(
    monkeypatch: pytest.MonkeyPatch, client: str, times: int, how: signal.Signals = signal.SIGKILL
) -> list[int]:
    """Kill the process that begins with a client, so often; those killed."""
    original, killed = Ray._begin, []

    def begin(self: Ray, actor: Actor, load: Load, shared: object) -> object:
        answer = original(self, actor, load, shared)
        if client in load.job.clients and len(killed) < times:
            os.kill(actor.process, how)
            killed.append(actor.process)
        return answer

    monkeypatch.setattr(Ray, "_begin", begin)
    return killed


def test_clients_of_a_process_that_dies_are_asked_again(in_pairs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small_federation()
    straight = play(FEDAVG, federation, "parallel_vectorised", rounds=2)
    killed = killed_at(monkeypatch, "3", 1)
    played = play(FEDAVG, federation, "ray", rounds=2)
    assert not played.stats.dropped
    assert played.engine.notes == [f"process {killed[0]} of Ray's ended; its clients were asked again"]
    for name, value in straight.state.params.items():
        torch.testing.assert_close(played.state.params[name], value, rtol=0, atol=1e-12)


def came_back(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The clients of each sum that comes to this process."""
    original, found = Ray._read, []

    def read(self: Ray, result: Any) -> Outcome:
        outcome = original(self, result)
        if outcome.total is not None:
            found.append(list(outcome.replies))
        return outcome

    monkeypatch.setattr(Ray, "_read", read)
    return found


@pytest.mark.parametrize(("models", "engine"), [(DENSE, "parallel_vectorised"), (CONVOLVED, "parallel")])
def test_sums_have_the_same_bits_for_any_number_of_actors(
    models: tuple[str, ...], engine: str, in_pairs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine clients, of which blocks of two parts are added up, and of whom one cannot be used."""
    monkeypatch.setattr("fedloom.engines.ray.SUMS", 3)
    federation = small_federation(models[:1], sizes=(9, 4, 13, 7, 5, 6, 8, 3, 10))
    federation.x[federation.roster["8"].rows["train"]] = float("nan")
    here, sums = play(FEDAVG, federation, engine), came_back(monkeypatch)
    found = []
    for number in (1, 2, 3):
        sums.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Cluster, "number", lambda *_, number=number: number)
            played = play(FEDAVG, federation, "ray", added_up=True)
        assert len(played.engine.actors()) == number
        assert played.stats.dropped == here.stats.dropped and played.stats.up == here.stats.up
        assert "FedAvg needs only a mean of replies: they are added up where clients run" in played.engine.notes
        assert len(sums) == 4 and max(map(len, sums)) > 2  # two of three blocks, in two rounds
        found.append(everything(played))
    assert same(found[0], found[1]) and same(found[0], found[2])
    torch.testing.assert_close(found[0], everything(here), rtol=0, atol=1e-12)


def test_a_sum_whose_process_dies_is_made_of_its_clients_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client at a time gives the same replies whoever asks, so that not a bit is another."""
    monkeypatch.setattr("fedloom.engines.ray.SUMS", 2)
    federation, sums = small_federation(CONVOLVED[:1]), came_back(monkeypatch)
    straight = play(FEDAVG, federation, "ray", rounds=2, added_up=True)
    assert sorted(sums) == [["0", "1"], ["0", "1"], ["2", "3", "4"], ["2", "3", "4"]]
    sums.clear()
    killed = killed_at(monkeypatch, "3", 1)
    played = play(FEDAVG, federation, "ray", rounds=2, added_up=True)
    assert killed and not played.stats.dropped
    assert sorted(sums) == [["0", "1"], ["0", "1"], ["2", "3", "4"]]  # of the others each client came by itself
    assert same(everything(straight), everything(played))


@pytest.mark.slow
def test_a_client_whose_process_dies_twice_is_dropped_by_name(
    in_pairs: None, monkeypatch: pytest.MonkeyPatch, ray_cluster: Cluster
) -> None:
    federation = small_federation()
    killed = killed_at(monkeypatch, "3", 2)
    played = play(FEDAVG, federation, "ray", rounds=1)
    (dropped,) = played.stats.dropped
    assert dropped.client == "3" and re.match(f"its process {killed[1]} ended: The actor died", dropped.reason)
    without = play(FEDAVG, federation, "sequential", rounds=1, cohorts=[["0", "1", "2", "4"]])
    for name, value in without.state.params.items():
        torch.testing.assert_close(played.state.params[name], value, rtol=0, atol=1e-12)
    assert not set(killed) & {actor.process for actor in ray_cluster.actors(Host, "cpu", 2, 0.0)}


@pytest.mark.slow
def test_a_process_that_stands_still_is_ended_and_its_clients_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    play(FEDAVG, small_federation(), "ray", rounds=1)  # processes are there
    monkeypatch.setattr(workers, "STILL_SECONDS", 2)
    stopped = killed_at(monkeypatch, "3", 1, signal.SIGSTOP)
    played = play(FEDAVG, small_federation(), "ray", rounds=1)
    assert f"process {stopped[0]} of Ray's stood still for 2 seconds and was ended" in played.engine.notes
    assert not played.stats.dropped


@pytest.mark.slow
def test_an_error_or_an_interrupt_ends_what_actors_are_at(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small_federation()
    played = play(FEDAVG, federation, "ray", rounds=1)
    before = {actor.process for actor in played.engine.actors()}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Ray, "_result", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        FEDAVG.round(played.setup, played.state, Cohort(2, played.setup.clients), played.session(2).ask)
    deadline = time.monotonic() + 20
    while before & {int(path.name) for path in Path("/proc").glob("[0-9]*")} and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not before & {int(path.name) for path in Path("/proc").glob("[0-9]*")}
    session = played.session(2)
    FEDAVG.round(played.setup, played.state, Cohort(2, played.setup.clients), session.ask)
    assert not session.stats.dropped


@pytest.mark.slow
def test_on_gpus_one_tree_comes_back_from_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpus(Ray):
        """With two GPUs that are numbers only."""

        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self._local, self._inner, self._gpus = Vectorised(*given, **options), Vectorised.name, 1.0

    federation, sums = small_federation(sizes=(6,) * 8), came_back(monkeypatch)
    here = play(FEDAVG, federation, "vectorised", rounds=1)
    played = play(FEDAVG, federation, OnGpus, rounds=1, added_up=True)
    assert len(played.engine.actors()) == 2 and sorted(sums) == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    torch.testing.assert_close(everything(played), everything(here), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_on_gpus_large_groups_come_first_and_an_architecture_stays_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two GPUs that are numbers only: two architectures of which one has most of the work."""
    federation = small_federation(("mlp:hidden=40", "mlp:hidden=5"), sizes=(9, 4, 13, 7, 5, 6))
    engine = Ray(federation, FEDAVG, FEDAVG.config(local_epochs=1, batch_size=4), 0)
    engine._local, engine._inner, engine._gpus = Vectorised(federation, FEDAVG, engine.config, 0), Vectorised.name, 1.0
    began: list[tuple[int, str, int]] = []
    original = Ray._begin

    def begin(self: Ray, actor: Actor, load: Load, shared: object) -> object:
        began.append((actor.process, str(load.job.spec), cost(load.job)))
        return original(self, actor, load, shared)

    monkeypatch.setattr(Ray, "_begin", begin)
    pfedhn = algorithms.get("pfedhn")
    engine.algorithm, setup = pfedhn, setup_of(federation, pfedhn.config(local_steps=2))
    engine.config, memory = setup.config, Memories()
    state = pfedhn.init(setup)
    for number in (1, 2):
        session = engine.session(number, memory)
        state, _ = pfedhn.round(setup, state, Cohort(number, setup.clients), session.ask)
        memory = session.memory
        assert not session.stats.dropped
    first, second = began[: len(began) // 2], began[len(began) // 2 :]
    assert [spec for _, spec, _ in first] == ["mlp:hidden=40"] * 2 + ["mlp:hidden=5"]
    assert [work for *_, work in first] == sorted((work for *_, work in first), reverse=True)
    assert {process for process, *_ in first} == {actor.process for actor in engine.actors()}
    assert {(process, spec) for process, spec, _ in second if spec != "mlp:hidden=5"} <= {
        (process, spec) for process, spec, _ in first
    }


def test_a_method_of_a_folder_and_a_network_of_the_users_go_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(algorithms.VARIABLE, str(tmp_path))
    source = (Path(algorithms.__path__[0]) / "fedprox.py").read_text()
    (tmp_path / "mine_on_ray.py").write_text(source)
    mine, federation = algorithms.get("mine_on_ray"), small_federation(("testnets:DenseNormed",))
    expected = everything(play(mine, federation, "parallel_vectorised"))
    played = play(mine, federation, "ray")
    assert not played.stats.dropped and same(expected, everything(played))


def test_ray_listens_to_this_machine_only(ray_cluster: Cluster) -> None:
    ray_cluster.actors(Host, "cpu", 2, 0.0)
    folder = Path(ray_cluster.ray._private.worker._global_node.get_session_dir_path()).parents[1]
    assert folder.stat().st_mode & 0o077 == 0
    sockets = {
        str(file.readlink())
        for process in sweep.users(str(folder))
        for file in Path(f"/proc/{process}/fd").iterdir()
        if file.exists() or file.is_symlink()
    }
    listening = [
        row.split()[1].rpartition(":")[0]
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if row.split()[3] == "0A" and f"socket:[{row.split()[9]}]" in sockets
    ]
    assert len(listening) > 3 and set(listening) <= {
        "0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"
    }  # fmt: skip
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0" and os.environ["RAY_AUTH_MODE"] == "token"


def test_what_cannot_be_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ray_address", "auto"), ("gpus", 2)):
        with pytest.raises(ConfigError, match="is about --engine ray; the engine is auto"):
            RunOptions(**{name: value})
    federation = small_federation()
    with pytest.raises(ConfigError, match="--gpus is 2, and clients run on the CPU"):
        Ray(federation, FEDAVG, FEDAVG.config(), 0, Machine(gpus=2))
    with pytest.raises(ConfigError, match=r"connected to Ray at local and cannot be at 10\.0\.0\.1:6379 too"):
        Ray(federation, FEDAVG, FEDAVG.config(), 0, Machine(ray_address="10.0.0.1:6379"))
    with pytest.raises(NeedsError, match="takes 2 gradients of each batch"):  # as on every engine
        play(algorithms.get("ditto"), federation, "ray", rounds=1, clip=0.0, sample_dp_clip=1.0, sample_dp_noise=1.0)
    joined = object.__new__(Cluster)
    for address in ("local", "ray://10.0.0.1:10001", ":6379", "10.0.0.1:ray"):
        with pytest.raises(ConfigError, match=f"--ray-address is {address}; give HOST:PORT, or auto"):
            joined._join(address)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(NeedsError, match=f"There is no Ray for us at 127.0.0.1:{port}: .* Start it with `ray start`"):
        joined._join(f"127.0.0.1:{port}")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NeedsError, match=r"--engine ray needs Ray, which is not installed .* pip install"):
        clusters._ray(True)


def test_a_run_on_ray_is_that_of_this_process(tmp_path: Path) -> None:
    given = {"dataset": "digits", "clients": 4, "cohort": 3, "rounds": 2, "local_steps": 3, "model": "mlp:hidden=8"}
    one, other = (
        fedloom.run("pfedhn", **given, engine=engine, out=tmp_path / engine, progress="quiet")
        for engine in ("ray", "auto")
    )
    assert one.summary["engine"] == "ray" and one.summary["last"] == other.summary["last"]


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_ended(end: signal.Signals, tmp_path: Path) -> None:
    words = f"run fedavg --engine ray --dataset digits --clients 4 --rounds 100000 --cohort 4 --out {tmp_path / 'run'}"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom", *words.split(), "--eval-every", "1000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    records = tmp_path / "run" / "metrics.jsonl"
    while not (records.exists() and records.stat().st_size) and process.poll() is None:
        time.sleep(0.1)
    folders = {path for path in Path("/tmp").glob("fedloom-*") if path.is_dir() and any(sweep.users(str(path)))}
    (folder,) = {f for f in folders if process.pid in sweep.users(str(f))}
    assert len(list(sweep.users(str(folder)))) > 4
    process.send_signal(end)
    assert process.wait(60) == (130 if end is signal.SIGINT else -end)
    deadline = time.monotonic() + 20
    while (folder.exists() or any(sweep.users(str(folder)))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not folder.exists() and not list(sweep.users(str(folder)))


@pytest.mark.slow
def test_a_machine_of_a_cluster_that_is_lost_leaves_the_others_its_clients() -> None:
    """Two machines that are processes here, joined at their address."""
    script = Path(__file__).with_name("two_machines.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAY_AUTH_MODE": "disabled"}
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("{"))  # Ray's have more to say
    found = json.loads(line)
    assert found["actors"] == [2, 1] and not found["dropped"] and max(found["gaps"]) < 1e-12
    _, ended, fewer = found["notes"]
    assert re.match(r"process \d+ of Ray's ended; its clients were asked again", ended)
    assert re.match(r"Ray has no place for another process like \d+, which ended; 1 go on", fewer)
