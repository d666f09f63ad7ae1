# SPDX-License-Identifier: Apache-2.0
"""Participants' models for newcomers without labels: valid predictions, and the nearest is the one that is alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import play, small_federation
from fedloom import algorithms
from fedloom.algorithms import pfedhn
from fedloom.core.errors import NeedsError
from fedloom.core.trees import PerClient, leaves
from fedloom.engines.auto import ENGINES
from fedloom.metrics.handed_on import (
    MODES,
    a_distances,
    ensemble,
    ensemble_predict,
    evaluate_handed_on,
    nearest,
    sampled,
)
from fedloom.programs.evaluation import evaluate
from tiny import Ears

TWO = ("lenet:kernels=2", "mlp:hidden=5")


def trained(engine: str = "sequential", models=("mlp:hidden=5",), **shape):
    federation = small_federation(models, **{"sizes": (24, 21, 20, 24, 25), "unseen": 2, **shape})
    played = play(pfedhn.ALGORITHM, federation, engine, rounds=1, hidden=20)
    woven = pfedhn.send(played.setup, played.state, played.setup.clients).mine
    return federation, played, woven


def shifted(engine: str):
    """Client i's inputs stand around a point of its own; newcomer 3 is like participant 2, newcomer 4 like 0."""
    federation, played, woven = trained(engine)
    directions = torch.randn(3, *federation.x.shape[1:], generator=torch.Generator().manual_seed(5)).double() * 2
    for client, kind in zip(federation.roster.values(), (0, 1, 2, 2, 0)):
        rows = torch.as_tensor(client.of("all"))
        noise = torch.randn(len(rows), *federation.x.shape[1:], generator=torch.Generator().manual_seed(int(client.id)))
        federation.x[rows] = noise.double() + directions[kind]
    return federation, played, woven


@pytest.mark.parametrize("engine", ENGINES)
def test_the_nearest_participant_is_the_one_with_the_same_distribution(engine: str) -> None:
    federation, played, woven = shifted(engine)
    distances = a_distances(played.setup, played.setup.clients, federation.unseen, played.session("admission").ask)
    assert distances.shape == (2, 3) and distances.argmin(1).tolist() == [2, 0]
    # told apart without error: 2; alike: about 0
    assert distances[0, :2].min() > 1.7 and distances[1, 1:].min() > 1.7
    assert distances[0, 2].abs() < 1 and distances[1, 0].abs() < 1
    sent = nearest(played.setup, woven, federation.unseen, played.session("admission").ask)
    for newcomer, participant in (("3", "2"), ("4", "0")):
        for path, leaf in leaves(sent.mine[newcomer]):
            assert torch.equal(leaf, dict(leaves(woven[participant]))[path])


def test_only_classifiers_gradients_and_errors_travel() -> None:
    federation, played, woven = shifted("sequential")
    ears = Ears()
    nearest(played.setup, woven, federation.unseen, ears(played.session("admission").ask), steps=3)
    assert ears.programs == ["a_distance"] * 4
    assert ears.down == {"weights", "side"} and ears.up == {"grad", "error"}


def test_the_first_gradient_by_hand() -> None:
    """At w = 0 every sigmoid is 1/2: the gradient is -side / 2 times the mean of the samples at even places."""
    federation, played, _ = shifted("sequential")
    ears = Ears()
    a_distances(played.setup, ("0",), ("3",), ears(played.session("admission").ask), steps=1)
    for client, side in (("0", -1.0), ("3", 1.0)):
        rows = federation.roster[client].rows["train"][::2]
        points = federation.x[torch.as_tensor(rows)].flatten(1) / 6  # 36 inputs
        expected = torch.cat([-side / 2 * points.mean(0), torch.tensor([-side / 2]).double()])
        torch.testing.assert_close(ears.replies[0][client]["grad"][0], expected, rtol=0, atol=1e-12)
        assert ears.replies[0][client]["error"].tolist() == [0.5]


def test_a_participant_that_does_not_answer_is_not_the_nearest() -> None:
    federation, played, _ = shifted("sequential")

    def deaf(program, shared, mine):
        replies = played.session("admission").ask(program, shared, mine)
        return PerClient.of({c: replies[c] for c in replies if c != "2"})

    distances = a_distances(played.setup, played.setup.clients, federation.unseen, deaf)
    assert distances[:, 2].tolist() == [float("inf")] * 2 and distances[:, :2].isfinite().all()


@pytest.mark.parametrize("engine", ENGINES)
def test_every_mode_gives_predictions(engine: str) -> None:
    federation, played, woven = trained(engine, TWO)
    session = played.session("admission")
    together = replace(pfedhn.ALGORITHM, predict=ensemble_predict)
    for algorithm, sent in (
        *((pfedhn.ALGORITHM, sent) for sent in sampled(played.setup, woven, federation.unseen)),
        (pfedhn.ALGORITHM, nearest(played.setup, woven, federation.unseen, session.ask, steps=2)),
        (together, ensemble(played.setup, woven, federation.unseen)),
    ):
        assert set(sent.mine) <= set(federation.unseen)
        scores = evaluate(algorithm, lambda _, sent=sent: sent, list(sent.mine), "test", session.ask)
        assert all(score.samples == 5 and 0 <= score.metric <= 1 and score.loss > 0 for score in scores.values())


def test_an_ensemble_averages_logits() -> None:
    federation, played, woven = trained()
    sent = ensemble(played.setup, woven, ("4",))
    home = played.home("4")
    deployed = pfedhn.ALGORITHM.client_deploy(home, sent.shared, sent.mine["4"], played.recall("4"))
    each = [home.model(woven[c]["params"], {}, federation.x[:7]) for c in ("0", "1", "2")]
    found = ensemble_predict(home, deployed, federation.x[:7])
    torch.testing.assert_close(found, torch.stack(each).mean(0), rtol=0, atol=1e-12)


def test_sampled_tries_every_participant_once() -> None:
    _, played, woven = trained()
    tried = [sent.mine["4"]["params"]["output.bias"] for sent in sampled(played.setup, woven, ("3", "4"))]
    assert [one.tolist() for one in tried] == [woven[c]["params"]["output.bias"].tolist() for c in ("0", "1", "2")]


def test_models_go_to_newcomers_of_the_same_architecture() -> None:
    federation, played, woven = trained(models=TWO, unseen=3)
    everybody = ensemble(played.setup, woven, federation.unseen)
    for sent in (*sampled(played.setup, woven, federation.unseen), everybody):
        for client in sent.mine:
            assert set(sent.mine[client]["params"]) == set(federation.roster[client].model.shapes)
    assert set(everybody.mine) == set(federation.unseen)


def test_an_architecture_that_nobody_has_is_refused() -> None:
    federation, played, woven = trained(models=TWO, sizes=(4, 4), unseen=1)
    with pytest.raises(NeedsError, match="Client 1 has mlp:hidden=5, which no participant has"):
        next(sampled(played.setup, woven, federation.unseen))


def test_an_ensemble_of_models_with_running_statistics_is_refused() -> None:
    federation, played, woven = trained(models=("testnets:Normed",))
    with pytest.raises(
        NeedsError, match="An ensemble needs models without running statistics; testnets:Normed has some"
    ):
        ensemble(played.setup, woven, federation.unseen)


@pytest.mark.parametrize("mode", MODES)
def test_every_newcomer_has_a_score_of_its_own_samples(mode: str) -> None:
    """Sampled: the mean over the participants of its architecture, each tried in turn."""
    federation, played, woven = trained(models=TWO, unseen=2)
    ask = played.session("admission").ask
    found = evaluate_handed_on(pfedhn.ALGORITHM, played.setup, played.state, federation.unseen, "test", mode, ask)
    assert set(found) == set(federation.unseen) and all(score.samples == 5 for score in found.values())
    if mode == "sampled":
        x, y = (part[torch.as_tensor(federation.roster["4"].rows["test"])] for part in (federation.x, federation.y))
        losses = [
            federation.task.loss(federation.models[c](woven[c]["params"], {}, x), y).mean()
            for c in ("0", "2")  # lenet, as newcomer 4
        ]
        assert found["4"].loss == pytest.approx(float(sum(losses)) / 2, abs=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "pfedhn_pc", "mh_pfedhn"])
def test_a_method_without_a_whole_model_for_each_participant_is_refused(method: str) -> None:
    algorithm, federation = algorithms.get(method), small_federation(unseen=1)
    played = play(algorithm, federation, rounds=0)
    ask = played.session("admission").ask
    with pytest.raises(NeedsError, match="has no whole model for each participant"):
        evaluate_handed_on(algorithm, played.setup, played.state, federation.unseen, "test", "sampled", ask)
