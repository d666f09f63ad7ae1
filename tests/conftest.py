# SPDX-License-Identifier: Apache-2.0
"""Fakes that all tests share: small ragged federations, and how to run a method on one."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom import algorithms
from fedloom.clients.federation import Client, Federation
from fedloom.core.contract import Algorithm, Cohort, Home, Sent, ServerData, Setup
from fedloom.core.sharded import Shards
from fedloom.core.task import CLASSIFICATION, SEQUENCE
from fedloom.core.tokens import UNLABELLED, Tokens
from fedloom.core.trees import PerClient, Tree
from fedloom.engines.auto import ENGINES
from fedloom.engines.cluster import Cluster
from fedloom.engines.engine import AbstractEngine, Session, Stats
from fedloom.engines.job import Means
from fedloom.engines.memories import Memories
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.programs.allowed import programs_of

torch.set_num_threads(1)
gc.disable()  # what is made while tests are collected stays: to walk through it again and again takes half the time

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


def token_federation(
    models: Sequence[str] = ("gru:embedding=3:hidden=4",),
    per_token: bool = False,
    sizes: Sequence[int] = SIZES,
    unseen: int = 0,
    dtype: torch.dtype = torch.float64,
    training_dtype: torch.dtype | None = None,
) -> Federation:
    """As ``small_federation``, with sequences of five tokens among 300; where each has a label some are padding."""
    rng, tokens = np.random.default_rng(0), Tokens(300, per_token)
    built = [Model(parse(name, (5,), CLASSES, tokens), "cpu", dtype, training_dtype=training_dtype) for name in models]
    roster, start = {}, 0
    for i, size in enumerate(sizes):
        cuts = np.cumsum([start, size, 3, 5])
        rows = {s: np.arange(a, b) for s, a, b in zip(("train", "val", "test"), cuts, cuts[1:])}
        roster[str(i)] = Client(str(i), built[i % len(built)], rows, unseen=i >= len(sizes) - unseen)
        start = int(cuts[-1])
    y = rng.integers(0, CLASSES, (start, 5) if per_token else start)
    # a class has tokens of its own, so that there is something to learn; bfloat16 holds whole numbers up to 256
    x = 250 + 10 * np.broadcast_to(y if per_token else y[:, None], (start, 5)) + rng.integers(0, 10, (start, 5))
    if per_token:
        y[::3, 3:] = UNLABELLED
    task = SEQUENCE if per_token else CLASSIFICATION
    return Federation(torch.as_tensor(x), torch.as_tensor(y), task, roster)


class Played:
    """A method after some rounds: its state, what clients remember, and the stats of the last round."""

    def __init__(
        self, setup: Setup[Any], state: Any, engine: AbstractEngine, memory: Memories, stats: Stats | None,
        diagnostics: list[Any], after: list[tuple[Any, Memories]],
    ) -> None:  # fmt: skip
        self.setup, self.state, self.engine, self.memory = setup, state, engine, memory
        self.stats, self.diagnostics = stats, diagnostics
        self.after = after
        """The state and what clients remembered after each round."""
        self.sent = Sent({}, PerClient.empty(()))
        """What newcomers were sent."""

    def session(self, stage: int | str) -> Session:
        """Another stage, from here on."""
        return self.engine.session(stage, self.memory)

    def recall(self, client: str) -> Tree:
        """What the client remembers."""
        return self.session("recall").recall(client)

    def settle(self) -> None:
        """Bring the state into the form in which it is used, as before an evaluation."""
        session = self.session("settling")
        self.state, self.memory = self.engine.algorithm.settle(self.setup, self.state, session.ask), session.memory

    def admit(self) -> Played:
        """The same with the unseen clients admitted: ``deployed`` then knows them too."""
        session, unseen = self.session("admission"), self.engine.federation.unseen
        setup = self.setup.joined_by(self.engine.federation.models)
        self.sent = self.engine.algorithm.admit(setup, self.state, Cohort(1, unseen), session.ask)
        self.memory = session.memory
        return self

    def deployed(self, client: str) -> Tree:
        """What a participant, or an admitted newcomer, deploys."""
        algorithm = self.engine.algorithm
        sent = algorithm.send(self.setup, self.state, [client]) if client in self.setup else self.sent
        return algorithm.client_deploy(self.home(client), sent.shared, sent.mine[client], self.recall(client))

    def home(self, client: str) -> Home:
        """The client's surroundings."""
        own, zero = self.engine.federation.roster[client], torch.zeros((), dtype=torch.int64)
        samples = torch.tensor(float(len(own.rows["train"])), dtype=self.setup.dtype)
        return Home(own.model, self.setup.task, self.setup.config, samples, zero)


def setup_of(
    federation: Federation, config: Any, seed: int = 0, rounds: int = 0, server: ServerData | None = None
) -> Setup[Any]:
    """The setup for a method on a federation; the server has a few labelled samples of its own."""
    own = server or server_data_like(federation, seed)
    clients, models, task = federation.participants, federation.models, federation.task
    return Setup(config, clients, models, task, seed, federation.device, federation.dtype, rounds, own)


def server_data_like(federation: Federation, seed: int = 0) -> ServerData:
    """Six samples, or fewer, with the labels of the first clients' and, of classes, with their means."""
    y = federation.y[:6]
    if not federation.x.is_floating_point():
        return ServerData(federation.x[:6], y)
    x = np.random.default_rng(seed).standard_normal((len(y), *federation.x.shape[1:])).astype(np.float32)
    moved = 0 if y.is_floating_point() else y.reshape(-1, *[1] * (x.ndim - 1))
    return ServerData((torch.as_tensor(x).to(federation.x) + moved).float().to(federation.x), y)


def needed(algorithm: Algorithm) -> dict[str, Any]:
    """The options without which a run of the method is refused, and those with which it does not take long."""
    return few(algorithm) | ({} if algorithm.needs.server_data == "none" else {"server_data": 0.2})


FEW = {"pretrain_rounds": 1, "server_steps": 5, "server_epochs": 3, "common_rounds": 1, "head_epochs": 2,
       "inner_steps": 2, "hidden": 8}  # fmt: skip
"""Options of which some methods have a great deal by default: with fewer, two rounds see all of a method."""


def few(algorithm: Algorithm) -> dict[str, Any]:
    """Those that the method has."""
    own = {name: getattr(algorithm.config, name) for name in FEW if hasattr(algorithm.config, name)}
    return {name: (FEW[name],) if isinstance(default, tuple) else FEW[name] for name, default in own.items()}


def by_programs() -> list[Any]:
    """All methods, for tests of what engines make of steps; those without a program of their own are slow ones."""
    ways, seen, model = [], set(), next(iter(small_federation().models.values()))
    for name in algorithms.names():
        algorithm = algorithms.get(name)
        programs = set(programs_of(algorithm, algorithm.config(local_lr=0.05), model, False))
        ways.append(pytest.param(name, marks=[pytest.mark.slow] * (programs <= seen)))
        seen |= programs
    return ways


def play(
    algorithm: Algorithm,
    federation: Federation,
    engine: str | type[AbstractEngine] = "sequential",
    rounds: int = 2,
    cohorts: Sequence[Sequence[str]] | None = None,
    wrap: Any = None,
    server: ServerData | None = None,
    added_up: bool = False,
    shards: Shards | None = None,
    **config: Any,
) -> Played:
    """``rounds`` rounds with everybody or with ``cohorts``; ``wrap(ask)`` stands between method and engine.

    ``server`` is what the server has of its own, ``shards`` where it has heads of looms. ``added_up``: replies
    may be, as the method declares.
    """
    small = {"local_epochs": 2, "batch_size": 4, "local_lr": 0.05, "clip": 0.5, **few(algorithm)}
    made = algorithm.config(**{**small, **config})
    ran = (ENGINES[engine] if isinstance(engine, str) else engine)(federation, algorithm, made, seed=0)
    means = Means(algorithm.means, algorithm.mean_weight) if added_up else None
    setup = replace(setup_of(federation, made, rounds=rounds, server=server), shards=shards)
    state, memory, stats, diagnostics, after = algorithm.init(setup), Memories(), None, [], []
    for number in range(1, rounds + 1):
        clients = cohorts[number - 1] if cohorts else federation.participants
        session = ran.session(number, memory)
        ask = wrap(session.ask) if wrap else partial(session.ask, means=means)
        state, found = algorithm.round(setup, state, Cohort(number, tuple(clients)), ask)
        memory, stats = session.memory, session.stats
        diagnostics.append(found)
        after.append((state, memory))
    return Played(setup, state, ran, memory, stats, diagnostics, after)


def models_for(algorithm: Algorithm, *names: str) -> tuple[str, ...]:
    """As many of ``names`` as the method can have in one federation."""
    one = algorithm.needs.same_model or algorithm.needs.features == "same"
    return names[:1] if one else names


@pytest.fixture
def federation() -> Federation:
    """Five ragged clients with one small dense model."""
    return small_federation()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """Ray on this machine, started once: engines of the whole session share it. Its GPUs are a number only."""
    cluster = Cluster.at(None, workers=2, gpus=2)
    yield cluster
    assert Cluster.at(None, 0, 0) is cluster


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of all engines: Ray takes seconds to start, and has fast tests of its own."""
    for item in items:
        given = getattr(item, "callspec", SimpleNamespace(params={})).params.values()
        if any(isinstance(one, str) and one == "ray" for one in given):  # arrays are given too, which compare otherwise
            item.add_marker(pytest.mark.slow)
            item.fixturenames = [*item.fixturenames, "ray_cluster"]  # the list is one for all ways of a test
