# SPDX-License-Identifier: Apache-2.0
"""HyperGenFL's loom: weights on paper, then against torch's own attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedloom.looms.attention import AttentionLoom, layers_of

DOUBLE = (torch.device("cpu"), torch.float64)
THREE = {"a": ("a.weight",), "b": ("b.weight",), "c": ("c.weight",)}


def drawn(clients: int, dim: int) -> Tensor:
    return torch.randn(clients, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_a_layer_is_a_name_without_its_last_part() -> None:
    names = [
        "conv1.weight",
        "conv1.bias",
        "blocks.0.conv.weight",
        "blocks.1.conv.weight",
        "scale",
        "blocks.0.conv.bias",
    ]
    assert layers_of(names) == {
        "conv1": ("conv1.weight", "conv1.bias"),
        "blocks.0.conv": ("blocks.0.conv.weight", "blocks.0.conv.bias"),
        "blocks.1.conv": ("blocks.1.conv.weight",),
        "scale": ("scale",),
    }


def on_paper(head: dict[str, Tensor]) -> dict[str, Tensor]:
    """Attention of one head and two features that looks at everybody alike and gives the mean embedding."""
    weight = torch.zeros(6, 2, dtype=torch.float64)
    weight[4:] = torch.eye(2)  # queries and keys are 0, values are the embeddings
    nothing = {"attention.0.in.bias": torch.zeros(6).double(), "attention.0.out.bias": torch.zeros(2).double()}
    return {"attention.0.in.weight": weight, "attention.0.out.weight": torch.eye(2).double(), **nothing, **head}


def test_weights_on_paper() -> None:
    """Embeddings (0, ln 3) and (0, -ln 3), mean 0: features softmax(0 + embedding), (1/4, 3/4) and (3/4, 1/4).

    Head a, 4 times the first feature: 1 and 3, with the floor of 1/2 3/2 and 7/2, shares 0.3 and 0.7. Head b, 4 times
    the second less 2: 1 and -1, on and off, 3/2 and 1/2, shares 0.75 and 0.25. Head c is -1 for both: dead, one half
    each.
    """
    head = {
        "head.weight": torch.tensor([[4.0, 0.0], [0.0, 4.0], [0.0, 0.0]]).double(),
        "head.bias": torch.tensor([0.0, -2.0, -1.0]).double(),
    }
    loom = AttentionLoom(2, THREE, width=2, attention_heads=1, floor=0.5)
    sigma = torch.tensor([[0.0, math.log(3)], [0.0, -math.log(3)]], dtype=torch.float64)
    activations = loom.activations(on_paper(head), sigma)
    assert activations.flatten().tolist() == pytest.approx([1.0, 1.0, -1.0, 3.0, -1.0, -1.0], abs=1e-12)
    weights = loom.weights(activations)
    assert weights.T.flatten().tolist() == pytest.approx([0.3, 0.7, 0.75, 0.25, 0.5, 0.5], abs=1e-12)


def test_attention_adds_what_the_others_have() -> None:
    """Embeddings (0, ln 3) and (0, ln 27), mean (0, ln 9): (0, ln 27) and (0, ln 243), features 27/28 and 243/244."""
    head = {"head.weight": torch.tensor([[0.0, 1.0]]).double(), "head.bias": torch.zeros(1).double()}
    loom = AttentionLoom(2, {"a": ("a.weight",)}, width=2, attention_heads=1)
    sigma = torch.tensor([[0.0, math.log(3)], [0.0, math.log(27)]], dtype=torch.float64)
    found = loom.activations(on_paper(head), sigma).flatten().tolist()
    assert found == pytest.approx([27 / 28, 243 / 244], abs=1e-12)


def modules(loom: AttentionLoom, params: dict[str, Tensor]) -> list[nn.MultiheadAttention]:
    """torch's attention layers with the loom's parameters."""
    made = []
    for i in range(loom.attention_layers):
        layer = nn.MultiheadAttention(loom.embed_dim, loom.attention_heads, dtype=torch.float64)
        own = {"in_proj_weight": "in.weight", "in_proj_bias": "in.bias"}
        own |= {f"out_proj.{part}": f"out.{part}" for part in ("weight", "bias")}
        layer.load_state_dict({theirs: params[f"attention.{i}.{ours}"] for theirs, ours in own.items()})
        made.append(layer)
    return made


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_is_torchs(depth: int, heads: int) -> None:
    loom = AttentionLoom(8, THREE, width=8, attention_heads=heads, attention_layers=depth)
    params = {name: value + 0.1 for name, value in loom.init(0, *DOUBLE).items()}  # biases are not 0
    x = sigma = drawn(5, 8)
    for layer in modules(loom, params):
        x = x + layer(x, x, x, need_weights=False)[0]
    wanted = nn.functional.linear(torch.softmax(x, dim=1), params["head.weight"], params["head.bias"])
    torch.testing.assert_close(loom.activations(params, sigma), wanted, rtol=0, atol=1e-12)


def test_initial_values_are_torchs() -> None:
    """Attention as nn.MultiheadAttention (Xavier inputs, biases 0), heads as nn.Linear (within 1 / sqrt 128)."""
    params = AttentionLoom(128, THREE).init(0, torch.device("cpu"), torch.float32)
    assert {name: tuple(value.shape) for name, value in params.items()} == {
        "attention.0.in.weight": (384, 128), "attention.0.in.bias": (384,),
        "attention.0.out.weight": (128, 128), "attention.0.out.bias": (128,),
        "head.weight": (3, 128), "head.bias": (3,),
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = nn.MultiheadAttention(128, 4).requires_grad_(False)
    for ours, other in (("in.weight", theirs.in_proj_weight), ("out.weight", theirs.out_proj.weight)):
        assert float(params[f"attention.0.{ours}"].std()) == pytest.approx(float(other.std()), rel=0.03)
        assert float(params[f"attention.0.{ours}"].abs().max()) == pytest.approx(float(other.abs().max()), rel=0.01)
    assert not params["attention.0.in.bias"].any() and not params["attention.0.out.bias"].any()
    assert 0 < float(params["head.bias"].abs().max()) <= 128**-0.5


def test_weights_sum_to_one_and_follow_their_clients() -> None:
    loom = AttentionLoom(6, THREE, width=8, attention_layers=2)  # embeddings need not be as wide as the attention
    params, sigma = loom.init(0, *DOUBLE), drawn(7, 6)
    weights = loom.weights(loom.activations(params, sigma))
    assert weights.shape == (7, 3) and (weights > 0).all()
    torch.testing.assert_close(weights.sum(0), torch.ones(3).double())
    order = [3, 0, 6, 1, 5, 2, 4]
    torch.testing.assert_close(loom.weights(loom.activations(params, sigma[order])), weights[order])
    alone = loom.weights(loom.activations(params, sigma[:1]))
    assert alone.tolist() == [[1.0, 1.0, 1.0]]


def test_clients_that_look_alike_weigh_the_same() -> None:
    loom = AttentionLoom(128, THREE)
    weights = loom.weights(loom.activations(loom.init(0, *DOUBLE), torch.ones(4, 128).double()))
    torch.testing.assert_close(weights, torch.full((4, 3), 0.25).double())


def test_the_living_start_is_on_for_every_embedding() -> None:
    """Features sum to 1 and head weights are at most 1 / sqrt 128 = 0.088, around a bias of 1."""
    loom = AttentionLoom(128, THREE, attention_layers=3)
    params = loom.init(0, *DOUBLE, alive=True)
    for scale in (0.0, 1.0, 100.0):
        activations = loom.activations(params, scale * drawn(9, 128))
        assert (activations - 1).abs().max() < 0.0884
    assert (loom.weights(loom.activations(params, drawn(9, 128))).std(0) > 1e-5).all()
