# SPDX-License-Identifier: Apache-2.0
"""The chunked loom against the modules that it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedloom.core.errors import NeedsError
from fedloom.looms.chunked import ChunkedLoom, dense, dense_init, dense_size, matched

DOUBLE = (torch.device("cpu"), torch.float64)
LOOM = ChunkedLoom(condition_dim=3, size=23, hidden=(6, 5), chunk_size=4, chunk_dim=2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sequential(params: dict[str, Tensor]) -> nn.Sequential:
    """The layers ``0.weight``, ``0.bias``, ``1.weight`` ... with ReLU between them."""
    layers: list[nn.Module] = []
    for i in range(sum(name.endswith("weight") for name in params)):
        outputs, inputs = params[f"{i}.weight"].shape
        layer = nn.Linear(inputs, outputs).double()
        layer.load_state_dict({part: params[f"{i}.{part}"] for part in ("weight", "bias")})
        layers += [nn.ReLU(), layer] if i else [layer]
    return nn.Sequential(*layers)


def test_the_parameters_of_a_loom() -> None:
    """23 parameters in chunks of 4 are 6 chunks; the network goes from 3 + 2 to 4."""
    params = LOOM.init(0, *DOUBLE)
    assert {name: tuple(value.shape) for name, value in params.items()} == {
        "chunks": (6, 2),
        "0.weight": (6, 5), "0.bias": (6,),
        "1.weight": (5, 6), "1.bias": (5,),
        "2.weight": (4, 5), "2.bias": (4,),
    }  # fmt: skip
    assert LOOM.num_params == sum(value.numel() for value in params.values()) == 12 + 36 + 35 + 24


def test_a_loom_equals_the_layers_it_stands_for() -> None:
    """Chunk k of a sample is the network's output for its condition beside the chunk's embedding."""
    params, conditions = LOOM.init(0, *DOUBLE), random(2, 3)
    network = sequential({name: value for name, value in params.items() if name != "chunks"})
    for condition, vector in zip(conditions, LOOM(params, conditions)):
        chunks = [network(torch.cat([condition, chunk])) for chunk in params["chunks"]]
        # 24 are made; the last one is one too many
        torch.testing.assert_close(vector, torch.cat(chunks)[:23], rtol=0, atol=1e-12)


def test_a_loom_without_hidden_layers_is_linear() -> None:
    loom = ChunkedLoom(condition_dim=3, size=8, hidden=(), chunk_size=4, chunk_dim=2)
    params, (a, b) = loom.init(0, *DOUBLE), random(2, 3)
    ends = loom(params, torch.stack([a, b, (a + b) / 2]))
    torch.testing.assert_close(ends[2], (ends[0] + ends[1]) / 2)


def test_a_seed_fixes_a_loom_and_moves_no_global_generator() -> None:
    before = torch.get_rng_state()
    one, same, other = (LOOM.init(seed, *DOUBLE) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name]) for name in one)


def test_initial_values_are_those_of_a_linear_layer_and_standard_normal_chunks() -> None:
    params = ChunkedLoom(16, 200 * 576).init(0, torch.device("cpu"), torch.float32)
    assert float(params["chunks"].std()) == pytest.approx(1, abs=0.03)
    for name, inputs in (("0.weight", 48), ("1.weight", 300), ("2.weight", 300)):
        assert params[name].abs().max() <= inputs**-0.5
        assert float(params[name].std()) == pytest.approx((3 * inputs) ** -0.5, rel=0.05)


def test_dense_layers() -> None:
    params, x = dense_init((4, 3, 2), 0, *DOUBLE), random(5, 4)
    torch.testing.assert_close(dense(params, x), sequential(params)(x).detach())
    assert dense_size((4, 3, 2)) == sum(value.numel() for value in params.values()) == 5 * 3 + 4 * 2


@pytest.mark.parametrize(
    ("size", "others"),
    [(159_010, 25_120), (21_840, 6_440), (431_080, 25_120), (1_250_858, 98_336), (21_840, 0), (4_810, 1_000)],
)
def test_a_matched_loom_is_within_five_per_cent(size: int, others: int) -> None:
    """HyperFedZero's MLP, LeNet-S, LeNet and ZenkeNet beside their extractors, and two small cases."""
    loom = matched(ChunkedLoom(16, size), others)
    made = sum(value.numel() for value in loom.init(0, torch.device("cpu"), torch.float32).values())
    assert abs(made + others - size) <= 0.05 * size
    assert len(loom.hidden) == 2 and loom.hidden[0] == loom.hidden[1]


def test_chunks_are_halved_where_a_unit_is_too_coarse_a_step() -> None:
    """For 4,810 - 500 parameters a width of 5 gives 4,019 and one of 6 gives 4,656: both are off by more than 240."""
    wide = [ChunkedLoom(16, 4_810, (width, width)).num_params for width in (5, 6)]
    assert wide == [4_019, 4_656]
    assert matched(ChunkedLoom(16, 4_810), 500).chunk_size == 288
    assert matched(ChunkedLoom(16, 4_810), 1_000).chunk_size == 576


def test_what_cannot_be_matched_is_refused() -> None:
    with pytest.raises(NeedsError) as caught:
        matched(ChunkedLoom(16, 21_840), 25_120)
    assert str(caught.value) == (
        "No loom has, with the 25,120 parameters of the extractor, as many as the 21,840 that it weaves; "
        "give another --extractor-hidden, a larger --model, or leave --size-match out."
    )
