# SPDX-License-Identifier: Apache-2.0
"""Canaries: an intact build is never accused, and one with half the noise, no bound or wrong sampling is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import setup_of, small_federation
from fedloom import algorithms
from fedloom.audit.canary import LITTLE, at_least, attack, judge, with_canaries
from fedloom.audit.finding import Side
from fedloom.core.errors import NeedsError
from fedloom.privacy import client_level
from fedloom.privacy.client_level import ClientPrivacy, with_client_privacy
from fedloom.training import cohorts

pytest.importorskip("dp_accounting")

HOW = ClientPrivacy(clip=0.3, noise=1.0)
DELTA = 1e-3


def audited(noise: float = HOW.noise, **options: Any) -> Side:
    """What canaries alone say of a build with this noise, of which ``HOW`` is claimed."""
    federation = small_federation(("mlp:hidden=250",), dtype=torch.float32)  # 10,003 numbers
    fedavg = algorithms.get("fedavg")
    setup = setup_of(federation, fedavg.config())
    built = with_client_privacy(fedavg, ClientPrivacy(HOW.clip, noise))
    rounds = {"rounds": 1, "sampling": "poisson", "cohort": 5.0, "number": 600, **options}
    return judge(*with_canaries(built, setup, HOW, ask_in=None, **rounds), DELTA)


def test_an_intact_build_keeps_its_promise() -> None:
    found = audited()
    assert 1.0 < found.value < found.chance, "and the bound says something"


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_so_it_does_when_clients_are_drawn(sampling: str) -> None:
    assert not audited(sampling=sampling, cohort=2.0, rounds=5, number=100).beats


def test_half_the_noise_is_caught() -> None:
    assert audited(HOW.noise / 2).beats


def test_a_missing_bound_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_level, "_norms", lambda tree, number: torch.zeros(number))
    assert audited().beats


def everybody(draw: np.random.Generator, clients: int, size: float, sampling: str) -> Any:
    return np.arange(clients)


def always_the_same(draw: np.random.Generator, clients: int, size: float, sampling: str) -> Any:
    return np.arange(clients)[:: round(clients / size)]


@pytest.mark.parametrize("broken", [None, everybody, always_the_same])
def test_wrong_sampling_is_caught(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client of ten is to be asked in a round, drawn anew; the intact build keeps the promise of that."""
    if broken:
        monkeypatch.setattr(cohorts, "drawn", broken)
    found = audited(cohort=0.5, rounds=10)
    assert found.beats == bool(broken)


def test_the_control_succeeds() -> None:
    assert audited(HOW.noise * LITTLE, rounds=5, number=100).beats


def test_nothing_is_found_where_nothing_is() -> None:
    assert at_least(np.random.default_rng(0).normal(size=1000), DELTA) == 0
    assert at_least(np.random.default_rng(0).normal(-5, 1, size=1000), DELTA) == 0


def test_the_bound_of_a_shift_lies_below_its_epsilon() -> None:
    """A Gaussian mechanism of sensitivity 2 and deviation 1 has epsilon 7.5 at this delta."""
    for seed in range(20):
        assert 2 < at_least(np.random.default_rng(seed).normal(2, 1, size=1000), DELTA) < 7.5


def test_a_private_run(runs: Any) -> None:
    options = {"dp_noise": 1.0, "dp_clip": 0.5, "sampling": "poisson", "cohort": 3, "model": "mlp:hidden=64"}
    simulation = runs("fedavg", **options).simulation
    before = simulation.server.now
    found = attack(simulation)
    (measure,) = found.measures
    assert not measure.run.beats and measure.control.beats
    assert "as it must be" in found.verdict
    assert simulation.server.now is before


def test_a_run_that_promises_nothing(runs: Any) -> None:
    with pytest.raises(NeedsError, match="makes none"):
        attack(runs("fedavg").simulation)


def test_a_method_whose_replies_are_something_else() -> None:
    federation, fedavg = small_federation(), algorithms.get("fedavg")
    other = replace(with_client_privacy(fedavg, HOW), means=("delta", "control"))
    with pytest.raises(NeedsError, match="more than the change"):
        with_canaries(
            other, setup_of(federation, fedavg.config()), HOW, ask_in=None, rounds=1, sampling="poisson", cohort=5.0
        )
