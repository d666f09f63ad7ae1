# SPDX-License-Identifier: Apache-2.0
"""FedJETs, reconstructed: aggregation, routing and anchors on paper, FedAvg with one expert, and predictions."""

from __future__ import annotations

import pytest
import torch

from conftest import play, setup_of, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedjets import ALGORITHM, Config, State, anchored, learned, route, to_train
from fedloom.core.errors import ConfigError
from fedloom.core.trees import PerClient, tree_map
from tiny import Ears


def double(*values: object) -> torch.Tensor:
    return torch.tensor(*values, dtype=torch.float64)


def test_experts_are_averaged_over_those_who_trained_them() -> None:
    """A, with 1 sample, trains experts 0 and 1, B, with 3, experts 1 and 2. Changes: A 1 and 2, B 4 and 5.

    Expert 0 moves by 1, expert 1 by (1 * 2 + 3 * 4) / 4 = 3.5, expert 2 by 5, expert 3 stays. The gate moves by the
    mean of 8 and 4: (8 + 3 * 4) / 4 = 5.
    """
    state = State({}, {"1.bias": double([0.0])}, {"w": double([[10.0], [20.0], [30.0], [40.0]])},
                  torch.full((4,), -1))  # fmt: skip
    delta = {"gate.1.bias": double([[8.0], [4.0]]), "expert0.w": double([[1.0], [4.0]]),
             "expert1.w": double([[2.0], [5.0]])}  # fmt: skip
    replies = PerClient([(["A", "B"], {"delta": delta, "num_samples": double([1.0, 3.0]), "loss": double([0.0, 0.0])})])
    picked = PerClient([(["A", "B"], {"which": torch.tensor([[0, 1], [1, 2]])})])
    after = learned(state, replies, picked)
    assert after.experts["w"].flatten().tolist() == [11.0, 23.5, 35.0, 40.0]
    assert after.gate["1.bias"].tolist() == [5.0]


def test_anchors_are_the_clients_whose_labels_differ_most() -> None:
    """The first client, then the one that is farthest from it, then the one that is farthest from both."""
    setup = setup_of(small_federation(), Config())
    told = PerClient(
        [(["0", "1", "3", "4"], {"shares": double([[1, 0, 0], [0.9, 0.1, 0], [0, 0.5, 0.5], [0, 1, 0.0]])})]
    )
    assert anchored(setup, told, torch.full((3,), -1)).tolist() == [0, 3, 4]
    assert anchored(setup, told, torch.full((6,), -1)).tolist() == [0, 3, 4, 1, -1, -1]


def test_a_client_gets_the_experts_that_the_gate_prefers_and_an_anchor_its_own_first() -> None:
    federation, ears = small_federation(), Ears()
    start = play(ALGORITHM, federation, rounds=0, experts=3, experts_each=2)
    gate = {name: torch.zeros_like(value) for name, value in start.state.gate.items()}
    gate["1.bias"] = double([1.0, 3.0, 2.0])  # for every sample: experts 1, 2, 0
    state = start.state._replace(gate=gate, anchors=torch.tensor([2, -1, -1]))
    clients, picked = route(start.setup, state, ["1", "2"], ears(start.session(1).ask))
    assert clients == ["1", "2"] and picked.tolist() == [[1, 2], [0, 1]]
    shares = ears.replies[0]["1"]["shares"]
    torch.testing.assert_close(shares, double([1.0, 3.0, 2.0]).softmax(0), rtol=0, atol=1e-12)
    sent = to_train(start.setup, state, clients, picked)
    assert sent.mine["1"]["own"] == -1 and sent.mine["2"]["own"] == 0
    assert set(sent.mine["1"]["params"]) == {f"expert{k}.{name}" for k in (0, 1) for name in state.common}


@pytest.mark.parametrize("common_rounds", [0, 1])
def test_one_expert_is_fedavg(common_rounds: int) -> None:
    federation = small_federation(("lenet:kernels=2",))
    ours = play(ALGORITHM, federation, rounds=3, experts=1, experts_each=1, anchors=False, weight_decay=0.0,
                common_rounds=common_rounds)  # fmt: skip
    avg = play(fedavg.ALGORITHM, federation, rounds=3, weight_decay=0.0)
    for name, value in avg.state.params.items():
        torch.testing.assert_close(ours.state.experts[name][0], value, rtol=0, atol=1e-12)


def test_the_first_rounds_are_fedavgs_and_the_common_expert_is_frozen_then() -> None:
    federation, ears = small_federation(), Ears()
    avg = play(fedavg.ALGORITHM, federation, rounds=2)
    played = play(ALGORITHM, federation, rounds=2, common_rounds=2)
    later = play(ALGORITHM, federation, rounds=4, common_rounds=2, wrap=ears)
    for name, value in avg.state.params.items():
        torch.testing.assert_close(played.state.common[name], value, rtol=0, atol=1e-12)
        assert all(torch.equal(expert, played.state.common[name]) for expert in played.state.experts[name])
        assert torch.equal(later.state.common[name], played.state.common[name])
        assert not torch.equal(later.state.experts[name], played.state.experts[name])
    assert ears.programs == ["train", "train", "label_shares", "route", "fedjets.train", "route", "fedjets.train"]
    assert sorted(later.state.anchors.tolist()) == [0, 1, 2, 3, 4]


def test_a_run_without_experts_says_so() -> None:
    few, enough = (setup_of(small_federation(), Config(common_rounds=3), rounds=rounds) for rounds in (3, 4))
    assert "--common-rounds" in ALGORITHM.notes(few)[0] and not ALGORITHM.notes(enough)


def test_the_expert_that_the_gate_prefers_answers() -> None:
    federation = small_federation(("lenet:kernels=2",))
    played = play(ALGORITHM, federation, rounds=4, common_rounds=1, local_lr=0.5)
    home, x, model = played.home("0"), federation.x[:20], federation.roster["0"].model
    sent = ALGORITHM.send(played.setup, played.state, ["0"])
    deployed = ALGORITHM.client_deploy(home, sent.shared, {}, played.recall("0"))
    outputs = ALGORITHM.predict(home, deployed, x)
    hidden = model.features(played.state.common, {}, x) @ played.state.gate["0.weight"].T + played.state.gate["0.bias"]
    best = (hidden.relu() @ played.state.gate["1.weight"].T + played.state.gate["1.bias"]).argmax(1)
    for i, k in enumerate(best.tolist()):
        expert = {name: value[k] for name, value in played.state.experts.items()}
        torch.testing.assert_close(outputs[i], model(expert, {}, x[i : i + 1])[0], rtol=0, atol=1e-12)
    assert torch.equal(ALGORITHM.module(home, deployed)(x), outputs)


def test_with_equal_experts_the_gate_makes_no_difference() -> None:
    federation = small_federation()
    played = play(ALGORITHM, federation, rounds=1, common_rounds=1)
    x, home = federation.x[:9], played.home("0")
    sent = ALGORITHM.send(played.setup, played.state, ["0"]).shared
    gates = sent["gate"], tree_map(lambda leaf: -leaf, sent["gate"])
    outputs = [ALGORITHM.predict(home, {**sent, "gate": gate, "buffers": {}}, x) for gate in gates]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(outputs[0], federation.roster["0"].model(played.state.common, {}, x), rtol=0, atol=1e-12)


def test_an_anchor_teaches_the_gate_its_expert() -> None:
    """All clients are anchors; after some rounds the gate sends each of them to its own expert more than before."""
    federation = small_federation(sizes=(8, 8))
    for label, client in enumerate(federation.roster.values()):
        federation.y[torch.as_tensor(client.rows["train"])] = label
        federation.x[torch.as_tensor(client.rows["train"])] = torch.randn(
            8, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(label)) + 3.0 * label  # fmt: skip
    share = {}
    for rounds in (2, 20):
        ears = Ears()
        played = play(ALGORITHM, federation, rounds=rounds, common_rounds=1, experts=3, wrap=ears)
        own = {row: k for k, row in enumerate(played.state.anchors.tolist()) if row >= 0}
        last = [replies for name, replies in zip(ears.programs, ears.replies) if name == "route"][-1]
        share[rounds] = [float(last[client]["shares"][own[int(client)]]) for client in ("0", "1")]
    assert all(after > before for before, after in zip(share[2], share[20])) and min(share[20]) > 0.6


def test_more_experts_each_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="--experts-each is 3 and --experts 2"):
        Config(experts=2, experts_each=3)
