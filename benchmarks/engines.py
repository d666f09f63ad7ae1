# SPDX-License-Identifier: Apache-2.0
"""The engines against a plain PyTorch loop, as ratios in one run: local training of FedAvg, no evaluation.

    python benchmarks/engines.py [--clients 100] [--steps 20] [--batch 32] [--repeats 5] [--threads 1]

The contenders take turns, round by round, so that other work on the machine meets all of them; medians are compared.
Operator threads are those of the plain loop and of the engines in one process; workers have one each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from fedloom import algorithms
from fedloom.clients.federation import federate
from fedloom.clients.partition import partition
from fedloom.core.contract import Cohort, Setup
from fedloom.core.task import CLASSIFICATION
from fedloom.engines.auto import ENGINES, choose
from fedloom.engines.memories import Memories
from fedloom.engines.workers import cores
from fedloom.models.model import Model
from fedloom.models.spec import parse

SHAPE, CLASSES = (1, 28, 28), 10


def contenders(model_name: str, clients: int, steps: int, batch: int) -> tuple[dict[str, Callable[[int], None]], str]:
    """One round of each, and which engine ``auto`` takes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients * 400, *SHAPE), dtype=np.float32)
    y = rng.integers(0, CLASSES, len(x))
    model = Model(parse(model_name, SHAPE, CLASSES))
    federation = federate(x, y, partition(y, "iid", clients, 0), [model], CLASSIFICATION)
    algorithm = algorithms.get("fedavg")
    config = algorithm.config(local_steps=steps, batch_size=batch)
    setup = Setup(config, federation.participants, federation.models, CLASSIFICATION, 0)
    state = algorithm.init(setup)

    def with_engine(name: str) -> Callable[[int], None]:
        engine, memory = ENGINES[name](federation, algorithm, config, 0), Memories()

        def one_round(number: int) -> None:
            nonlocal memory
            session = engine.session(number, memory)
            algorithm.round(setup, state, Cohort(number, federation.participants), session.ask)
            memory = session.memory

        return one_round

    def plain(number: int) -> None:
        for client in federation.roster.values():
            module = model.module(state.params, {}).train()
            optimiser = torch.optim.SGD(module.parameters(), 5e-3, momentum=0.9, weight_decay=5e-5)
            order = torch.from_numpy(rng.permutation(client.rows["train"]))
            for step in range(steps):
                rows = order[(step * batch) % (len(order) - batch) :][:batch]
                optimiser.zero_grad()
                F.cross_entropy(module(federation.x[rows]), federation.y[rows]).backward()
                torch.nn.utils.clip_grad_norm_(module.parameters(), 50.0)
                optimiser.step()

    names = ("sequential", "parallel", "vectorised", "parallel_vectorised")
    rounds = {"plain loop": plain, **{name: with_engine(name) for name in names}}
    return rounds, choose("auto", federation.device, [model], clients)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("clients", 100), ("steps", 20), ("batch", 32), ("repeats", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    samples = options.clients * options.steps * options.batch
    print(f"torch {torch.__version__}, {cores()} cores, {options.threads} operator threads, {options.clients} clients "
          f"x {options.steps} steps x {options.batch} samples, median of {options.repeats}")  # fmt: skip
    print(f"{'model':16s}{'way':21s}{'samples/s':>12s}{'of plain':>10s}{'of sequential':>15s}   auto takes")
    for model in ("mlp:hidden=100", "lenet"):
        rounds, chosen = contenders(model, options.clients, options.steps, options.batch)
        seconds: dict[str, list[float]] = {name: [] for name in rounds}
        for repeat in range(options.repeats + 1):
            for name, one_round in rounds.items():
                start = time.perf_counter()
                one_round(repeat)
                if repeat:  # the first round warms up, and traces
                    seconds[name].append(time.perf_counter() - start)
        speed = {name: samples / statistics.median(taken) for name, taken in seconds.items()}
        for name, value in speed.items():
            mark = "<-" if name == chosen else ""
            ratios = (value / speed["plain loop"], value / speed["sequential"])
            print(f"{model:16s}{name:21s}{value:12,.0f}{ratios[0]:9.2f}x{ratios[1]:14.2f}x   {mark}")


if __name__ == "__main__":
    main()
