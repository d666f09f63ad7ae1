# SPDX-License-Identifier: Apache-2.0
"""Canaries: an intact build is never accused, and one with half the noise, no bound or wrong sampling is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import setup_of, small_federation
from fedloom import algorithms
from fedloom.audit import planted_clients, planted_samples
from fedloom.audit.canary import at_least, attack, judge
from fedloom.audit.finding import Side
from fedloom.audit.planted import LITTLE
from fedloom.clients import batching
from fedloom.core import noised, training
from fedloom.core.contract import Batches
from fedloom.core.errors import NeedsError
from fedloom.engines import job
from fedloom.engines.auto import ENGINES
from fedloom.privacy import client_level
from fedloom.privacy.client_level import ClientPrivacy, with_client_privacy
from fedloom.training import cohorts

pytest.importorskip("dp_accounting")

HOW = ClientPrivacy(clip=0.3, noise=1.0)
DELTA = 1e-3
Audited = Callable[..., Side]


def replies(noise: float = HOW.noise, **options: Any) -> Side:
    """What canaries alone say of a build of FedAvg with this noise, of which ``HOW`` is claimed."""
    return clients("fedavg", {}, ("mlp:hidden=250",), noise, **options)  # 10,003 numbers


def gradients(noise: float = HOW.noise, **options: Any) -> Side:
    """Likewise of pFedHN, whose loom has 9,630 numbers."""
    config = {"hidden": 60, "layers": 1, "embed_dim": 5, "server_step": "cohort_mean"}
    return clients("pfedhn", config, ("mlp:hidden=4",), noise, **options)


def clients(name: str, config: Any, models: tuple[str, ...], noise: float, **options: Any) -> Side:
    method = algorithms.get(name)
    setup = setup_of(small_federation(models, dtype=torch.float32), method.config(**config))

    def build(base: Any) -> Any:
        return with_client_privacy(base, ClientPrivacy(HOW.clip, noise))

    rounds = {"rounds": 1, "sampling": "poisson", "cohort": 5.0, "number": 600, **options}
    return judge(*planted_clients.with_canaries(build, method, setup, HOW, ask_in=None, **rounds), DELTA)


def samples(noise: float = 1.0, *, name: str = "fedavg", engine: str = "sequential", **options: Any) -> Side:
    """What canaries say of a client whose 400 samples are hidden by this noise in one step, of which 1 is claimed."""
    method, federation = algorithms.get(name), small_federation(("mlp:hidden=250",), (400, 3), dtype=torch.float32)
    chosen = {"local_steps": 1, "batch_size": 400, "local_lr": 0.1, "momentum": 0.0, **options}
    claimed = method.config(**chosen, sample_dp_clip=0.2, sample_dp_noise=1.0)
    built = replace(claimed, sample_dp_noise=noise)
    ran = ENGINES[engine](federation, method, built, 0)
    return judge(*planted_samples.with_canaries(ran, setup_of(federation, built), "0", claimed, [1], 400), DELTA)


ALL = pytest.mark.parametrize("audited", [replies, gradients, samples], ids=lambda one: one.__name__)
CLIENTS = pytest.mark.parametrize("audited", [replies, gradients], ids=lambda one: one.__name__)


@ALL
def test_an_intact_build_keeps_its_promise(audited: Audited) -> None:
    found = audited()
    assert 1.0 < found.value < found.chance, "and the bound says something"


@ALL
def test_half_the_noise_is_caught(audited: Audited) -> None:
    assert audited(0.5).beats


@CLIENTS
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_so_it_does_when_clients_are_drawn(audited: Audited, sampling: str) -> None:
    assert not audited(sampling=sampling, cohort=2.0, rounds=5, number=100).beats


@CLIENTS
def test_a_missing_bound_on_clients_is_caught(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_level, "_norms", lambda tree, number: torch.zeros(number))
    assert audited().beats


def test_a_missing_bound_on_samples_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unbounded(of_sample: Any, some: Any, mask: Any, clip: float) -> Any:
        return noised.clipped_sum(of_sample, some, mask, 1e9)

    monkeypatch.setattr(training, "clipped_sum", unbounded)
    assert samples().beats


def everybody(draw: np.random.Generator, clients: int, size: float, sampling: str) -> Any:
    return np.arange(clients)


def always_the_same(draw: np.random.Generator, clients: int, size: float, sampling: str) -> Any:
    return np.arange(clients)[:: round(clients / size)]


@CLIENTS
@pytest.mark.parametrize("broken", [None, everybody, always_the_same])
def test_wrong_sampling_of_clients_is_caught(audited: Audited, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client of ten is to be asked in a round, drawn anew; the intact build keeps the promise of that."""
    if broken:
        monkeypatch.setattr(cohorts, "drawn", broken)
    found = audited(cohort=0.5, rounds=10)
    assert found.beats == bool(broken)


def all_rows(rows: np.ndarray, batches: Batches, rng: np.random.Generator) -> batching.Schedule:
    return batching.Schedule([rows] * batches.steps, [0] * batches.steps)


def first_rows(rows: np.ndarray, batches: Batches, rng: np.random.Generator) -> batching.Schedule:
    return batching.Schedule([rows[: batches.size]] * batches.steps, [0] * batches.steps)


@pytest.mark.parametrize("broken", [None, all_rows, first_rows])
def test_wrong_sampling_of_samples_is_caught(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample of ten is to be in a step, drawn anew."""
    if broken:
        monkeypatch.setattr(job, "drawn_one_by_one", broken)
    found = samples(batch_size=40, local_steps=10)
    assert found.beats == bool(broken)


@ALL
def test_the_control_succeeds(audited: Audited) -> None:
    assert audited(LITTLE).beats


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "ray"])
def test_samples_are_found_on_every_engine(engine: str) -> None:
    assert samples(LITTLE, engine=engine).beats


@pytest.mark.parametrize("name", ["fedper", "scaffold", "pfedhn", "mh_pfedhn"])
def test_samples_are_found_in_every_kind_of_reply(name: str) -> None:
    assert samples(LITTLE, name=name).beats


def test_nothing_is_found_where_nothing_is() -> None:
    assert at_least(np.random.default_rng(0).normal(size=1000), DELTA) == 0
    assert at_least(np.random.default_rng(0).normal(-5, 1, size=1000), DELTA) == 0


def test_the_bound_of_a_shift_lies_below_its_epsilon() -> None:
    """A Gaussian mechanism of sensitivity 2 and deviation 1 has epsilon 7.5 at this delta."""
    for seed in range(20):
        assert 2 < at_least(np.random.default_rng(seed).normal(2, 1, size=1000), DELTA) < 7.5


PRIVATE = {"dp_noise": 1.0, "dp_clip": 0.5, "sampling": "poisson", "cohort": 3, "model": "mlp:hidden=64"}


@pytest.mark.parametrize(
    ("name", "options", "sees"),
    [
        ("fedavg", PRIVATE, "model before round 1"),
        ("pfedhn", {**PRIVATE, "server_step": "cohort_mean", "hidden": 8, "layers": 1}, "loom before round 1"),
        ("pfedhn", {"sample_dp_noise": 2.0, "sample_dp_clip": 0.5, "model": "mlp:hidden=64"}, "what client"),
    ],
)
def test_a_private_run(runs: Any, name: str, options: dict[str, Any], sees: str) -> None:
    simulation = runs(name, **options).simulation
    before = simulation.server.now
    found = attack(simulation)
    (measure,) = found.measures
    assert not measure.run.beats and measure.control.beats
    assert "as it must be" in found.verdict and sees in found.sees
    assert simulation.server.now is before


def test_a_run_that_promises_two_things(runs: Any) -> None:
    both = {**PRIVATE, "sample_dp_noise": 2.0, "sample_dp_clip": 0.5}
    found = attack(runs("fedavg", **both).simulation)
    assert [one.name.split(" is")[0] for one in found.measures] == ["epsilon of clients", "epsilon of samples"]


def test_a_run_that_promises_nothing(runs: Any) -> None:
    with pytest.raises(NeedsError, match="makes none"):
        attack(runs("fedavg").simulation)


def test_a_method_whose_replies_are_something_else() -> None:
    federation, fedavg = small_federation(), algorithms.get("fedavg")
    other = replace(fedavg, means=("delta", "control"))
    with pytest.raises(NeedsError, match="more than the change"):
        planted_clients.with_canaries(
            lambda base: with_client_privacy(base, HOW), other, setup_of(federation, fedavg.config()), HOW,
            ask_in=None, rounds=1, sampling="poisson", cohort=5.0,
        )  # fmt: skip
