# SPDX-License-Identifier: Apache-2.0
"""Time to accuracy of asynchronous rounds and of synchronous ones, on the clock of docs/how-to-asynchronous.md.

    python benchmarks/asynchronous.py [--seeds 3] [--replies 1000] [--out FILE]

FedAvg and pFedHN on digits, 40 clients with three classes each, at speeds drawn by the seed. Every way gets as many
replies; it is tried after every 50 of them. ``--out results/performance/asynchronous.json`` writes what the page shows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch

import fedloom

TARGET = 0.9
TRIED = 50
"""Replies from one evaluation to the next."""
COMMON = {
    "dataset": "digits", "partition": "classes:3", "clients": 40, "model": "mlp:hidden=32", "local_steps": 10,
    "batch_size": 16, "local_lr": 0.05, "availability": "always", "progress": "quiet",
}  # fmt: skip
MEAN = {"server_step": "cohort_mean"}
SMALL = {"server_lr": 0.001}
WAYS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("FedAvg, cohorts of 10", "fedavg", {"cohort": 10}),
    ("FedAvg, 10 at a time, steps of 5", "fedavg", {"cohort": 10, "async_": 5}),
    ("FedAvg, 10 at a time, steps of 1", "fedavg", {"cohort": 10, "async_": 1}),
    ("pFedHN, one client after another", "pfedhn", {"cohort": 1}),
    ("pFedHN, cohorts of 10", "pfedhn", {"cohort": 10}),
    ("pFedHN, 10 at a time, steps of 1", "pfedhn", {"cohort": 10, "async_": 1}),
    ("pFedHN, rate / 10, cohorts of 10", "pfedhn", {"cohort": 10, **SMALL}),
    ("pFedHN, rate / 10, 10 at a time, steps of 1", "pfedhn", {"cohort": 10, "async_": 1, **SMALL}),
    ("pFedHN, a step a round, cohorts of 10", "pfedhn", {"cohort": 10, **MEAN}),
    ("pFedHN, a step a round, 10 at a time, of 5", "pfedhn", {"cohort": 10, "async_": 5, **MEAN}),
)


class Trained(NamedTuple):
    """One run: when it reached the target, on the clock and in replies, if it did; and where it ended."""

    seconds: float | None
    replies: int | None
    accuracy: float
    whole: float
    """Seconds on the clock for all replies."""
    staleness: float


def trained(method: str, given: dict[str, Any], seed: int, replies: int) -> Trained:
    """A run of so many replies."""
    each = given.get("async_") or given["cohort"]
    with tempfile.TemporaryDirectory() as folder:
        run = fedloom.run(
            method, out=Path(folder) / "run", rounds=replies // each, eval_every=max(1, TRIED // each), seed=seed,
            engine="vectorised" if each > 1 else "sequential", **COMMON, **given,
        )  # fmt: skip
        records = run.records
    tried = [r for r in records if "metrics" in r]
    name = "deployed/participants/test/accuracy"
    there = next((r for r in tried if r["metrics"][name] >= TARGET), None)
    clock = [r["diagnostics"]["clock"] for r in records]
    stale = fmean(r["diagnostics"].get("staleness", 0.0) for r in records)
    when = (there["diagnostics"]["clock"], there["round"] * each) if there else (None, None)
    return Trained(*when, tried[-1]["metrics"][name], clock[-1], stale)


def row(name: str, runs: list[Trained]) -> list[str]:
    """A line of the table."""
    there = [run for run in runs if run.seconds is not None and run.replies is not None]
    missing = f" in {len(there)} of {len(runs)}" if len(there) < len(runs) else ""
    times = [f"{spread([getattr(run, part) for run in there])}{missing}" if there else "never"
             for part in ("seconds", "replies")]  # fmt: skip
    accuracy = spread([100 * run.accuracy for run in runs], 1)
    return [name, *times, accuracy, spread([run.whole for run in runs]), f"{fmean(run.staleness for run in runs):.1f}"]


def spread(values: list[float], digits: int = 0) -> str:
    """Mean and standard deviation over seeds."""
    mean = f"{fmean(values):,.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {stdev(values):,.{digits}f}"


def written(rows: list[list[str]], seeds: int, replies: int) -> dict[str, Any]:
    """The file that the page is made from."""
    commit = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=True)
    made = {
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": "one of 2 CPU cores",
        "torch": torch.__version__.partition("+")[0],
    }
    return {
        "format": 1,
        "title": "Time to accuracy of asynchronous rounds",
        "command": "python benchmarks/asynchronous.py --out results/performance/asynchronous.json",
        "note": f"{seeds} seeds, mean and standard deviation; {replies:,} replies each, tried after every {TRIED}. "
        "Digits, 40 clients with three classes each, MLP 64-32-10, 10 local steps of 16 samples, local rate 0.05, "
        "pFedHN's own outer rate 0.01 and a tenth of it.",
        "made": [made],
        "columns": [
            "way", f"seconds to {100 * TARGET:g}%", f"replies to {100 * TARGET:g}%", "test accuracy at the end, %",
            "seconds at the end", "staleness",
        ],
        "rows": rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replies", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for name, method, given in WAYS:
        rows.append(row(name, [trained(method, given, seed, options.replies) for seed in range(options.seeds)]))
        print(" | ".join(rows[-1]), flush=True)
    if options.out:
        content = json.dumps(written(rows, options.seeds, options.replies), indent=1, ensure_ascii=False)
        options.out.write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
