# SPDX-License-Identifier: Apache-2.0
"""pFedHN-PC: the woven body and the client's own classifier on paper, against torch, and as pFedHN without a head."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from conftest import play, setup_of, small_federation
from fedloom.algorithms import pfedhn
from fedloom.algorithms.pfedhn_pc import ALGORITHM
from fedloom.core.contract import Cohort
from fedloom.core.trees import flatten
from fedloom.looms.outer import begin_outer
from tiny import HAND, Ears, headless, lines, torch_steps

PLAIN_OUTER = {"server_momentum": 0.0, "server_weight_decay": 0.0, "server_clip": 0.0}


def by_hand(setup) -> pfedhn.State:
    """v = 1; a loom of width 1: 2 v, then ReLU, times 1, times 0.5: the body is b = 1. No biases yet."""
    values = {"trunk.0": 2.0, "trunk.1": 1.0, "head.tiny:BodyAndHead": 0.5}
    loom = {f"{name}.weight": torch.full((1, 1), value).double() for name, value in values.items()}
    loom |= {f"{name}.bias": torch.zeros(1).double() for name in values}
    table = torch.ones(len(setup.clients), 1, dtype=torch.float64)
    return pfedhn.State(loom, table, torch.full((len(table),), True), begin_outer(setup.config.outer(), loom, table))


BY_HAND = dataclasses.replace(ALGORITHM, init=by_hand)


def test_one_round_on_paper() -> None:
    """y = h b x with the woven b = 1 and the kept h = 2, one sample (1, 3): residual -1.

    Slopes 2 (-1) h = -4 for b and 2 (-1) b = -2 for h; at rate 0.1 the body changes by 0.4 and the head is 2.2. Outer,
    at rate 0.1 along -0.4: head of the loom 0.5 + 0.1 * 0.4 * 2 = 0.58, bias 0.04; trunk.1 1 + 0.1 * 0.2 * 2 = 1.04,
    bias 0.02; trunk.0 2 + 0.1 * 0.2 * 1 = 2.02, bias 0.02; v = 1 + 0.1 * 0.2 * 2 = 1.04.
    """
    federation = lines([[(1, 3)]], "tiny:BodyAndHead")
    played = play(BY_HAND, federation, rounds=1, hidden=1, layers=1, server_lr=0.1, **PLAIN_OUTER, **HAND)
    expected = {
        "trunk.0.weight": 2.02,
        "trunk.0.bias": 0.02,
        "trunk.1.weight": 1.04,
        "trunk.1.bias": 0.02,
        "head.tiny:BodyAndHead.weight": 0.58,
        "head.tiny:BodyAndHead.bias": 0.04,
    }
    assert {name: float(value) for name, value in played.state.loom.items()} == pytest.approx(expected, abs=1e-12)
    assert float(played.state.embeddings) == pytest.approx(1.04, abs=1e-12)
    assert float(played.memory["0"]["own"]["top.weight"]) == pytest.approx(2.2, abs=1e-12)


def test_the_heads_momentum_persists_and_the_bodys_starts_afresh_on_paper() -> None:
    """Outer rate 0, so that b = 1 in every round; inner momentum 0.9.

    Round 1: h = 2 + 0.1 * 2 = 2.2 with momentum -2. Round 2: residual -0.8, slope -1.6, momentum 0.9 (-2) - 1.6 = -3.4:
    h = 2.54 (afresh it would be 2.36). The body: slope 2 (-0.8) 2.2 = -3.52, change 0.352 (kept it would be 0.712).
    Round 3: residual -0.46, slope -0.92, momentum 0.9 (-3.4) - 0.92 = -3.98: h = 2.938.
    """
    federation, ears = lines([[(1, 3)]], "tiny:BodyAndHead"), Ears()
    config = {**HAND, **PLAIN_OUTER, "momentum": 0.9, "server_lr": 0.0}
    played = play(BY_HAND, federation, rounds=3, hidden=1, layers=1, wrap=ears, **config)
    memory = played.memory["0"]
    assert float(memory["own"]["top.weight"]) == pytest.approx(2.938, abs=1e-12)
    assert float(memory["own_optimiser"]["momentum"]["top.weight"]) == pytest.approx(-3.98, abs=1e-12)
    changes = [float(replies["0"]["delta"]["body.weight"]) for replies in ears.replies]
    assert changes[:2] == pytest.approx([0.4, 0.352], abs=1e-12)
    assert "optimiser" not in memory


def test_a_client_does_what_torch_does_with_two_optimisers() -> None:
    """The body's is new in every round, the head's is one and the same; they are clipped apart."""
    federation = small_federation(("lenet:kernels=2", "mlp:hidden=5"))
    config = {"hidden": 20, "server_lr": 0.3, "weight_decay": 0.01, "clip": 0.3}
    untouched = play(ALGORITHM, federation, rounds=0, **config)
    for client in ("0", "1"):
        ears = Ears()
        played = play(ALGORITHM, federation, rounds=3, cohorts=[[client]] * 3, wrap=ears, **config)
        model = federation.roster[client].model
        module = model.module(model.init(0), {}).train()
        module.load_state_dict(untouched.recall(client)["own"], strict=False)
        own = {name: p for name, p in module.named_parameters() if name in model.head}
        head = torch.optim.SGD(own.values(), lr=0.05, momentum=0.9, weight_decay=0.01)
        for number in range(3):
            before = play(ALGORITHM, federation, rounds=number, cohorts=[[client]] * 3, **config)
            woven = ALGORITHM.send(before.setup, before.state, (client,)).mine[client]["params"]
            module.load_state_dict(woven, strict=False)
            rest = {name: p for name, p in module.named_parameters() if name not in model.head}
            body = torch.optim.SGD(rest.values(), lr=0.05, momentum=0.9, weight_decay=0.01)
            torch_steps(module, [body, head], federation, ears.plans[number][client], clip=0.3)
            for name, value in ears.replies[number][client]["delta"].items():
                torch.testing.assert_close(value, rest[name].detach() - woven[name], rtol=0, atol=1e-10)
        for name, value in own.items():
            kept = played.memory[client]
            torch.testing.assert_close(kept["own"][name], value.detach(), rtol=0, atol=1e-10)
            momentum = head.state[value]["momentum_buffer"]
            torch.testing.assert_close(kept["own_optimiser"]["momentum"][name], momentum, rtol=0, atol=1e-10)


@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed"])
def test_with_an_empty_head_it_is_pfedhn(model: str) -> None:
    federation = headless(small_federation((model,)))
    config = {"server_lr": 0.3, "hidden": 20, "clip": 0.0}
    pc, whole = (play(method, federation, rounds=3, **config).state for method in (ALGORITHM, pfedhn.ALGORITHM))
    assert torch.equal(pc.embeddings, whole.embeddings) and pc.loom.keys() == whole.loom.keys()
    assert all(torch.equal(value, pc.loom[name]) for name, value in whole.loom.items())


def test_the_head_is_in_nothing_that_is_sent() -> None:
    federation, ears = small_federation(("lenet:kernels=2",), unseen=2), Ears()
    played = play(ALGORITHM, federation, wrap=ears, hidden=20, admit_rounds=1)
    body = {name for name in federation.roster["0"].model.shapes if not name.startswith("fc3.")}
    session = played.session("admission")
    admitted = ALGORITHM.admit(played.setup, played.state, Cohort(1, federation.unseen), ears(session.ask))
    assert ears.down == {f"params/{name}" for name in body}
    assert ears.up == {f"delta/{name}" for name in body} | {"num_samples", "loss"}
    sent = ALGORITHM.send(played.setup, played.state, federation.participants)
    for what, clients in ((sent, federation.participants), (admitted, federation.unseen)):
        assert what.shared == {} and all(set(flatten(what.mine[client])) == ears.down for client in clients)
    rows = sum(len(v) for name, v in played.state.loom.items() if name.startswith("head.") and name.endswith("bias"))
    model = federation.roster["0"].model
    assert rows == model.size - 84 * 3 - 3  # all but the output layer, 84 to 3


def test_the_clients_head_goes_on_the_woven_body() -> None:
    federation = small_federation()
    played = play(ALGORITHM, federation, rounds=1, hidden=20)
    sent = ALGORITHM.send(played.setup, played.state, ("2",))
    deployed = ALGORITHM.client_deploy(None, sent.shared, sent.mine["2"], played.recall("2"))
    assert deployed["params"].keys() == federation.roster["2"].model.shapes.keys()
    assert deployed["params"]["output.weight"] is played.memory["2"]["own"]["output.weight"]
    assert torch.equal(deployed["params"]["hidden.0.weight"], sent.mine["2"]["params"]["hidden.0.weight"])


def test_a_client_that_was_not_asked_keeps_its_head_and_momentum() -> None:
    federation = small_federation()
    one, two = (play(ALGORITHM, federation, rounds=n, cohorts=[["0", "1"], ["1"]], hidden=20).memory for n in (1, 2))
    after = flatten(two["0"])
    assert all(torch.equal(after[path], value) for path, value in flatten(one["0"]).items())
    assert not torch.equal(one["1"]["own"]["output.weight"], two["1"]["own"]["output.weight"])


def test_the_outer_rate_is_five_times_pfedhns_and_all_else_is_the_same() -> None:
    own, other = dataclasses.asdict(ALGORITHM.config()), dataclasses.asdict(pfedhn.ALGORITHM.config())
    assert {name: value for name, value in own.items() if value != other[name]} == {"server_lr": 5e-2}
    assert other["server_lr"] == 1e-2 and own.keys() == other.keys()


def test_a_model_that_is_nothing_but_its_output_layer_is_refused() -> None:
    (sentence,) = ALGORITHM.needs.violations(setup_of(lines(), ALGORITHM.config()), ALGORITHM.name)
    assert sentence.startswith("pFedHN-PC keeps the output layer apart from the body; tiny:Line has nothing but")
    assert not ALGORITHM.needs.violations(setup_of(lines(model="tiny:BodyAndHead"), None), ALGORITHM.name)
