# SPDX-License-Identifier: Apache-2.0
"""The time of a round and the memory of a run against the number of registered clients: pFedHN, cohorts of 50.

    python benchmarks/scale.py [--clients 100 10000 1000000] [--rounds 12] [--device cpu] [--engine ray]
                               [--samples 2] [--on-disk]

Every size has a process of its own, so that its memory is its own; the data are random, two samples a client. The CPU
time is the server's, without that of the processes that train: other work on the machine takes little part in it.
``--on-disk`` leaves the samples in a file; what of it happens to be in memory is not counted as the run's own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import fedloom
from fedloom.progress import Quiet


class Stamp(Quiet):
    """The CPU time that the process had used when each round ended."""

    def __init__(self) -> None:
        self.stamps: list[float] = []
        self.own = 0.0

    def update(self, record: dict[str, Any]) -> None:
        self.stamps.append(time.process_time())
        self.own = max(self.own, own_memory())


def own_memory() -> float:
    """GiB in this process's memory that are not of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) / 2**20


def samples_of(clients: int, each: int, folder: Path | None) -> Any:
    """Random samples; in files of ``folder``, if it is given."""
    rng, number = np.random.default_rng(0), clients * each
    y = rng.integers(0, 10, number)
    if folder is None:
        return rng.standard_normal((number, 16), dtype=np.float32), y
    folder.mkdir()
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (number, 16))
    for start in range(0, number, 1 << 20):
        x[start : start + (1 << 20)] = rng.standard_normal((min(1 << 20, number - start), 16), dtype=np.float32)
    x.flush()
    np.save(folder / "y.npy", y)
    return str(folder)


def one(
    clients: int, rounds: int, device: str, engine: str = "auto", samples: int = 2, *, on_disk: bool = False
) -> None:
    """Train, and print a line."""
    stamp = Stamp()
    with tempfile.TemporaryDirectory() as folder:
        dataset = samples_of(clients, samples, Path(folder) / "data" if on_disk else None)
        start = time.perf_counter()
        run = fedloom.run(
            "pfedhn", dataset=dataset, model="mlp:hidden=64", clients=clients, partition="iid", embed_dim=32, cohort=50,
            rounds=rounds, local_steps=20, batch_size=32, eval_every=rounds, eval_clients=50, val_share=0.0,
            test_share=0.0, device=device, engine=engine, threads=1, out=Path(folder) / "run", progress=stamp,
        )  # fmt: skip
        total = time.perf_counter() - start
        records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    taken = [record["seconds"]["round"] for record in records if "seconds" in record][2:]
    used = [after - before for before, after in pairwise(stamp.stamps)][1:-1]  # the last round is evaluated
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    line = (
        f"{clients:9,d} clients: {statistics.median(taken) * 1e3:7.0f} ms a round (least {min(taken) * 1e3:.0f}), "
        f"{statistics.median(used) * 1e3:.0f} ms of them the server's CPU time (least {min(used) * 1e3:.0f}), "
        f"{peak:.2f} GiB at most, {stamp.own:.2f} GiB in rounds that are not of files, {total:.0f} s for the whole run"
    )
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 10_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--samples", type=int, default=2, help="of each client")
    parser.add_argument("--on-disk", action="store_true")
    options = parser.parse_args()
    for clients in options.clients:
        process = multiprocessing.get_context("spawn").Process(
            target=one,
            args=(clients, options.rounds, options.device, options.engine, options.samples),
            kwargs={"on_disk": options.on_disk},
        )
        process.start()
        process.join()


if __name__ == "__main__":
    main()
