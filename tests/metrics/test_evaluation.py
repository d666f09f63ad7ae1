# SPDX-License-Identifier: Apache-2.0
"""Evaluation counts each sample of each client once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from conftest import play, setup_of, small_federation
from fedloom.algorithms.fedavg import ALGORITHM
from fedloom.core.contract import Sent
from fedloom.engines.auto import ENGINES
from fedloom.metrics.evaluation import evaluate


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "loopback"])
@pytest.mark.parametrize("batch_size", [1, 4, 256])
@pytest.mark.parametrize("split", ["train", "test", "all"])
def test_scores_are_means_over_exactly_the_clients_samples(engine: str, batch_size: int, split: str) -> None:
    federation = small_federation()
    played = play(ALGORITHM, federation, engine, rounds=1)
    before = {client: dict(tree) for client, tree in played.engine.memory.items()}
    played.engine.begin("evaluation")

    def sent(clients: Sequence[str]) -> Sent:
        assert len(clients) <= 2
        return ALGORITHM.personalise(played.setup, played.state, clients)

    clients = ("4", "0", "2")
    scores = evaluate(ALGORITHM, sent, clients, split, played.engine.ask, batch_size=batch_size, at_once=2)
    assert set(scores) == set(clients)
    for client, score in scores.items():
        rows = torch.as_tensor(federation.roster[client].of(split))
        outputs = federation.models[client](played.state.params, {}, federation.x[rows])
        assert score.samples == len(rows)
        assert score.loss == pytest.approx(float(federation.task.loss(outputs, federation.y[rows]).mean()), abs=1e-12)
        assert score.metric == pytest.approx(
            float(federation.task.metric(outputs, federation.y[rows]).mean()), abs=1e-12
        )
    assert {client: dict(tree) for client, tree in played.engine.memory.items()} == before


def test_a_client_whose_model_gives_nan_has_no_score() -> None:
    federation = small_federation()
    setup = setup_of(federation, ALGORITHM.config())
    state = ALGORITHM.init(setup)
    poisoned = federation.x.clone()
    poisoned[torch.as_tensor(federation.roster["1"].of("test"))[0]] = float("nan")
    object.__setattr__(federation, "x", poisoned)
    engine = ENGINES["vectorised"](federation, ALGORITHM, setup.config, 0)
    scores = evaluate(
        ALGORITHM, lambda c: ALGORITHM.personalise(setup, state, c), setup.clients, "test", engine.ask, batch_size=2
    )
    assert set(scores) == set(setup.clients) - {"1"}
    assert [drop.client for drop in engine.books.dropped] == ["1"]
