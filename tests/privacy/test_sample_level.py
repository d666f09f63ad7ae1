# SPDX-License-Identifier: Apache-2.0
"""Sample-level privacy: what one sample changes is bounded, noise and draws are what is said, and nothing else is told.

Each check of a guarantee is tried on builds that break it: with half the noise, without clipping, with other draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from conftest import models_for, play, setup_of, small_federation, token_federation
from fedloom import algorithms
from fedloom.clients import batching
from fedloom.core import noised, training
from fedloom.core.contract import Batches
from fedloom.core.errors import ConfigError, NeedsError
from fedloom.core.trees import flatten, tree_map
from fedloom.deploy import node
from fedloom.engines import job
from fedloom.engines.auto import ENGINES
from fedloom.engines.memories import Memories
from fedloom.engines.sequential import Sequential
from fedloom.programs.local import local_training
from tiny import HAND, lines

LOCAL = [name for name in ENGINES if name != "ray"]
HIDDEN = {"sample_dp_noise": 1.0, "sample_dp_clip": 0.5}


def parameters(name: str, engine: str, *models: str, **config: Any) -> dict[str, torch.Tensor]:
    """The server's state after a round."""
    algorithm = algorithms.get(name)
    federation = small_federation(models_for(algorithm, *models))
    return flatten(play(algorithm, federation, engine, rounds=1, **HIDDEN, **config).state._asdict())


@pytest.mark.parametrize(("name", "model"), [("fedavg", "lenet:kernels=2"), ("pfedhn", "mlp:hidden=5")])
def test_all_engines_give_the_same(name: str, model: str) -> None:
    """Batches of all sizes, empty ones among them."""
    expected = parameters(name, "sequential", model, batch_size=2)
    for engine in LOCAL:
        found = parameters(name, engine, model, batch_size=2)
        assert all(torch.allclose(found[path], expected[path], atol=1e-9) for path in expected), engine


def test_samples_of_tokens_are_hidden_too() -> None:
    played = play(algorithms.get("fedavg"), token_federation(), rounds=1, **HIDDEN)
    assert all(leaf.isfinite().all() for leaf in played.state.params.values())


def test_a_step_on_paper() -> None:
    """Residuals 0, 1, 1 times 2 x are 0, 2, 4, the last shortened to 3: w = 1 - 0.1 * (0 + 2 + 3) / 3."""
    federation = lines((((1, 1), (1, 0), (2, 1)),))
    for engine in LOCAL:
        config = {**HAND, "sample_dp_clip": 3.0, "sample_dp_noise": 1e-12}
        played = play(algorithms.get("fedavg"), federation, engine, rounds=1, **config)
        assert float(played.state.params["line.weight"]) == pytest.approx(1 - 0.1 * 5 / 3, abs=1e-9)


def test_a_sample_without_a_finite_gradient_adds_nothing() -> None:
    x = torch.tensor([1.0, 1e30, math.nan, 2.0])
    found = noised.clipped_sum(lambda one: {"w": one * one}, (x,), torch.tensor([True, True, True, False]), 5.0)
    assert float(found["w"]) == 1.0


def check_bound() -> None:
    """Brute force: with one sample more, whatever it is, the sum differs by the bound at most, and reaches it."""
    largest, total = 0.0, training.clipped_sum
    for seed in range(300):
        drawn = torch.Generator().manual_seed(seed)
        rows = 10.0 ** (seed % 12 - 4) * torch.randn(5, 7, generator=drawn, dtype=torch.float64)
        mask, without = torch.ones(5, dtype=torch.bool), torch.arange(5) != seed % 5
        one, other = (total(lambda row: {"w": row[:3], "b": row[3:]}, (rows,), some, 0.5) for some in (mask, without))
        gap = math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))
        assert gap <= 0.5 * (1 + 1e-9)
        largest = max(largest, gap)
    assert largest > 0.499


def steps(engine: str, rounds: int = 4, clients: int = 80) -> torch.Tensor:
    """What rounds of a single step add to the one parameter of a network that gets 0: (rounds, clients) of noise."""
    federation, algorithm = lines([[(0, 1)] * 4] * clients), algorithms.get("fedavg")
    chosen = {"batch_size": 2, "local_epochs": 0, "local_steps": 1, "local_lr": 1.0}
    config = algorithm.config(**{**HAND, **chosen, "sample_dp_noise": 3.0, "sample_dp_clip": 0.5})
    ran = ENGINES[engine](federation, algorithm, config, seed=0)
    setup = setup_of(federation, ran.config)
    sent = algorithm.send(setup, algorithm.init(setup), federation.participants)
    told = []
    for number in range(1, rounds + 1):
        replies = ran.session(number, Memories()).ask(local_training(ran.config), sent.shared, sent.mine)
        told.append([float(replies[client]["delta"]["line.weight"]) for client in federation.participants])
        assert all(float(replies[client]["loss"]) == 0 for client in federation.participants), "losses are not told"
    return torch.tensor(told)


def check_noise(engine: str) -> None:
    """Deviation z C / 2 for batches of two on average, and no draw that comes twice."""
    found = steps(engine)
    assert found.std() == pytest.approx(3.0 * 0.5 / 2, rel=4 / math.sqrt(2 * found.numel()))
    assert found.mean().abs() < 4 * 0.75 / math.sqrt(found.numel())
    for one, other in ((found[:-1], found[1:]), (found[:, :-1], found[:, 1:])):
        together = torch.corrcoef(torch.stack([one.reshape(-1), other.reshape(-1)]))[0, 1]
        assert abs(float(together)) < 5 / math.sqrt(one.numel())


def check_sampling() -> None:
    """Each sample is in a batch by itself, with probability 4 / 20: sizes and pairs are as of a binomial."""
    plan = job.drawn_one_by_one(np.arange(20), Batches(size=4, steps=4000), np.random.default_rng(0))
    drawn = np.zeros((4000, 20))
    for step, (rows, size) in enumerate(zip(plan.rows, plan.sizes)):
        drawn[step, rows[:size]] = 1
    sizes = drawn.sum(1)
    assert sizes.mean() == pytest.approx(4, abs=5 * math.sqrt(3.2 / 4000))
    assert sizes.var() == pytest.approx(3.2, rel=0.15)
    assert np.abs(drawn.mean(0) - 0.2).max() < 5 * math.sqrt(0.16 / 4000)
    pairs = np.corrcoef(drawn.T)[np.triu_indices(20, 1)]
    assert np.abs(pairs).max() < 5.5 / math.sqrt(4000)
    following = np.corrcoef(drawn[:-1].reshape(-1), drawn[1:].reshape(-1))[0, 1]
    assert abs(following) < 5 / math.sqrt(drawn.size)
    assert (sizes == 0).any() and sizes.max() > 10, "batches are neither filled up nor cut short"


def test_one_sample_moves_a_sum_by_the_bound_at_most() -> None:
    check_bound()


@pytest.mark.parametrize("engine", ENGINES)
def test_noise_is_what_is_said_on_every_engine(engine: str) -> None:
    check_noise(engine)


def test_samples_are_drawn_one_by_one() -> None:
    check_sampling()


def _half(total: Any, clip: float, noise: float, expected: Any, key: Any) -> Any:
    return noised.noised(total, clip, noise / 2, expected, key)


def _unclipped(of_sample: Any, samples: Any, mask: Any, clip: float) -> Any:
    return noised.clipped_sum(of_sample, samples, mask, 1e9)


def _cut(rows: np.ndarray, batches: Batches, rng: np.random.Generator) -> batching.Schedule:
    plan = batching.schedule(rows, batches, rng)
    return batching.Schedule(plan.rows, plan.epochs)


@pytest.mark.parametrize(
    ("where", "name", "broken", "check"),
    [
        (training, "noised", _half, lambda: check_noise("sequential")),
        (training, "noised", lambda t, c, z, e, k: noised.noised(t, c, z, e, torch.zeros_like(k)),
         lambda: check_noise("vectorised")),
        (training, "clipped_sum", _unclipped, check_bound),
        (job, "drawn_one_by_one", _cut, check_sampling),
    ],
)  # fmt: skip
def test_a_broken_build_is_caught(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, broken: Any, check: Callable[[], None]
) -> None:
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ditto", "takes 2 gradients of each batch"),
        ("hyperfedzero", "computes more from a client's samples"),
        ("fedproto", "computes more from a client's samples"),
        ("fedrod", "computes more from a client's samples"),
        ("pefll", "computes more from a client's samples"),
    ],
)
def test_methods_whose_clients_tell_more_are_refused_by_name(name: str, reason: str) -> None:
    algorithm = algorithms.get(name)
    with pytest.raises(NeedsError, match=f"{algorithm.name} asks clients for .*{reason}"):
        parameters(name, "vectorised", "mlp:hidden=5")


def test_a_program_that_fails_when_it_is_tried_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(home: Any, *_: Any) -> Any:
        return lambda params, buffers, batch: torch.nn.functional.one_hot(batch.y, 3)

    monkeypatch.setattr(training, "mean_loss_of", reads)
    with pytest.raises(NeedsError, match=r"FedAvg asks clients for train, which raised RuntimeError when it was tried"):
        parameters("fedavg", "sequential", "mlp:hidden=5")


def test_batch_normalisation_is_refused() -> None:
    with pytest.raises(NeedsError, match="running statistics"):
        play(algorithms.get("fedavg"), small_federation(("testnets:Normed",)), **HIDDEN)


def test_noise_without_a_bound_is_refused() -> None:
    for given in ({"sample_dp_noise": 1.0}, {"sample_dp_clip": 1.0}):
        with pytest.raises(ConfigError, match="go together"):
            algorithms.get("fedavg").config(**given)


def test_secret_draws_follow_from_nothing() -> None:
    """As on a node: neither noise nor batches come again, and no trace keeps them."""
    algorithm, federation = algorithms.get("fedavg"), lines([[(0, 1)] * 4])
    config = algorithm.config(**{**HAND, **HIDDEN})
    engine = Sequential(federation, algorithm, config, 0)
    sent = {"params": {"line.weight": torch.ones(1, 1, dtype=torch.float64)}}
    told = {float(node.answer(engine, "0", local_training(config), 1, 1, sent, {}, None)[0]["delta"]["line.weight"])
            for _ in range(3)}  # fmt: skip
    assert len(told) == 3
    assert tree_map(float, sent["params"]) == {"line.weight": 1.0}
