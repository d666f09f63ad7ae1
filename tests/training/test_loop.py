# SPDX-License-Identifier: Apache-2.0
"""What a run writes down, when, and that nothing is evaluated twice. How it goes on: ``test_resume``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom.core.task import CLASSIFICATION, REGRESSION
from fedloom.engines.engine import Session
from fedloom.training import loop
from fedloom.training.loop import better

RNG = np.random.default_rng(0)
Y = np.arange(120) % 3
X = (RNG.standard_normal((120, 5)) + Y[:, None]).astype(np.float32)
TEST = "deployed/participants/test/accuracy"


def run(path: Path, method: str = "fedavg", **options: Any) -> fedloom.Run:
    small = {"clients": 4, "rounds": 4, "local_steps": 2, "model": "mlp:hidden=4", "eval_every": 2, "keep": 9}
    return fedloom.run(method, dataset=(X, Y), out=path, progress="quiet", **{**small, **options})


def asks(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int | str, str]]:
    """How often each program is asked for in each stage."""
    counted: Counter[tuple[int | str, str]] = Counter()
    ask = Session.ask

    def noted(self: Session, program: Any, *rest: Any, **more: Any) -> Any:
        counted[self.stage, program.name] += 1
        return ask(self, program, *rest, **more)

    monkeypatch.setattr(Session, "ask", noted)
    return counted


def test_nothing_is_evaluated_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = asks(monkeypatch)
    run(tmp_path / "plain", rounds=3)
    training = {(number, "train"): 1 for number in (1, 2, 3)}
    evaluations = {(f"evaluation after round {n}", f"evaluate.{split}"): 1 for n in (2, 3) for split in ("val", "test")}
    assert counted == {**training, **evaluations}
    counted.clear()
    run(tmp_path / "adapted", adapt="prior", rounds=2)
    assert counted["settling after round 2", "label_shares"] == 1
    evaluated = {name: number for (stage, name), number in counted.items() if str(stage).startswith("evaluation")}
    assert evaluated and set(evaluated.values()) == {1}


def test_the_summary_is_that_of_the_records_and_its_clients_those_of_the_best_round(tmp_path: Path) -> None:
    done = run(tmp_path / "run", rounds=6, local_lr=0.3, local_steps=10, momentum=0.99, eval_every=1, seed=1)
    records, summary = done.records, done.summary
    assert summary["last"] == {"round": 6, **records[-1]["metrics"]}
    best = summary["best"]["round"]
    assert best < 6 and records[best - 1]["metrics"][TEST] != records[-1]["metrics"][TEST], "take another seed"
    assert summary["best"] == {"round": best, **records[best - 1]["metrics"]}
    found = {client: score._asdict() for client, score in fedloom.load(done.path, dataset=(X, Y)).evaluate().items()}
    assert summary["clients"] == found
    assert summary["best"][TEST] == pytest.approx(np.mean([score["metric"] for score in found.values()]))
    assert summary["dropped"] == 0 and summary["seconds"] == sum(record["seconds"]["round"] for record in records)


@pytest.mark.parametrize(("seconds", "saved"), [(1e9, [2, 4]), (0.0, [1, 2, 3, 4])])
def test_checkpoints_are_written_at_evaluations_and_after_some_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, saved: list[int]
) -> None:
    monkeypatch.setattr(loop, "SAVE_SECONDS", seconds)
    assert run(tmp_path / "run").directory.checkpoints() == saved


@pytest.mark.parametrize(
    ("metrics", "best", "gain"),
    [
        ({"deployed": 0.5}, None, True),
        ({"deployed": 0.5}, {"deployed": 0.4}, True),
        ({"deployed": 0.5}, {"deployed": 0.5}, False),  # the later of two equals
        ({"deployed": 0.9, "plain": 0.3}, {"deployed": 0.1, "plain": 0.4}, False),  # the plain method's decides
        ({"deployed": 0.5}, {"plain": 0.4}, True),
        ({}, None, False),
    ],
)
def test_the_best_is_chosen_by_validation(
    metrics: Mapping[str, float], best: Mapping[str, float] | None, gain: bool
) -> None:
    def named(values: Mapping[str, float], task: Any) -> dict[str, float]:
        return {f"{model}/participants/val/{task.metric_name}": value for model, value in values.items()}

    assert better(named(metrics, CLASSIFICATION), CLASSIFICATION, best and named(best, CLASSIFICATION)) == gain
    lower = {model: -value for model, value in metrics.items()}
    lower_best = best and {model: -value for model, value in best.items()}
    assert better(named(lower, REGRESSION), REGRESSION, lower_best and named(lower_best, REGRESSION)) == gain


def test_the_first_line_says_what_runs(tmp_path: Path) -> None:
    heads = []

    class Noted(fedloom.progress.Quiet):
        def begin(self, run: Any) -> None:
            heads.append(run)

    given = {"clients": 4, "cohort": 2, "unseen": 1, "rounds": 1, "local_steps": 1, "model": "mlp:hidden=4"}
    fedloom.run("fedavg", dataset="digits", out=tmp_path / "run", progress=Noted(), engine="sequential", **given)
    fedloom.resume(tmp_path / "run", rounds=2, progress=Noted())
    first, second = heads
    assert (first.name, first.dataset, first.clients, first.cohort, first.unseen) == ("FedAvg", "digits", 4, 2, 1)
    assert (first.models, first.engine, first.metric) == (("mlp:hidden=4",), "sequential", "accuracy")
    assert (first.round, first.rounds, second.round, second.rounds) == (0, 1, 1, 2)
