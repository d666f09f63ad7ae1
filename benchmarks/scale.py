# SPDX-License-Identifier: Apache-2.0
"""The time of a round and the memory of a run against the number of registered clients: pFedHN, cohorts of 50.

    python benchmarks/scale.py [--clients 100 10000 1000000] [--rounds 12] [--device cpu] [--engine ray]

Every size has a process of its own, so that its memory is its own; the data are random, two samples a client. The CPU
time is the server's, without that of the processes that train: other work on the machine takes little part in it.
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

    def update(self, record: dict[str, Any]) -> None:
        self.stamps.append(time.process_time())


def one(clients: int, rounds: int, device: str, engine: str = "auto") -> None:
    """Train, and print a line."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2 * clients, 16), dtype=np.float32)
    y = rng.integers(0, 10, len(x))
    stamp = Stamp()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run = fedloom.run(
            "pfedhn", dataset=(x, y), model="mlp:hidden=64", clients=clients, partition="iid", embed_dim=32, cohort=50,
            rounds=rounds, local_steps=20, batch_size=32, eval_every=rounds, eval_clients=50, val_share=0.0,
            test_share=0.0, device=device, engine=engine, threads=1, out=Path(folder) / "run", progress=stamp,
        )  # fmt: skip
        total = time.perf_counter() - start
        records = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    taken = [record["seconds"]["round"] for record in records if "seconds" in record][2:]
    used = [after - before for before, after in pairwise(stamp.stamps)][1:-1]  # the last round is evaluated
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{clients:9,d} clients: {statistics.median(taken) * 1e3:7.0f} ms a round (least {min(taken) * 1e3:.0f}), "
          f"{statistics.median(used) * 1e3:.0f} ms of them the server's CPU time (least {min(used) * 1e3:.0f}), "
          f"{peak:.2f} GiB at most, {total:.0f} s for the whole run", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 10_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="auto")
    options = parser.parse_args()
    for clients in options.clients:
        process = multiprocessing.get_context("spawn").Process(
            target=one, args=(clients, options.rounds, options.device, options.engine)
        )
        process.start()
        process.join()


if __name__ == "__main__":
    main()
