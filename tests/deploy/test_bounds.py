# SPDX-License-Identifier: Apache-2.0
"""What one client can do to the others: numbers on paper, and whole rounds in which a client lies."""

from __future__ import annotations

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
from fedloom.core.trees import flatten, tree_map
from fedloom.core.wire import decode
from fedloom.deploy.bounds import too_far, weight_fault, weights_of
from fedloom.deploy.codec import pack
from fedloom.deploy.server import Deployment


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
