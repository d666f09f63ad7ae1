# SPDX-License-Identifier: Apache-2.0
"""Run directories that nobody trained: records of any shape and size, made of random numbers, for tests of reports."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.runs.directory import EMBEDDINGS, ESTIMATES, METRICS, SCORES, RunDirectory
from fedloom.runs.records import AUDIT, by_client, embeddings_line, scores_line, seconds_by_client
from fedloom.runs.roster import Member, Roster

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAAAAABX3VL4AAAADklEQVR4nGNsYGBiYAAAApIAhPd8o1gAAAAASUVORK5CYII="
)
"""A picture of two by two grey pixels."""
CLASSES = 4
TASK = {"name": "accuracy", "higher_is_better": True}


def made_run(
    path: Path,
    *,
    clients: int | Sequence[str] = 10,
    unseen: int = 2,
    rounds: int = 6,
    finished: bool = True,
    lift: float = 0.0,
    estimates: bool = False,
    class_names: Sequence[str] = (),
    **config: Any,
) -> RunDirectory:
    """A run whose scores rise with the rounds; ``lift`` is added to every score. Evaluated every second round."""
    rng = np.random.default_rng(int(config.get("seed", 0)))
    names = [str(i) for i in range(clients)] if isinstance(clients, int) else list(clients)
    given = {
        "method": "pfedhn", "dataset": "digits", "partition": "dirichlet:0.3", "clients": len(names), "unseen": unseen,
        "seed": 0, "rounds": rounds, "cohort": min(5, len(names)), "engine": "sequential", "device": "cpu",
        "adapt": "none", **config,
    }  # fmt: skip
    run = RunDirectory.create(path, given)
    newcomers = [f"new {i}" for i in range(unseen)]
    everybody = [*names, *newcomers]
    labels = rng.multinomial(40, rng.dirichlet(np.full(CLASSES, 0.4), len(everybody)).mean(0), len(everybody))
    members = [
        Member(name, name in newcomers, "mlp", 100, {"train": 24, "val": 6, "test": 10}, tuple(map(int, row)))
        for name, row in zip(everybody, labels)
    ]
    run.write_roster(Roster((1, 8, 8), CLASSES, CLASSES, tuple(class_names), (), members))
    run.write_environment({"command": "fedloom run", "started": "2026-01-01", "versions": {"python": "3"}, "cpus": 2})
    best = write_rounds(run, range(1, rounds + 1), lift=lift, rng=rng)
    if estimates:
        shares = [[0.25] * CLASSES for _ in newcomers]
        line = {
            "round": best["round"], "group": "unseen", "client": newcomers, "samples": [24] * unseen,
            "labelled": [0] * unseen, "decision": ["corrected"] * unseen, "weight": [1.0] * unseen, "share": shares,
            "low": shares, "high": shares,
        }  # fmt: skip
        run.append_to(ESTIMATES, line)
    if finished:
        run.write_summary(summary_of(run, best))
    return run


def attacked(run: RunDirectory, names: Sequence[str] = ("invert",), picture: bytes = b"") -> None:
    """Have attacks of these names found something, with a picture each."""
    whole = {"value": 20.5, "low": 18.0, "high": 23.0, "chance": 11.0, "beats": True}
    measures = [{"name": "likeness", "run": {**whole, "low": None, "high": None}, "control": whole}]
    told = {"round": 6, "sees": "a reply", "knows": "the network", "control": "one step", "verdict": "It succeeded."}
    run.write_extra(AUDIT, {name: {"attack": name, **told, "measures": measures} for name in names})
    for name in names:
        if name.isalpha():
            (run.path / f"audit-{name}.png").write_bytes(picture or PNG)


def write_rounds(
    run: RunDirectory, rounds: Sequence[int] | range, *, lift: float = 0.0, rng: np.random.Generator | None = None
) -> dict[str, Any]:
    """Add these rounds to the records; the metrics of the best of them."""
    rng = np.random.default_rng(0) if rng is None else rng
    roster, best = run.roster(), {"round": 0, "deployed/participants/val/accuracy": -1.0}
    names = list(roster.participants)
    newcomers = [member.id for member in roster.members if member.unseen]
    places = rng.normal(size=(len(names) + len(newcomers), 5))
    for number in rounds:
        cohort = [names[i] for i in sorted(rng.choice(len(names), min(5, len(names)), replace=False))]
        moved = dict.fromkeys(cohort, 1000)
        seconds = seconds_by_client(cohort, dict.fromkeys(cohort, 0.01))
        record: dict[str, Any] = {
            "round": number, "clients": len(cohort), "dropped": [], "bytes": {"down": 5000, "up": 5000},
            "seconds": {"round": 0.1, "generate": 0.01, "local_training": 0.08, "server_step": 0.01, **seconds},
            "diagnostics": {"local_loss": 2.0 / number}, "cohort": by_client(cohort, moved, moved),
            "told": {"train": {"delta": 4990, "loss": 5, "num_samples": 5}}, "notes": [],
        }  # fmt: skip
        if number % 2 == 0:
            metrics = {}
            groups = (("participants", "val", names), ("participants", "test", names), ("unseen", "test", newcomers))
            for who, split, clients in groups:
                if not clients:
                    continue
                values = np.clip(1 - 1 / number + lift + rng.normal(0, 0.05, len(clients)), 0, 1).round(3)
                columns = {"loss": [1.0] * len(clients), "metric": values.tolist(), "samples": [10] * len(clients)}
                run.append_to(SCORES, scores_line(number, ("deployed", who, split), TASK, clients, columns))
                metrics[f"deployed/{who}/{split}/accuracy"] = float(values.mean())
                group = names if who == "participants" else newcomers
                if split == "test":
                    start = 0 if who == "participants" else len(names)
                    rows = places[start : start + min(len(group), 1000)].tolist()
                    run.append_to(EMBEDDINGS, embeddings_line(number, who, dict(zip(group, rows))))
            record["metrics"] = metrics
            if metrics["deployed/participants/val/accuracy"] > best["deployed/participants/val/accuracy"]:
                best = {"round": number, **metrics}
        run.append_to(METRICS, record)
    return best


def broken(run: RunDirectory, clients: int) -> RunDirectory:
    """The run with a regression's error for a metric, which is no finite number for the first clients."""
    lines = run.lines(SCORES)
    (run.path / SCORES).unlink()
    for line in lines:
        values = [*[None] * min(clients, len(line["metric"])), *line["metric"][clients:]]
        run.append_to(SCORES, {**line, "name": "rmse", "higher_is_better": False, "metric": values})
    summary = run.summary()
    assert summary is not None
    run.write_summary({**summary, "metric": "rmse", "best": {"round": summary["best"]["round"]}})
    return run


def summary_of(run: RunDirectory, best: dict[str, Any]) -> dict[str, Any]:
    """As training ends with."""
    records = run.records()
    metrics = next(record["metrics"] for record in reversed(records) if "metrics" in record)
    full = {**best, "deployed/participants/test/accuracy_worst10": 0.5}
    name, moved = "pFedHN" if run.config["method"] == "pfedhn" else "FedAvg", 5000 * len(records)
    return {
        "method": run.config["method"], "name": name, "finished": True, "rounds": len(records), "metric": "accuracy",
        "seed": run.config["seed"], "notes": [], "dropped": 0, "seconds": 0.1 * len(records), "evaluation_seconds": 0.1,
        "bytes": {"down": moved, "up": moved}, "best": full, "last": {"round": len(records), **metrics}, "clients": {},
        "unseen": {},
    }  # fmt: skip
