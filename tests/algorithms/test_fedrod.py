# SPDX-License-Identifier: Apache-2.0
"""Fed-RoD: both heads on paper, FedAvg where classes are balanced, and what newcomers and participants predict."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedrod import ALGORITHM
from fedloom.core.contract import Cohort
from fedloom.core.trees import PerClient
from tiny import HAND, Ears, labels

FEW = [[(1, 0), (1, 0), (1, 0), (1, 1)]]


def test_one_step_of_both_heads_on_paper() -> None:
    """Scores are (2, 2); the client has classes 3 to 1. With log 3 and log 1 added the probabilities are (3/4, 1/4).

    That is what its labels are: the common model stays where it is.

    The own head sees (1/2, 1/2): its slope is (1/2 - 3/4, 1/2 - 1/4), at rate 0.1 it goes to (0.025, -0.025).
    """
    played = play(ALGORITHM, labels(FEW), rounds=1, **HAND)
    assert played.state.params["top.weight"].flatten().tolist() == pytest.approx([2, 2], abs=1e-12)
    assert float(played.state.params["body.weight"]) == pytest.approx(1, abs=1e-12)
    own = played.memory["0"]["own"]
    assert own["personal.top.weight"].flatten().tolist() == pytest.approx([0.025, -0.025], abs=1e-12)
    assert played.memory["0"]["label_counts"].tolist() == [3.0, 1.0]
    assert played.diagnostics[0]["local_loss"] == pytest.approx(math.log(2), abs=1e-12)


def test_a_class_that_a_client_lacks_is_left_alone() -> None:
    """With samples of class 0 alone, class 1 is out of the question, and the common head learns nothing."""
    played = play(ALGORITHM, labels([[(1, 0), (3, 0)]]), rounds=1, **HAND)
    assert played.state.params["top.weight"].flatten().tolist() == [2.0, 2.0]


def test_the_own_head_has_no_say_in_the_body() -> None:
    """In round 2 the own head is not 0 any more, yet the common model still has no slope."""
    played = play(ALGORITHM, labels(FEW), rounds=3, **HAND)
    assert float(played.state.params["body.weight"]) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed", "testnets:Pooled"])
def test_without_balance_the_common_model_is_fedavgs(model: str) -> None:
    """Whole batches, as counting is an ask more in round 1; no clipping, which counts the own head, too."""
    federation = small_federation((model,))
    ours = play(ALGORITHM, federation, rounds=1, balance=0.0, clip=0.0, batch_size=99, local_epochs=1)
    avg = play(fedavg.ALGORITHM, federation, rounds=1, clip=0.0, batch_size=99, local_epochs=1)
    for name, value in avg.state.params.items():
        torch.testing.assert_close(ours.state.params[name], value, rtol=0, atol=1e-12)


def test_with_equal_counts_the_common_model_is_fedavgs() -> None:
    federation = small_federation(sizes=(6, 6))
    for client in federation.roster.values():
        federation.y[torch.as_tensor(client.rows["train"])] = torch.arange(6) % 3
    ours = play(ALGORITHM, federation, rounds=1, clip=0.0, batch_size=99, local_epochs=1)
    avg = play(fedavg.ALGORITHM, federation, rounds=1, clip=0.0, batch_size=99, local_epochs=1)
    for name, value in avg.state.params.items():
        torch.testing.assert_close(ours.state.params[name], value, rtol=0, atol=1e-12)


def test_a_participant_uses_both_heads_and_a_newcomer_the_common_one() -> None:
    federation = small_federation(("lenet:kernels=2",), unseen=1)
    played = play(ALGORITHM, federation)
    model, x = federation.roster["0"].model, federation.x[:5]
    common = model(played.state.params, {}, x)
    for client, alike in (("0", False), ("4", True)):
        setup, session = played.setup.joined_by(federation.models), played.session("admission")
        sent = ALGORITHM.admit(setup, played.state, Cohort(2, ("4",)), session.ask)
        home = played.home(client)
        deployed = ALGORITHM.client_deploy(home, sent.shared, {}, session.recall(client))
        outputs = ALGORITHM.predict(home, deployed, x)
        assert torch.allclose(outputs, common, rtol=0, atol=1e-12) is alike
        if not alike:
            z, own = model.features(played.state.params, {}, x), session.recall(client)["own"]
            added = z @ own["personal.fc3.weight"].T + own["personal.fc3.bias"]
            torch.testing.assert_close(outputs, common + added, rtol=0, atol=1e-12)
        assert torch.equal(ALGORITHM.module(home, deployed)(x), outputs)


def test_labels_are_counted_once_and_no_count_travels() -> None:
    federation, ears = small_federation(("lenet:kernels=2",)), Ears()
    played = play(ALGORITHM, federation, rounds=3, cohorts=[["0", "1"], ["1", "2"], ["0", "2"]], wrap=ears)
    assert list(zip(ears.programs, ears.asked)) == [
        ("label_counts", ["0", "1"]), ("fedrod.train", ["0", "1"]),
        ("label_counts", ["2"]), ("fedrod.train", ["1", "2"]), ("fedrod.train", ["0", "2"]),
    ]  # fmt: skip
    assert all(reply == {} for reply in ears.replies[0].values())
    assert not any("personal" in path or "count" in path for path in ears.down | ears.up)
    assert played.state.counted.tolist() == [True, True, True, False, False]


def test_who_did_not_count_is_not_asked_to_train() -> None:
    ears = Ears()

    def silent(ask):
        def some(program, shared, mine):
            replies = ears(ask)(program, shared, mine)
            return PerClient.of({c: replies[c] for c in replies if (program.name, c) != ("label_counts", "1")})

        some.__self__ = ask.__self__
        return some

    played = play(ALGORITHM, small_federation(), rounds=1, wrap=silent)
    assert ears.asked[1] == ["0", "2", "3", "4"]
    assert played.state.counted.tolist() == [True, False, True, True, True]
