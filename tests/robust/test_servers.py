# SPDX-License-Identifier: Apache-2.0
"""Runs with liars: the mean falls to them, rules do not; who was left out is recorded; the same seed, the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.errors import ConfigError, NeedsError
from fedloom.robust.attacks import ATTACKS, alie, liars

CLIENTS = tuple(map(str, range(10)))


def train(out: Path, method: str = "fedavg", **more: Any) -> fedloom.Run:
    options = {"dataset": "digits", "partition": "iid", "clients": 10, "cohort": 10, "rounds": 8, "local_steps": 10,
               "local_lr": 0.05, "model": "mlp:hidden=16", "eval_every": 8, "progress": "quiet"}  # fmt: skip
    return fedloom.run(method, out=out, **{**options, **more})


def accuracy(run: fedloom.Run) -> float:
    return run.summary["last"]["deployed/participants/test/accuracy"]


def test_liars_are_drawn_by_the_seed() -> None:
    drawn = liars(CLIENTS, 0.3, 0)
    assert len(drawn) == 3 and drawn == liars(CLIENTS, 0.3, 0) != liars(CLIENTS, 0.3, 1)
    assert liars(CLIENTS, 0.0, 0) == frozenset()


def test_a_little_is_enough_by_hand() -> None:
    """Of 1 and 3 the mean is 2 and the deviation 1: both say 1."""
    assert alie(torch.tensor([[1.0], [3.0]])).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("rule", ["median", "trimmed:2", "krum:2", "geomedian", "dnc:2"])
def test_rules_hold_where_the_mean_falls(rule: str, tmp_path: Path) -> None:
    """Two of ten send ten times the opposite; the controls are a run without them, and the mean."""
    honest = accuracy(train(tmp_path / "honest"))
    fallen = accuracy(train(tmp_path / "mean", malicious=0.2, attack="scale"))
    held = accuracy(train(tmp_path / "rule", malicious=0.2, attack="scale", aggregate=rule))
    assert fallen < 0.4 < 0.75 < honest and held > honest - 0.15


def test_who_was_left_out_is_recorded(tmp_path: Path) -> None:
    run = train(tmp_path / "run", malicious=0.2, attack="scale", aggregate="dnc:2", rounds=2)
    table = run.directory.records()[-1]["tables"]["kept"]
    left_out = {client for client, (kept,) in zip(table["client"], table["values"]) if not kept}
    assert liars(CLIENTS, 0.2, 0) < left_out and len(left_out) == 3


def test_the_plain_mean_counts_each_client_once(tmp_path: Path) -> None:
    """Without liars and with equal numbers of samples, `mean` gives FedAvg's model but for rounding."""
    options = {"partition": "iid", "rounds": 2, "dtype": "float64"}
    one, other = (train(tmp_path / name, aggregate=name, **options).model("0") for name in ("", "mean"))
    for a, b in zip(one.parameters(), other.parameters()):
        assert torch.allclose(a, b, atol=2e-3)


@pytest.mark.parametrize("kind", [*ATTACKS, "label_flip"])
def test_every_attack_runs_and_repeats_bit_for_bit(kind: str, tmp_path: Path) -> None:
    one, other = (train(tmp_path / str(i), malicious=0.3, attack=kind, rounds=2).model("1") for i in range(2))
    plain = train(tmp_path / "plain", rounds=2).model("1")
    states = [model.state_dict() for model in (one, other, plain)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_only_liars_train_on_wrong_labels(tmp_path: Path) -> None:
    run = train(tmp_path / "run", malicious=0.2, attack="label_flip", rounds=0)
    simulation, lying = run.simulation, liars(CLIENTS, 0.2, 0)
    y, right = simulation.federation.y.numpy(), simulation.arrays.y
    for client, own in simulation.federation.roster.items():
        expected = 9 - right[own.rows["train"]] if client in lying else right[own.rows["train"]]
        assert np.array_equal(y[own.rows["train"]], expected)
        assert np.array_equal(y[own.rows["test"]], right[own.rows["test"]])


def test_a_loom_can_be_lied_to_but_has_no_rule(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "pfedhn", malicious=0.2, rounds=1, cohort=3).summary["finished"]
    with pytest.raises(NeedsError, match="only means"):
        train(tmp_path / "rule", "pfedhn", aggregate="median")


def test_methods_without_changes_cannot_be_lied_to_by_changing_them(tmp_path: Path) -> None:
    with pytest.raises(NeedsError, match="Choose another method, or --attack label_flip"):
        train(tmp_path / "run", "fedproto", malicious=0.5)


def test_privacy_and_rules_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not go together"):
        train(tmp_path / "run", aggregate="median", dp_noise=1.0, dp_clip=1.0)
