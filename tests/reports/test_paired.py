# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from fedloom.reports.facts import Facts
from fedloom.reports.paired import paired
from fedloom.runs.directory import METRICS, SCORES, RunDirectory
from fedloom.runs.records import scores_line


def run(path: Path, values: dict[str, float], samples: int = 10, *, seed: int = 0, metric: str = "accuracy") -> Facts:
    """A run that was evaluated once."""
    directory = RunDirectory.create(path, {"method": "fedavg", "seed": seed, "rounds": 1})
    task = {"name": metric, "higher_is_better": metric == "accuracy"}
    columns = {"metric": list(values.values()), "loss": [1.0] * len(values), "samples": [samples] * len(values)}
    directory.append_to(SCORES, scores_line(1, ("deployed", "participants", "test"), task, list(values), columns))
    directory.append_to(METRICS, {"round": 1, "metrics": {f"deployed/participants/val/{metric}": 0.5}})
    return Facts.read(directory)


def against(tmp_path, *pairs, samples=10, metric="accuracy"):
    """Two methods, a pair of scores by client for each seed."""
    one, base = {}, {}
    for seed, (mine, theirs) in enumerate(pairs):
        one[seed] = run(tmp_path / f"one-{seed}", mine, samples, seed=seed, metric=metric)
        base[seed] = run(tmp_path / f"base-{seed}", theirs, samples, seed=seed, metric=metric)
    return paired("One", one, "Base", base)


def test_clients_are_paired_by_name(tmp_path):
    """0.9 - 0.5 and 0.2 - 0.3: mean 0.15, one of two loses. Of 20 samples 11 and 8 are right: 3 apart."""
    found = against(tmp_path, ({"a": 0.9, "b": 0.2}, {"b": 0.3, "a": 0.5}))
    assert found.seeds[0].clients == ["a", "b"]
    assert found.seeds[0].differences.tolist() == pytest.approx([0.4, -0.1])
    assert found.interval == pytest.approx((0.15, None, None))
    assert (found.lose, found.worst) == (0.5, ("b", pytest.approx(-0.1)))
    assert (found.seeds[0].samples, found.seeds[0].apart) == (20, 3)


def test_a_few_samples_tell_nothing_apart(tmp_path):
    """11 and 8 of 20: p = 0.55 and 0.4, error sqrt((0.2475 + 0.24) / 20) = 0.156; 0.15 is less than twice that."""
    found = against(tmp_path, ({"a": 0.9, "b": 0.2}, {"a": 0.5, "b": 0.3}))
    assert found.seeds[0].error == pytest.approx(0.1561, abs=1e-4)
    assert not found.told_apart
    assert found.sentence() == "One and Base are 3 of 20 test samples apart: too few to tell them apart."


def test_many_samples_do(tmp_path):
    found = against(tmp_path, ({"a": 0.9, "b": 0.2}, {"a": 0.5, "b": 0.3}), samples=1000)
    assert found.sentence() == "One is right on 300 more of 2000 test samples than Base."
    found = against(tmp_path / "other", ({"a": 0.5}, {"a": 0.9}), samples=1000)
    assert found.sentence() == "One is right on 400 fewer of 1000 test samples than Base."


def test_several_seeds_have_an_interval_over_seeds(tmp_path):
    """Differences 0.1, 0.2 and 0.3: 20 points, 4.30265 * 0.1 / sqrt 3 = 24.8 points each way."""
    seeds = [({"a": 0.5 + d}, {"a": 0.5}) for d in (0.1, 0.2, 0.3)]
    found = against(tmp_path, *seeds)
    assert found.sentence() == (
        "One and Base differ by +20.0 points (95% interval over 3 seeds: -4.8 to +44.8): too few seeds "
        "to tell them apart."
    )
    seeds = [({"a": 0.5}, {"a": 0.5 + d}) for d in (0.19, 0.2, 0.21)]
    assert against(tmp_path / "other", *seeds).sentence() == (
        "One is worse than Base by 20.0 points (95% interval over 3 seeds: 17.5 to 22.5)."
    )


def test_a_smaller_error_is_a_gain(tmp_path):
    values = {str(i): 1.0 + i / 100 for i in range(20)}
    found = against(tmp_path, ({c: v - 0.5 for c, v in values.items()}, values), metric="absolute_error")
    assert found.interval.mean == pytest.approx(0.5)
    assert found.sentence() == "One is better than Base by 0.5 over 20 clients."


def test_other_clients_or_other_samples_are_not_paired(tmp_path):
    mine = {0: run(tmp_path / "a", {"a": 0.5}), 1: run(tmp_path / "b", {"a": 0.5}, 10, seed=1)}
    theirs = {0: run(tmp_path / "c", {"b": 0.5}), 1: run(tmp_path / "d", {"a": 0.5}, 11, seed=1)}
    assert paired("One", mine, "Base", theirs) is None
    assert paired("One", mine, "Base", {7: theirs[0]}) is None
