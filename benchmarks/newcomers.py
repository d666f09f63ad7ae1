# SPDX-License-Identifier: Apache-2.0
"""Newcomers without labels: their accuracy against the number of unlabelled samples, and under feature shifts.

    python benchmarks/newcomers.py --data-root DATA --device cuda --out DIR [--settings cifar10-path ...] [--quick]

For each setting and seed FedAvg is trained, with clients held out, and calibrated by its participants. Each held-out
client's scores are computed once. Then, many times over, its samples are divided at random: up to 500 to estimate from,
at least a sixth to be tested on. What is estimated from the first n of the former is tried on all of the latter.
Every setting's DIR/NAME.json is written as soon as a seed of it is done. In the repository DIR is results/newcomers;
``benchmarks/pages.py`` makes the tables and figures of docs/results-newcomers.md from it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.adaptation import trial as tried
from fedloom.adaptation.checks import Reference, judge, statistics
from fedloom.adaptation.dirichlet import estimate, shares
from fedloom.clients.shift import apply_shift, shifts
from fedloom.core.random import stream
from fedloom.data.arrays import Arrays
from fedloom.data.registry import load
from fedloom.runs.files import write_file
from fedloom.tables.perform import commit
from fedloom.training.config import parse_options
from fedloom.training.simulation import Simulation

NUMBERS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
RAW, EM, OURS, UNCALIBRATED, TRUE = "FedAvg", "plain EM", "FedAvg + prior", "without calibration", "true prior"
LABELLED, PFEDHN = "FedAvg + prior, labelled participants", "pFedHN, labelled participants"
IT_PFL_HN = {preset: f"IT-PFL-HN, {preset}" for preset in ("paper", "standardised")}


@dataclass(frozen=True)
class Setting:
    """A federation: 100 clients of which some are held out, except where clients are natural."""

    title: str
    dataset: str
    partition: str
    rounds: int = 250
    clients: int = 80
    unseen: int = 20


SETTINGS = {
    "cifar10-path": Setting("CIFAR-10, two classes per client", "cifar10", "classes:2"),
    "cifar10-0.1": Setting("CIFAR-10, Dirichlet 0.1", "cifar10", "dirichlet:0.1"),
    "cifar10-0.5": Setting("CIFAR-10, Dirichlet 0.5", "cifar10", "dirichlet:0.5"),
    "cifar10-10": Setting("CIFAR-10, Dirichlet 10", "cifar10", "dirichlet:10"),
    "cifar100-path": Setting("CIFAR-100, ten classes per client", "cifar100", "classes:10", rounds=300),
    "cifar100-0.1": Setting("CIFAR-100, Dirichlet 0.1", "cifar100", "dirichlet:0.1", rounds=300),
    "fashion-path": Setting("Fashion-MNIST, two classes per client", "fashion_mnist", "classes:2", rounds=150),
    "fashion-0.1": Setting("Fashion-MNIST, Dirichlet 0.1", "fashion_mnist", "dirichlet:0.1", rounds=150),
    "fashion-10": Setting("Fashion-MNIST, Dirichlet 10", "fashion_mnist", "dirichlet:10", rounds=150),
    "qmnist": Setting("QMNIST, a client per writer", "mnist", "group:writer", rounds=150, clients=200, unseen=50),
}


class Draws(NamedTuple):
    """Random divisions of newcomers: rows of newcomers x repetitions, padded."""

    newcomer: Tensor  # (rows,)
    given: Tensor  # (rows, 500) samples of the newcomer to estimate from
    number: Tensor  # (rows,) how many of them are real
    tested: Tensor  # (rows, tested)
    real: Tensor  # (rows, tested) bool


class Newcomers(NamedTuple):
    """Scores of all newcomers' samples, padded, and what the participants found out."""

    scores: Tensor  # (newcomers, samples, classes)
    labels: Tensor  # (newcomers, samples), -1: padding
    sizes: list[int]


class Found(NamedTuple):
    """What settling found: see ``fedloom.adaptation.prior``."""

    alpha: Tensor
    slope: Tensor
    bias: Tensor
    reference: Reference
    trial: tried.Trial


class Clock:
    """Seconds by phase."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, dict[str, float]()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def build(
    method: str, setting: Setting, seed: int, arrays: Arrays, args: argparse.Namespace, **more: Any
) -> Simulation:
    """A federation of the setting before its first round."""
    given = {
        "dataset": setting.dataset, "partition": setting.partition, "clients": setting.clients, "seed": seed,
        "unseen": setting.unseen, "rounds": setting.rounds, "model": args.model, "device": args.device,
        "local_steps": args.local_steps, **more,
    }  # fmt: skip
    options, config = parse_options(method, given)
    return Simulation(method, options, config, arrays)


def train(simulation: Simulation) -> Simulation:
    """All rounds, without evaluations."""
    while simulation.server.round < simulation.server.options.rounds:
        simulation.train_round()
    return simulation


def score(simulation: Simulation, shift: str | None = None) -> Newcomers:
    """The plain model's scores of everything that newcomers hold, with their images shifted if so wished."""
    federation, data, server = simulation.federation, simulation.arrays, simulation.server
    low, high = data.x.min(), data.x.max()
    shared, mine = server.base.send(server.setup, server.plain(server.state), federation.unseen)
    scores, labels = [], []
    for row, client in enumerate(federation.unseen):
        rows = federation.roster[client].of("all")
        x = federation.x[torch.as_tensor(rows)]
        if shift:
            seed = server.options.seed * 1000 + row
            x = torch.from_numpy(apply_shift(data.x[rows], shift, None, seed, low=low, high=high)).to(x)
        home = server.home(client)
        with torch.no_grad():
            plain = server.base.client_deploy(home, shared, mine[client], server.recall(client))
            scores.append(server.base.predict(home, plain, x))
        labels.append(federation.y[torch.as_tensor(rows)])
    pad = torch.nn.utils.rnn.pad_sequence
    return Newcomers(pad(scores, True), pad(labels, True, padding_value=-1), [len(y) for y in labels])


def divide(sizes: list[int], repetitions: int, seed: int, device: torch.device) -> Draws:
    """Each newcomer ``repetitions`` times: up to 500 samples to estimate from, at least a sixth to be tested on."""
    most = NUMBERS[-1]
    plan = [(row, r) for row in range(len(sizes)) for r in range(repetitions)]
    given, tested = np.zeros((2, len(plan), most), dtype=np.int64)
    numbers, real = np.zeros(len(plan), dtype=np.int64), np.zeros((len(plan), most), dtype=bool)
    for at, (row, r) in enumerate(plan):
        order = stream(seed, row, r, "division").permutation(sizes[row])
        numbers[at] = number = min(most, sizes[row] - max(1, sizes[row] // 6))
        rest = order[number:][:most]
        given[at, :number], tested[at, : len(rest)], real[at, : len(rest)] = order[:number], rest, True
    newcomer = np.array([row for row, _ in plan])
    return Draws(*(torch.as_tensor(a, device=device) for a in (newcomer, given, numbers, tested, real)))


def plain_em(scores: Tensor, mask: Tensor, steps: int = 100) -> Tensor:
    """Saerens et al. (2002): shares that make the samples likeliest, from even ones on."""
    prior = torch.full_like(scores[:, 0], 1 / scores.shape[-1])
    for _ in range(steps):
        found = torch.softmax(scores + torch.log(prior)[:, None], -1) * mask[..., None]
        prior = (found.sum(1) / mask.sum(1, keepdim=True)).clamp(min=1e-12)
    return prior


class Trial:
    """Everything that is done with scores, for all rows of ``draws`` at once."""

    def __init__(self, newcomers: Newcomers, draws: Draws, found: Found) -> None:
        self.newcomers, self.draws, self.found = newcomers, draws, found
        self.raw = newcomers.scores[draws.newcomer[:, None], draws.tested]
        self.labels = newcomers.labels[draws.newcomer[:, None], draws.tested]

    def calibrate(self, scores: Tensor) -> Tensor:
        return self.found.slope * scores + self.found.bias

    def given(self, number: int) -> tuple[Tensor, Tensor]:
        """The first ``number`` scores to estimate from, and which of them are real."""
        draws = self.draws
        mask = torch.arange(number, device=draws.number.device) < draws.number[:, None]
        return self.newcomers.scores[draws.newcomer[:, None], draws.given[:, :number]], mask

    def right(self, scores: Tensor) -> Tensor:
        """(rows,) the share of tested samples that these scores get right."""
        right = ((scores.argmax(-1) == self.labels) & self.draws.real).sum(1) / self.draws.real.sum(1)
        return right.double()

    def accuracy(self, scores: Tensor) -> float:
        """Mean over newcomers and divisions, in per cent."""
        return 100 * float(self.right(scores).mean())

    def with_shares(self, prior: Tensor) -> float:
        return self.accuracy(self.calibrate(self.raw) + torch.log(prior)[:, None])

    def true_prior(self) -> float:
        """Shares counted from all labels of the newcomer."""
        labels = self.newcomers.labels
        counted = torch.stack([torch.bincount(row[row >= 0], minlength=len(self.found.alpha)) for row in labels])
        return self.with_shares(shares(counted, torch.full_like(self.found.alpha, 1e-6))[self.draws.newcomer])

    def ours(self, number: int) -> tuple[float, float]:
        """Accuracy, and the share of rows that are told that they do not fit."""
        scores, weight, _ = self.admitted(number)
        return self.accuracy(scores), float((weight < 1).double().mean())

    def unchecked(self, number: int) -> float:
        """Accuracy without checks and without what the federation's trial says."""
        scores, mask = self.given(number)
        expected = estimate(self.calibrate(scores), self.found.alpha, mask=mask).counts
        return self.with_shares(shares(expected, self.found.alpha))

    def admitted(self, number: int, *, tried_out: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """As ``admit`` does it: scores, what the fit makes a sample count, and the part of the correction, by rows.

        ``tried_out``: as far as the federation's trial says, or all of it wherever the scores fit.
        """
        scores, mask = self.given(number)
        scores, found = self.calibrate(scores), self.found
        expected = estimate(scores, found.alpha, mask=mask).counts
        size = mask.sum(1).to(scores.dtype)
        mean = torch.where(mask[..., None], statistics(scores), 0).sum(1) / size[:, None]
        verdict = judge(torch.zeros_like(expected), expected, mean, size, found.alpha, found.reference)
        use = tried.trusted(found.trial, size, torch.zeros_like(size))
        part, most = (use.part, use.weight) if tried_out else (torch.ones_like(size), torch.ones_like(size))
        trust = torch.where(verdict.keep_plain, 0, part)
        slope = torch.where(trust > 0, found.slope, 1)[:, None, None]
        offset = found.bias + torch.log(shares(most[:, None] * verdict.counts, found.alpha))
        return slope * self.raw + (trust[:, None] * offset)[:, None], verdict.weight, trust

    def uncalibrated(self, number: int) -> float:
        scores, mask = self.given(number)
        prior = estimate(scores, self.found.alpha, mask=mask).shares
        return self.accuracy(self.raw + torch.log(prior)[:, None])

    def em(self, number: int) -> float:
        scores, mask = self.given(number)
        return self.with_shares(plain_em(self.calibrate(scores), mask))


def one_seed(setting: Setting, seed: int, arrays: Arrays, args: argparse.Namespace) -> dict[str, Any]:
    """Every number of a seed."""
    made = build(
        "fedavg", setting, seed, arrays, args, adapt="prior", cohort=args.cohort, local_steps=25, local_lr=0.01
    )
    device = made.federation.device
    clock = Clock(device)
    with clock.phase("train"):
        simulation = train(made)
    with clock.phase("settle"):
        simulation.settle()
        state = simulation.server.state
        found = Found(state.alpha, state.slope, state.bias, Reference(**state.reference), tried.Trial(**state.trial))
        labelled = float(np.mean([s.metric for s in simulation.evaluate("test").values()])) * 100
    with clock.phase("curves"):
        newcomers = score(simulation)
        draws = divide(newcomers.sizes, args.repetitions, seed, device)
        trial = Trial(newcomers, draws, found)
        # a point of the curve needs at least half of the newcomers to have that many samples
        numbers = [n for n in NUMBERS if float((draws.number >= n).double().mean()) >= 0.5]
        raw, ours = trial.accuracy(trial.raw), [trial.ours(n) for n in numbers]
        curves = {
            RAW: [raw] * len(numbers),
            EM: [trial.em(n) for n in numbers],
            OURS: [accuracy for accuracy, _ in ours],
            UNCALIBRATED: [trial.uncalibrated(n) for n in numbers],
        }
        levels = {TRUE: trial.true_prior(), LABELLED: labelled}
    with clock.phase("shifts"):
        names = [s for s in shifts() if s != "saturation" or arrays.x.shape[1] == 3]
        with ThreadPoolExecutor() as pool:
            shifted = dict(zip(names, pool.map(lambda name: score(simulation, name), names)))
        table = {
            name: shifted_row(Trial(scores, draws, found)) for name, scores in {"none": newcomers, **shifted}.items()
        }
    levels |= references(setting, seed, arrays, args, clock)
    return {
        "seed": seed, "numbers": numbers, "curves": curves, "levels": levels, "shifts": table,
        "flagged": [flagged for _, flagged in ours], "alpha_sum": float(found.alpha.sum()), "slope": float(found.slope),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "seconds": clock.seconds, "notes": simulation.engine.notes,
    }  # fmt: skip


def shifted_row(trial: Trial) -> dict[str, float]:
    """Plain, checked and not, with all the samples that there are to estimate from."""
    checked, flagged = trial.ours(NUMBERS[-1])
    unchecked = trial.unchecked(NUMBERS[-1])
    return {"raw": trial.accuracy(trial.raw), "checked": checked, "unchecked": unchecked, "flagged": flagged}


def references(setting: Setting, seed: int, arrays: Arrays, args: argparse.Namespace, clock: Clock) -> dict[str, float]:
    """The hypernetwork methods, where asked for: pFedHN's participants, IT-PFL-HN's newcomers."""
    levels = {}
    if args.pfedhn:
        with clock.phase("pFedHN"):
            longer = replace(setting, rounds=args.rounds or 1000)
            simulation = train(build("pfedhn", longer, seed, arrays, args, cohort=5))
            levels[PFEDHN] = 100 * float(np.mean([s.metric for s in simulation.evaluate("test").values()]))
    for preset in args.it_pfl_hn:
        name = IT_PFL_HN[preset]
        with clock.phase(name):
            longer = replace(setting, rounds=args.rounds or 500)
            more = {"cohort": 10, "preset": preset, "finetune_after": longer.rounds * 4 // 5}
            simulation = train(build("it_pfl_hn", longer, seed, arrays, args, **more))
            levels[name] = 100 * simulation.evaluation_of_unseen().metrics["deployed/unseen/test/accuracy"]
    return levels


def summary(name: str, setting: Setting, args: argparse.Namespace, seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Means and standard deviations over seeds, beside the seeds' own numbers."""
    numbers = [n for n in NUMBERS if all(n in one["numbers"] for one in seeds)]
    made = {"commit": commit(), "date": datetime.now(UTC).date().isoformat(), "hardware": seeds[0]["hardware"],
            "torch": torch.__version__}  # fmt: skip
    return {
        "format": 1, "name": name, "title": setting.title, "command": command(args), "made": made,
        "seeds": [one["seed"] for one in seeds], "numbers": numbers,
        "curves": {
            method: spread([one["curves"][method][: len(numbers)] for one in seeds]) for method in seeds[0]["curves"]
        },
        "levels": {method: spread([one["levels"][method] for one in seeds]) for method in seeds[0]["levels"]},
        "shifts": {
            shift: {k: spread([one["shifts"][shift][k] for one in seeds]) for k in row}
            for shift, row in seeds[0]["shifts"].items()
        },
        "runs": seeds,
    }  # fmt: skip


def command(args: argparse.Namespace) -> str:
    """The command line without its settings, folders and device, which are in the file or the machine's."""
    given = {"model": args.model, "rounds": args.rounds, "cohort": args.cohort, "local_steps": args.local_steps,
             "repetitions": args.repetitions, "it_pfl_hn": " ".join(args.it_pfl_hn)}  # fmt: skip
    words = [f"--{name.replace('_', '-')} {value}" for name, value in given.items() if value]
    return " ".join(["python benchmarks/newcomers.py", *words, *["--pfedhn"] * args.pfedhn])


def spread(values: list[Any]) -> dict[str, Any]:
    """Mean and standard deviation (n - 1) over seeds."""
    found = np.array(values, dtype=float)
    deviation = found.std(0, ddof=1) if len(found) > 1 else np.zeros_like(found[0])
    return {"mean": found.mean(0).tolist(), "std": deviation.tolist()}


def show(result: dict[str, Any]) -> None:
    """The tables, as Markdown."""
    numbers = result["numbers"]
    print(f"\n### {result['title']}: {len(result['seeds'])} seeds\n")
    print("| unlabelled samples | " + " | ".join(map(str, numbers)) + " |\n|---|" + "---|" * len(numbers))
    for method, found in result["curves"].items():
        print(f"| {method} | " + " | ".join(f"{m:.1f} ± {s:.1f}" for m, s in zip(found["mean"], found["std"])) + " |")
    for method, found in result["levels"].items():
        print(f"| {method} | {found['mean']:.1f} ± {found['std']:.1f} |" + " |" * (len(numbers) - 1))
    columns = ("feature shift", RAW, f"{OURS}, checked", "without checks", "told not to fit")
    print(f"\n| {' | '.join(columns)} |\n|" + "---|" * len(columns))
    for shift, row in result["shifts"].items():
        cells = [f"{row[k]['mean']:.1f} ± {row[k]['std']:.1f}" for k in ("raw", "checked", "unchecked")]
        print(f"| {shift} | {' | '.join(cells)} | {100 * row['flagged']['mean']:.0f}% |")
    print("\nseconds by phase and seed:")
    for one in result["runs"]:
        print(f"  seed {one['seed']}: " + ", ".join(f"{k} {v:.1f}" for k, v in one["seconds"].items()), *one["notes"])
    print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-root")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--rounds", type=int, default=0, help="instead of the setting's")
    parser.add_argument("--cohort", type=int, default=20)
    parser.add_argument("--local-steps", type=int, default=25)
    parser.add_argument("--repetitions", type=int, default=20, help="random divisions of each newcomer's samples")
    parser.add_argument("--pfedhn", action="store_true", help="also train pFedHN, for its labelled participants")
    parser.add_argument("--it-pfl-hn", nargs="+", choices=list(IT_PFL_HN), default=[], help="also train IT-PFL-HN")
    parser.add_argument("--quick", action="store_true", help="a small check: 3 rounds, one seed, 2 divisions")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seeds, args.repetitions = args.rounds or 3, args.seeds[:1], 2
    args.out.mkdir(parents=True, exist_ok=True)
    start, loaded = time.perf_counter(), dict[str, Arrays]()
    for name in args.settings:
        setting = replace(SETTINGS[name], rounds=args.rounds or SETTINGS[name].rounds)
        if setting.dataset not in loaded:
            loaded = {setting.dataset: load(setting.dataset, args.data_root)}  # settings of one dataset stand together
        arrays = loaded[setting.dataset]
        seeds: list[dict[str, Any]] = []
        for seed in args.seeds:
            seeds.append(one_seed(setting, seed, arrays, args))
            result = summary(name, setting, args, seeds)
            write_file(args.out / f"{name}.json", json.dumps(result, indent=1).encode())
        show(result)
    print(f"all: {time.perf_counter() - start:.0f} seconds")


if __name__ == "__main__":
    main()
