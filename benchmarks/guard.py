# SPDX-License-Identifier: Apache-2.0
"""What the federation's trial of ``--adapt prior`` saves newcomers, and what it costs them.

    python benchmarks/guard.py --out results/trial/newcomers.json [--settings digits-0.1 ...] [--seeds 0 1 2 3]

For each setting and seed FedAvg is trained, with clients held out, and settled with the prior. Then every newcomer's
samples are divided at random, several times over: what is estimated from some of them without labels is tried on the
others, by the plain model, by the correction without a trial, and as ``admit`` does it. In some settings each client's
images are rotated, brightened and blurred by strengths of its own, as if it had a camera of its own.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from newcomers import NUMBERS, Found, Trial, divide, score, spread

from fedloom.adaptation import trial as tried
from fedloom.adaptation.checks import Reference
from fedloom.clients.shift import apply_shift
from fedloom.core.random import stream
from fedloom.data.arrays import Arrays
from fedloom.data.registry import load
from fedloom.runs.files import write_file
from fedloom.tables.perform import commit
from fedloom.training.config import parse_options
from fedloom.training.simulation import Simulation, split


@dataclass(frozen=True)
class Setting:
    """A federation small enough for a CPU: so many clients of ``samples`` in all, some more held out."""

    title: str
    dataset: str
    partition: str
    shifted: bool = False
    clients: int = 30
    unseen: int = 20
    samples: int = 0
    rounds: int = 40


REPETITIONS = 4
"""Random divisions of each newcomer's samples."""
DIGITS: dict[str, Any] = {"clients": 25, "unseen": 11}
FASHION: dict[str, Any] = {"clients": 40, "unseen": 20, "samples": 12000}
SETTINGS = {
    "digits-path": Setting("digits, two classes per client", "digits", "classes:2", **DIGITS),
    "digits-0.1": Setting("digits, Dirichlet 0.1", "digits", "dirichlet:0.1", **DIGITS),
    "digits-0.5": Setting("digits, Dirichlet 0.5", "digits", "dirichlet:0.5", **DIGITS),
    "digits-10": Setting("digits, Dirichlet 10", "digits", "dirichlet:10", **DIGITS),
    "fashion-path": Setting("Fashion-MNIST, two classes per client", "fashion_mnist", "classes:2", **FASHION),
    "fashion-0.1": Setting("Fashion-MNIST, Dirichlet 0.1", "fashion_mnist", "dirichlet:0.1", **FASHION),
    "fashion-0.5": Setting("Fashion-MNIST, Dirichlet 0.5", "fashion_mnist", "dirichlet:0.5", **FASHION),
    "fashion-10": Setting("Fashion-MNIST, Dirichlet 10", "fashion_mnist", "dirichlet:10", **FASHION),
    "qmnist": Setting("QMNIST, a client per writer", "mnist", "group:writer", clients=60, unseen=30, samples=12000),
    "digits-iid-shifted": Setting("digits, IID, a camera per client", "digits", "iid", shifted=True, **DIGITS),
    "digits-0.5-shifted": Setting(
        "digits, Dirichlet 0.5, a camera per client", "digits", "dirichlet:0.5", shifted=True, **DIGITS
    ),
    "fashion-iid-shifted": Setting("Fashion-MNIST, IID, a camera per client", "fashion_mnist", "iid", True, **FASHION),
    "fashion-0.5-shifted": Setting(
        "Fashion-MNIST, Dirichlet 0.5, a camera per client", "fashion_mnist", "dirichlet:0.5", True, **FASHION
    ),
    "cifar10-0.5-shifted": Setting(
        "CIFAR-10, Dirichlet 0.5, a camera per client", "cifar10", "dirichlet:0.5", True, **FASHION
    ),
    "cifar10-iid-shifted": Setting("CIFAR-10, IID, a camera per client", "cifar10", "iid", True, **FASHION),
}


def few(arrays: Arrays, setting: Setting, seed: int) -> Arrays:
    """Some of the samples: so many at random, or those of so many writers."""
    if setting.partition.startswith("group:"):
        group = arrays.groups[setting.partition.removeprefix("group:")]
        names = stream(seed, "writers").permutation(np.unique(group))[: setting.clients + setting.unseen]
        rows = np.flatnonzero(np.isin(group, names))
    elif setting.samples:
        rows = np.sort(stream(seed, "samples").permutation(len(arrays))[: setting.samples])
    else:
        return arrays
    groups = {name: members[rows] for name, members in arrays.groups.items()}
    return replace(arrays, x=arrays.x[rows], y=arrays.y[rows], split=None, groups=groups)


def with_cameras(arrays: Arrays, options: Any, seed: int) -> Arrays:
    """Each client's images turned, lit and blurred by its own strengths."""
    x, low, high = arrays.x.copy(), arrays.x.min(), arrays.x.max()
    images = x.reshape(-1, 1, 8, 8) if x.ndim == 2 else x
    for client in split(options, arrays).clients:
        rows = np.concatenate([client.train, client.val, client.test])
        draw = stream(seed, str(client.id), "camera")
        strengths = {"rotation": draw.uniform(-40, 40), "brightness": draw.uniform(0.4, 1.6)}
        if images.shape[-1] > 8:  # digits are 8 x 8
            strengths["blur"] = draw.uniform(0.1, 2.0)
        for name, strength in strengths.items():
            images[rows] = apply_shift(images[rows], name, strength, seed, low=low, high=high)
    return replace(arrays, x=images.reshape(x.shape))


def trained(setting: Setting, seed: int, arrays: Arrays) -> Simulation:
    """FedAvg with the prior after its last round, settled."""
    model = "mlp" if setting.dataset == "digits" else "mlp:hidden=100"
    given = {
        "dataset": setting.dataset, "partition": setting.partition, "clients": setting.clients, "seed": seed,
        "unseen": setting.unseen, "rounds": setting.rounds, "model": model, "device": "cpu", "cohort": 10,
        "local_steps": 20, "adapt": "prior",
    }  # fmt: skip
    options, config = parse_options("fedavg", given)
    arrays = few(arrays, setting, seed)
    if setting.shifted:
        arrays = with_cameras(arrays, options, seed)
    made = Simulation("fedavg", options, config, arrays)
    while made.server.round < setting.rounds:
        made.train_round()
    return made


def measured(simulation: Simulation, seed: int) -> dict[str, dict[str, float]]:
    """Newcomers' accuracies in per cent, with ten samples and with all that are not tested on."""
    simulation.settle()
    state = simulation.server.state
    found = Found(state.alpha, state.slope, state.bias, Reference(**state.reference), tried.Trial(**state.trial))
    newcomers = score(simulation)
    trial = Trial(newcomers, divide(newcomers.sizes, REPETITIONS, seed, torch.device("cpu")), found)
    plain, rows = trial.right(trial.raw), {}
    for name, number in (("10", 10), ("all", NUMBERS[-1])):
        free, _, _ = trial.admitted(number, tried_out=False)
        kept, fitting, part = trial.admitted(number)
        guarded = trial.right(kept)
        corrected = (fitting == 1) & (part == 1)
        change = (guarded - plain)[corrected].mean() if bool(corrected.any()) else torch.zeros(())
        figures = {"plain": plain.mean(), "untried": trial.right(free).mean(), "guarded": guarded.mean(),
                   "corrected": corrected.double().mean(), "change": change}  # fmt: skip
        rows[name] = {name: 100 * float(value) for name, value in figures.items()}
    return rows


def summary(title: str, seeds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Means and deviations over seeds, beside each seed's own; gains and costs by seed, as they are paired."""
    rows = dict[str, dict[str, Any]]()
    for number in seeds[0]:
        runs = [one[number] for one in seeds]
        told = [one for one in runs if one["corrected"]]
        paired = [
            {"gain": one["guarded"] - one["plain"], "untried_gain": one["untried"] - one["plain"], **one}
            for one in runs
        ]
        rows[number] = {name: spread([one[name] for one in paired]) for name in paired[0] if name != "change"}
        weights = sum(one["corrected"] for one in told)
        change = sum(one["corrected"] * one["change"] for one in told) / weights if told else None
        rows[number] |= {"change_of_corrected": change, "runs": runs}
    return {"title": title, **rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    loaded, start, found = dict[str, Arrays](), time.process_time(), dict[str, Any]()
    for name in args.settings:
        setting = SETTINGS[name]
        if setting.dataset not in loaded:
            loaded[setting.dataset] = load(setting.dataset, args.data_root)
        seeds = [measured(trained(setting, seed, loaded[setting.dataset]), seed) for seed in args.seeds]
        found[name] = summary(setting.title, seeds)
        print(setting.title, *(f"{number}: {row['gain']['mean']:+.2f}" for number, row in found[name].items()
                               if number != "title"), flush=True)  # fmt: skip
        made = {"commit": commit(), "date": datetime.now(UTC).date().isoformat(), "hardware": "CPU",
                "torch": torch.__version__}  # fmt: skip
        chosen = "" if len(args.settings) == len(SETTINGS) else f" --settings {' '.join(args.settings)}"
        command = f"python benchmarks/guard.py --seeds {' '.join(map(str, args.seeds))}{chosen}"
        result = {"format": 1, "command": command, "made": made, "seeds": args.seeds, "settings": found}
        write_file(args.out, json.dumps(result, indent=1).encode())
    print(f"all: {time.process_time() - start:.0f} seconds of processor time")


if __name__ == "__main__":
    main()
