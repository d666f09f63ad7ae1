# SPDX-License-Identifier: Apache-2.0
"""Evaluation counts each sample of each client once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms.fedavg import ALGORITHM
from fedloom.core.contract import Sent
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


def test_a_client_whose_predictions_are_no_numbers_counts_with_the_worst_score() -> None:
    from conftest import play, small_federation
    from fedloom import algorithms
    from fedloom.metrics.evaluation import DIVERGED, evaluate

    fedavg, federation = algorithms.get("fedavg"), small_federation()
    played = play(fedavg, federation, rounds=1)
    federation.x[federation.roster["2"].rows["test"]] = float("nan")
    played.engine.begin("evaluation")
    sent = lambda clients: fedavg.personalise(played.setup, played.state, clients)  # noqa: E731
    scores = evaluate(fedavg, sent, federation.participants, "test", played.engine.ask)
    assert set(scores) == set(federation.participants)
    assert scores["2"].metric == 0.0 and scores["2"].loss > 0.9 * DIVERGED and scores["2"].samples == 5
