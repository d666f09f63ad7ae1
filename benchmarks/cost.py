# SPDX-License-Identifier: Apache-2.0
"""What a round would cost on more machines than there were: a model fitted to what was measured, and its phones played.

    python benchmarks/cost.py [--registered 10000 100000] [--out results/performance]

The first table works out rounds of pFedHN from ``results/performance/rounds.json`` (one GPU) and from what is assumed
here. The second plays phones that are there for a few minutes a day, on the clock of asynchronous rounds; nothing is
trained. ``--out`` writes both for docs/explanation-cost-of-scale.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from fedloom.training.availability import SPREAD, TICKS, Availability
from fedloom.training.clock import Asynchronous

ROUNDS = Path(__file__).parent.parent / "results" / "performance" / "rounds.json"
PART = 0.025 / 4
"""Seconds that Ray adds for each part of a round: docs/how-to-scale.md has 25 ms for four parts of nearly nothing."""
NETWORK = 1.25e9
"""Bytes a second between machines: 10 Gbit/s, assumed."""
ROOM = 140e9
"""Bytes of a GPU's memory."""
LENET, RESNET = 121_182, 11_200_000
"""Parameters of a client's model: pFedHN's on CIFAR-10, and one of eleven million."""

DAY = 86_400
THERE = DAY // 100
"""Seconds a day that a phone is there, in one stretch."""
STEPS = 50


class Line(NamedTuple):
    """Seconds that each more client takes, and those of a round without any."""

    each: float
    fixed: float

    def of(self, clients: float) -> float:
        """The seconds of so many clients."""
        return self.fixed + self.each * clients


class Setting(NamedTuple):
    """Machines with one loom among them, and a round."""

    name: str
    gpus: int
    machines: int
    cohort: int
    parameters: int


SETTINGS = (
    Setting("1 GPU", 1, 1, 400, LENET),
    Setting("8 GPUs of one machine", 8, 1, 400, LENET),
    Setting("8 GPUs of one machine", 8, 1, 4_000, LENET),
    Setting("100 machines, a GPU each", 100, 100, 4_000, LENET),
    Setting("100 machines, a GPU each", 100, 100, 4_000, RESNET),
)


def fitted() -> tuple[Line, Line]:
    """Training, and the server's own work, by the number of clients on one GPU: least squares on 1, 10 and 50."""
    rows, clients = json.loads(ROUNDS.read_text(encoding="utf-8"))["rows"], 0
    found = []
    for who, way, whole, training, *_ in rows:
        clients = int(who.split(",")[0]) if who.endswith(", 64") else 0 if who else clients
        if clients and way == "compiled":
            found.append((clients, training / 1e3, (whole - training) / 1e3))
    number, training, server = np.array(found).T
    return Line(*np.polyfit(number, training, 1)), Line(*np.polyfit(number, server, 1))


def round_of(setting: Setting, training: Line, server: Line) -> list[str]:
    """A line of the table: a round's seconds by what takes them, and what is the most."""
    scale = setting.parameters / LENET  # what trains and what weaves grow with the model
    replies = 4.0 * setting.parameters * setting.cohort
    abroad = 2 * replies * (1 - 1 / setting.machines)  # down and up
    seconds = {
        "training": training.of(setting.cohort / setting.gpus) * scale,
        "Ray": PART * setting.gpus * (setting.gpus > 1),
        "network": abroad / NETWORK,
        "server": server.of(setting.cohort) * scale,
    }
    most = max(seconds, key=lambda name: seconds[name])
    limit = "the server's memory" if replies > ROOM else f"the {most}" if most != "training" else "training"
    parts = [f"{taken:,.2f}" for taken in seconds.values()]
    return [
        setting.name, f"{setting.cohort:,}", f"{setting.parameters / 1e6:.2g} M", *parts,
        f"{sum(seconds.values()):,.2f}", f"{replies / 1e9:,.1f}", limit,
    ]  # fmt: skip


def phones(registered: int) -> list[str]:
    """A line of the table: rounds of phones that come and go, a tenth of those who are there training at any time."""
    rng = np.random.default_rng(0)
    starts = (rng.integers(0, DAY - THERE, registered) * TICKS).astype(np.int64)
    ends = starts + THERE * TICKS
    ends[0], starts[0] = DAY * TICKS, (DAY - THERE) * TICKS  # the span is a day
    there = Availability(np.exp(SPREAD * rng.standard_normal(registered)), np.arange(registered + 1), starts, ends)
    at_once = registered // 1000
    names = [*map(str, range(registered))]
    clock = Asynchronous(names, there, [STEPS] * registered, seed=0, cohort=at_once, buffer=max(1, at_once // 10))
    number = 1
    while clock.turn(number).time < THERE:  # at first nobody has been there for long
        number += 1
    first, since = number, time.process_time()
    while clock.turn(number).time < THERE + 3600:
        number += 1
    took = (time.process_time() - since) / (number - first)
    turns = [clock.turn(at) for at in range(first + 1, number + 1)]
    came, left = sum(len(turn.came) for turn in turns), sum(len(turn.left) for turn in turns)
    old = fmean(age for turn in turns for age in turn.staleness.values())
    return [
        f"{registered:,}", f"{at_once:,}", f"{came:,}", f"{100 * left / (came + left):.1f}", f"{old:.1f}",
        f"{came * 24 / registered:.1f}", f"{took * 1e3:.1f}",
    ]  # fmt: skip


def written(title: str, note: str, columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
    """A file that the page is made from."""
    commit = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True)
    made = {
        "commit": commit.stdout.strip(), "date": datetime.now(UTC).date().isoformat(),
        "hardware": "worked out on one CPU core", "torch": torch.__version__.partition("+")[0],
    }  # fmt: skip
    command = "python benchmarks/cost.py --out results/performance"
    return {"format": 1, "title": title, "command": command, "note": note, "made": [made], "columns": columns,
            "rows": rows}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--registered", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    training, server = fitted()
    for name, line in (("training", training), ("the server", server)):
        print(f"{name}: {line.fixed * 1e3:.1f} ms and {line.each * 1e3:.2f} ms for each client of a GPU")
    told = (
        f"A model, not a measurement: training takes {training.fixed * 1e3:.1f} ms and {training.each * 1e3:.2f} ms "
        f"for each client of a GPU, the server {server.fixed * 1e3:.1f} and {server.each * 1e3:.2f} ms for each reply, "
        "fitted to rounds of 1, 10 and 50 clients on an H200; larger models are taken in proportion. Ray takes "
        f"{PART * 1e3:.1f} ms for each part, and 10 Gbit/s between machines are assumed."
    )
    machines = written(
        "Rounds of pFedHN on more machines than were tried",
        told,
        ["machines", "clients a round", "model", "training, s", "Ray, s", "network, s", "server, s", "a round, s",
         "replies, GB", "most is"],
        [round_of(setting, training, server) for setting in SETTINGS],
    )  # fmt: skip
    played = written(
        "Phones that are there for 1% of the day",
        f"Played on the clock, nothing is trained: {THERE} seconds a day in one stretch, {STEPS} steps, speeds as "
        f"drawn by default; a step of the server with a tenth of those who train; one hour.",
        ["registered", "train at a time", "replies in an hour", "went away, %", "staleness", "replies a day by phone",
         "the clock's CPU time a round, ms"],
        [phones(number) for number in options.registered],
    )  # fmt: skip
    for name, found in (("machines", machines), ("phones", played)):
        for row in found["rows"]:
            print(" | ".join(row))
        if options.out:
            content = json.dumps(found, indent=1, ensure_ascii=False)
            (options.out / f"{name}.json").write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
