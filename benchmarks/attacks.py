# SPDX-License-Identifier: Apache-2.0
"""What rules leave out of honest clients, what becomes of a back door, and what a server reads off replies.

    python benchmarks/attacks.py left-out --out results/attacks
    python benchmarks/attacks.py inversion --out results/attacks

One seed each, minutes on two cores: the numbers are examples, not comparisons of rules. The pages have them by
``benchmarks/pages.py``.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import fedloom
from fedloom.audit.perform import audit
from fedloom.reports.left_out import left_out
from fedloom.robust import TRIGGERED
from fedloom.runs.files import write_file
from fedloom.tables.perform import commit

FEDERATION = {"dataset": "fashion_mnist", "partition": "dirichlet:0.5", "engine": "vectorised", "progress": "quiet"}
RULES = {"clients": 20, "cohort": 20, "model": "mlp:hidden=100", "local_steps": 10, "batch_size": 32, "local_lr": 0.05}
REPLIES = {"clients": 6, "cohort": 6, "model": "mlp:hidden=64", "rounds": 5}
LIARS = 4
"""Of the 20 clients, whom the rules know to be so many."""
ATTACKS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "scale": {"malicious": LIARS / 20, "attack": "scale"},
    "alie": {"malicious": LIARS / 20, "attack": "alie"},
    "backdoor": {"malicious": LIARS / 20, "attack": "backdoor"},
}
ONE_STEP = {"local_steps": 1, "batch_size": 8, "momentum": 0.0}
MANY_STEPS = {"local_steps": 20, "batch_size": 32}
METHODS: Mapping[str, Mapping[str, Any]] = {"fedavg": {}, "pfedhn": {}, "mh_pfedhn": {"local_epochs": 0}}


def leaving_out(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each rule without an attack and with some; and the mean, against a back door and against nobody."""
    rules = ["median", f"trimmed:{LIARS}", f"krum:{LIARS}", "geomedian", f"dnc:{LIARS}"]
    cases = [(attack, rule, options) for attack, options in ATTACKS.items() for rule in rules]
    cases += [("none", "mean", {"attack": "backdoor"}), ("backdoor", "mean", ATTACKS["backdoor"])]
    rows = []
    for attack, rule, options in cases:
        every = {"rounds": args.rounds, "eval_every": args.rounds, "data_root": args.data_root}
        run = trained("fedavg", {**RULES, **every, **options, "aggregate": rule}, args)
        last = run.summary["last"]
        name = "deployed/participants"
        rows.append({
            "attack": attack, "rule": rule, "accuracy": last[f"{name}/test/accuracy"],
            "worst_tenth": last[f"{name}/test/accuracy_worst10"],
            "back_door": last.get(f"{name}/{TRIGGERED}/accuracy_pooled"),
            "left_out": {one.who: one.share for one in left_out(run.directory.records(), run.directory.roster())},
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def inverting(args: argparse.Namespace) -> list[dict[str, Any]]:
    """``fedloom audit --attack invert`` on replies of one small step and of many."""
    rows = []
    for method, own in METHODS.items():
        for steps in (ONE_STEP, MANY_STEPS):
            run = trained(method, {**REPLIES, **own, **steps, "data_root": args.data_root}, args)
            found = audit(run, "invert")
            rows.append(
                {"method": method, "steps": steps["local_steps"], "batch": steps["batch_size"], **found.as_dict()}
            )
            print(method, steps, found.verdict, flush=True)
    return rows


def trained(method: str, options: Mapping[str, Any], args: argparse.Namespace) -> fedloom.Run:
    """A run of which nothing is kept after the benchmark."""
    out = Path(args.scratch) / str(len(list(Path(args.scratch).iterdir())))
    return fedloom.run(method, out=out, **{**FEDERATION, **options})


def main() -> None:
    """Measure one of both, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["left-out", "inversion"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--data-root")
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        args.scratch = scratch
        rows = (leaving_out if args.what == "left-out" else inverting)(args)
    made = {"commit": commit(), "date": datetime.now(UTC).date().isoformat(), "hardware": platform.machine() + " CPU",
            "torch": torch.__version__.partition("+")[0]}  # fmt: skip
    command = shlex.join(["python", "benchmarks/attacks.py", *sys.argv[1:]])
    args.out.mkdir(parents=True, exist_ok=True)
    found = {"command": command, "rounds": args.rounds, "made": made, "rows": rows}
    write_file(args.out / f"{args.what}.json", (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
