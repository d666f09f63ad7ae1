# SPDX-License-Identifier: Apache-2.0
"""Convolutions as products give what convolutions give, with their gradients, for one client and for many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedloom.engines import convolution
from fedloom.engines.convolution import Faster, faster_for


@pytest.mark.parametrize("padding", [0, 1, (2, 1)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 5, 100])
def test_values_and_gradients_are_those_of_conv2d(padding: Any, bias: bool, parts: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4, 9, 8, dtype=torch.float64, requires_grad=True)
    layer = nn.Conv2d(4, 5, (3, 2), padding=padding, bias=bias).double()
    plain = layer(x)
    with Faster(parts=parts):
        product = layer(x)
    cotangent = torch.randn_like(plain)
    torch.testing.assert_close(product, plain, rtol=0, atol=1e-12)
    wanted = [x, *layer.parameters()]
    for one, other in zip(
        torch.autograd.grad(plain, wanted, cotangent), torch.autograd.grad(product, wanted, cotangent)
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_traced_step_of_many_clients_has_products_and_no_convolutions() -> None:
    torch.manual_seed(0)
    weights = torch.randn(3, 4, 4, 3, 3, dtype=torch.float64)
    x = torch.randn(3, 2, 4, 7, 7, dtype=torch.float64)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return F.conv2d(torch.tanh(F.conv2d(x, weight)), weight[:, :, :1, :1].transpose(0, 1)).square().sum()

    step = vmap(grad(loss, argnums=(0, 1)))
    with Faster(parts=2):
        traced = make_fx(step)(weights, x)
    called = {str(node.target) for node in traced.graph.nodes}
    assert "aten.bmm.default" in called
    for one, other in zip(traced(weights, x), step(weights, x)):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options", [{"stride": 2}, {"dilation": 2}, {"groups": 2}, {"padding": "same"}, {"kernel_size": 1}]
)
def test_other_kinds_are_left_to_torch(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution._Patches, "apply", lambda *_: pytest.fail("computed as a product"))
    layer = nn.Conv2d(**{"in_channels": 4, "out_channels": 4, "kernel_size": 3, **options})
    x = torch.randn(2, 4, 8, 8)
    with Faster():
        assert torch.equal(layer(x), nn.Conv2d.forward(layer, x))


def test_the_number_of_clients_decides() -> None:
    assert faster_for(50).min_inputs == 128 and faster_for(500).min_inputs == 1
    assert faster_for(50).own_inputs == 1024 and faster_for(500).own_inputs == 0
    assert faster_for(50, own_kernels=False).own_inputs == 0
    assert faster_for(1).parts == 80 and faster_for(10).parts == 8 and faster_for(50).parts == 1
