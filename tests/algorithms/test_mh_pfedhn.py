# SPDX-License-Identifier: Apache-2.0
"""MH-pFedHN: a step on paper, then against the authors' loop in plain torch, then its options and newcomers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import play, setup_of, small_federation
from fedloom.algorithms import mh_pfedhn
from fedloom.algorithms.mh_pfedhn import ALGORITHM, Carry, Config, State
from fedloom.clients.federation import Client, Federation
from fedloom.core.config import build
from fedloom.core.contract import Cohort, Home, Seeds, Setup
from fedloom.core.errors import ConfigError, RoundError
from fedloom.core.optim import Optimiser
from fedloom.core.random import fold as fold_key
from fedloom.core.random import key, laplace
from fedloom.core.sparse import change_in
from fedloom.core.task import CLASSIFICATION
from fedloom.core.trees import PerClient, flatten
from fedloom.core.vectors import to_vector
from fedloom.looms.multi_head import TRUNK
from fedloom.looms.places import places_of
from fedloom.models.model import Model
from fedloom.models.spec import parse
from tiny import HAND, Ears, lines, torch_steps

TWO = ("lenet:kernels=2", "mlp:hidden=5")
SMALL: dict[str, Any] = {"chunk": 100, "embed_dim": 4, "hidden": 6, "server_lr": 0.01}


def by_hand(setup: Setup[Any]) -> State:
    """v = 1; a loom of width 1: relu(2 v) times 0.5: theta = 1 for everybody. No biases yet."""
    full = torch.full((1, 1), 1.0, dtype=torch.float64)
    pieces = {
        TRUNK: {"0.weight": 2 * full, "0.bias": 0 * full[0]},
        "head.1": {"weight": 0.5 * full[None], "bias": 0 * full},
        **{f"vectors.{row}": {"v": full} for row in range(len(setup.clients))},
    }
    return State(pieces, {piece: Optimiser("adam").init(params) for piece, params in pieces.items()})


def test_one_outer_step_on_paper() -> None:
    """theta = 0.5 relu(2 v) = 1. The client's gradient is -4, its change 0.4, the pseudo-gradient -0.4.

    Every gradient is negative: head -0.8 and -0.4, trunk -0.2 and -0.2, vector -0.4. Adam's first step is the rate in
    the direction of the sign, so all gain 0.1. The other client's vector rests.
    """
    algorithm = dataclasses.replace(ALGORITHM, init=by_hand)
    shape = {"chunk": 1, "embed_dim": 1, "hidden": 1, "layers": 1, "server_lr": 0.1}
    played = play(algorithm, lines(), rounds=1, cohorts=[["0"]], **shape, **HAND)
    found = {path: value.flatten().tolist() for path, value in flatten(played.state.pieces).items()}
    expected = {
        "trunk/0.weight": [2.1],
        "trunk/0.bias": [0.1],
        "head.1/weight": [0.6],
        "head.1/bias": [0.1],
        "vectors.0/v": [1.1],
        "vectors.1/v": [1.0],
    }
    assert found == {path: pytest.approx(value, abs=1e-7) for path, value in expected.items()}
    counts = {piece: int(tree["count"]) for piece, tree in played.state.optimiser.items()}
    assert counts == {"trunk": 1, "head.1": 1, "vectors.0": 1, "vectors.1": 0}
    mean = played.state.optimiser["head.1"]["mean"]["weight"]
    assert float(mean) == pytest.approx(0.1 * -0.8, abs=1e-12)


class Hyper(nn.Module):
    """The authors' hypernetwork: a parameter per client, a trunk, and lists of linear layers, one list per count."""

    def __init__(self, state: State, places: dict[str, Any], layers: int = 3) -> None:
        super().__init__()
        self.places, self.layers = places, layers
        self.names = [(piece, name) for piece, params in state.pieces.items() for name in params]
        self.values = nn.ParameterList(state.pieces[p][n].clone() for p, n in self.names)

    def at(self, piece: str, name: str) -> Tensor:
        return self.values[self.names.index((piece, name))]

    def forward(self, client: str) -> Tensor:
        place, chunks = self.places[client], []
        for t in range(place.tau):
            x = self.at(place.vectors, "v")[t]
            for i in range(self.layers):
                x = torch.relu(nn.functional.linear(x, self.at(TRUNK, f"{i}.weight"), self.at(TRUNK, f"{i}.bias")))
            chunks.append(nn.functional.linear(x, self.at(place.head, "weight")[t], self.at(place.head, "bias")[t]))
        return torch.cat(chunks)[: place.size]

    def learn(self, optimiser: torch.optim.Optimizer, clip: float, outputs: list[Tensor], grads: list[Tensor]) -> None:
        """As the authors do: parameters that took no part have no gradient at all, and Adam leaves them alone."""
        wanted = [p for group in optimiser.param_groups for p in group["params"]]
        found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
        for parameter, grad in zip(wanted, found):
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_([p for p in wanted if p.grad is not None], clip)
        optimiser.step()

    def assert_same(self, state: State, atol: float = 1e-10) -> None:
        assert {(p, n) for p, params in state.pieces.items() for n in params} == set(self.names)
        for (piece, name), value in zip(self.names, self.values):
            torch.testing.assert_close(
                state.pieces[piece][name], value.detach(), rtol=0, atol=atol, msg=lambda m, w=(piece, name): f"{w}: {m}"
            )


def hyper_of(played: Any) -> Hyper:
    return Hyper(ALGORITHM.init(played.setup), places_of(played.setup, played.setup.clients))


@pytest.mark.parametrize("clip", [50.0, 0.01], ids=["wide", "tight"])
@pytest.mark.parametrize("models", [("lenet:kernels=2",), TWO], ids=["one architecture", "two"])
def test_cohorts_of_one_are_the_authors_loop(models: tuple[str, ...], clip: float) -> None:
    federation, ears, order = small_federation(models, sizes=(9, 4, 7)), Ears(), ("1", "0", "1", "2")
    config = {**SMALL, "server_clip": clip, "weight_decay": 0.01}
    played = play(ALGORITHM, federation, rounds=4, cohorts=[[c] for c in order], wrap=ears, **config)
    hyper = hyper_of(played)
    outer = torch.optim.Adam(hyper.parameters(), lr=0.01)
    for number, client in enumerate(order):
        model, woven = federation.roster[client].model, hyper(client)
        shaped = dict(zip(model.shapes, woven.detach().split([v.numel() for v in model.init(0).values()])))
        module = model.module({n: v.reshape(model.shapes[n]) for n, v in shaped.items()}, {}).train()
        inner = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        torch_steps(module, [inner], federation, ears.plans[number][client], clip=0.5)
        after = torch.cat([p.detach().flatten() for p in module.parameters()])
        hyper.learn(outer, clip, [woven], [woven.detach() - after])
    hyper.assert_same(played.state)


def replay(played: Any, ears: Ears, steps: list[list[str]], asks: list[int]) -> Hyper:
    """One step per entry of ``steps`` on the mean of these clients' replies to ``asks``."""
    hyper = hyper_of(played)
    outer = torch.optim.Adam(hyper.parameters(), lr=0.01)
    for members, ask in zip(steps, asks):
        grads = [-ears.replies[ask][c]["delta"] / len(members) for c in members]
        hyper.learn(outer, 0.02, [hyper(c) for c in members], grads)
    return hyper


def test_per_client_steps_are_taken_one_after_another_in_the_rosters_order() -> None:
    federation, ears = small_federation(TWO), Ears()
    played = play(ALGORITHM, federation, rounds=1, wrap=ears, server_clip=0.02, **SMALL)
    assert ears.asked == [["0", "2", "4", "1", "3"]]  # those alike are sent together
    replay(played, ears, [["0"], ["1"], ["2"], ["3"], ["4"]], [0] * 5).assert_same(played.state)


def test_cohort_mean_is_one_step_on_the_mean_of_all_replies() -> None:
    federation, ears = small_federation(TWO), Ears()
    played = play(ALGORITHM, federation, rounds=1, wrap=ears, server_clip=0.02, server_step="cohort_mean", **SMALL)
    replay(played, ears, [["0", "1", "2", "3", "4"]], [0]).assert_same(played.state)


def test_in_turn_every_client_is_woven_after_the_step_before() -> None:
    federation, ears = small_federation(TWO), Ears()
    sent: list[Any] = []

    def listening(ask):
        hears = ears(ask)

        def heard(program, shared, mine):
            sent.append({client: mine[client]["vector"] for client in mine})
            return hears(program, shared, mine)

        return heard

    played = play(ALGORITHM, federation, rounds=1, wrap=listening, server_clip=0.02, server_step="in_turn", **SMALL)
    order = [who[0] for who in ears.asked]
    assert sorted(order) == list(federation.participants) and [len(who) for who in ears.asked] == [1] * 5
    replay(played, ears, [[c] for c in order], list(range(5))).assert_same(played.state)
    before_last = replay(played, ears, [[c] for c in order[:4]], list(range(4)))
    torch.testing.assert_close(sent[4][order[4]], before_last(order[4]).detach(), rtol=0, atol=1e-12)
    assert played.diagnostics[0]["local_loss"] == pytest.approx(
        np.mean([float(ears.replies[i][c]["loss"]) for i, c in enumerate(order)]), abs=1e-12
    )


def test_for_a_cohort_of_one_all_outer_steps_are_the_same() -> None:
    federation, order = small_federation(TWO), [["3"], ["0"], ["3"]]
    one, *others = (
        flatten(play(ALGORITHM, federation, rounds=3, cohorts=order, server_step=kind, **SMALL).state._asdict())
        for kind in ("per_client", "in_turn", "cohort_mean")
    )
    assert all(torch.equal(value, other[path]) for other in others for path, value in one.items())


def test_in_turn_a_client_that_fails_costs_its_turn_and_nothing_else() -> None:
    federation = small_federation()
    federation.x[federation.roster["1"].rows["train"]] = float("nan")
    played = play(ALGORITHM, federation, rounds=1, server_step="in_turn", **SMALL)
    counts = [int(played.state.optimiser[f"vectors.{row}"]["count"]) for row in range(5)]
    assert counts == [1, 0, 1, 1, 1] and int(played.state.optimiser[TRUNK]["count"]) == 4
    federation.x[:] = float("nan")
    with pytest.raises(RoundError, match="No client of 1"):
        play(ALGORITHM, federation, rounds=1, server_step="in_turn", **SMALL)


class Spy:
    """A model of which the server may know no more than its size and whether two are equal."""

    def __init__(self, model: Model) -> None:
        self.size, self.spec = model.size, model.spec

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the server looked at {name}")


def test_the_server_is_told_only_the_number_of_parameters() -> None:
    federation = small_federation(TWO, unseen=1)
    config = Config(local_epochs=1, batch_size=4, admit_rounds=1, **SMALL)
    setup = setup_of(federation, config)
    blind = dataclasses.replace(setup, models={client: Spy(model) for client, model in setup.models.items()})
    played, state = play(ALGORITHM, federation, rounds=0), ALGORITHM.init(blind)
    for number, kind in enumerate(("per_client", "in_turn", "cohort_mean")):
        blind = dataclasses.replace(blind, config=dataclasses.replace(config, server_step=kind))
        state, _ = ALGORITHM.round(blind, state, Cohort(number, federation.participants), played.session(number).ask)
    ALGORITHM.send(blind, state, federation.participants)
    ALGORITHM.admit(blind, state, Cohort(1, federation.unseen), played.session("admission").ask)


def test_only_vectors_travel_and_the_loom_never() -> None:
    ears = Ears()
    play(ALGORITHM, small_federation(TWO), wrap=ears, **SMALL)
    assert ears.down == {"vector"} and ears.up == {"delta", "num_samples", "loss"}


def test_normalisation_is_woven_and_its_statistics_stay() -> None:
    federation, ears = small_federation(("testnets:Normed",)), Ears()
    played = play(ALGORITHM, federation, wrap=ears, **SMALL)
    size = sum(p.numel() for p in federation.roster["0"].model.init(0).values())
    assert len(ears.replies[0]["0"]["delta"]) == size and ears.down == {"vector"}
    assert played.memory["0"]["buffers"]["norm.num_batches_tracked"] > 0


def test_a_client_deploys_the_vector_in_its_models_shapes() -> None:
    federation = small_federation(TWO)
    played = play(ALGORITHM, federation, rounds=1, **SMALL)
    sent = ALGORITHM.send(played.setup, played.state, ("4", "1"))
    for client in ("4", "1"):
        model = federation.roster[client].model
        home = played.home(client)
        deployed = ALGORITHM.client_deploy(home, {}, sent.mine[client], played.recall(client))
        assert {n: tuple(v.shape) for n, v in deployed["params"].items()} == dict(model.shapes)
        assert torch.equal(to_vector(deployed["params"]), sent.mine[client]["vector"])


def test_the_defaults_are_the_papers_and_the_codes_are_a_preset() -> None:
    config = ALGORITHM.config()
    inner = dataclasses.asdict(config.local_optimiser())
    expected = {"name": "sgd", "lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4, "clip": 50.0}
    assert {name: inner[name] for name in expected} == expected
    assert (config.batches().epochs, config.batches().size) == (2, 64)
    assert (config.chunk, config.embed_dim, config.hidden, config.layers) == (3072, 64, 128, 3)
    assert (config.server_lr, config.server_clip, ALGORITHM.cohort) == (2e-4, 50.0, 1)
    code = build(ALGORITHM.config, {"preset": "code"})
    assert (code.batches().epochs, code.local_lr, code.weight_decay) == (1, 5e-3, 5e-4)
    assert build(ALGORITHM.config, {"preset": "code", "local_lr": "0.1"}) == dataclasses.replace(code, local_lr=0.1)


def pieces_of(models: tuple[str, ...], **config: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    state = play(ALGORITHM, small_federation(models), rounds=0, **{**SMALL, **config}).state
    return {p: {n: tuple(v.shape) for n, v in params.items()} for p, params in state.pieces.items()}


def test_clients_with_as_many_vectors_share_a_head() -> None:
    """203 and 238 parameters in chunks of 100 are three vectors, 379 are four."""
    models = ("mlp:hidden=5", "mlp:hidden=7", "mlp:hidden=6x20")
    sizes = [Model(parse(name, (1, 6, 6), 3)).size for name in models]
    assert [-(-size // 100) for size in sizes] == [3, 3, 5]
    pieces = pieces_of(models)
    assert {name for name in pieces if name.startswith("head")} == {"head.3", "head.5"}
    assert pieces["head.3"] == {"weight": (3, 100, 6), "bias": (3, 100)}
    assert [pieces[f"vectors.{row}"]["v"] for row in range(5)] == [(3, 4), (3, 4), (5, 4), (3, 4), (3, 4)]


@pytest.mark.parametrize(
    ("heads", "names"),
    [
        ("by_model", {"head.3.mlp:hidden=5", "head.3.mlp:hidden=7"}),  # App. D.8
        ("per_client", {f"head.vectors.{row}" for row in range(5)}),  # Table 3, its caption
        ("single", {"head.all"}),  # Table 3, its text
        ("none", set()),
    ],
)
def test_other_ways_to_share_heads(heads: str, names: set[str]) -> None:
    models = ("mlp:hidden=5", "mlp:hidden=7")
    pieces = pieces_of(models, heads=heads)
    assert {name for name in pieces if name.startswith("head")} == names
    played = play(ALGORITHM, small_federation(models, unseen=1), heads=heads, admit_rounds=1, **SMALL)
    assert set(admitted(played, ("4",))) == {"4"}


def test_redundant_vectors_weave_nothing() -> None:
    """App. D.7: two vectors more, whose layers of the head and whose own values never change."""
    played = play(ALGORITHM, small_federation(), extra_vectors=2, **SMALL)
    start = ALGORITHM.init(played.setup)
    assert played.state.pieces["vectors.0"]["v"].shape == (5, 4)
    for piece, name in (("vectors.0", "v"), ("head.5", "weight"), ("head.5", "bias")):
        moved = (played.state.pieces[piece][name] - start.pieces[piece][name]).abs().flatten(1).amax(1)
        assert (moved[:3] > 0).all() and not moved[3:].any()


def home_of(model: Model, **config: Any) -> Home:
    return Home(model, CLASSIFICATION, Config(**config), torch.tensor(4.0), key("test"))


def test_the_largest_entries_of_a_change_are_sent_with_their_places() -> None:
    """Of the change 3, -5, 1, 0.5, -4 a share of 0.5 are two entries, -5 and -4, at 1 and 4."""
    model = Model(parse("tiny:Line", (5,), 1), dtype=torch.float64)
    change = torch.tensor([[3.0, -5, 1, 0.5, -4]], dtype=torch.float64)
    home, zeros = home_of(model, top_share=0.5), {"line.weight": torch.zeros_like(change)}
    carry = mh_pfedhn.client_init(home, {}, {"vector": torch.zeros(5).double()}, {"buffers": {}})
    carry = carry._replace(training=carry.training._replace(params={"line.weight": change}, start=zeros))
    reply, _ = mh_pfedhn.client_final(home, {}, carry, {"buffers": {}})
    assert reply["values"].tolist() == [-5, -4] and reply["places"].tolist() == [1, 4]
    assert reply["places"].dtype == torch.int32
    stacked = {name: value[None] for name, value in reply.items()}
    assert change_in(stacked, 5).tolist() == [[0, -5, 0, 0, -4]]


def test_places_outside_of_the_model_do_no_harm() -> None:
    reply = {"values": torch.tensor([[1.0, 2.0]]), "places": torch.tensor([[-7, 900]], dtype=torch.int32)}
    assert change_in(reply, 3).tolist() == [[1, 0, 2]]


def test_a_sparse_reply_is_smaller_and_steps_on_what_was_sent() -> None:
    """0.3 of 203 entries are 60, of 8 and 4 bytes, instead of 203 of 8."""
    federation, ears = small_federation(), Ears()
    whole = play(ALGORITHM, federation, rounds=1, **SMALL)
    played = play(ALGORITHM, federation, rounds=1, wrap=ears, top_share=0.3, server_clip=0.02, **SMALL)
    numbers = 2 * 8  # samples and loss
    assert whole.stats.bytes_up == 5 * (203 * 8 + numbers)
    assert played.stats.bytes_up == 5 * (60 * 12 + numbers)
    for reply in ears.replies[0].values():
        reply["delta"] = change_in({name: value[None] for name, value in reply.items()}, 203)[0]
        assert int((reply["delta"] != 0).sum()) == 60
    replay(played, ears, [["0"], ["1"], ["2"], ["3"], ["4"]], [0] * 5).assert_same(played.state)


def test_laplace_noise_is_added_to_the_change_and_nothing_else() -> None:
    federation, quiet, loud = small_federation(), Ears(), Ears()
    play(ALGORITHM, federation, rounds=1, wrap=quiet, **SMALL)
    play(ALGORITHM, federation, rounds=1, wrap=loud, laplace_noise=0.02, **SMALL)
    noise = torch.stack([loud.replies[0][c]["delta"] - quiet.replies[0][c]["delta"] for c in quiet.replies[0]])
    # a Laplace variable of scale b has a mean absolute value of b; 1015 draws: a standard error of 3%
    assert float(noise.abs().mean()) == pytest.approx(0.02, rel=0.12)
    assert not torch.equal(noise[0], noise[1])
    assert all(torch.equal(loud.replies[0][c]["loss"], quiet.replies[0][c]["loss"]) for c in quiet.replies[0])


def test_the_noise_is_the_draw_of_the_clients_key() -> None:
    model = Model(parse("tiny:Line", (5,), 1), dtype=torch.float64)
    home, zeros = home_of(model, laplace_noise=2.0), {"line.weight": torch.zeros(1, 5).double()}
    carry = mh_pfedhn.client_init(home, {}, {"vector": torch.zeros(5).double()}, {"buffers": {}})
    carry = carry._replace(training=carry.training._replace(params=zeros, start=zeros))
    reply, _ = mh_pfedhn.client_final(home, {}, carry, {"buffers": {}})
    assert torch.equal(reply["delta"], 2 * laplace(fold_key(home.key, -1), (5,), torch.float64))


def test_layers_kept_local_never_travel_and_are_trained() -> None:
    """App. D.12: fc3 and its 3 (84 + 1) numbers stay, so K is that much smaller."""
    federation, ears = small_federation(("lenet:kernels=2",)), Ears()
    played = play(ALGORITHM, federation, wrap=ears, keep_local=("head",), **SMALL)
    model = federation.roster["0"].model
    assert len(ears.replies[0]["0"]["delta"]) == model.size - 255
    kept = played.memory["0"]["own"]
    assert kept.keys() == {"fc3.weight", "fc3.bias"}
    home = played.home("0")
    sent = ALGORITHM.send(played.setup, played.state, ("0",))
    deployed = ALGORITHM.client_deploy(home, {}, sent.mine["0"], played.memory["0"])["params"]
    assert list(deployed) == list(model.shapes) and torch.equal(deployed["fc3.bias"], kept["fc3.bias"])
    fresh = play(ALGORITHM, federation, rounds=0, keep_local=("head",), **SMALL).recall("0")["own"]
    assert not torch.equal(fresh["fc3.weight"], kept["fc3.weight"])
    # every client begins with a head of its own
    other = play(ALGORITHM, federation, rounds=0, keep_local=("head",), **SMALL).recall("1")["own"]
    assert not torch.equal(fresh["fc3.weight"], other["fc3.weight"])


def test_the_kept_layer_takes_the_steps_of_ordinary_training() -> None:
    federation, ears = small_federation(("lenet:kernels=2",), sizes=(9,)), Ears()
    played = play(ALGORITHM, federation, rounds=1, wrap=ears, keep_local=("conv1+fc3",), **SMALL)
    model = federation.roster["0"].model
    fresh = play(ALGORITHM, federation, rounds=0, keep_local=("conv1+fc3",), **SMALL)
    start = ALGORITHM.send(played.setup, ALGORITHM.init(played.setup), ("0",)).mine["0"]
    params = ALGORITHM.client_deploy(fresh.home("0"), {}, start, fresh.recall("0"))["params"]
    module = model.module(params, {}).train()
    inner = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    torch_steps(module, [inner], federation, ears.plans[0]["0"], clip=0.5)
    after = {name: value.detach() for name, value in module.named_parameters()}
    for name, value in played.memory["0"]["own"].items():
        torch.testing.assert_close(value, after[name], rtol=0, atol=1e-12)
    woven = [name for name in model.shapes if not name.startswith(("conv1", "fc3"))]
    change = torch.cat([(after[name] - params[name]).flatten() for name in woven])
    torch.testing.assert_close(ears.replies[0]["0"]["delta"], change, rtol=0, atol=1e-12)


def test_clients_take_the_ways_to_keep_layers_in_turn() -> None:
    """App. D.12's four: the classifier, both ends, the input layer, nothing."""
    ways = ("fc3", "conv1+fc3", "conv1", "none")
    federation, ears = small_federation(("lenet:kernels=2",), sizes=(9, 4, 13, 7, 5, 6)), Ears()
    played = play(ALGORITHM, federation, wrap=ears, keep_local=ways, **SMALL)
    model = federation.roster["0"].model
    ends, conv1 = 255, 2 * 25 + 2
    expected = [ends, ends + conv1, conv1, 0, ends, ends + conv1]
    assert [model.size - len(ears.replies[0][str(i)]["delta"]) for i in range(6)] == expected
    fresh = play(ALGORITHM, federation, rounds=0, keep_local=ways, **SMALL)
    for client, moved in (("0", {"fc3"}), ("1", {"conv1", "fc3"}), ("2", {"conv1"}), ("3", set())):
        first, last = fresh.recall(client)["own"], played.memory[client]["own"]
        assert {n.partition(".")[0] for n in first if not torch.equal(first[n], last[n])} == moved


def test_every_architecture_takes_every_way_to_keep_layers() -> None:
    """App. D.12: the modes of each architecture have as many clients, however architectures were dealt."""
    federation = small_federation(TWO, sizes=(3,) * 8)
    setup = play(ALGORITHM, federation, rounds=0, keep_local=("head", "none"), **SMALL).setup
    told = {client: place.size for client, place in places_of(setup, setup.clients).items()}
    for members in setup.by_model(setup.clients).values():
        model = setup.models[members[0]]
        head = sum(math.prod(model.shapes[name]) for name in model.head)
        assert [told[client] for client in members] == [model.size - head, model.size] * 2


def test_frozen_layers_are_woven_and_not_trained() -> None:
    """App. D.13; neither momentum nor decay moves them, and their part of the change is zero."""
    federation, ears = small_federation(("lenet:kernels=2",)), Ears()
    play(ALGORITHM, federation, wrap=ears, frozen=("fc2+head",), weight_decay=0.1, **SMALL)
    model = federation.roster["0"].model
    frozen = 84 * 121 + 3 * 85
    for reply in (reply for replies in ears.replies for reply in replies.values()):
        assert len(reply["delta"]) == model.size
        assert not reply["delta"][-frozen:].any() and (reply["delta"][:-frozen] != 0).any()


def test_each_client_draws_one_of_the_ways_to_be_frozen_and_keeps_to_it() -> None:
    federation = small_federation(("mlp:hidden=5",), sizes=(2,) * 30)
    ways, ears = ("hidden+output", "output", "none"), Ears()
    played = play(ALGORITHM, federation, rounds=2, wrap=ears, frozen=ways, local_epochs=1, **SMALL)
    drawn = []
    for client in federation.participants:
        trained = {n for n, v in played.memory[client]["moves"].items() if v > 0}
        drawn.append(len(trained))
        for replies in ears.replies:
            moved = [bool(part.any()) for part in replies[client]["delta"].split([180, 5, 15, 3])]
            names = ["hidden.0.weight", "hidden.0.bias", "output.weight", "output.bias"]
            assert {n for n, m in zip(names, moved) if m} <= trained
    assert set(drawn) == {0, 2, 4} and all(drawn.count(n) >= 4 for n in (0, 2, 4))


def test_a_frozen_layer_has_no_part_in_the_clipped_norm() -> None:
    federation, ears = small_federation(("mlp:hidden=5",), sizes=(9,)), Ears()
    played = play(ALGORITHM, federation, rounds=1, wrap=ears, frozen=("hidden",), clip=0.01, **SMALL)
    model = federation.roster["0"].model
    start = ALGORITHM.send(played.setup, ALGORITHM.init(played.setup), ("0",)).mine["0"]["vector"]
    sizes = [180, 5, 15, 3]
    params = {n: v.reshape(model.shapes[n]) for n, v in zip(model.shapes, start.split(sizes))}
    module = model.module(params, {}).train()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith("output"))
    trained = [p for p in module.parameters() if p.requires_grad]
    inner = torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=1e-4)
    torch_steps(module, [inner], federation, ears.plans[0]["0"], clip=0.01)
    change = torch.cat([p.detach().flatten() for p in module.parameters()]) - start
    torch.testing.assert_close(ears.replies[0]["0"]["delta"], change, rtol=0, atol=1e-13)


EVERYTHING = {
    "top_share": 0.4,
    "laplace_noise": 0.01,
    "extra_vectors": 1,
    "keep_local": ("head", "*bias", "none"),
    "frozen": ("conv2", "hidden", "none"),
    "heads": "by_model",
    "keep_optimiser": True,
}


@pytest.mark.parametrize("step", ["per_client", "in_turn", "cohort_mean"])
def test_all_options_together_give_the_same_on_every_engine(step: str) -> None:
    federation = small_federation(TWO, unseen=1)
    ends = []
    for engine in ("sequential", "vectorised", "loopback"):
        config = {**SMALL, **EVERYTHING, "server_step": step, "admit_rounds": 2}
        played = play(ALGORITHM, federation, engine, rounds=2, **config)
        sent = admitted(played, federation.unseen)
        ends.append(flatten({"s": played.state._asdict(), "m": played.memory, "sent": dict(sent)}))
    for other in ends[1:]:
        assert other.keys() == ends[0].keys()
        for path, value in ends[0].items():
            torch.testing.assert_close(other[path], value, rtol=0, atol=1e-9)


def test_ways_can_be_for_some_networks_only() -> None:
    """App. D.12 with several architectures: each has ways of its own."""
    ways = ("lenet/fc3", "lenet/conv1", "l*/none", "testnets:*/norm+head", "testnets:Normed/none")
    frozen = ("mlp/output", "*Normed/conv")
    federation = small_federation(("lenet:kernels=2", "mlp:hidden=5", "testnets:Normed"), sizes=(4,) * 9)
    played = play(ALGORITHM, federation, rounds=2, keep_local=ways, frozen=frozen, local_epochs=1, **SMALL)
    setup = played.setup
    told = {client: place.size for client, place in places_of(setup, setup.clients).items()}
    for members in setup.by_model(setup.clients).values():
        model, memory = setup.models[members[0]], played.memory[members[0]]
        kept, moved = memory["own"].keys(), memory["moves"].keys()
        left = [model.size - told[client] for client in members]
        if str(model.spec).startswith("lenet"):
            assert left == [255, 52, 0] and {n.partition(".")[0] for n in kept} == {"conv1", "fc3"} and not moved
        elif str(model.spec).startswith("mlp"):
            assert left == [0, 0, 0] and not kept and moved == {"output.weight", "output.bias"}
        else:
            own = {name for name in model.shapes if not name.startswith("conv")}
            assert kept == own and left == [sum(math.prod(model.shapes[n]) for n in own), 0, left[0]]
            assert moved == {"conv.weight", "conv.bias"}


def test_layers_that_are_not_there_are_refused_before_round_one() -> None:
    with pytest.raises(ConfigError, match="--frozen names the network 'vgg'; the clients have lenet"):
        play(ALGORITHM, small_federation(TWO), rounds=0, frozen=("vgg/fc1",), **SMALL)
    with pytest.raises(ConfigError, match=r"--keep-local names 'fc1', which no model has. Choose from .* hidden"):
        play(ALGORITHM, small_federation(TWO), rounds=0, keep_local=("mlp/fc1",), **SMALL)
    with pytest.raises(ConfigError, match="--keep-local names 'fc7', which no model has"):
        play(ALGORITHM, small_federation(TWO), rounds=0, keep_local=("fc7",), **SMALL)
    with pytest.raises(ConfigError, match="--frozen names 'bn', which no model has"):
        play(ALGORITHM, small_federation(TWO), rounds=0, frozen=("none", "bn"), **SMALL)
    with pytest.raises(ConfigError, match="--keep-local leaves nothing of mlp:hidden=5"):
        play(ALGORITHM, small_federation(TWO), rounds=0, keep_local=("hidden+output",), **SMALL)


def test_the_papers_networks_in_one_federation() -> None:
    """LeNet, VGG8, a ResNet, MLP, SqueezeNet and ViT out of one loom, the server told six numbers."""
    names = ("mh_lenet", "vgg8", "resnet10", "mlp", "squeezenet1_1", "vit:width=24:depth=1")
    built = [Model(parse(name, (1, 20, 20), 4)) for name in names]
    rows = [{"train": np.arange(2 * i, 2 * i + 2), "val": np.arange(0), "test": np.arange(0)} for i in range(6)]
    roster = {str(i): Client(str(i), built[i], rows[i]) for i in range(6)}
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 1, 20, 20, generator=rng), torch.randint(4, (12,), generator=rng)
    federation = Federation(x, y, CLASSIFICATION, roster)
    played = play(ALGORITHM, federation, rounds=1, local_epochs=1, hidden=2, local_lr=1e-3)
    assert len([piece for piece in played.state.pieces if piece.startswith("head")]) == 6
    start = ALGORITHM.init(played.setup)
    assert all(not torch.equal(start.pieces[f"head.{-(-m.size // 3072)}"]["bias"],
                               played.state.pieces[f"head.{-(-m.size // 3072)}"]["bias"]) for m in built)  # fmt: skip


def admitted(played: Any, newcomers: tuple[str, ...], ears: Ears | None = None) -> PerClient:
    """What newcomers are sent; ``played`` has their memory afterwards."""
    session = played.session("admission")
    ask = ears(session.ask) if ears else session.ask
    sent = ALGORITHM.admit(played.setup, played.state, Cohort(1, newcomers), ask)
    played.memory = session.memory
    return sent.mine


def replay_admission(played: Any, newcomers: tuple[str, ...], ears: Ears, moving: tuple[str, ...]) -> Hyper:
    """Adam on the pieces whose names begin with ``moving``, one step per round on the mean of the replies."""
    places = places_of(played.setup, newcomers)
    loom = played.setup.config.loom()
    pieces = loom.grow(played.state.pieces, places.values(), 0, torch.device("cpu"), torch.float64)
    hyper = Hyper(State(pieces, {}), places)
    trained = [p for (piece, _), p in zip(hyper.names, hyper.values) if piece.startswith(moving)]
    outer = torch.optim.Adam(trained, lr=played.setup.config.admit_lr)
    for replies in ears.replies:
        grads = [-replies[c]["delta"] / len(newcomers) for c in newcomers]
        hyper.learn(outer, 50.0, [hyper(c) for c in newcomers], grads)
    return hyper


def test_a_newcomer_of_a_known_size_gets_vectors_of_its_own_and_the_loom_rests() -> None:
    federation, ears = small_federation(TWO, unseen=2), Ears()
    played = play(ALGORITHM, federation, rounds=2, admit_rounds=3, admit_lr=0.05, **SMALL)
    sent = admitted(played, ("4",), ears)
    hyper = replay_admission(played, ("4",), ears, ("newcomer",))
    torch.testing.assert_close(sent["4"]["vector"], hyper("4").detach(), rtol=0, atol=1e-10)
    assert len(ears.replies) == 3


def test_newcomers_of_a_known_size_do_not_depend_on_who_else_comes() -> None:
    federation = small_federation(unseen=2)
    played = play(ALGORITHM, federation, rounds=2, admit_rounds=3, admit_lr=0.05, **SMALL)
    alone, together = admitted(played, ("4",)), admitted(played, ("3", "4"))
    torch.testing.assert_close(together["4"]["vector"], alone["4"]["vector"], rtol=0, atol=1e-12)
    assert not torch.allclose(together["3"]["vector"], together["4"]["vector"])


def test_newcomers_of_a_new_architecture_get_a_head_that_they_share_and_the_trunk_rests() -> None:
    federation = small_federation()
    other = Model(parse("mlp:hidden=30", (1, 6, 6), 3), dtype=torch.float64)
    for name, rows in (("x", slice(0, 6)), ("y", slice(20, 25))):
        federation = federation.joined_by(name, other, federation.x[rows], federation.y[rows])
    ears = Ears()
    played = play(ALGORITHM, federation, rounds=2, admit_rounds=3, admit_lr=0.01, **SMALL)
    sent = admitted(played, ("x", "y"), ears)
    hyper = replay_admission(played, ("x", "y"), ears, ("newcomer", "head.13"))
    assert other.size == 1203 and ("head.13", "weight") in hyper.names
    for client in ("x", "y"):
        torch.testing.assert_close(sent[client]["vector"], hyper(client).detach(), rtol=0, atol=1e-10)
    assert "head.13" not in played.state.pieces


@pytest.mark.parametrize("model", ["mlp:hidden=5", "mlp:hidden=30"], ids=["known", "new"])
def test_admission_lowers_a_newcomers_loss(model: str) -> None:
    federation = small_federation(sizes=(20,) * 4)
    other = Model(parse(model, (1, 6, 6), 3), dtype=torch.float64)
    federation = federation.joined_by("new", other, federation.x[:12], federation.y[:12])
    ears = Ears()
    config = {**SMALL, "hidden": 20, "admit_lr": 0.02, "admit_rounds": 25, "local_lr": 0.01}
    played = play(ALGORITHM, federation, rounds=5, **config)
    admitted(played, ("new",), ears)
    losses = [float(replies["new"]["loss"]) for replies in ears.replies]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_a_newcomer_trains_its_own_layers_while_it_is_admitted() -> None:
    played = play(ALGORITHM, small_federation(unseen=1), keep_local=("head",), admit_rounds=2, **SMALL)
    before = {n: v.clone() for n, v in played.recall("4")["own"].items()}
    admitted(played, ("4",))
    assert not torch.equal(before["output.bias"], played.memory["4"]["own"]["output.bias"])


def test_a_carry_is_a_tree_of_tensors() -> None:
    """What a graph records: nothing but tensors."""
    model = Model(parse("mlp:hidden=5", (1, 6, 6), 3))
    home = home_of(model, frozen=("hidden",))
    memory = {"buffers": {}, **ALGORITHM.first_memory(model, home.config, Seeds(0, 0))}
    carry = mh_pfedhn.client_init(home, {}, {"vector": torch.zeros(model.size)}, memory)
    assert isinstance(carry, Carry) and carry.moves.keys() == {"hidden.0.weight", "hidden.0.bias"}
    assert all(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves(carry))


def test_two_ways_that_a_client_cannot_tell_apart_are_refused() -> None:
    """36 inputs and 36 hidden units: both layers have 36 * 36 + 36 parameters."""
    federation = small_federation(("mlp:hidden=36x36",))
    with pytest.raises(ConfigError, match=r"--keep-local hidden.0 and hidden.1 leave as many parameters of mlp:hidden"):
        play(ALGORITHM, federation, rounds=0, keep_local=("hidden.0", "hidden.1"), **SMALL)
    play(ALGORITHM, federation, rounds=0, keep_local=("hidden.0", "hidden.0", "none"), **SMALL)


def test_ways_that_a_newcomers_network_cannot_have_are_refused_before_anybody_trains() -> None:
    """Of the newcomer's hidden.0 and output nothing would be left; participants keep their hidden.1."""
    ways, small = ("hidden.0+output",), Model(parse("mlp:hidden=5", (1, 6, 6), 3), dtype=torch.float64)
    federation = small_federation(("mlp:hidden=5x4",))
    played = play(ALGORITHM, federation, rounds=1, admit_rounds=1, keep_local=ways, **SMALL)
    joined = federation.joined_by("new", small, federation.x[:5], federation.y[:5])
    refusal = r"--keep-local leaves nothing of mlp:hidden=5\. Name fewer layers, or another network\."
    with pytest.raises(ConfigError, match=refusal):  # a run with such an unseen client
        play(ALGORITHM, joined, rounds=0, keep_local=ways, **SMALL)
    setup, ears = dataclasses.replace(played.setup, models=joined.models), Ears()
    with pytest.raises(ConfigError, match=refusal):  # one that comes after training
        ALGORITHM.admit(setup, played.state, Cohort(1, ("new",)), ears(played.session("admission").ask))
    assert not ears.asked


def test_layers_that_only_a_newcomer_has_can_be_named() -> None:
    federation = small_federation()
    deep = Model(parse("mlp:hidden=5x4", (1, 6, 6), 3), dtype=torch.float64)
    federation = federation.joined_by("new", deep, federation.x[:5], federation.y[:5])
    played = play(ALGORITHM, federation, rounds=1, admit_rounds=1, keep_local=("hidden.1",), **SMALL)
    assert len(admitted(played, ("new",))["new"]["vector"]) == deep.size - (5 * 4 + 4)
