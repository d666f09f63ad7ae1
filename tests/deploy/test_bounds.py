# SPDX-License-Identifier: Apache-2.0
"""What one client can do to the others: numbers on paper, and whole rounds in which a client lies."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from flwr.app import RecordDict

from conftest import small_federation
from deploy.nearby import deployed
from fedloom.clients.federation import Federation
from fedloom.core.task import CLASSIFICATION, REGRESSION
from fedloom.core.trees import flatten, tree_map
from fedloom.core.wire import decode
from fedloom.deploy.bounds import (
    as_shares,
    believed,
    believed_losses,
    count_fault,
    shares_fault,
    too_far,
    weight_fault,
    weights_of,
)
from fedloom.deploy.codec import pack
from fedloom.deploy.deployment import Deployment
from fedloom.metrics.summary import Group, summarise
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.programs.evaluation import DIVERGED, Score, worst


def job(sent: float = 0.0) -> Any:
    """An ask in which everybody was sent one number."""
    return SimpleNamespace(shared={"w": torch.tensor([sent])}, mine={client: {} for client in "abcd"})


def replies(*norms: float) -> dict[str, Any]:
    """Replies of those norms, and whatever numbers of samples."""
    return {
        client: {"delta": {"w": torch.tensor([0.6, 0.8]) * norm}, "num_samples": torch.tensor(1e9)}
        for client, norm in zip("abcd", norms)
    }


def test_a_reply_is_measured_by_the_median_of_its_cohort() -> None:
    """Norms 1, 2, 3 and 260: the median is 2.5, so that 100 times as much is 250."""
    (reason,) = too_far(job(), replies(1, 2, 3, 260), 100).items()
    assert reason == (
        "d",
        "replied with numbers of norm 260, more than 100 times the median of the cohort, 2.5",
    )
    assert not too_far(job(), replies(1, 2, 3, 240), 100)
    assert not too_far(job(), replies(1, 2, 3, 1e30), 0)


def test_two_replies_are_measured_by_what_was_sent() -> None:
    assert too_far(job(sent=5.0), replies(1, 501), 100).keys() == {"b"}
    assert not too_far(job(sent=5.0), replies(1, 499), 100)
    assert too_far(job(sent=0.0), replies(101), 100).keys() == {
        "a"
    }  # of what is sent as next to nothing, norm 1 counts


def test_a_reply_that_is_no_number_spoils_the_median_of_nobody() -> None:
    for norms in ((math.nan, 1, 1), (1, math.nan, 1), (1, 1, math.nan)):
        assert not too_far(job(), replies(*norms), 100)
    assert too_far(job(), replies(1, math.inf, 1), 100).keys() == {"b"}


def test_a_client_weighs_what_it_said_when_it_joined_and_not_too_much() -> None:
    """The median of 10, 20 and a billion is 20; ten times that is 200. A newcomer says nothing."""
    assert weights_of({"a": 10, "b": 20, "c": 10**9, "new": 0}, 10) == {"a": 10, "b": 20, "c": 200, "new": 0}
    assert weights_of({"a": 10, "b": 10**9}, 10) == {"a": 10, "b": 100}  # one of two makes no bound of its own
    assert weights_of({"a": 10, "b": 10**9}, 0) == {"a": 10, "b": 10**9}


@pytest.mark.parametrize("number", [0.0, -5000.0, 0.5, 4.5, math.nan, math.inf])
def test_a_number_of_samples_is_a_whole_number_of_at_least_one(number: float) -> None:
    assert weight_fault({"num_samples": torch.tensor(number)}) == f"says that it has {number:g} samples"
    assert weight_fault({"num_samples": torch.tensor(4.0)}) is None and weight_fault({}) is None


def replying(change: Callable[[Any], Any]) -> Any:
    """A client whose replies in training are changed."""

    def changed(kind: str, asked: RecordDict, reply: RecordDict) -> RecordDict:
        if kind != "train":
            return reply
        return pack(dict(reply["facts"]), reply=change(decode(reply["trees"]["reply"].data)))

    return changed


def state_of(deployment: Deployment) -> dict[str, torch.Tensor]:
    return {path: leaf for path, leaf in flatten(deployment.server.state._asdict()).items() if leaf.numel()}


@pytest.mark.parametrize("claimed", [1e12, 1.0])
def test_what_a_reply_says_of_its_weight_moves_nothing_and_is_noted(claimed: float, tmp_path: Path) -> None:
    federation = small_federation()
    honest, ours = (deployed("fedavg", federation, tmp_path / name) for name in ("honest", "ours"))
    told = replying(lambda tree: {**tree, "num_samples": torch.full_like(tree["num_samples"], claimed)})
    ours.lobby.faults["2"] = told
    record, expected = ours.train_round(), honest.train_round()
    assert record["dropped"] == [] and record["notes"] == [
        *expected["notes"],
        f"client 2 says that it has {round(claimed)} samples and counts as one with 13",
    ]
    assert all(leaf.equal(state_of(honest)[path]) for path, leaf in state_of(ours).items())


@pytest.mark.parametrize(("most", "weight"), [(10.0, 90), (2.0, 18), (0.0, 10**12)])
def test_what_a_client_says_when_it_joins_is_capped(most: float, weight: int, tmp_path: Path) -> None:
    """The median of 9, 4, a lie, 7 and 5 samples is 7, or with a large lie for the second 9."""

    def lie(kind: str, asked: RecordDict, reply: RecordDict) -> RecordDict:
        return pack({**dict(reply["facts"]), "samples": 10**12}) if kind == "query.hello" else reply

    ours = deployed("fedavg", small_federation(), tmp_path, max_weight=most, faults={"1": lie})
    assert ours.engine.weights == {"0": 9, "1": weight, "2": 13, "3": 7, "4": 5}


@pytest.mark.parametrize("samples", [0, -3, 2.5, True, "many", 1 << 60])
def test_a_greeting_with_no_number_of_samples_is_refused(samples: Any, tmp_path: Path) -> None:
    def lie(kind: str, asked: RecordDict, reply: RecordDict) -> RecordDict:
        return pack({**dict(reply["facts"]), "samples": samples}) if kind == "query.hello" else reply

    ours = deployed("fedavg", small_federation(), tmp_path)
    ours.lobby.disconnect("1")
    ours.lobby.refresh()
    ours.lobby.faults["1"] = lie
    ours.lobby.connect("1", node=999)
    ours.lobby.refresh()
    (refused,) = ours.lobby.refused
    assert refused.startswith("node 999 says that it has") and "1" not in ours.lobby.nodes


def test_a_client_that_comes_back_with_more_samples_weighs_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = deployed("fedavg", small_federation(), tmp_path)
    ours.lobby.disconnect("1")
    ours.look()
    ours.lobby.faults["1"] = lambda kind, asked, reply: pack({**dict(reply["facts"]), "samples": 999})
    ours.lobby.connect("1", node=999)
    with caplog.at_level(logging.WARNING):
        ours.look()
    assert "Client 1 told 4 samples when it joined and tells 999 now; the first number counts" in caplog.text
    assert ours.engine.weights["1"] == 4


def test_one_enormous_reply_leaves_the_round_to_the_others(tmp_path: Path) -> None:
    federation = small_federation()
    ours, free = (deployed("fedavg", federation, tmp_path / str(most), max_norm=most) for most in (100.0, 0.0))
    huge = replying(lambda tree: {**tree, "delta": tree_map(lambda leaf: leaf + 1e30, tree["delta"])})
    for deployment in (ours, free):
        deployment.lobby.faults["2"] = huge
    record = ours.train_round()
    assert [one["client"] for one in record["dropped"]] == ["2"]
    assert "more than 100 times the median of the cohort" in record["dropped"][0]["reason"]
    assert max(float(leaf.abs().max()) for leaf in state_of(ours).values()) < 10
    assert free.train_round()["dropped"] == []
    assert max(float(leaf.abs().max()) for leaf in state_of(free).values()) > 1e28


def test_no_client_decides_whether_the_change_of_another_counts_where_noise_is_to_hide_it(tmp_path: Path) -> None:
    """One client can move a median from end to end, and noise hides no more than one change of the bound."""
    ours = deployed("fedavg", small_federation(), tmp_path, dp_noise=1.0, dp_clip=0.5)
    for client in ("0", "1", "2"):
        ours.lobby.faults[client] = replying(
            lambda tree: {**tree, "delta": tree_map(lambda leaf: 0 * leaf, tree["delta"])}
        )
    assert ours.train_round()["dropped"] == []
    ours.lobby.faults = {
        "2": replying(lambda tree: {**tree, "delta": tree_map(lambda leaf: leaf + 1e30, tree["delta"])})
    }
    assert ours.train_round()["dropped"] == []
    assert max(float(leaf.abs().max()) for leaf in state_of(ours).values()) < 10, "the bound is enough"


def test_steps_and_changes_are_measured_by_themselves(tmp_path: Path) -> None:
    """FedNova's changes are for each step: far smaller numbers than that of the steps."""
    ours = deployed("fednova", small_federation(), tmp_path)
    ours.lobby.faults["1"] = replying(lambda tree: {**tree, "effective_steps": tree["effective_steps"] * 1e4})
    ours.lobby.faults["2"] = replying(lambda tree: {**tree, "delta": tree_map(lambda leaf: leaf * 1e3, tree["delta"])})
    steps, norm = (one["reason"] for one in ours.train_round()["dropped"])
    assert steps.startswith("says that it took") and "steps, more than 100 times the median" in steps
    assert norm.startswith("replied with numbers of norm")


def test_running_statistics_that_are_none_are_refused(tmp_path: Path) -> None:
    """A mean of variances below 0 would make everybody's predictions NaN."""
    ours = deployed("fedavg", small_federation(["testnets:Normed"]), tmp_path, batchnorm="averaged")
    ours.lobby.faults["2"] = replying(lambda tree: {**tree, "buffers": tree_map(torch.neg, tree["buffers"])})
    (dropped,) = ours.train_round()["dropped"]
    assert dropped["client"] == "2" and dropped["reason"] == "replied with buffers/norm.running_var below 0"


@pytest.mark.parametrize("lie", [1e30, -1e30])
def test_a_training_loss_counts_no_more_than_so_many_times_the_median_and_is_noted(lie: float, tmp_path: Path) -> None:
    ours = deployed("fedavg", small_federation(), tmp_path)
    ours.lobby.faults["2"] = replying(lambda tree: {**tree, "loss": torch.full_like(tree["loss"], lie)})
    record = ours.train_round()
    assert record["dropped"] == [] and abs(float(record["diagnostics"]["local_loss"])) < 100
    (note,) = record["notes"]
    assert note.startswith(f"client 2's training loss of {lie:.6g} counts as ")
    odd = [{}, torch.ones(2), torch.tensor(float("nan")), torch.tensor(1)]
    replies = {client: {"loss": loss} for client, loss in zip("abcd", odd)}
    assert believed_losses(replies, 100.0) == (replies, [])  # which are refused elsewhere


def test_one_client_whose_answers_curve_the_wrong_way_leaves_the_calibration_to_the_others(tmp_path: Path) -> None:
    ours = deployed("fedavg", small_federation(), tmp_path, adapt="prior", rounds=1)
    ours.lobby.faults["2"] = replying(
        lambda tree: (
            {name: leaf if name == "num_samples" else -leaf for name, leaf in tree.items()}
            if "curvature" in tree
            else tree
        )
    )
    ours.train_round()
    ours.settle()
    assert 0 < float(ours.server.state.slope) < 100 and float(ours.server.state.bias.abs().max()) < 100


def scores(*metrics: float, samples: float = 20) -> dict[str, Score]:
    """Scores of clients, each of as many samples, the last one's as many as are given."""
    numbers = [*[20] * (len(metrics) - 1), int(samples)]
    return {c: Score(1.0, metric, number) for c, metric, number in zip("abcde", metrics, numbers)}


def test_no_client_takes_over_a_pooled_score() -> None:
    """Three of 20 samples that are half right and one of 1e30 that are all wrong: it counts as ten of them."""
    group, lie = Group("deployed", "participants", "val"), scores(0.5, 0.5, 0.5, 0.0, samples=1e30)
    found, notes = believed(lie, CLASSIFICATION, 100, 10)
    assert notes == ["client d's number of samples of 1e+30 counts as 200"]
    pooled = "deployed/participants/val/accuracy_pooled"
    assert summarise(found, CLASSIFICATION, group)[pooled] == pytest.approx(30 / 260)
    assert summarise(lie, CLASSIFICATION, group)[pooled] < 1e-20  # what it is for
    assert believed(lie, CLASSIFICATION, 100, 0)[0] == lie
    (two, _) = believed({"a": Score(1.0, 0.5, 20), "b": Score(1.0, 0.0, 10**30)}, CLASSIFICATION, 100, 10)
    assert two["b"].samples == 200


@pytest.mark.parametrize("lie", [1e30, -1e30])
def test_a_metric_without_bounds_counts_no_more_than_so_many_times_the_median(lie: float) -> None:
    found, notes = believed(scores(2.0, 2.0, 3.0, lie), REGRESSION, 100, 10)
    assert found["d"].metric == math.copysign(200, lie) and found["a"].metric == 2
    assert notes == [f"client d's absolute_error of {lie:.6g} counts as {math.copysign(200, lie):.6g}"]
    assert believed(scores(2.0, 2.0, 3.0, 190), REGRESSION, 100, 10) == (scores(2.0, 2.0, 3.0, 190), [])
    assert believed(scores(0.0, 0.5, 1.0, 1.0), CLASSIFICATION, 100, 10)[1] == []  # a share is what it is


def test_a_loss_counts_no_more_than_so_many_times_the_median_or_so_many_nats() -> None:
    well = {c: Score(loss, 0.9, 20) for c, loss in zip("abcd", (1e-6, 1e-6, 90.0, DIVERGED))}
    found, notes = believed(well, CLASSIFICATION, 100, 10)
    assert [score.loss for score in found.values()] == [1e-6, 1e-6, 90.0, 100.0] and len(notes) == 1
    assert all(score.metric == 0.9 for score in found.values())


def test_a_client_that_is_missing_once_makes_no_other_checkpoint_the_best() -> None:
    """Without an answer an error would count 1e30, and any checkpoint that it answered would be better."""
    missing = {**scores(2.0, 2.0, 3.0), "d": worst(higher_is_better=False)}
    found, notes = believed(missing, REGRESSION, 100, 10)
    assert found["d"] == Score(1.0, 3.0, 1) and not notes
    nobody = {"a": worst(higher_is_better=False)}
    assert believed(nobody, REGRESSION, 100, 10) == (nobody, [])
    right = {**scores(0.5, 0.6), "d": worst(higher_is_better=True)}
    assert believed(right, CLASSIFICATION, 100, 10)[0]["d"] == Score(1.0, 0.0, 1)


@pytest.mark.parametrize("counts", [[-5000.0, 0, 0], [1e12, 0, 0], [math.nan, 1, 1], [0.5, 0.5, 0], [7, 7, 7]])
def test_counts_of_classes_are_of_samples_that_the_client_has(counts: list[float]) -> None:
    assert count_fault({"counts": torch.tensor(counts)}, 20, noised=True)
    assert count_fault({"counts": torch.tensor([7.0, 6, 7])}, 20, noised=False) is None
    assert count_fault({"counts": torch.tensor([7.0, 6, 7])}, None, noised=False) is None


def test_other_numbers_that_a_client_weighs_by() -> None:
    assert count_fault({"samples": torch.tensor(-3.0)}, 20, noised=False)
    assert count_fault({"samples": torch.tensor(2.5)}, 20, noised=True) is None  # which are noised and weigh nothing
    for steps in (-5000.0, 0.0, math.nan):
        assert count_fault({"effective_steps": torch.tensor(steps)}, 20, noised=True)
    assert count_fault({"effective_steps": torch.tensor(2.5)}, 20, noised=False) is None


@pytest.mark.parametrize("given", [[-5000.0, 1], [1e12, 0], [math.nan, 1], [0.9, 0.9]])
def test_shares_are_shares(given: list[float]) -> None:
    assert shares_fault({"shares": torch.tensor(given)})
    held = as_shares(torch.tensor(given))
    assert bool((held >= 0).all()) and float(held.sum()) <= 1 + 1e-6
    for fine in ([0.25, 0.75], [0.0, 0.0]):
        assert shares_fault({"shares": torch.tensor(fine)}) is None
        assert as_shares(torch.tensor(fine)).tolist() == fine


LIES = [
    ("fedproto", {}, "counts", "replied with counts that are not whole"),
    ("fedtgp", {}, "counts", "replied with counts that are not whole"),
    ("fedgh", {}, "counts", "replied with counts that are not whole"),
    ("pfedhn", {"descriptor": "class_shares"}, "shares", "replied with shares from -5000"),
    ("fednova", {}, "effective_steps", "says that it took -5000 steps"),
]


@pytest.mark.parametrize(("method", "options", "name", "reason"), LIES, ids=[one[0] for one in LIES])
def test_a_count_that_is_none_is_refused_and_recorded(
    method: str, options: Any, name: str, reason: str, tmp_path: Path
) -> None:
    ours = deployed(method, small_federation(), tmp_path, **options)
    ours.lobby.faults["2"] = replying(
        lambda tree: {**tree, name: torch.full_like(tree[name], -5000)} if name in tree else tree
    )
    (dropped,) = ours.train_round()["dropped"]
    assert dropped["client"] == "2" and dropped["reason"].startswith(reason)


def test_a_lie_about_shares_in_an_adapted_run_counts_as_shares(tmp_path: Path) -> None:
    """A node may have noise of its own on them, which the server does not know."""
    ours = deployed("fedavg", small_federation(), tmp_path, adapt="prior", rounds=1)
    ours.lobby.faults["2"] = replying(
        lambda tree: (
            {**tree, "shares": torch.tensor([1e12, 0, -1e12], dtype=torch.float64)} if "shares" in tree else tree
        )
    )
    ours.train_round()
    ours.settle()
    alpha = ours.server.state.alpha
    assert bool((alpha > 0).all()) and float(alpha.sum()) < 100


def regression_federation() -> Federation:
    """Clients that learn their classes' numbers as if they were values."""
    known = small_federation()
    model = Model(parse("mlp:hidden=5", known.x.shape[1:], 1), dtype=torch.float64)
    roster = {name: dataclasses.replace(client, model=model) for name, client in known.roster.items()}
    return Federation(known.x, known.y.double(), REGRESSION, roster)


LIED = [
    (
        {"samples": 1e30},
        [],
        ["On val data client 2's number of samples of 1e+30 counts as 30: it is far above the median"],
    ),
    ({"metric": -1e30}, ["says that its loss is"], []),
    ({"metric": 1e30}, [], ["On val data client 2's absolute_error of 3.33333e+29 counts as"]),
    ({"loss": -1e30}, ["says that its loss is -1e+30"], []),
    ({"loss": 1e30}, [], ["On val data client 2's loss of 3.33333e+29 counts as"]),
]


@pytest.mark.parametrize(("lie", "dropped", "noted"), LIED, ids=str)
def test_what_a_client_says_of_its_error_counts_within_bounds_and_is_recorded(
    lie: dict[str, float], dropped: list[str], noted: list[str], tmp_path: Path
) -> None:
    ours = deployed("fedavg", regression_federation(), tmp_path, task="regression")
    honest = ours.evaluate("val")
    ours.lobby.faults["2"] = replying(
        lambda tree: {**tree, **{n: torch.full_like(tree[n], v) for n, v in lie.items()}} if "metric" in tree else tree
    )
    found = ours.evaluate("val")
    usual = max(score.metric for score in honest.values())
    assert all(0 <= score.metric <= 100 * usual and score.samples <= 30 for score in found.values())
    reasons = [one.reason for one in ours._dropped]
    for texts, starts in ((reasons, dropped), (ours.engine.notes, noted)):
        assert len(texts) == len(starts) and all(text.startswith(start) for text, start in zip(texts, starts))
    assert all(found[client] == honest[client] for client in honest if client != "2")
