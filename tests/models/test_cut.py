# SPDX-License-Identifier: Apache-2.0
"""Networks cut before their output layer: features, then the head, give what the whole network gives."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

from fedloom.core.random import key
from fedloom.models.model import Model
from fedloom.models.spec import parse

KEY = key("step")
NETWORKS = [
    ("mlp:hidden=7", (1, 8, 8)),
    ("lenet:kernels=2", (1, 16, 16)),
    ("zenkenet", (3, 32, 32)),
    ("resnet10", (3, 16, 16)),
    ("vgg8", (3, 32, 32)),
    ("squeezenet1_1", (3, 32, 32)),  # its head is a convolution, with a mean after it
    ("vit", (3, 32, 32)),
    ("testnets:Normed", (1, 6, 6)),
    ("testnets:Dropping", (1, 6, 6)),
]
every_network = pytest.mark.parametrize(("name", "shape"), NETWORKS, ids=[name for name, _ in NETWORKS])


def made(name: str, shape: tuple[int, ...]) -> tuple[Model, dict, dict, torch.Tensor]:
    """A network, its parameters and buffers, and samples."""
    model = Model(parse(name, shape, 3), dtype=torch.float64)
    x = torch.randn(4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return model, model.init(0), model.fresh_buffers(), x


@every_network
def test_the_head_on_the_features_is_the_network(name: str, shape: tuple[int, ...]) -> None:
    model, params, buffers, x = made(name, shape)
    z = model.features(params, buffers, x)
    assert tuple(z.shape) == (4, *model.feature_shape)
    assert (model.classify(params, z) - model(params, buffers, x)).abs().max() < 1e-12
    changed = {n: value + 1 if n in model.head else value for n, value in params.items()}
    assert torch.equal(model.features(changed, buffers, x), z)
    assert not torch.allclose(model.classify(changed, z), model.classify(params, z))


@every_network
def test_in_training_features_have_the_masks_and_the_statistics_of_training(name: str, shape: tuple[int, ...]) -> None:
    model, params, buffers, x = made(name, shape)
    mask = torch.tensor([True, True, True, False])
    outputs, after = model.train(params, buffers, x, mask, KEY)
    z, also = model.train_features(params, buffers, x, mask, KEY)
    assert (model.classify(params, z) - outputs).abs().max() < 1e-12
    assert {n: v.tolist() for n, v in after.items()} == {n: v.tolist() for n, v in also.items()}


@pytest.mark.parametrize("name", ["lenet:kernels=2", "testnets:Normed", "squeezenet1_1"])
def test_it_runs_for_many_clients_at_once_with_gradients(name: str) -> None:
    model, params, buffers, x = made(name, (3, 32, 32))
    mask = torch.ones(4, dtype=torch.bool)

    def loss(params: dict, buffers: dict, x: torch.Tensor) -> torch.Tensor:
        z, _ = model.train_features(params, buffers, x, mask, KEY)
        return model.classify(params, z).square().mean() + z.mean()

    stacked = {n: torch.stack([value, value + 0.01]) for n, value in params.items()}
    many = {n: torch.stack([value, value]) for n, value in buffers.items()}
    found = vmap(grad(loss))(stacked, many, torch.stack([x, x + 1]))
    for row in range(2):
        alone = grad(loss)({n: v[row] for n, v in stacked.items()}, {n: v[row] for n, v in many.items()}, x + row)
        for n, gradient in alone.items():  # of a hundred million, in the second row of squeezenet
            assert float((found[n][row] - gradient).abs().max()) <= 1e-12 * max(1.0, float(gradient.abs().max()))


def test_what_a_network_says_of_its_cut() -> None:
    lenet, squeezed = made("lenet", (3, 32, 32))[0], made("squeezenet1_1", (3, 32, 32))[0]
    assert lenet.feature_shape == (84,) and lenet.has_linear_head and not lenet.norm
    assert not squeezed.has_linear_head
    assert made("testnets:Normed", (1, 6, 6))[0].norm == {"norm.weight", "norm.bias"}
    assert made("testnets:TwiceHeaded", (1, 6, 6))[0].feature_shape is None
