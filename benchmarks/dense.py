# SPDX-License-Identifier: Apache-2.0
"""Where the time of a dense client's step goes on one core of a CPU, and what the limit is.

    python benchmarks/dense.py [--clients 13] [--rounds 8]

FedAvg, MLP 784-100-10, 20 steps of 32 samples, plain SGD, one process with one thread. CPU time, not the clock's: other
work on the machine takes little part in it. Each line is the lower quartile, per client and step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fedloom import algorithms
from fedloom.clients.federation import federate
from fedloom.clients.partition import partition
from fedloom.core.contract import Cohort, Setup
from fedloom.core.task import CLASSIFICATION
from fedloom.engines import traced, vectorised
from fedloom.engines.machine import Machine
from fedloom.engines.memories import Memories
from fedloom.engines.parallel import ParallelVectorised
from fedloom.models.model import Model
from fedloom.models.spec import parse

STEPS, BATCH = 20, 32


@contextmanager
def timed(owner: Any, name: str) -> Iterator[list[float]]:
    """The CPU seconds of every call of ``owner.name``."""
    function, seconds = getattr(owner, name), []

    def call(*arguments: Any) -> Any:
        start = time.thread_time()
        result = function(*arguments)
        seconds.append(time.thread_time() - start)
        return result

    with patch.object(owner, name, call):
        yield seconds


def repeated(function: Callable[[], Any], times: int = 200) -> list[float]:
    seconds = []
    for _ in range(times):
        start = time.thread_time()
        function()
        seconds.append(time.thread_time() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=13, help="clients in a batch")
    parser.add_argument("--rounds", type=int, default=8)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    clients = chosen.clients
    everybody = 4 * clients
    rng = np.random.default_rng(0)
    x = rng.standard_normal((everybody * STEPS * BATCH, 1, 28, 28), dtype=np.float32)
    y = rng.integers(0, 10, len(x))
    parts = partition(y, "iid", everybody, 0, val_share=0.0, test_share=0.0)
    federation = federate(x, y, parts, [Model(parse("mlp:hidden=100", (1, 28, 28), 10))], CLASSIFICATION)
    algorithm = algorithms.get("fedavg")
    config = algorithm.config(local_steps=STEPS, batch_size=BATCH, local_lr=0.05, momentum=0, weight_decay=0, clip=0)
    setup = Setup(config, federation.participants, federation.models, CLASSIFICATION, 0)
    engine = ParallelVectorised(federation, algorithm, config, 0, Machine(workers=1))
    engine.part_size = lambda job: clients
    state, memory = algorithm.init(setup), Memories()

    def one_round(number: int) -> None:
        nonlocal memory
        session = engine.session(number, memory)
        algorithm.round(setup, state, Cohort(number, federation.participants), session.ask)
        memory = session.memory

    for number in range(3):  # until steps are traced
        one_round(number)
    with timed(engine.inner, "run_group") as parts_of_rounds, timed(vectorised, "_gather") as gathered:
        rounds = []
        for number in range(3, 3 + chosen.rounds):
            start = time.thread_time()
            one_round(number)
            rounds.append(time.thread_time() - start)
    (run,) = engine.inner._traces._forms.kept.values()
    assert run is not None
    given = [leaf.clone() for leaf in _arguments(run, engine, one_round)]
    images, weights = torch.randn(clients, BATCH, 784), torch.randn(clients, 100, 784)
    slopes = torch.randn(clients, BATCH, 100)

    def show(what: str, seconds: list[float], per: int) -> None:
        print(f"{what:60s}{np.quantile(seconds, 0.25) / per * 1e6:7.0f} µs")

    print(f"torch {torch.__version__}, batches of {clients} clients; per client and step:")
    show(
        "the two products of the first layer, by themselves",
        repeated(lambda: _products(images, weights, slopes)),
        clients,
    )
    show("a traced step, again and again on the same numbers", repeated(lambda: run(*given)), clients)
    show("gathering images", [g for g in gathered if g > np.median(gathered)], clients)
    show("a client's whole training", parts_of_rounds, clients * STEPS)
    show("a round, with checks and the mean", rounds, everybody * STEPS)


def _products(images: Tensor, weights: Tensor, slopes: Tensor) -> None:
    torch.bmm(images, weights.mT)
    torch.bmm(slopes.mT, images)


def _arguments(run: traced.Run, engine: ParallelVectorised, one_round: Callable[[int], None]) -> list[Tensor]:
    """What the traced step is called with."""
    met: list[Any] = []
    kinds = engine.inner._traces._forms.kept
    before = dict(kinds)
    kinds.update({kind: lambda *given: met.append(given) or run(*given) for kind in kinds})
    one_round(0)
    kinds.update(before)
    return list(met[0])


if __name__ == "__main__":
    main()
