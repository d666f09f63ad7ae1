# SPDX-License-Identifier: Apache-2.0
"""What Ray's actors cost and bring: rounds of FedAvg in this process, in processes of its own, and on Ray.

    python benchmarks/actors.py [--rounds 9] [--steps 100] [--clients 32] [--hidden 100] [--kill]

A round is so many clients' MLPs (64-100-10) for so many steps of 32 samples. The ways take turns, round by round, so
that other work on the machine meets them alike. Actors add replies up, but in the last way. ``--kill`` also ends one of
two actors in the middle of a round.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import torch

from fedloom import algorithms
from fedloom.clients.federation import Client, Federation
from fedloom.core.contract import Cohort, Setup
from fedloom.core.task import CLASSIFICATION
from fedloom.engines.auto import ENGINES
from fedloom.engines.engine import Session
from fedloom.engines.job import Means
from fedloom.engines.machine import Machine
from fedloom.engines.memories import Memories
from fedloom.engines.ray import Ray
from fedloom.models.model import Model
from fedloom.models.spec import parse

SAMPLES = 200
SINGLY = "ray, 2 actors, singly"
WAYS = {
    "this process, 1 worker": ("parallel_vectorised", 1),
    "ray, 1 actor": ("ray", 1),
    "this process, 2 workers": ("parallel_vectorised", 2),
    "ray, 2 actors": ("ray", 2),
    SINGLY: ("ray", 2),
}


def federation(clients: int, hidden: int) -> Federation:
    """Random samples, as many for each client."""
    rng, model = np.random.default_rng(0), Model(parse(f"mlp:hidden={hidden}", (64,), 10))
    rows = np.arange(clients * SAMPLES).reshape(clients, SAMPLES)
    none = rows[0, :0]
    roster = {str(i): Client(str(i), model, {"train": own, "val": none, "test": none}) for i, own in enumerate(rows)}
    x = torch.as_tensor(rng.standard_normal((rows.size, 64), dtype=np.float32))
    return Federation(x, torch.as_tensor(rng.integers(0, 10, rows.size)), CLASSIFICATION, roster)


class Counting(Ray):
    """Knows how much comes back to this process."""

    came = 0

    def _read(self, result: Any) -> Any:
        self.came += result[1][1].nbytes
        return super()._read(result)


class Way:
    """Rounds by one engine."""

    def __init__(self, name: str, workers: int, clients: Federation, steps: int, *, singly: bool = False) -> None:
        self.algorithm = algorithms.get("fedavg")
        config = self.algorithm.config(local_epochs=0, local_steps=steps, batch_size=32)
        self.engine = (Counting if name == Ray.name else ENGINES[name])(
            clients, self.algorithm, config, 0, Machine(workers)
        )
        self.means = None if singly else Means(self.algorithm.means, self.algorithm.mean_weight)
        self.setup: Setup[Any] = Setup(config, clients.participants, clients.models, CLASSIFICATION, 0)
        self.state, self.memory, self.round = self.algorithm.init(self.setup), Memories(), 0

    def one_round(self) -> tuple[float, Session]:
        """Its seconds, and what happened."""
        self.round += 1
        session, start = self.engine.session(self.round, self.memory), time.perf_counter()
        cohort, ask = Cohort(self.round, self.setup.clients), partial(session.ask, means=self.means)
        self.state, _ = self.algorithm.round(self.setup, self.state, cohort, ask)
        self.memory = session.memory
        return time.perf_counter() - start, session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=100)
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    clients = federation(options.clients, options.hidden)
    ways = {name: Way(*way, clients, options.steps, singly=name == SINGLY) for name, way in WAYS.items()}
    print(f"Ray was there after {time.perf_counter() - start:.1f} s")
    for way in ways.values():  # processes are started, steps traced
        for _ in range(2):
            way.one_round()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    worked: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            start = time.process_time()
            taken[name].append(way.one_round()[0])
            worked[name].append(time.process_time() - start)
    middle = {name: statistics.median(seconds) for name, seconds in taken.items()}
    for name, seconds in middle.items():
        engine = ways[name].engine
        came = f", {engine.came / ways[name].round / 1e6:.2f} MB come back" if isinstance(engine, Counting) else ""
        own = 1000 * statistics.median(worked[name])
        print(f"{name:24}{seconds:7.3f} s a round, {own:4.0f} ms of this process's CPU time{came}")
    for one, other in (("ray, 1 actor", "this process, 1 worker"), ("ray, 2 actors", "this process, 2 workers")):
        ratios = statistics.median(a / b for a, b in zip(taken[one], taken[other]))
        print(f"{one} takes {ratios:.2f} times as long as {other}, as the median of pairs of rounds")
    print(f"two actors are {middle['ray, 1 actor'] / middle['ray, 2 actors']:.2f} times as fast as one")
    added = ["ray, 1 actor", "ray, 2 actors"]
    for group in (added, [name for name in WAYS if name not in added]):
        first, *others = (ways[name].state.params for name in group)
        alike = all(torch.equal(first[n], other[n]) for other in others for n in other)
        print(f"the bits are the same of {'; '.join(group)}: {alike}")
    if options.kill:
        killed(ways["ray, 2 actors"], middle["ray, 2 actors"])


def killed(way: Way, usual: float) -> None:
    """End one of the actors in the middle of a round."""
    engine = way.engine
    assert isinstance(engine, Ray)
    process = engine.actors()[0].process
    threading.Timer(usual / 2, os.kill, (process, signal.SIGKILL)).start()
    seconds, session = way.one_round()
    print(f"kill -9 of one of two: the round takes {seconds:.1f} s, {len(session.stats.dropped)} clients are dropped")
    print(f"the next one takes {way.one_round()[0]:.3f} s")


if __name__ == "__main__":
    main()
