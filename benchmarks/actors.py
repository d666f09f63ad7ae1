# SPDX-License-Identifier: Apache-2.0
"""What Ray's actors cost and bring: rounds of FedAvg in this process, in processes of its own, and on Ray.

    python benchmarks/actors.py [--rounds 9] [--steps 100] [--kill]

A round is 32 clients' MLPs (64-100-10) for so many steps of 32 samples. The ways take turns, round by round, so that
other work on the machine meets them alike. ``--kill`` also ends one of two actors in the middle of a round.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import threading
import time
from typing import Any

import numpy as np
import torch

from fedloom import algorithms
from fedloom.clients.federation import Client, Federation
from fedloom.core.contract import Cohort, Setup
from fedloom.core.task import CLASSIFICATION
from fedloom.engines.auto import ENGINES
from fedloom.engines.engine import Session
from fedloom.engines.machine import Machine
from fedloom.engines.memories import Memories
from fedloom.engines.ray import Ray
from fedloom.models.model import Model
from fedloom.models.spec import parse

CLIENTS, SAMPLES = 32, 200
WAYS = {
    "this process, 1 worker": ("parallel_vectorised", 1),
    "ray, 1 actor": ("ray", 1),
    "this process, 2 workers": ("parallel_vectorised", 2),
    "ray, 2 actors": ("ray", 2),
}


def federation() -> Federation:
    """Random samples, as many for each client."""
    rng, model = np.random.default_rng(0), Model(parse("mlp:hidden=100", (64,), 10))
    rows = np.arange(CLIENTS * SAMPLES).reshape(CLIENTS, SAMPLES)
    none = rows[0, :0]
    roster = {str(i): Client(str(i), model, {"train": own, "val": none, "test": none}) for i, own in enumerate(rows)}
    x = torch.as_tensor(rng.standard_normal((rows.size, 64), dtype=np.float32))
    return Federation(x, torch.as_tensor(rng.integers(0, 10, rows.size)), CLASSIFICATION, roster)


class Way:
    """Rounds by one engine."""

    def __init__(self, name: str, workers: int, steps: int) -> None:
        self.algorithm, clients = algorithms.get("fedavg"), federation()
        config = self.algorithm.config(local_epochs=0, local_steps=steps, batch_size=32)
        self.engine = ENGINES[name](clients, self.algorithm, config, 0, Machine(workers))
        self.setup: Setup[Any] = Setup(config, clients.participants, clients.models, CLASSIFICATION, 0)
        self.state, self.memory, self.round = self.algorithm.init(self.setup), Memories(), 0

    def one_round(self) -> tuple[float, Session]:
        """Its seconds, and what happened."""
        self.round += 1
        session, start = self.engine.session(self.round, self.memory), time.perf_counter()
        cohort = Cohort(self.round, self.setup.clients)
        self.state, _ = self.algorithm.round(self.setup, self.state, cohort, session.ask)
        self.memory = session.memory
        return time.perf_counter() - start, session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    ways = {name: Way(*way, options.steps) for name, way in WAYS.items()}
    print(f"Ray was there after {time.perf_counter() - start:.1f} s")
    for way in ways.values():  # processes are started, steps traced
        for _ in range(2):
            way.one_round()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            taken[name].append(way.one_round()[0])
    middle = {name: statistics.median(seconds) for name, seconds in taken.items()}
    for name, seconds in middle.items():
        print(f"{name:24}{seconds:7.3f} s a round")
    for one, other in (("ray, 1 actor", "this process, 1 worker"), ("ray, 2 actors", "this process, 2 workers")):
        ratios = statistics.median(a / b for a, b in zip(taken[one], taken[other]))
        print(f"{one} takes {ratios:.2f} times as long as {other}, as the median of pairs of rounds")
    print(f"two actors are {middle['ray, 1 actor'] / middle['ray, 2 actors']:.2f} times as fast as one")
    states = [way.state.params for way in ways.values()]
    print("the bits are the same:", all(torch.equal(states[0][n], other[n]) for other in states for n in other))
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
