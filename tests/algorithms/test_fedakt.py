# SPDX-License-Identifier: Apache-2.0
"""FedAKT, reconstructed: one round on paper, one step against plain torch, Local without the adapter's part."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from conftest import play, small_federation
from fedloom.algorithms import local
from fedloom.algorithms.fedakt import ALGORITHM
from fedloom.core.contract import Cohort
from fedloom.core.errors import NeedsError
from fedloom.core.trees import leaves
from tiny import HAND, Ears, labels


def test_two_rounds_on_paper() -> None:
    """Model and adapter both give the feature x, and both classes are as likely: bodies have no slope.

    The head has (-1/2, 1/2) from each kind of features: it goes from (2, 2) by 0.1 (1, -1) to (2.1, 1.9).

    Round 2: p_1 = 1 / (1 + e^0.2); the slope by either feature is p_1 (1.9 - 2.1), and there is no pull, as both are
    equal: body and adapter go to 1 + 0.02 p_1.
    """
    one, two = (play(ALGORITHM, labels([[(1, 0)]]), rounds=n, adapter="tiny:Line", **HAND) for n in (1, 2))
    assert one.memory["0"]["own"]["top.weight"].flatten().tolist() == pytest.approx([2.1, 1.9], abs=1e-12)
    wanted = 1 + 0.02 / (1 + math.exp(0.2))
    assert float(two.memory["0"]["own"]["body.weight"]) == pytest.approx(wanted, abs=1e-12)
    assert float(two.state.adapter["line.weight"]) == pytest.approx(wanted, abs=1e-12)


def test_one_step_is_that_of_plain_torch() -> None:
    federation, ears = small_federation(("mlp:hidden=5",)), Ears()
    given = {"adapter": "mlp:hidden=4", "mutual_weight": 0.7, "adapter_weight": 0.3, "local_epochs": 1,
             "batch_size": 99, "momentum": 0.0, "clip": 0.0, "weight_decay": 0.0}  # fmt: skip
    start = play(ALGORITHM, federation, rounds=0, **given)
    played = play(ALGORITHM, federation, rounds=1, cohorts=[["1"]], wrap=ears, **given)
    own = {n: v.clone().requires_grad_() for n, v in start.recall("1")["own"].items()}
    adapter = {n: v.clone().requires_grad_() for n, v in start.state.adapter.items()}
    (rows,) = ears.plans[0]["1"].rows
    x, y = federation.x[rows].flatten(1), federation.y[rows]
    z = F.linear(x, own["hidden.0.weight"], own["hidden.0.bias"]).relu()
    u = F.linear(x, adapter["hidden.0.weight"], adapter["hidden.0.bias"]).relu()
    u = F.linear(u, adapter["output.weight"], adapter["output.bias"])
    one, other = (F.cross_entropy(F.linear(f, own["output.weight"], own["output.bias"]), y) for f in (z, u))
    pull = F.mse_loss(z, u.detach()) + F.mse_loss(u, z.detach())
    slopes = torch.autograd.grad(one + 0.3 * other + 0.7 * pull, [*own.values(), *adapter.values()])
    for (name, value), slope in zip([*own.items(), *adapter.items()], slopes):
        found = (played.memory["1"]["own"] if value is own.get(name) else played.state.adapter)[name]
        torch.testing.assert_close(found, (value - 0.05 * slope).detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed", "testnets:Dropping"])
def test_without_the_adapters_part_it_is_local(model: str) -> None:
    federation = small_federation((model,))
    off = {"mutual_weight": 0.0, "adapter_weight": 0.0, "clip": 0.0}
    ours = play(ALGORITHM, federation, **off)
    alone = play(local.ALGORITHM, federation, keep_optimiser=False, clip=0.0)
    for client in federation.participants:
        for (path, one), (_, other) in zip(leaves(ours.memory[client]), leaves(alone.memory[client]), strict=True):
            assert float((one - other).abs().max()) < 1e-12, path


def test_only_the_adapter_travels_and_participants_use_their_own_model() -> None:
    federation, ears = small_federation(("lenet:kernels=2", "mlp:hidden=84")), Ears()
    played = play(ALGORITHM, federation, wrap=ears)
    adapter = {f"adapter.{name}" for name in played.state.adapter}
    assert ears.down == {f"params/{name}" for name in adapter}
    assert ears.up == {f"delta/{name}" for name in adapter} | {"num_samples", "loss"}
    home, memory = played.home("1"), played.memory["1"]
    sent = ALGORITHM.send(played.setup, played.state, ["1"])
    deployed = ALGORITHM.client_deploy(home, sent.shared, sent.mine["1"], memory)
    x = federation.x[:4]
    wanted = federation.roster["1"].model(memory["own"], memory["buffers"], x)
    assert torch.equal(ALGORITHM.predict(home, deployed, x), wanted)
    torch.testing.assert_close(ALGORITHM.module(home, deployed)(x), wanted)


def test_an_adapter_with_running_statistics_is_refused() -> None:
    with pytest.raises(NeedsError, match="FedAKT's adapter must be all parameters; testnets:Normed has running"):
        play(ALGORITHM, small_federation(), rounds=0, adapter="testnets:Normed")


def test_a_newcomer_trains_a_model_beside_the_adapter() -> None:
    federation, ears = small_federation(unseen=1), Ears()
    played = play(ALGORITHM, federation, rounds=1, admit_rounds=2)
    session, setup = played.session("admission"), played.setup.joined_by(federation.models)
    before = session.recall("4")["own"]["output.weight"]
    ALGORITHM.admit(setup, played.state, Cohort(1, ("4",)), ears(session.ask))
    assert ears.programs == ["fedakt.train"] * 2
    assert not torch.equal(session.recall("4")["own"]["output.weight"], before)
