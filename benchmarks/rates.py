# SPDX-License-Identifier: Apache-2.0
"""What ``--local-lr auto`` finds, against a method's own rate and a tuned one.

    python benchmarks/rates.py --out results/rates/all.json [--settings "FedAvg, digits, IID" ...] [--seeds 0 1 2]

In each setting a method is trained with its own rate, with the rate that short trials find (anew for each seed), and
with the best of seven, from a tenth to a hundred times its own, by the validation score of the first seed's whole runs.
Accuracies are those on participants' test data at the best round by validation data.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import fedloom
from fedloom import algorithms
from fedloom.core.errors import FedloomError
from fedloom.core.random import stream
from fedloom.data import from_arrays
from fedloom.data.arrays import Arrays
from fedloom.data.registry import load
from fedloom.runs.files import write_file
from fedloom.tables.perform import commit

FACTORS = (0.1, 0.3, 1, 3, 10, 30, 100)
SHARED: dict[str, Any] = {
    "clients": 20, "model": "mlp:hidden=32", "rounds": 40, "cohort": 10, "local_epochs": 0, "local_steps": 20,
    "batch_size": 16, "eval_every": 5, "device": "cpu", "workers": 1, "progress": "quiet", "keep": 1,
}  # fmt: skip
IID, CLASSES, DIRICHLET = {"partition": "iid"}, {"partition": "classes:2"}, {"partition": "dirichlet:0.5"}
CAMERAS = {**IID, "client_shift": "rotation:60,brightness"}
WRITERS = {"partition": "group:writer", "clients": 40}
PEOPLE = {"partition": "group:client", "model": "conv1d:channels=4x8x8"}
BY_ONE = {"cohort": 1, "rounds": 400, "eval_every": 50}


class Setting(NamedTuple):
    """A method on some data."""

    method: str
    data: str
    options: dict[str, Any]


SETTINGS = {
    "FedAvg, digits, IID": Setting("fedavg", "digits", IID),
    "FedAvg, digits, two classes per client": Setting("fedavg", "digits", CLASSES),
    "FedAvg, digits, a camera per client": Setting("fedavg", "digits", CAMERAS),
    "FedAvg, QMNIST, a client per writer": Setting("fedavg", "mnist", WRITERS),
    "FedAvg, Fashion-MNIST, Dirichlet 0.5": Setting("fedavg", "fashion_mnist", DIRICHLET),
    "FedAvg, made-up sensors, a client per person": Setting("fedavg", "sensors", PEOPLE),
    "FedPer, Fashion-MNIST, two classes per client": Setting("fedper", "fashion_mnist", CLASSES),
    "pFedHN, digits, two classes per client": Setting("pfedhn", "digits", {**CLASSES, **BY_ONE}),
    "MH-pFedHN, digits, a camera per client": Setting("mh_pfedhn", "digits", {**CAMERAS, "server_step": "in_turn"}),
    "MH-pFedHN, made-up sensors, a client per person": Setting(
        "mh_pfedhn", "sensors", {**PEOPLE, "server_step": "in_turn"}
    ),
}


def sensors() -> Arrays:
    """Windows of 3 channels by 32 steps: an activity is a frequency, a person has gains, a tempo and noise."""
    draw = stream(0, "sensors")
    people, each, steps = SHARED["clients"], 60, np.arange(32)
    person, activity = np.repeat(np.arange(people), each), draw.integers(0, 6, people * each)
    tempo, gain = draw.uniform(0.7, 1.3, people), draw.uniform(0.3, 2, (people, 3, 1))
    pace = 0.1 * (1 + activity) * tempo[person]
    start = draw.uniform(0, 2 * np.pi, (len(person), 3, 1))
    x = gain[person] * np.sin(start + pace[:, None, None] * steps) + draw.normal(0, 0.5, (len(person), 3, len(steps)))
    return from_arrays(x, activity, client=person.astype(str), name="sensors")


@cache
def data(name: str) -> Arrays:
    made: dict[str, Callable[[], Arrays]] = {"sensors": sensors}
    return made[name]() if name in made else load(name)


def accuracy(setting: Setting, seed: int, rate: float | str) -> dict[str, float]:
    """The best round's accuracies on validation and test data, and the rate that was used."""
    with tempfile.TemporaryDirectory() as folder:
        run = fedloom.run(
            setting.method, dataset=data(setting.data), out=Path(folder) / "run", seed=seed, local_lr=rate,
            **{**SHARED, **setting.options},
        )  # fmt: skip
        best, used = run.summary["best"], run.server.config.local_lr
    return {"rate": used} | {split: best[f"deployed/participants/{split}/accuracy"] for split in ("val", "test")}


def measured(setting: Setting, seeds: list[int]) -> dict[str, Any]:
    """Test accuracies by seed with the method's own rate, with the one that trials find, and with a tuned one."""
    own = algorithms.get(setting.method).config().local_lr
    tried = {}
    for factor in FACTORS:
        rate = float(f"{own * factor:.3g}")
        try:
            tried[rate] = accuracy(setting, seeds[0], rate)
        except FedloomError:  # too large a rate
            continue
    tuned = max(tried, key=lambda rate: tried[rate]["val"])
    again = {rate: [tried[rate], *(accuracy(setting, seed, rate) for seed in seeds[1:])] for rate in {own, tuned}}
    auto = [accuracy(setting, seed, "auto") for seed in seeds]
    tests = {name: [one["test"] for one in runs]
             for name, runs in (("own", again[own]), ("auto", auto), ("tuned", again[tuned]))}  # fmt: skip
    return {**tests, "rates": {"own": own, "auto": [one["rate"] for one in auto], "tuned": tuned}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found = dict[str, Any]()
    for name in args.settings:
        start = time.process_time()
        found[name] = measured(SETTINGS[name], args.seeds)
        means = {which: float(np.mean(found[name][which])) for which in ("own", "auto", "tuned")}
        print(name, *(f"{which} {100 * mean:.1f}" for which, mean in means.items()), found[name]["rates"],
              f"{time.process_time() - start:.0f} s", flush=True)  # fmt: skip
        made = {"commit": commit(), "date": datetime.now(UTC).date().isoformat(), "hardware": "CPU",
                "torch": torch.__version__}  # fmt: skip
        chosen = "" if len(args.settings) == len(SETTINGS) else f" --settings {' '.join(map(repr, args.settings))}"
        command = f"python benchmarks/rates.py --seeds {' '.join(map(str, args.seeds))}{chosen}"
        result = {"format": 1, "command": command, "made": made, "seeds": args.seeds, "settings": found}
        write_file(args.out, json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    main()
