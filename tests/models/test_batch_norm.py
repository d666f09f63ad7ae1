# SPDX-License-Identifier: Apache-2.0
"""BatchNorm that leaves padding out: its derivatives, and numbers far from zero. More of it is in test_model."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from conftest import play, small_federation
from fedloom import algorithms
from fedloom.models.batch_norm import batch_norm

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MASK = torch.tensor([True, True, True, False])


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    running = torch.zeros(2, dtype=x.dtype), torch.ones(2, dtype=x.dtype)
    return batch_norm(MASK.to(x.device), x, *(r.to(x.device) for r in running), weight, bias, training=True)


@pytest.mark.parametrize("shape", [(4, 2), (4, 2, 3), (4, 2, 2, 2)])
def test_first_and_second_derivatives(shape: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(0)
    given = [torch.randn(s, dtype=torch.float64, generator=rng).requires_grad_() for s in (shape, (2,), (2,))]
    assert gradcheck(normed, given)
    assert gradgradcheck(normed, given)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_numbers_far_from_zero_keep_their_digits(device: str) -> None:
    """A mean of a hundred deviations, in float32, whose seven digits are then five."""
    rng = torch.Generator().manual_seed(0)
    x = (torch.randn(4, 2, 8, 8, generator=rng) + 100).to(device).requires_grad_()
    wanted_x = x.detach()[MASK.to(device)].double().requires_grad_()
    weight, bias = torch.tensor([1.5, -0.5], device=device), torch.tensor([0.1, 0.2], device=device)
    normed(x, weight, bias)[MASK.to(device)].sin().sum().backward()
    F.batch_norm(wanted_x, None, None, weight.double(), bias.double(), training=True).sin().sum().backward()
    torch.testing.assert_close(x.grad[MASK.to(device)].double(), wanted_x.grad, rtol=0, atol=2e-4)
    assert not x.grad[~MASK.to(device)].any()


def test_of_a_single_value_nothing_is_left_but_the_bias() -> None:
    """Exactly: its deviation is divided by nearly nothing, and a rectifier may follow."""
    x = 5 * torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    alone = torch.tensor([False, True, False, False])
    bias = torch.tensor([0.0, 0.3])
    y = batch_norm(alone, x, torch.zeros(2), torch.ones(2), torch.ones(2), bias, training=True)
    assert torch.equal(y[1], bias)
    (grad,) = torch.autograd.grad(y[1].sin().sum(), x)
    assert grad.abs().max() < 1e-4  # of 316, by which a deviation is multiplied


@pytest.mark.parametrize("sizes", [(8, 8, 8, 1, 2), (1, 1, 1, 1)])
def test_clients_with_one_sample_train_alike_alone_and_in_a_stack(sizes: tuple[int, ...]) -> None:
    states = [
        play(algorithms.get("fedavg"), small_federation(("testnets:DenseNormed",), sizes=sizes), engine, rounds=3).state
        for engine in ("sequential", "vectorised")
    ]
    for name, value in states[0].params.items():
        torch.testing.assert_close(states[1].params[name], value, rtol=0, atol=1e-10)
