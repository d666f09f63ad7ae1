# SPDX-License-Identifier: Apache-2.0
"""Fakes that all tests share: small ragged federations, and how to run a method on one."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.clients.federation import Client, Federation
from fedloom.core.contract import Algorithm, Cohort, Setup
from fedloom.core.task import CLASSIFICATION
from fedloom.engines.auto import ENGINES
from fedloom.engines.engine import AbstractEngine
from fedloom.models.model import Model
from fedloom.models.spec import parse

torch.set_num_threads(1)

SHAPE, CLASSES = (1, 6, 6), 3
SIZES = (9, 4, 13, 7, 5)
"""Training samples of the clients: with batches of 4, unequal numbers of steps and last batches that are not full."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # started in the background by a shell: processes that tests interrupt would inherit the deafness
    signal.signal(signal.SIGINT, signal.default_int_handler)


def small_federation(
    models: Sequence[str] = ("mlp:hidden=5",),
    sizes: Sequence[int] = SIZES,
    unseen: int = 0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    device: str = "cpu",
) -> Federation:
    """Clients with ``sizes`` training samples, 3 for validation and 5 for testing; the last ``unseen`` are held out."""
    rng = np.random.default_rng(seed)
    built = [Model(parse(name, SHAPE, CLASSES), device, dtype) for name in models]
    roster, start = {}, 0
    for i, size in enumerate(sizes):
        cuts = np.cumsum([start, size, 3, 5])
        rows = {s: np.arange(a, b) for s, a, b in zip(("train", "val", "test"), cuts, cuts[1:])}
        roster[str(i)] = Client(str(i), built[i % len(built)], rows, unseen=i >= len(sizes) - unseen)
        start = int(cuts[-1])
    y = torch.as_tensor(rng.integers(0, CLASSES, start))
    # classes differ in their mean, so that there is something to learn
    x = torch.as_tensor(rng.standard_normal((start, *SHAPE))) + y.reshape(-1, 1, 1, 1)
    return Federation(x.to(device, dtype), y.to(device), CLASSIFICATION, roster)


class Played:
    """A method after some rounds."""

    def __init__(self, setup: Setup[Any], state: Any, engine: AbstractEngine, diagnostics: list[Any]) -> None:
        self.setup, self.state, self.engine, self.diagnostics = setup, state, engine, diagnostics


def setup_of(federation: Federation, config: Any, seed: int = 0) -> Setup[Any]:
    """The setup for a method on a federation."""
    return Setup(
        config, federation.participants, federation.models, federation.task, seed, federation.device, federation.dtype
    )


def play(
    algorithm: Algorithm,
    federation: Federation,
    engine: str = "sequential",
    rounds: int = 2,
    cohorts: Sequence[Sequence[str]] | None = None,
    wrap: Any = None,
    **config: Any,
) -> Played:
    """``rounds`` rounds with everybody or with ``cohorts``; ``wrap(ask)`` stands between method and engine."""
    made = algorithm.config(**{"local_epochs": 2, "batch_size": 4, "local_lr": 0.05, "clip": 0.5, **config})
    setup = setup_of(federation, made)
    ran = ENGINES[engine](federation, algorithm, made, seed=0)
    state, diagnostics = algorithm.init(setup), []
    for number in range(1, rounds + 1):
        clients = cohorts[number - 1] if cohorts else federation.participants
        ran.begin(number)
        ask = wrap(ran.ask) if wrap else ran.ask
        state, found = algorithm.round(setup, state, Cohort(number, tuple(clients)), ask)
        diagnostics.append(found)
    return Played(setup, state, ran, diagnostics)


def models_for(algorithm: Algorithm, *names: str) -> tuple[str, ...]:
    """As many of ``names`` as the method can have in one federation."""
    return names[:1] if algorithm.needs.same_model else names


@pytest.fixture
def federation() -> Federation:
    """Five ragged clients with one small dense model."""
    return small_federation()
