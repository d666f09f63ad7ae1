# SPDX-License-Identifier: Apache-2.0
"""pFedHN's loom: shapes, initial values and spectral normalisation."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.looms.per_tensor import PerTensorLoom

TARGETS = {"s": {"w": (3, 2), "b": (3,), "t": ()}, "m": {"w": (4, 1, 2, 2), "b": (4,)}}
LOOM = PerTensorLoom(5, TARGETS, hidden=6, layers=2)
DOUBLE = (torch.device("cpu"), torch.float64)


def test_the_parameters_of_a_loom() -> None:
    """layers + 1 linear layers in the trunk, then a head of 10 and of 20 outputs."""
    shapes = {name: tuple(value.shape) for name, value in LOOM.init(0, *DOUBLE).items()}
    assert shapes == {
        "trunk.0.weight": (6, 5), "trunk.0.bias": (6,),
        "trunk.1.weight": (6, 6), "trunk.1.bias": (6,),
        "trunk.2.weight": (6, 6), "trunk.2.bias": (6,),
        "head.s.weight": (10, 6), "head.s.bias": (10,),
        "head.m.weight": (20, 6), "head.m.bias": (20,),
    }  # fmt: skip


def test_a_loom_equals_the_layers_it_stands_for() -> None:
    params, v = LOOM.init(0, *DOUBLE), torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).double()
    x = F.linear(v, params["trunk.0.weight"], params["trunk.0.bias"])
    for i in (1, 2):
        x = F.linear(x.relu(), params[f"trunk.{i}.weight"], params[f"trunk.{i}.bias"])
    for target, size in (("s", 10), ("m", 20)):
        wanted = F.linear(x, params[f"head.{target}.weight"], params[f"head.{target}.bias"])
        assert wanted.shape == (3, size)
        torch.testing.assert_close(LOOM(params, v, target), wanted)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5), st.integers(1, 4))
def test_flatten_is_the_inverse_of_unflatten(shapes: list[tuple[int, ...]], clients: int) -> None:
    loom = PerTensorLoom(1, {"a": {str(i): shape for i, shape in enumerate(shapes)}})
    total = sum(math.prod(shape) for shape in shapes)
    vectors = torch.arange(float(clients * total)).reshape(clients, total)
    trees = loom.unflatten(vectors, "a")
    assert [tuple(value.shape) for value in trees.values()] == [(clients, *shape) for shape in shapes]
    assert torch.equal(loom.flatten(trees, "a"), vectors)
    assert torch.equal(loom.flatten(dict(reversed(trees.items())), "a"), vectors)


def test_initial_values_are_those_of_a_linear_layer() -> None:
    """Uniform within 1 / sqrt(inputs): standard deviation that over sqrt 3."""
    loom = PerTensorLoom(16, {"a": {"w": (2000,)}}, hidden=100, layers=1)
    params = loom.init(0, torch.device("cpu"), torch.float32)
    for name, inputs in (("trunk.0", 16), ("trunk.1", 100), ("head.a", 100)):
        bound = inputs**-0.5
        values = torch.cat([params[f"{name}.weight"].flatten(), params[f"{name}.bias"]])
        assert values.abs().max() <= bound
        assert float(values.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
        assert float(values.mean()) == pytest.approx(0, abs=0.05 * bound)


def test_a_seed_fixes_a_loom_and_moves_no_global_generator() -> None:
    before = torch.get_rng_state()
    one, same, other = (LOOM.init(seed, *DOUBLE) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name]) for name in one)


def effective(loom: PerTensorLoom, params: dict[str, Tensor], target: str) -> Tensor:
    """The head's weight as the loom applies it: differences of outputs, with a trunk that gives its bias only."""
    still = {name: torch.zeros_like(value) if name.startswith("trunk") else value for name, value in params.items()}
    last = f"trunk.{loom.layers}"
    for i in range(loom.layers + 1):
        still[f"trunk.{i}.weight"] = params[f"trunk.{i}.weight"]
    zero = torch.zeros(1, loom.embed_dim, dtype=torch.float64)
    base = loom(still, zero, target)[0]
    columns = []
    for unit in range(loom.hidden):
        bias = torch.zeros(loom.hidden, dtype=torch.float64)
        bias[unit] = 1
        columns.append(loom({**still, f"{last}.bias": bias}, zero, target)[0] - base)
    return torch.stack(columns, 1)


def test_spectral_norm_makes_every_block_of_a_head_of_norm_one() -> None:
    loom = PerTensorLoom(5, TARGETS, hidden=6, layers=2, spectral_norm=True)
    params = loom.init(0, *DOUBLE)
    for target, sizes in (("s", [6, 3, 1]), ("m", [16, 4])):
        blocks = torch.split(effective(loom, params, target), sizes)
        raw = torch.split(params[f"head.{target}.weight"], sizes)
        for block, before in zip(blocks, raw):
            assert float(torch.linalg.matrix_norm(block, 2)) == pytest.approx(1, abs=1e-9)
            torch.testing.assert_close(block, before / torch.linalg.matrix_norm(before, 2))
    torch.testing.assert_close(effective(LOOM, params, "s"), params["head.s.weight"])


def test_spectral_norm_normalises_the_trunk() -> None:
    """Scaling a weight changes nothing; without biases a trunk never lengthens what it is given."""
    loom = PerTensorLoom(5, TARGETS, hidden=6, layers=2, spectral_norm=True)
    params, v = loom.init(0, *DOUBLE), torch.ones(2, 5, dtype=torch.float64)
    scaled = {name: 7 * value if name.endswith("weight") else value for name, value in params.items()}
    torch.testing.assert_close(loom(params, v, "s"), loom(scaled, v, "s"))
    assert not torch.allclose(LOOM(params, v, "s"), LOOM(scaled, v, "s"))


def test_spectral_norm_has_the_right_gradient_also_for_a_weight_of_zero() -> None:
    loom = PerTensorLoom(2, {"a": {"w": (3,), "b": ()}}, hidden=3, layers=1, spectral_norm=True)
    params, v = loom.init(0, *DOUBLE), torch.ones(2, 2, dtype=torch.float64)
    names = list(params)
    inputs = [params[name].clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(lambda *p: loom(dict(zip(names, p)), v, "a"), inputs)
    zero = {name: torch.zeros_like(value).requires_grad_() for name, value in params.items()}
    grads = torch.autograd.grad(loom(zero, v, "a").sum(), list(zero.values()))
    assert all(torch.isfinite(value).all() for value in grads)
