# SPDX-License-Identifier: Apache-2.0
"""fedloom's simulation against its peers' on one CPU: Flower (Ray) and pfl-research, as ratios in one run.

    python benchmarks/peers.py [--clients 100] [--steps 20] [--batch 32] [--rounds 8] [--repeats 3] [--networks mlp]

FedAvg on Fashion-MNIST (from ``FEDLOOM_DATA``), every client in every round, plain SGD, no evaluation. Each contender
runs as its users run it (``peer_apps/``), with one one-thread worker per core and the data in memory; the peers once as
they are and once with glibc's thresholds raised, which helps them. Contenders take turns, repeat by repeat, so that
other work on the machine meets all of them. A contender's figure is the median over all rounds but each start's first.

The peers live in a virtual environment of their own, made on first use in ``--venv``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import venv
from datetime import date
from pathlib import Path

import numpy as np
import torch

import fedloom
from fedloom.core.errors import FedloomError
from fedloom.data.arrays import Arrays
from fedloom.data.registry import load
from fedloom.engines.workers import cores

HERE = Path(__file__).parent
APPS = HERE / "peer_apps"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fedloom" / "peers"
PEERS = ["flwr[simulation]>=1.41,<1.43", "pfl"]
RAISED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
GOALS = {("mlp", "flwr"): 6.0, ("mlp", "pfl"): 2.5, ("lenet", "flwr"): 1.6, ("lenet", "pfl"): 1.2}


def peers_python(folder: Path) -> Path:
    """The interpreter of the peers' environment, which is made if it is not there."""
    python, stamp = folder / "bin" / "python", folder / ".installed"
    constraints = (HERE.parent / "constraints.txt").read_text().splitlines()
    wanted = [next(line for line in constraints if line.startswith("torch==")), *PEERS]
    if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
        print(f"making {folder} with {', '.join(wanted)}", flush=True)
        venv.create(folder, with_pip=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, wanted[0]], check=True)
        subprocess.run([*install, *wanted], check=True)
        stamp.write_text("\n".join(wanted))
    return python


def write_data(arrays: Arrays, path: Path, clients: int, samples: int) -> None:
    """``samples`` of Fashion-MNIST for each client, dealt at random."""
    need = clients * samples
    if need > len(arrays.x):
        raise SystemExit(f"{clients} clients x {samples} samples are {need}; Fashion-MNIST has {len(arrays.x)}.")
    rows = np.random.default_rng(0).permutation(len(arrays.x))[:need]
    torch.save({"x": torch.from_numpy(arrays.x[rows]).float(), "y": torch.from_numpy(arrays.y[rows]).long()}, path)


def one_start(command: list[str | Path], environment: dict[str, str]) -> tuple[list[float], float]:
    """Run a contender; the seconds of its rounds, and the loss it reached. One that crashes may try once more."""
    for _ in range(2):
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        told = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
        if told and not done.returncode:
            result = json.loads(told[-1])
            return result["seconds"], result["loss"]
    raise SystemExit(f"{' '.join(map(str, command))} failed ({done.returncode}):\n{done.stderr[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("clients", 100), ("steps", 20), ("batch", 32), ("rounds", 8), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--workers", type=int, default=cores(), help="one-thread workers; default: one per core")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--networks", nargs="+", choices=["mlp", "lenet"], default=["mlp", "lenet"])
    parser.add_argument("--venv", type=Path, default=CACHE)
    chosen = parser.parse_args()
    try:
        arrays = load("fashion_mnist", None)
    except FedloomError as error:
        raise SystemExit(str(error)) from None
    python = peers_python(chosen.venv)
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={chosen.workers}"]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_DEDUP_LOGS": "0"}
    one_thread = {"OMP_NUM_THREADS": "1", **quiet}
    contenders: dict[str, tuple[list[str | Path], dict[str, str]]] = {
        "flwr": ([python, APPS / "with_flower.py"], one_thread),
        "flwr, thresholds raised": ([python, APPS / "with_flower.py"], one_thread | RAISED),
        "pfl": ([*torchrun, APPS / "with_pfl.py"], one_thread),
        "pfl, thresholds raised": ([*torchrun, APPS / "with_pfl.py"], one_thread | RAISED),
        "fedloom": ([sys.executable, APPS / "with_fedloom.py"], {}),
    }
    freeze = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    versions = [line for line in freeze.splitlines() if line.split("==")[0] in ("flwr", "ray", "pfl", "torch")]
    print(f"{date.today()}, {platform.processor() or platform.machine()}, {chosen.workers} workers of {cores()} cores; "
          f"fedloom {fedloom.__version__} on torch {torch.__version__}; {', '.join(versions)}")  # fmt: skip
    print(f"FedAvg, Fashion-MNIST, {chosen.clients} clients x {chosen.steps} steps x {chosen.batch} samples, momentum "
          f"{chosen.momentum:g}; median of {chosen.repeats} x {chosen.rounds - 1} rounds")  # fmt: skip
    samples = chosen.steps * chosen.batch
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.pt"
        write_data(arrays, data, chosen.clients, samples)
        work = [
            f"--{n}={getattr(chosen, n)}"
            for n in ("clients", "steps", "batch", "rounds", "workers", "rate", "momentum")
        ]
        for network in chosen.networks:
            seconds: dict[str, list[float]] = {name: [] for name in contenders}
            loss: dict[str, float] = {}
            for _ in range(chosen.repeats):
                for name, (command, environment) in contenders.items():
                    told = one_start([*command, f"--network={network}", f"--data={data}", *work], environment)
                    seconds[name] += told[0]
                    loss[name] = told[1]
            show(network, {n: chosen.clients * samples / statistics.median(s) for n, s in seconds.items()}, loss)


def show(network: str, speed: dict[str, float], loss: dict[str, float]) -> None:
    """Samples per second, what fedloom's are of the better setting of each peer, and the loss, which must be alike."""
    print(f"\n{network:8s}{'':26s}{'samples/s':>12s}{'fedloom is':>12s}{'loss':>9s}")
    for name, value in speed.items():
        print(f"{'':8s}{name:26s}{value:12,.0f}{speed['fedloom'] / value:11.2f}x{loss[name]:9.4f}")
    for peer in ("flwr", "pfl"):
        ratio = speed["fedloom"] / max(value for name, value in speed.items() if name.startswith(peer))
        print(f"{'':8s}of {peer} at its best: {ratio:.2f}x (goal {GOALS[network, peer]}x)", flush=True)


if __name__ == "__main__":
    main()
