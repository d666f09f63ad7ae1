# SPDX-License-Identifier: Apache-2.0
"""What a client's step of each baseline takes, as a multiple of FedAvg's on the same engine, in one run.

    python benchmarks/baselines.py [--clients 8] [--steps 20] [--batch 32] [--hidden 100] [--repeats 9] [--out FILE]

One process with one thread; the steps of all clients are one batch, traced as the workers of parallel_vectorised trace
them. After every round of a method comes one of FedAvg, so that other work on the machine meets both; the ratio is
taken of the two, and of the ratios the median. CPU time, not the clock's. Only the asks that train are timed: what
comes besides is in the methods' pages. A method that is slower than ``LIMIT`` must have a reason in its equations,
``REASONS``. ``--out results/performance/baselines.json`` writes what docs/speed-of-methods.md is made from.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedloom import algorithms
from fedloom.clients.federation import Federation, federate
from fedloom.clients.partition import partition
from fedloom.core.contract import Cohort, Program, ServerData, Setup
from fedloom.core.task import CLASSIFICATION
from fedloom.core.trees import PerClient
from fedloom.engines.memories import Memories
from fedloom.engines.vectorised import Vectorised
from fedloom.engines.workers import cores
from fedloom.models.model import Model
from fedloom.models.spec import parse

SHAPE, CLASSES = (1, 28, 28), 10
LIMIT = 1.2
"""How many times FedAvg's step a baseline's may take without a reason."""
PAPERS = {"pfedhn", "pfedhn_pc", "mh_pfedhn", "mh_pfedhn_gd", "it_pfl_hn", "hypergenfl", "hyperfedzero"}
"""The methods that the others are baselines of."""
REASONS = {
    "apfl": "a second gradient, at the mix, and a step on the own model",
    "ditto": "a second gradient and step, of the personal model",
    "fedala": "the weights of the upper tensors and their mix, beside a step of training",
    "fedakt": "a second network, the adapter, and the head twice",
    "fedjets": "two experts are trained, and the common one looks at each sample first",
    "fedsam": "a second gradient, at the worst point nearby",
    "fedsr": "a dense layer more, a draw for each feature, the divergence and its gradient",
    "moon": "two more forward passes, of the global and of the last model",
    "per_fedavg": "a second gradient; each on half of the step's samples",
    "pfedme": "five gradients and steps on each batch",
}
"""What the equations of a method ask for besides FedAvg's gradient and step."""


def options_of(name: str, steps: int, batch: int) -> dict[str, Any]:
    """Steps of as many samples as FedAvg's, and the stage of a method that is its own."""
    own = {
        "fedakt": {"adapter": "mlp:hidden=100"},  # as large as the network; by default it would be a convolutional one
        "fedala": {"local_steps": steps // 2, "weight_steps": steps - steps // 2},
        "fedjets": {"common_rounds": 0},
        "fednova": {"local_epochs": 0},
        "fedrep": {"local_steps": steps // 10, "head_steps": steps - steps // 10},
        "lg_fedavg": {"pretrain_rounds": 0},
        "per_fedavg": {"batch_size": batch // 2},  # of two parts
        "feddf": {"server_steps": 0},
        "fedbe": {"server_epochs": 0},
        "fedlaw": {"server_epochs": 0},
    }
    return {"local_steps": steps, "batch_size": batch, **own.get(name, {})}


def rounds_of(name: str, federation: Federation, steps: int, batch: int) -> Callable[[int], float]:
    """A round of a method; it gives the seconds of CPU time per client and step of the asks that train."""
    algorithm = algorithms.get(name)
    config = algorithm.config(**options_of(name, steps, batch))
    clients, server = federation.participants, ServerData(federation.x[:100], federation.y[:100])
    setup = Setup(config, clients, federation.models, CLASSIFICATION, 0, rounds=100, server_data=server)
    engine, memory, state = Vectorised(federation, algorithm, config, 0, traced=True), Memories(), algorithm.init(setup)

    def one_round(number: int) -> float:
        nonlocal memory, state
        session, seconds = engine.session(number, memory), []

        def timed(program: Program, shared: Any, mine: Any) -> PerClient:
            start = time.thread_time()
            replies = session.ask(program, shared, mine)
            if program.batches == config.batches():
                seconds.append(time.thread_time() - start)
            return replies

        after, _ = algorithm.round(setup, state, Cohort(number, clients), timed)
        if number == 1:  # what is done once is done; from then on every round has the same work
            state, memory = after, session.memory
        (taken,) = seconds
        return taken / len(clients) / steps

    return one_round


def measured(names: list[str], clients: int, steps: int, batch: int, hidden: int, repeats: int) -> dict[str, Any]:
    """The median of each method's ratio to FedAvg, and FedAvg's own time."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients * 400, *SHAPE), dtype=np.float32)
    y = rng.integers(0, CLASSES, len(x))
    model = Model(parse(f"mlp:hidden={hidden}", SHAPE, CLASSES))
    federation = federate(x, y, partition(y, "iid", clients, 0), [model], CLASSIFICATION)
    ratios: dict[str, float] = {}
    alone: list[float] = []
    warm = 100 // steps + 2  # steps are traced after a hundred
    for name in names:
        # both anew: a process gives later comers other places in memory
        method, fedavg = (rounds_of(which, federation, steps, batch) for which in (name, "fedavg"))
        pairs = [(method(number), fedavg(number)) for number in range(1, warm + repeats)][warm - 1 :]
        ratios[name] = statistics.median(one / other for one, other in pairs)
        print(f"{name:14s}{ratios[name]:6.2f}", flush=True)
        alone += [other for _, other in pairs]
    return {"ratios": ratios, "fedavg_microseconds": statistics.median(alone) * 1e6}


def unexplained(ratios: dict[str, float]) -> list[str]:
    """The methods that are slower than the limit for no reason of their equations."""
    return [name for name, ratio in ratios.items() if ratio > LIMIT and name not in REASONS]


def written(found: dict[str, Any], settings: dict[str, int]) -> dict[str, Any]:
    """The file: a row for each method, the slowest first."""
    commit = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True)
    made = {
        "commit": commit.stdout.strip(),
        "date": date.today().isoformat(),
        "hardware": f"one of {cores()} CPU cores",
        "torch": torch.__version__.partition("+")[0],
    }
    rows = [
        [algorithms.get(name).name, f"{ratio:.2f}x", REASONS[name] if ratio > LIMIT else ""]
        for name, ratio in sorted(found["ratios"].items(), key=lambda item: -item[1])
    ]
    return {
        "format": 1,
        "title": "A client's step of the baselines by that of FedAvg",
        "command": "python benchmarks/baselines.py --out results/performance/baselines.json",
        "note": f"MLP 784-{settings['hidden']}-10, {settings['clients']} clients x {settings['steps']} steps x "
        f"{settings['batch']} samples, random data, one thread, CPU time, medians of {settings['repeats']} pairs of "
        f"rounds; FedAvg takes {found['fedavg_microseconds']:.0f} µs per client and step.",
        "made": [made],
        "columns": ["method", "of FedAvg's step", "what its equations ask for besides"],
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {"clients": 8, "steps": 20, "batch": 32, "hidden": 100, "repeats": 9}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--methods", default=",".join(n for n in algorithms.built_in() if n not in {"fedavg", *PAPERS}))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: getattr(options, name) for name in sizes}
    found = measured(options.methods.split(","), **settings)
    print(f"FedAvg: {found['fedavg_microseconds']:.0f} µs per client and step")
    if slow := unexplained(found["ratios"]):
        raise SystemExit(f"Slower than {LIMIT} times FedAvg for no reason of their equations: {', '.join(slow)}.")
    if options.out:
        content = json.dumps(written(found, settings), indent=1, ensure_ascii=False)
        options.out.write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
