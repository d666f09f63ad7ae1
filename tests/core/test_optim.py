# SPDX-License-Identifier: Apache-2.0
"""Optimisers equal torch's, leave their inputs alone and run under vmap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from fedloom.core.optim import Optimiser
from fedloom.core.trees import flatten, stack

STEPS = 5
OURS = [
    Optimiser("sgd", 0.1),
    Optimiser("sgd", 0.1, momentum=0.9, weight_decay=0.01, clip=0.7),
    Optimiser("adam", 0.1, weight_decay=0.01, clip=0.7),
    Optimiser("adamw", 0.1, weight_decay=0.1),
]


def params_and_grads(seed: int, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (3, 2), "bias": (3,), "scale": ()}

    def drawn() -> dict[str, torch.Tensor]:
        return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in shapes.items()}

    return drawn(), [drawn() for _ in range(STEPS)]


def ours(optimiser: Optimiser, params: Any, grads: Any) -> Any:
    state = optimiser.init(params)
    for grad in grads:
        params, state = optimiser.update(params, grad, state)
    return params


def torchs(optimiser: Optimiser, params: Any, grads: Any) -> Any:
    own = {name: value.clone().requires_grad_() for name, value in params.items()}
    more = {"lr": optimiser.lr, "weight_decay": optimiser.weight_decay}
    made: torch.optim.Optimizer
    if optimiser.name == "sgd":
        made = torch.optim.SGD(own.values(), momentum=optimiser.momentum, **more)
    else:
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimiser.name]
        made = kind(own.values(), betas=optimiser.betas, eps=optimiser.eps, **more)
    for grad in grads:
        for name, value in own.items():
            value.grad = grad[name].clone()
        if optimiser.clip:
            torch.nn.utils.clip_grad_norm_(own.values(), optimiser.clip)
        made.step()
    return {name: value.detach() for name, value in own.items()}


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        Optimiser,
        st.sampled_from(["sgd", "adam", "adamw"]),
        lr=st.floats(0, 1),
        momentum=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        weight_decay=st.sampled_from([0.0, 1e-4, 0.1, 1.0]),
        clip=st.sampled_from([0.0, 1e-3, 0.5, 2.0, 100.0]),
        betas=st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.5, 0.9)]),
    ),
    st.integers(0, 2**31),
)
def test_five_steps_equal_those_of_torch(optimiser: Optimiser, seed: int) -> None:
    params, grads = params_and_grads(seed)
    got, wanted = ours(optimiser, params, grads), torchs(optimiser, params, grads)
    for name in params:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimiser", OURS, ids=str)
def test_float32_stays_float32_and_near_torch(optimiser: Optimiser) -> None:
    params, grads = params_and_grads(0, torch.float32)
    got, wanted = ours(optimiser, params, grads), torchs(optimiser, params, grads)
    for name in params:
        torch.testing.assert_close(got[name], wanted[name], rtol=1e-5, atol=1e-6)


def test_a_step_of_sgd_by_hand() -> None:
    """Norm 5, clipped to 1: (0.6, 0.8); plus decay 0.1 * 10: (1.6, 1.8); minus half of it: (9.2, 9.1)."""
    params, grads = {"a": torch.tensor([10.0, 10.0])}, {"a": torch.tensor([3.0, 4.0])}
    after, _ = Optimiser("sgd", 0.5, weight_decay=0.1, clip=1.0).update(params, grads, {})
    torch.testing.assert_close(after["a"], torch.tensor([9.2, 9.1]))


@pytest.mark.parametrize("optimiser", OURS, ids=str)
def test_the_inputs_are_left_as_they_are(optimiser: Optimiser) -> None:
    params, grads = params_and_grads(1)
    _, state = optimiser.update(params, grads[0], optimiser.init(params))
    given = {"params": params, "grads": grads[1], "state": state}
    before = {path: leaf.clone() for path, leaf in flatten(given).items()}
    optimiser.update(params, grads[1], state)
    assert all(torch.equal(leaf, before[path]) for path, leaf in flatten(given).items())


@pytest.mark.parametrize("optimiser", OURS, ids=str)
def test_a_stack_under_vmap_equals_a_loop(optimiser: Optimiser) -> None:
    clients = [params_and_grads(seed) for seed in range(4)]
    looped = [ours(optimiser, *client) for client in clients]
    params = stack([p for p, _ in clients])
    state = vmap(optimiser.init)(params)
    for step in range(STEPS):
        params, state = vmap(optimiser.update)(params, stack([g[step] for _, g in clients]), state)
    for name, value in stack(looped).items():
        torch.testing.assert_close(params[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "rates",
    [
        {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3},  # pFedHN's
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5},  # its matrix has complex eigenvalues
        {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.1},
        {"lr": 0.5, "momentum": 0.0, "weight_decay": 2.0},  # all is lost in one step
        {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.0},
        {"lr": 0.0, "momentum": 0.5, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 1.0, "weight_decay": 0.0},  # both eigenvalues are 1
    ],
)
def test_coasting_is_as_many_steps_without_a_gradient(rates: dict[str, float]) -> None:
    optimiser, waits = Optimiser("sgd", clip=50.0, **rates), [0, 1, 2, 7, 300]
    table, speed = torch.randn(2, len(waits), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if not rates["momentum"]:
        speed = torch.zeros_like(speed)
    values, moving = optimiser.coast(table, speed, torch.tensor(waits))
    for row, wait in enumerate(waits):
        params, state = {"v": table[row]}, {"momentum": {"v": speed[row]}} if rates["momentum"] else {}
        for _ in range(wait):
            params, state = optimiser.update(params, {"v": torch.zeros(3, dtype=torch.float64)}, state)
        torch.testing.assert_close(values[row], params["v"], rtol=1e-9, atol=1e-12)
        if rates["momentum"]:
            torch.testing.assert_close(moving[row], state["momentum"]["v"], rtol=1e-9, atol=1e-12)


def test_only_sgd_can_coast() -> None:
    with pytest.raises(NotImplementedError, match="only sgd can coast, not adam"):
        Optimiser("adam").coast(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1))
