# SPDX-License-Identifier: Apache-2.0
"""Telling training samples from others by their loss: the numbers by hand, an overfitted run, an honest one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from conftest import small_federation
from fedloom.audit.membership import attack, memorised, told_apart
from fedloom.core.errors import NeedsError


def test_the_numbers_by_hand() -> None:
    members, others = np.array([0.0, 1.0, 2.0]), np.array([1.0, 3.0])
    # pairs: 0 < 1, 0 < 3, 1 = 1, 1 < 3, 2 > 1, 2 < 3; two of three members and one of two others are at most 1
    area, advantage = told_apart(members, others)
    assert area == pytest.approx(4.5 / 6)
    assert advantage == pytest.approx(2 / 3 - 1 / 2)
    assert told_apart(others, others) == (0.5, 0.0)


def test_an_overfitted_network_knows_its_samples() -> None:
    federation = small_federation(("mlp:hidden=32",), sizes=(40,))
    model, x, y = federation.roster["0"].model, federation.x, federation.y.roll(7)
    members, others = memorised(model, federation.task, [x[:20], x[20:40]], [y[:20], y[20:40]], 0)
    assert members.mean() < 0.1 < others.mean()
    assert told_apart(members, others)[0] > 0.9


@pytest.mark.slow
def test_a_run_that_knows_its_samples_by_heart_is_told_from_one_that_does_not(runs: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = (rng.normal(size=(120, 8)).astype(np.float32), rng.integers(0, 3, 120))
    heart = {"local_steps": 100, "optimiser": "adam", "local_lr": 5e-3, "weight_decay": 0.0, "progress": "quiet"}
    form = {"clients": 4, "partition": "iid", "model": "mlp:hidden=64", "rounds": 2}
    fedloom.run("local", dataset=noise, out=tmp_path / "run", **form, **heart)
    overfitted = attack(fedloom.load(tmp_path / "run", dataset=noise, which="last").simulation)
    honest = attack(runs("fedavg").simulation)
    assert all(measure.control.beats for measure in (*overfitted.measures, *honest.measures))
    assert overfitted.measures[0].run.value > 0.8 and overfitted.measures[0].run.beats
    assert not honest.measures[0].run.beats
    assert "does not prove" in honest.verdict


def test_clients_without_test_samples(runs: Any) -> None:
    simulation = runs("fedavg").simulation
    for client in simulation.federation.roster.values():
        client.rows["test"] = client.rows["test"][:0]
    with pytest.raises(NeedsError, match="training and test samples both"):
        attack(simulation)
