# SPDX-License-Identifier: Apache-2.0
"""Successive halving: who goes on, by what, for how long; and that being stopped, however, changes no bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom import algorithms
from fedloom.core.errors import ConfigError, RoundError, RunError
from fedloom.data.arrays import Arrays
from fedloom.reports.report import chart
from fedloom.runs.directory import RunDirectory
from fedloom.runs.lock import locked
from fedloom.tables.tune import Tuned, around, rungs
from test_resume import bits, records


def data(move: int = 0) -> Arrays:
    """Three classes that are told apart easily; ``move`` is added to the test labels."""
    rng = np.random.default_rng(0)
    y = np.arange(300) % 3
    x = (0.3 * rng.standard_normal((300, 3)) + np.eye(3)[y]).astype(np.float32)
    split = np.array(["train", "val", "test"])[np.arange(300) // 3 % 3]
    return Arrays("made", x, np.where(split == "test", (y + move) % 3, y), 3, split=split)


TINY = {"clients": 3, "rounds": 8, "eval_every": 2, "local_steps": 10, "model": "mlp:hidden=8", "engine": "sequential",
        "partition": "iid"}  # fmt: skip
RATES = {"local_lr": [1e-9, 0.1, 0.001]}


def tuned(out: Path, **more: Any) -> Tuned:
    given: dict[str, Any] = {
        "dataset": data(), "tries": RATES, "budget": 14, "say": lambda line: None, **TINY, **more,
    }  # fmt: skip
    return fedloom.tune("fedavg", out=out, **given)


def test_rungs_share_the_budget() -> None:
    """Of 9, 5, 3 and 2 trials each rung has 90 // 4 = 22 rounds: 2, 4, 7 and 11 for each trial."""
    assert rungs(9, 90, 100) == [(9, 2), (5, 6), (3, 13), (2, 24)]
    assert rungs(9, 90, 10) == [(9, 2), (5, 6), (3, 10), (2, 10)]
    assert rungs(2, 7, 100) == [(2, 3)]


def test_rates_are_those_of_the_method_but_for_newcomers() -> None:
    pfedhn = algorithms.get("pfedhn").config(local_lr=0.02)
    assert around(pfedhn) == {"local_lr": [0.002, 0.006, 0.02, 0.06, 0.2], "server_lr": [0.003, 0.01, 0.03]}
    assert list(around(algorithms.get("ditto").config())) == ["local_lr"]  # its other rate follows this one


def test_the_better_half_goes_on_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    """Of 14 rounds each of two rungs has 7: 2 for each of three trials, then 3 more for each of two."""
    told: list[str] = []
    found = tuned(tmp_path, say=told.append)
    assert [(one.chosen["local_lr"], one.rounds) for one in found.trials] == [(0.1, 5), (0.001, 5), (1e-9, 2)]
    assert [one.path.name for one in found.trials] == ["2-local_lr=0.1", "3-local_lr=0.001", "1-local_lr=1e-09"]
    assert [len(RunDirectory.open(one.path).records()) for one in found.trials] == [5, 5, 2]
    assert len(told) == 5 and "rung 2 of 2: local lr 0.1: accuracy " in told[3]
    assert chart([tmp_path], "sweep").data["value"] == [1e-9, 0.001, 0.1]


def test_a_trial_that_goes_on_ends_as_a_run_of_full_length(tmp_path: Path) -> None:
    best = tuned(tmp_path / "tuned", dataset="digits", tries={"local_lr": [1e-9, 0.1]}, budget=4).best
    fedloom.resume(best.path, progress="quiet")
    fedloom.run("fedavg", out=tmp_path / "run", progress="quiet", **TINY, **best.chosen)
    assert bits(best.path) == bits(tmp_path / "run")
    config = RunDirectory.open(best.path).config
    assert config == RunDirectory.open(tmp_path / "run").config and config["dataset"] == "digits"


def test_validation_decides_even_where_test_says_otherwise(tmp_path: Path) -> None:
    """Test labels are moved by one: the better a model, the worse it is there."""
    found = tuned(tmp_path, dataset=data(move=1))
    best, *_, worst = found.trials
    on_test = [fedloom.load(one.path).summary["best"]["deployed/participants/test/accuracy"] for one in (best, worst)]
    assert best.chosen["local_lr"] != 1e-9 and worst.chosen["local_lr"] == 1e-9
    assert on_test[0] < 0.1 < on_test[1]


class Killed(BaseException):
    """Nothing handles it: what is on disk is what a killed process leaves."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "every", "after"),
    [("append", 2, True), ("save", 2, True), ("save", 2, False), ("write_summary", 1, False), ("rewind", 1, True)],
)
def test_stopped_wherever_and_started_again_it_is_as_never_stopped(
    what: str, every: int, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = tuned(tmp_path / "straight")
    calls, original = 0, getattr(RunDirectory, what)

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        dies = calls in (every, every + 2, every + 3, every + 7)
        if dies and not after:
            raise Killed
        result = original(*args, **kwargs)
        if dies:
            raise Killed
        return result

    monkeypatch.setattr(RunDirectory, what, dying)
    found, kills = None, 0
    while found is None:
        try:
            found = tuned(tmp_path / "stopped")
        except Killed:
            kills += 1
    assert kills
    assert [(one.chosen, one.rounds, one.score) for one in found.trials] == [
        (one.chosen, one.rounds, one.score) for one in straight.trials
    ]
    for one, other in zip(found.trials, straight.trials):
        assert bits(one.path) == bits(other.path) and records(one.path) == records(other.path)
        assert RunDirectory.open(one.path).summary()


def test_a_trial_that_fails_is_out_and_the_others_go_on(tmp_path: Path) -> None:
    told: list[str] = []
    found = tuned(tmp_path, tries={"local_lr": [1e30, 0.1, 0.02], "clip": [0]}, say=told.append)
    assert found.best.chosen["local_lr"] == 0.1
    assert found.trials[-1].chosen["local_lr"] == 1e30 and "NaN" in found.trials[-1].failed
    assert "failed" in told[0]
    assert tuned(tmp_path, tries={"local_lr": [1e30, 0.1, 0.02], "clip": [0]}) == found
    with pytest.raises(RoundError, match=r"Every trial failed\. The first: .*NaN"):
        tuned(tmp_path / "all", tries={"local_lr": [1e30, 1e31], "clip": [0]})


def test_what_is_tried_wins_over_what_was_given(tmp_path: Path) -> None:
    """Steps that are tried are not passed over for passes that were given, as on the command line."""
    found = tuned(tmp_path, tries={"local_steps": [1, 3]}, local_epochs=1, budget=2)
    assert {RunDirectory.open(one.path).config["local_epochs"] for one in found.trials} == {0}


def refused(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_what_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "--budget is 3 rounds; 3 trials take at least 6" in refused(ConfigError, lambda: tuned(out, budget=3))
    assert "There is one trial" in refused(ConfigError, lambda: tuned(out, tries={"local_lr": [0.1, "1e-1"]}))
    assert "--try rounds: scores" in refused(ConfigError, lambda: tuned(out, tries={"rounds": [1, 2]}))
    assert "did you mean 'local_lr'" in refused(ConfigError, lambda: tuned(out, tries={"local_rl": [1, 2]}))
    assert "it must be at least" in refused(ConfigError, lambda: tuned(out, tries={"local_lr": [-1, 2]}))
    assert "trains in this process" in refused(ConfigError, lambda: tuned(out, engine="flower-sim"))
    assert not out.exists()
    assert "validation data" in refused(ConfigError, lambda: tuned(out, dataset=(data().x, data().y), val_share=0))


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    assert "holds 'thesis.tex'" in refused(RunError, lambda: tuned(tmp_path))
    out = tmp_path / "out"
    out.mkdir()
    with locked(out):
        other = []
        thread = threading.Thread(target=lambda: other.append(refused(RunError, lambda: tuned(out))))
        thread.start()
        thread.join()
    assert "is in use by" in other[0]
    (out / "tune.json").write_text('{"method": "fedavg"}')
    assert "another tuning (its options, try, budget differ" in refused(RunError, lambda: tuned(out))
    (out / "tune.json").write_text("[")
    assert "damaged" in refused(RunError, lambda: tuned(out))
