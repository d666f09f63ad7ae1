# SPDX-License-Identifier: Apache-2.0
"""FedGH: a step on the head on paper, what is kept and what is dropped, and a head that stays as it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conftest import play, small_federation
from fedloom.algorithms.fedgh import ALGORITHM
from fedloom.core.contract import Cohort
from tiny import HAND, Ears, labels


def test_one_step_of_the_head_on_paper() -> None:
    """Features are x, the head is (2, 2): both classes are as likely. One class mean, 3 of class 0:

    W <- W - eta (softmax(W p) - e_y) p = (2, 2) - 0.1 (-0.5, 0.5) 3 = (2.15, 1.85).
    """
    played = play(ALGORITHM, labels([[(3, 0)]]), rounds=1, server_lr=0.1, server_epochs=1, **{**HAND, "local_lr": 0.0})
    assert played.state.head["weight"].flatten().tolist() == pytest.approx([2.15, 1.85], abs=1e-12)


def test_class_means_not_samples_are_learned_from() -> None:
    """Samples 1 and 5 of class 0 count as one mean, 3: the same step as with 3 alone."""
    played = play(
        ALGORITHM, labels([[(1, 0), (5, 0)]]), rounds=1, server_lr=0.1, server_epochs=1, **{**HAND, "local_lr": 0.0}
    )
    assert played.state.head["weight"].flatten().tolist() == pytest.approx([2.15, 1.85], abs=1e-12)


def test_the_head_that_a_client_trains_is_dropped_and_the_body_kept() -> None:
    """The client's own training at rate 0.1 moves its head to (2.15, 1.85), at which the body has the slope
    -0.3 p_1 3; what is trained next starts from the common head again, so that b has no slope in any round.
    """
    federation, ears = labels([[(3, 0)]]), Ears()
    played = play(ALGORITHM, federation, rounds=3, server_lr=0.0, wrap=ears, **HAND)
    assert played.state.head["weight"].flatten().tolist() == [2.0, 2.0]
    assert float(played.memory["0"]["own"]["body.weight"]) == pytest.approx(1, abs=1e-12)
    assert set(played.memory["0"]["own"]) == {"body.weight"}
    assert ears.down == {"params/top.weight"}
    assert ears.up == {"num_samples", "loss", "prototypes", "counts"}


def test_without_a_server_rate_bodies_train_under_a_head_that_is_put_back() -> None:
    federation = small_federation(("mlp:hidden=5",))
    start, played = (play(ALGORITHM, federation, rounds=n, server_lr=0.0, momentum=0.0, clip=0.0, batch_size=99,
                          local_epochs=1, weight_decay=0.0) for n in (0, 2))  # fmt: skip
    rows = torch.as_tensor(federation.roster["1"].rows["train"])
    body = {name: value.clone() for name, value in start.recall("1")["own"].items()}
    for _ in range(2):
        w, b = (body[f"hidden.0.{part}"].requires_grad_() for part in ("weight", "bias"))
        z = F.linear(federation.x[rows].flatten(1), w, b).relu()
        loss = F.cross_entropy(F.linear(z, played.state.head["weight"], played.state.head["bias"]), federation.y[rows])
        slopes = torch.autograd.grad(loss, [w, b])
        body = {name: (value - 0.05 * slope).detach() for (name, value), slope in zip(body.items(), slopes)}
    for name, value in body.items():
        torch.testing.assert_close(played.memory["1"]["own"][name], value, rtol=0, atol=1e-12)


def test_networks_with_one_size_of_features_share_a_head_by_their_own_names() -> None:
    federation = small_federation(("lenet:kernels=2", "mlp:hidden=84"))
    played = play(ALGORITHM, federation)
    sent = ALGORITHM.send(played.setup, played.state, ["1", "0"])
    assert sent.shared == {}
    assert torch.equal(sent.mine["0"]["params"]["fc3.weight"], played.state.head["weight"])
    assert torch.equal(sent.mine["1"]["params"]["output.bias"], played.state.head["bias"])
    home, mine = played.home("1"), sent.mine["1"]
    deployed = ALGORITHM.client_deploy(home, {}, mine, played.recall("1"))
    assert torch.equal(deployed["params"]["output.weight"], played.state.head["weight"])
    assert torch.equal(deployed["params"]["hidden.0.weight"], played.memory["1"]["own"]["hidden.0.weight"])


def test_a_newcomer_trains_a_body_under_the_common_head() -> None:
    federation, ears = small_federation(unseen=1), Ears()
    played = play(ALGORITHM, federation, rounds=1, admit_rounds=3)
    session = played.session("admission")
    setup = played.setup.joined_by(federation.models)
    sent = ALGORITHM.admit(setup, played.state, Cohort(1, ("4",)), ears(session.ask))
    assert ears.programs == ["fedgh.train"] * 3
    assert torch.equal(sent.mine["4"]["params"]["output.weight"], played.state.head["weight"])
