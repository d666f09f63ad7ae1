# SPDX-License-Identifier: Apache-2.0
"""Traced steps of random networks give the bits of the steps they were traced from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core.optim import Optimiser
from fedloom.engines import traced
from fedloom.engines.traced import Traces

SIDE = 3

ONE: list[Callable[[Tensor], Tensor]] = [
    torch.relu,
    torch.sin,
    lambda x: x * 1,
    lambda x: x.t(),
    lambda x: x.t().t(),
    lambda x: x.flip(0),
    lambda x: x.view(SIDE * SIDE).view(SIDE, SIDE) if x.is_contiguous() else x.clone(),
    lambda x: x[:1].expand(SIDE, SIDE),
    lambda x: x[[2, 0, 1]],
    lambda x: x.clone().relu_(),
    lambda x: (x * 2).add_(1),
    lambda x: torch.ones_like(x) * 3,
    lambda x: torch.cat(torch.unsafe_chunk(x, 2, 0)[::-1]),
    lambda x: x.split([1, 2])[1].sum(0).expand(SIDE, SIDE),
    lambda x: torch.softmax(x, -1),
    lambda x: x.detach(),
    lambda x: torch.zeros_like(x).copy_(x),
]
TWO: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.add,
    torch.sub,
    torch.mul,
    torch.matmul,
    lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: torch.stack([x, y]).sum(0),
    lambda x, y: torch.maximum(x, y),
    lambda x, y: (-x.pow(2) / (y * y + 1).sqrt()).clamp(-1, 1).sum(1, keepdim=True) + y.transpose(0, 1),
]

place = st.sampled_from([-1, -2, -3, 0, 1, 2, 3, 4, 5])  # the last values, or the first
operation = st.one_of(st.integers(0, len(ONE) - 1), st.integers(len(ONE), len(ONE) + len(TWO) - 1))
nodes = st.lists(st.tuples(operation, place, place), min_size=1, max_size=8)
ends = st.lists(place, min_size=3, max_size=3)


def run(plan: list[tuple[int, int, int]], values: list[Tensor]) -> list[Tensor]:
    """Each node takes one or two of the values so far."""
    values = list(values)
    for which, first, second in plan:
        x, y = values[first % len(values)], values[second % len(values)]
        values.append(ONE[which](x) if which < len(ONE) else TWO[which - len(ONE)](x, y))
    return values


def both_ways(step: Callable[..., Any], fixed: Any, carry: Any, batches: list[tuple[Tensor, ...]]) -> list[Any]:
    """The carry after all steps, untraced and traced, and that arguments stayed as they were."""
    found = []
    for after in (10**9, 0):
        before = [leaf.clone() for leaf in torch.utils._pytree.tree_leaves((fixed, carry, batches))]
        with patch.object(traced, "TRACE_AFTER", after):
            traces = Traces([])
            found.append(torch.utils._pytree.tree_leaves(traces.steps("kind", "kind", step, fixed, carry, batches)))
        assert after or None not in traces._forms.kept.values()
        leaves = torch.utils._pytree.tree_leaves((fixed, carry, batches))
        assert all(torch.equal(one, other) for one, other in zip(before, leaves))
    return found


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other))


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=nodes, results=ends, sums=st.integers(0, 7))
@example(plan=[(3, 1, 0)], results=[-1, 2, 3], sums=1)  # a sum with its own transpose
@example(plan=[(6, 1, 0), (0, -1, 0)], results=[-2, -1, 3], sums=3)  # a view, and what is computed of it
def test_any_mixture_of_views_copies_and_sums(plan: list[tuple[int, int, int]], results: list[int], sums: int) -> None:
    """Whatever is returned, in which place, shown twice or added to the carry."""
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(SIDE, SIDE, generator=draw) for _ in range(7)]

    def step(fixed: Tensor, carry: tuple[Tensor, ...], batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        values = run(plan, [fixed, *carry, *batch])
        chosen = [values[end % len(values)] for end in results]
        return tuple(old + new if sums >> number & 1 else new for number, (old, new) in enumerate(zip(carry, chosen)))

    assert same_bits(*both_ways(step, tensors[0], tuple(tensors[1:4]), [(t,) for t in tensors[4:]]))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=nodes, momentum=st.sampled_from([0.0, 0.9]), decay=st.sampled_from([0.0, 0.1]), adam=st.booleans())
def test_training_a_random_network(plan: list[tuple[int, int, int]], momentum: float, decay: float, adam: bool) -> None:
    """Gradients and optimiser steps of several clients at once, as engines run them."""
    optimiser = Optimiser("adam" if adam else "sgd", 0.05, 0.0 if adam else momentum, decay, 1.0)
    draw = torch.Generator().manual_seed(0)
    clients = 2
    params = {name: torch.randn(clients, SIDE, SIDE, generator=draw) for name in "ab"}
    batches = [(torch.randn(clients, SIDE, SIDE, generator=draw),) for _ in range(3)]

    def one(params: dict[str, Tensor], state: Any, x: Tensor) -> Any:
        def loss(params: dict[str, Tensor]) -> Tensor:
            return torch.tanh(run(plan, [params["a"] @ x, params["b"], x])[-1]).sum()

        return optimiser.update(params, torch.func.grad(loss)(params), state)

    def step(fixed: Any, carry: Any, batch: tuple[Tensor, ...]) -> Any:
        return torch.vmap(one)(*carry, *batch)

    state = torch.vmap(optimiser.init)(params)
    assert same_bits(*both_ways(step, (), (params, state), batches))
