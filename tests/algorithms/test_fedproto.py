# SPDX-License-Identifier: Apache-2.0
"""FedProto: prototypes and the pull to them on paper, what travels, and that it is Local without the pull."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import local
from fedloom.algorithms.fedproto import ALGORITHM, State, averaged
from fedloom.core.contract import Cohort
from fedloom.core.trees import leaves
from tiny import HAND, Ears, labels

TWO = [[(1, 0)], [(3, 0), (5, 1)]]


def test_two_rounds_on_paper() -> None:
    """Features b x from b = 1; both classes have the score 2 b x, so that the loss has no slope for b at first.

    Round 1: only heads move, that of the first client by (0.05, -0.05) at rate 0.1. Prototypes are 1 of the first
    client, 3 and 5 of the second; the mean of those of class 0 is 2, each client counting once.
    Round 2, first client: scores 2.05 and 1.95, so p_1 = 1 / (1 + e^0.1), the slope by the loss is p_1 (1.95 - 2.05),
    by the pull 2 (1 - 2) = -2. So b = 1 + 0.1 (2 + 0.1 p_1).
    """
    one = play(ALGORITHM, labels(TWO), rounds=1, **HAND)
    assert one.state.prototypes.tolist() == [[2.0], [5.0]] and one.state.known.tolist() == [1.0, 1.0]
    assert float(one.memory["0"]["own"]["body.weight"]) == pytest.approx(1, abs=1e-12)
    two = play(ALGORITHM, labels(TWO), rounds=2, **HAND)
    assert float(two.memory["0"]["own"]["body.weight"]) == pytest.approx(
        1 + 0.1 * (2 + 0.1 / (1 + math.exp(0.1))), abs=1e-12
    )


def test_the_pull_is_a_mean_over_dimensions_and_leaves_unknown_classes_alone() -> None:
    """Only class 0 was ever seen, P_0 = 1. A client with (3, 0) and (5, 1): pull (3 - 1)^2 on one of two samples.

    The slopes for b: of the pull 2 (3 - 1) 3 / 2 = 6, of the loss none. At rate 0.1 and lambda 2: b = 1 - 1.2 = -0.2.
    """
    federation = labels([[(1, 0)], [(3, 0), (5, 1)]])
    played = play(ALGORITHM, federation, rounds=2, cohorts=[["0"], ["1"]], proto_weight=2.0, **HAND)
    assert float(played.memory["1"]["own"]["body.weight"]) == pytest.approx(-0.2, abs=1e-12)


def test_a_class_that_nobody_has_this_time_keeps_its_prototype() -> None:
    before = State(torch.tensor([[7.0], [8.0], [9.0]]), torch.tensor([1.0, 1.0, 0.0]))
    told, counts = torch.tensor([[[1.0], [0.0], [0.0]], [[3.0], [0.0], [0.0]]]), torch.tensor([[9.0, 0, 0], [1, 0, 0]])
    after = averaged(before, told, counts)
    assert after.prototypes.tolist() == [[2.0], [8.0], [9.0]] and after.known.tolist() == [1.0, 1.0, 0.0]


def test_a_sample_is_of_the_nearest_known_class() -> None:
    """Features are x; P = (2, 5), and class 2 is not known though it would be nearest to 9."""
    federation = labels([[(1, 0)]], classes=3)
    played = play(ALGORITHM, federation, rounds=0)
    state = State(torch.tensor([[2.0], [5.0], [9.0]], dtype=torch.float64), torch.tensor([1.0, 1.0, 0.0]).double())
    sent = ALGORITHM.send(played.setup, state, ["0"])
    home = played.home("0")
    deployed = ALGORITHM.client_deploy(home, sent.shared, sent.mine["0"], played.recall("0"))
    x = torch.tensor([[3.0], [4.0], [9.0]], dtype=torch.float64)
    outputs = ALGORITHM.predict(home, deployed, x)
    assert outputs.argmax(1).tolist() == [0, 1, 1]
    assert outputs[0, :2].tolist() == [-1.0, -4.0]
    assert torch.equal(ALGORITHM.module(home, deployed)(x), outputs)


@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed", "testnets:Dropping", "testnets:Pooled"])
def test_without_the_pull_it_is_local(model: str) -> None:
    federation = small_federation((model,))
    ours = play(ALGORITHM, federation, proto_weight=0.0)
    alone = play(local.ALGORITHM, federation, keep_optimiser=False)
    for client in federation.participants:
        for (path, one), (_, other) in zip(leaves(ours.memory[client]), leaves(alone.memory[client]), strict=True):
            assert float((one - other).abs().max()) < 1e-12, path


def test_no_parameter_travels_and_the_prototypes_are_those_of_the_trained_model() -> None:
    federation, ears = small_federation(("lenet:kernels=2", "mlp:hidden=84")), Ears()
    played = play(ALGORITHM, federation, rounds=1, wrap=ears)
    assert ears.down == {"prototypes", "known"}
    assert ears.up == {"num_samples", "loss", "prototypes", "counts"}
    for client in federation.participants:
        rows, memory = torch.as_tensor(federation.roster[client].rows["train"]), played.memory[client]
        z = federation.roster[client].model.features(memory["own"], memory["buffers"], federation.x[rows])
        told = ears.replies[1][client]
        for label in range(3):
            own = z[federation.y[rows] == label]
            assert int(told["counts"][label]) == len(own)
            wanted = own.mean(0) if len(own) else torch.zeros(84, dtype=torch.float64)
            torch.testing.assert_close(told["prototypes"][label], wanted, rtol=0, atol=1e-12)


def test_a_newcomer_trains_a_model_of_its_own_against_the_prototypes() -> None:
    federation, ears = small_federation(unseen=1), Ears()
    played = play(ALGORITHM, federation, rounds=1)
    setup, session = played.setup.joined_by(federation.models), played.session("admission")
    before = session.recall("4")["own"]
    sent = ALGORITHM.admit(setup, played.state, Cohort(1, ("4",)), ears(session.ask))
    assert ears.programs == ["fedproto.train"] * 20 and ears.up == {"num_samples", "loss"}
    assert torch.equal(sent.shared["prototypes"], played.state.prototypes)
    assert not torch.equal(session.recall("4")["own"]["output.weight"], before["output.weight"])
