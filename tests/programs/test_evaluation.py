# SPDX-License-Identifier: Apache-2.0
"""Evaluation counts each sample of each client once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms.fedavg import ALGORITHM
from fedloom.core.contract import Sent
from fedloom.core.task import CLASSIFICATION, REGRESSION, Task
from fedloom.programs.evaluation import BOUND, DIVERGED, evaluate, evaluation_program, noised


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "loopback"])
@pytest.mark.parametrize("batch_size", [1, 4, 256])
@pytest.mark.parametrize("split", ["train", "test", "all"])
def test_scores_are_means_over_exactly_the_clients_samples(engine: str, batch_size: int, split: str) -> None:
    federation = small_federation()
    played = play(ALGORITHM, federation, engine, rounds=1)
    before = {client: dict(tree) for client, tree in played.memory.items()}
    session = played.session("evaluation")

    def sent(clients: Sequence[str]) -> Sent:
        assert len(clients) <= 2
        return ALGORITHM.send(played.setup, played.state, clients)

    clients = ("4", "0", "2")
    scores = evaluate(ALGORITHM, sent, clients, split, session.ask, batch_size=batch_size, at_once=2)
    assert set(scores) == set(clients)
    for client, score in scores.items():
        rows = torch.as_tensor(federation.roster[client].of(split))
        outputs = federation.models[client](played.state.params, {}, federation.x[rows])
        assert score.samples == len(rows)
        assert score.loss == pytest.approx(float(federation.task.loss(outputs, federation.y[rows]).mean()), abs=1e-12)
        assert score.metric == pytest.approx(
            float(federation.task.metric(outputs, federation.y[rows]).mean()), abs=1e-12
        )
    assert {client: dict(tree) for client, tree in session.memory.items()} == before


def test_a_client_whose_predictions_are_no_numbers_counts_with_the_worst_score() -> None:
    federation = small_federation()
    played = play(ALGORITHM, federation, rounds=1)
    federation.x[federation.roster["2"].rows["test"]] = float("nan")
    sent = lambda clients: ALGORITHM.send(played.setup, played.state, clients)  # noqa: E731
    scores = evaluate(ALGORITHM, sent, federation.participants, "test", played.session("evaluation").ask)
    assert set(scores) == set(federation.participants)
    assert scores["2"].metric == 0.0 and scores["2"].loss > 0.9 * DIVERGED and scores["2"].samples == 5


def test_noised_sums_are_bounded_and_off_by_noise_of_the_right_size() -> None:
    """300 clients: a deviation of 1% of what one sample can change, 10 of a loss and 1 of a count, within 5 errors."""
    federation = small_federation(sizes=(3,) * 300)
    federation.x[federation.roster["7"].rows["test"]] *= 1e9  # five losses beyond all measure
    played, plain = play(ALGORITHM, federation, rounds=0), evaluation_program(ALGORITHM, "test")
    shared, mine = ALGORITHM.send(played.setup, played.state, federation.participants)
    exact, quiet, loud = (
        played.session("evaluation").ask(program, shared, mine)
        for program in (plain, noised(plain, 0.0), noised(plain, 0.01))
    )
    assert float(exact["7"]["loss"]) > 1e6 and float(quiet["7"]["loss"]) <= 5 * BOUND
    others = [client for client in federation.participants if client != "7"]
    for name, spread, most in (("loss", 0.1, 5 * BOUND), ("metric", 0.01, 5)):
        one, two, three = (torch.stack([replies[c][name] for c in others]) for replies in (exact, quiet, loud))
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
        inside = (two > 0.5) & (two < most - 0.5)  # where the noise is not cut off
        assert inside.sum() > 100
        assert float((three - two)[inside].std()) == pytest.approx(spread, rel=5 / (2 * int(inside.sum())) ** 0.5)
    assert all(float(loud[c]["samples"]) == 5 for c in others)


@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION], ids=lambda task: task.name)
def test_a_prediction_that_is_no_number_counts_as_the_worst_within_the_bounds(task: Task) -> None:
    """More would show through any noise, and whoever chooses the model chooses for which samples it is none."""
    federation = small_federation()
    federation.x[federation.roster["2"].rows["test"][0]] = float("nan")
    if task is REGRESSION:
        federation = replace(federation, y=federation.y.double()[:, None].expand(-1, 3), task=task)
    played, program = play(ALGORITHM, federation, rounds=0), noised(evaluation_program(ALGORITHM, "test"), 0.0)
    reply = played.session("evaluation").ask(program, *ALGORITHM.send(played.setup, played.state, ["2"]))["2"]
    assert float(reply["loss"]) <= 5 * BOUND and float(reply["metric"]) <= 5 * BOUND


def test_noise_hides_the_number_of_samples_too() -> None:
    federation = small_federation()
    played = play(ALGORITHM, federation, rounds=0)
    shared, mine = ALGORITHM.send(played.setup, played.state, federation.participants)
    program = noised(evaluation_program(ALGORITHM, "test"), 30.0)
    replies = played.session("evaluation").ask(program, shared, mine)
    counts = [float(replies[client]["samples"]) for client in federation.participants]
    assert len(set(counts)) > 1 and all(count >= 1 and count == round(count) for count in counts)
    assert all(0 <= float(replies[c]["metric"]) <= float(replies[c]["samples"]) for c in federation.participants)
