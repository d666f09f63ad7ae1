# SPDX-License-Identifier: Apache-2.0
"""MH-pFedHN's loom: chunks on paper, then against plain torch layers, then which pieces have gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.core.trees import PerClient, flatten
from fedloom.looms.multi_head import TRUNK, MultiHeadLoom, Place, adam_states, adam_step, alike, pull_back, weave
from fedloom.models.layers import check_named, check_told, rest, selected, size_of
from fedloom.models.model import Model
from fedloom.models.spec import parse

CPU = torch.device("cpu")
LOOM = MultiHeadLoom(chunk=4, embed_dim=3, hidden=5, layers=2)
PLACES = {
    "a": Place("vectors.0", "head.2", 2, 2, 7),
    "b": Place("vectors.1", "head.3", 3, 3, 9),
    "c": Place("vectors.2", "head.2", 2, 2, 7),
    "d": Place("vectors.3", "head.2", 2, 2, 8),
}


def grown(loom: MultiHeadLoom = LOOM, places=PLACES, seed: int = 0) -> dict:
    pieces = loom.grow({}, places.values(), seed, CPU, torch.float64)
    # larger vectors than a real loom begins with, so that they matter
    return {p: {n: 300 * v if n == "v" else v for n, v in piece.items()} for p, piece in pieces.items()}


def dense(reply, size: int) -> Tensor:
    return reply["delta"]


@pytest.mark.parametrize(("size", "chunks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_the_number_of_chunks_is_rounded_up(size: int, chunks: int) -> None:
    assert LOOM.chunks(size) == chunks


def test_the_papers_lenet_has_79_vectors_and_2832_numbers_to_cut() -> None:
    """MH-pFedHN, Table 13."""
    assert MultiHeadLoom().chunks(239_856) == 79 and 79 * 3072 - 239_856 == 2832


def test_seven_parameters_in_chunks_of_three_on_paper() -> None:
    """Vectors 1, 2, -3; the trunk gives 2 v + 1 or zero: 3, 5, 0. Layer t of the head: weights 10 t + n, bias t.

    Chunk 0: 3 (0, 1, 2) + 0; chunk 1: 5 (10, 11, 12) + 1; chunk 2: 0 + 2, of which one number is left.
    """
    loom = MultiHeadLoom(chunk=3, embed_dim=1, hidden=1, layers=1)
    pieces = {
        TRUNK: {"0.weight": torch.tensor([[2.0]]), "0.bias": torch.tensor([1.0])},
        "head.3": {
            "weight": torch.tensor([[[0.0], [1], [2]], [[10], [11], [12]], [[20], [21], [22]]]),
            "bias": torch.tensor([[0.0] * 3, [1.0] * 3, [2.0] * 3]),
        },
        "vectors.0": {"v": torch.tensor([[1.0], [2.0], [-3.0]])},
    }
    woven = weave(loom, pieces, {"a": Place("vectors.0", "head.3", 3, 3, 7)})
    assert woven["a"]["vector"].tolist() == [0, 3, 6, 51, 56, 61, 2]


def by_layers(pieces, place: Place, layers: int) -> Tensor:
    """Position by position, with a linear layer of its own, as the authors write it."""
    chunks = []
    for t, v in enumerate(pieces[place.vectors]["v"]):
        for i in range(layers):
            v = F.relu(F.linear(v, pieces[TRUNK][f"{i}.weight"], pieces[TRUNK][f"{i}.bias"]))
        layer = t if place.channels > 1 else 0
        chunks.append(F.linear(v, pieces[place.head]["weight"][layer], pieces[place.head]["bias"][layer]))
    return torch.cat(chunks)[: place.size]


def test_a_loom_equals_the_layers_it_stands_for() -> None:
    pieces = grown()
    woven = weave(LOOM, pieces, PLACES)
    assert list(woven) == ["a", "c", "b", "d"]  # those alike are one stack
    for client, place in PLACES.items():
        torch.testing.assert_close(woven[client]["vector"], by_layers(pieces, place, 2), rtol=0, atol=1e-14)
    assert not torch.equal(woven["a"]["vector"], woven["c"]["vector"])


def test_one_layer_for_all_positions_is_a_plain_chunked_hypernetwork() -> None:
    places = {"a": Place("vectors.0", "head.all", 3, 1, 10), "b": Place("vectors.1", "head.all", 2, 1, 6)}
    pieces = grown(places=places)
    assert pieces["head.all"]["weight"].shape == (1, 4, 5)
    for client, place in places.items():
        vector = weave(LOOM, pieces, {client: place})[client]["vector"]
        torch.testing.assert_close(vector, by_layers(pieces, place, 2), rtol=0, atol=1e-14)
    # and many layers that are all the same are that hypernetwork too
    same = {part: value.expand(3, *value.shape[1:]) for part, value in pieces["head.all"].items()}
    many = weave(LOOM, {**pieces, "head.3": same}, {"a": Place("vectors.0", "head.3", 3, 3, 10)})
    torch.testing.assert_close(many["a"]["vector"], by_layers(pieces, places["a"], 2), rtol=0, atol=1e-14)


def test_without_heads_the_trunk_ends_in_n_numbers_of_either_sign() -> None:
    loom = MultiHeadLoom(chunk=4, embed_dim=3, hidden=5, layers=2, headless=True)
    place = Place("vectors.0", "", 2, 2, 7)
    pieces = grown(loom, {"a": place})
    assert pieces.keys() == {TRUNK, "vectors.0"} and pieces[TRUNK]["1.weight"].shape == (4, 5)
    v, trunk = pieces["vectors.0"]["v"], pieces[TRUNK]
    hidden = F.relu(F.linear(v, trunk["0.weight"], trunk["0.bias"]))
    wanted = F.linear(hidden, trunk["1.weight"], trunk["1.bias"]).flatten()[:7]
    assert (wanted < 0).any()
    torch.testing.assert_close(weave(loom, pieces, {"a": place})["a"]["vector"], wanted)


def test_initial_values() -> None:
    loom = MultiHeadLoom(chunk=50, embed_dim=16, hidden=100, layers=2)
    pieces = loom.grow({}, [Place("vectors.0", "head.40", 40, 40, 2000)], 0, CPU, torch.float64)
    assert float(pieces["vectors.0"]["v"].std()) == pytest.approx(0.002, rel=0.1)
    for values, inputs in (
        (pieces[TRUNK]["0.weight"], 16),
        (pieces[TRUNK]["1.weight"], 100),
        (pieces["head.40"]["weight"], 100),
        (pieces["head.40"]["bias"], 100),
    ):
        assert values.abs().max() <= inputs**-0.5
        assert float(values.std()) == pytest.approx((inputs * 3) ** -0.5, rel=0.1)


def test_a_piece_depends_on_its_name_and_the_seed_alone() -> None:
    before = torch.get_rng_state()
    everything, few, other = grown(), grown(places={"d": PLACES["d"]}), grown(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    for piece, params in few.items():
        for name, value in params.items():
            assert torch.equal(value, everything[piece][name]) and not torch.equal(value, other[piece][name])


def test_growing_keeps_what_is_there() -> None:
    pieces = grown()
    more = LOOM.grow(pieces, [Place("newcomer.x", "head.4", 4, 4, 15)], 0, CPU, torch.float64)
    assert more.keys() - pieces.keys() == {"newcomer.x", "head.4"}
    assert all(more[piece] is params for piece, params in pieces.items())


@pytest.mark.parametrize("members", [("a",), ("a", "b", "c", "d")])
def test_replies_are_pulled_back_as_autograd_does(members: tuple[str, ...]) -> None:
    """The mean pseudo-gradient, and gradients for nothing but the pieces that the models came from."""
    pieces, places = grown(), {client: PLACES[client] for client in members}
    rng = torch.Generator().manual_seed(0)
    changes = {c: torch.randn(p.size, generator=rng, dtype=torch.float64) for c, p in places.items()}
    replies = PerClient.of({c: {"delta": change} for c, change in changes.items()})
    grads = pull_back(LOOM, pieces, PLACES, replies, dense)
    assert grads.keys() == {TRUNK, *(p.head for p in places.values()), *(p.vectors for p in places.values())}
    leaves = {p: {n: v.clone().requires_grad_() for n, v in piece.items()} for p, piece in pieces.items()}
    total = sum(-(by_layers(leaves, places[c], 2) * change).sum() / len(members) for c, change in changes.items())
    total.backward()
    for piece, found in grads.items():
        for name, grad in found.items():
            torch.testing.assert_close(grad, leaves[piece][name].grad, rtol=0, atol=1e-13)


def test_a_change_of_nothing_is_no_step_of_adam() -> None:
    pieces = {TRUNK: {"w": torch.ones(3)}}
    states = adam_states(pieces)
    grads = {TRUNK: {"w": torch.tensor([1.0, -1.0, 2.0])}}
    moved = adam_step(pieces, states, grads, 0.01, 0)  # it has momentum now
    rested = adam_step(*moved, {TRUNK: {"w": torch.zeros(3)}}, 0.01, 0)
    for one, other in zip(moved, rested):
        assert all(torch.equal(value, flatten(other)[path]) for path, value in flatten(one).items())


def test_frozen_pieces_have_no_gradient() -> None:
    pieces = grown()
    replies = PerClient.of({"a": {"delta": torch.ones(7, dtype=torch.float64)}})
    every = pull_back(LOOM, pieces, PLACES, replies, dense)
    own = pull_back(LOOM, pieces, PLACES, replies, dense, {"vectors.0"}.__contains__)
    assert own.keys() == {"vectors.0"} and torch.equal(own["vectors.0"]["v"], every["vectors.0"]["v"])


def test_what_is_cut_off_has_no_gradient() -> None:
    """K = 7 of two chunks of 4: the last number of layer 1 is nobody's."""
    replies = PerClient.of({"a": {"delta": torch.ones(7, dtype=torch.float64)}})
    grads = pull_back(LOOM, grown(), PLACES, replies, dense)["head.2"]
    assert grads["bias"].flatten().tolist() == [-1.0] * 7 + [0.0]
    assert not grads["weight"][1, 3].any()


def test_alike_are_models_of_one_head_and_one_size() -> None:
    assert alike(PLACES) == [["a", "c"], ["b"], ["d"]]


LENET = Model(parse("lenet:kernels=2", (1, 6, 6), 3))
CONV1, HEAD = {"conv1.weight", "conv1.bias"}, {"fc3.weight", "fc3.bias"}


@pytest.mark.parametrize(
    ("ways", "names"),
    [
        (("conv1",), CONV1),
        (("head",), HEAD),
        (("body",), set(LENET.shapes) - HEAD),
        (("conv1+head",), CONV1 | HEAD),
        (("conv1", "fc3"), CONV1 | HEAD),
        (("c*1.bias",), {"conv1.bias"}),
        (("none",), set()),
        (("fc",), set()),  # a layer, not the beginning of a name
    ],
)
def test_layers_are_named(ways: tuple[str, ...], names: set[str]) -> None:
    assert selected(LENET, *ways) == names


def test_the_rest_of_a_model_keeps_its_order() -> None:
    assert rest(LENET, ()) == [LENET.shapes]
    body, whole = rest(LENET, ("conv1+head", "none"))
    assert list(body) == [name for name in LENET.shapes if name not in CONV1 | HEAD] and whole == LENET.shapes
    assert size_of(whole) == LENET.size


def test_layers_that_no_model_has_are_refused_by_name() -> None:
    check_named("keep_local", ("conv1+none",), [LENET])
    with pytest.raises(ConfigError) as caught:
        check_named("keep_local", ("conv1+fc9",), [LENET])
    assert str(caught.value) == (
        "--keep-local names 'fc9', which no model has. Choose from head, body, none, conv1, conv2, fc1, fc2, fc3."
    )
    check_named("frozen", ("*",), [LENET])
    with pytest.raises(ConfigError, match=r"--keep-local leaves nothing of lenet:kernels=2. Name fewer layers, or"):
        check_told(("*",), [LENET])
