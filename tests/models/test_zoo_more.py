# SPDX-License-Identifier: Apache-2.0
"""SqueezeNet and the Vision Transformer: published parameter counts, shapes, heads, names, errors, and torch.func."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedloom.core.errors import ConfigError
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.models.zoo.squeezenet import SqueezeNet10, SqueezeNet11
from fedloom.models.zoo.vit import ViT

Network = Any  # a class of the zoo

CIFAR, MNIST, TINY = (3, 32, 32), (1, 28, 28), (3, 64, 64)
SQUEEZENETS: list[Network] = [SqueezeNet10, SqueezeNet11]
NETWORKS: list[Network] = [*SQUEEZENETS, ViT]

every_network = pytest.mark.parametrize("network", NETWORKS, ids=lambda network: str(network.name))


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("network", "shape", "outputs", "options", "expected"),
    [
        # from the configuration of MH-pFedHN's code
        (SqueezeNet10, CIFAR, 100, {}, 786_724),
        (SqueezeNet11, CIFAR, 100, {}, 773_796),
        # torchvision's, for ImageNet
        (SqueezeNet10, (3, 224, 224), 1000, {}, 1_248_424),
        (SqueezeNet11, (3, 224, 224), 1000, {}, 1_235_496),
        # ViT-Tiny with patches of 16 (MH-pFedHN, App. D.2)
        (ViT, (3, 224, 224), 1000, {"patch": 16, "width": 192, "depth": 12, "heads": 3}, 5_717_416),
        (ViT, CIFAR, 100, {}, 691_972),
    ],
)
def test_parameter_counts(
    network: Network, shape: tuple[int, ...], outputs: int, options: dict[str, Any], expected: int
) -> None:
    assert count(network(shape, outputs, **options)) == expected


@every_network
@pytest.mark.parametrize("shape", [CIFAR, MNIST, TINY, (3, 28, 40)], ids=str)
def test_forward_and_backward_on_images(network: Network, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = network(shape, 7)
    logits = model(torch.randn(2, *shape))
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(("network", "size"), [(SqueezeNet10, 21), (SqueezeNet11, 17), (ViT, 4)])
def test_the_smallest_image_runs_and_one_pixel_less_is_refused(network: Network, size: int) -> None:
    assert network((1, size, size), 3)(torch.zeros(2, 1, size, size)).shape == (2, 3)
    with pytest.raises(ConfigError, match=f"at least {size}x{size} pixels"):
        network((1, size, size - 1), 3)


@every_network
def test_head_is_the_output_layer_and_nothing_else(network: Network) -> None:
    model = network(CIFAR, 11)
    head = model.get_submodule(network.head)
    assert head is [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)][-1]
    assert head.weight.shape[0] == 11
    under_head = [name for name, _ in model.named_parameters() if name.startswith(network.head + ".")]
    assert under_head == [f"{network.head}.weight", f"{network.head}.bias"]


@every_network
def test_docstring_is_one_line(network: Network) -> None:
    assert network.__doc__
    assert "\n" not in network.__doc__


@pytest.mark.parametrize(
    ("network", "fires"), [(SqueezeNet10, (3, 4, 5, 7, 8, 9, 10, 12)), (SqueezeNet11, (3, 4, 6, 7, 9, 10, 11, 12))]
)
def test_squeezenet_has_torchvisions_names(network: Network, fires: tuple[int, ...]) -> None:
    layers = ["features.0"]
    layers += [f"features.{i}.{part}" for i in fires for part in ("squeeze", "expand1x1", "expand3x3")]
    layers.append("classifier.1")
    names = [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")]
    assert list(network(CIFAR, 10).state_dict()) == names


def test_squeezenets_initial_values() -> None:
    torch.manual_seed(0)
    model = SqueezeNet11(CIFAR, 100)
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert float(model.classifier[1].weight.detach().std()) == pytest.approx(0.01, rel=0.05)


def test_squeezenets_outputs_are_means_of_relu() -> None:
    torch.manual_seed(0)
    assert (SqueezeNet10(CIFAR, 9).eval()(torch.randn(4, *CIFAR)) >= 0).all()


def test_attention_is_torchs() -> None:
    """One block's attention against ``nn.MultiheadAttention`` with the same weights."""
    torch.manual_seed(0)
    ours = ViT(CIFAR, 3, width=12, heads=3).blocks[0].attn.double()
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    theirs.load_state_dict(
        {
            "in_proj_weight": ours.qkv.weight,
            "in_proj_bias": ours.qkv.bias,
            "out_proj.weight": ours.proj.weight,
            "out_proj.bias": ours.proj.bias,
        }
    )
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


def test_a_vit_sees_where_a_patch_is() -> None:
    torch.manual_seed(0)
    model, x = ViT((1, 8, 8), 3).double(), torch.randn(1, 1, 8, 8, dtype=torch.float64)
    moved = x.roll(4, dims=3)  # the same patches in other places
    assert not torch.allclose(model(x), model(moved))
    with torch.no_grad():
        model.positions[:, 1:] = model.positions[:, 1:2]
    torch.testing.assert_close(model(x), model(moved))


def test_a_number_written_as_a_list_of_one_is_that_number() -> None:
    model = parse("vit:patch=2x:width=6x:depth=1x:heads=3x", (1, 4, 4), 2).build()
    assert model(torch.zeros(1, 1, 4, 4)).shape == (1, 2)


@pytest.mark.parametrize(
    ("network", "shape", "options", "message"),
    [
        (
            ViT,
            CIFAR,
            {"width": 100, "heads": 3},
            "vit needs a width that its heads divide; got 100 and 3. Change one of them.",
        ),
        (
            ViT,
            CIFAR,
            {"patch": 0},
            "vit needs a whole number of at least 1 for patch; got 0. Write e.g. --model vit:patch=32.",
        ),
        (
            ViT,
            (1, 8, 8),
            {"patch": 16},
            "vit needs images of at least 16x16 pixels; got (1, 8, 8). Use --model lenet or mlp.",
        ),
        (
            ViT,
            (1, 8, 12),
            {"patch": 3},
            "vit needs a patch that divides the height and the width of images; got 3 for (1, 8, 12). "
            "Write e.g. --model vit:patch=2.",
        ),
        (
            SqueezeNet11,
            (20,),
            {},
            "squeezenet1_1 needs images (channels, height, width); got (20,). Use --model mlp.",
        ),
        (
            SqueezeNet10,
            CIFAR,
            {"dropout": 1},
            "squeezenet1_0 needs a dropout from 0 to below 1; got 1. "
            "Leave it out for the default, or write --model squeezenet1_0:dropout=0 for none.",
        ),
    ],
)
def test_errors(network: Network, shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        network(shape, 10, **options)
    assert str(caught.value) == message


def loss(model: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, params, (x,)), y)


@pytest.mark.parametrize(
    ("network", "options"), [(SqueezeNet10, {"dropout": 0.0}), (SqueezeNet11, {"dropout": 0.0}), (ViT, {"depth": 2})]
)
def test_vmap_over_clients_equals_a_loop(network: Network, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    shape = (2, 24, 24)
    models = [network(shape, 4, **options).double() for _ in range(2)]
    params, _ = stack_module_state(models)
    x, y = torch.randn(2, 3, *shape, dtype=torch.float64), torch.randint(4, (2, 3))

    def client_grad(p: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return grad(loss, argnums=1)(models[0], p, x, y)

    together = vmap(client_grad)(params, x, y)
    for k, model in enumerate(models):
        F.cross_entropy(model(x[k]), y[k]).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(together[name][k], p.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["squeezenet1_0", "squeezenet1_1", "vit:depth=1:width=12"])
def test_each_is_a_model_of_fedloom(name: str) -> None:
    """Dropout from keys and all: the same key gives the same outputs."""
    model = Model(parse(name, (1, 24, 24), 3))
    params, x = model.init(0), torch.randn(4, 1, 24, 24)
    mask, key = torch.ones(4, dtype=torch.bool), torch.zeros((), dtype=torch.int64)
    one, _ = model.train(params, {}, x, mask, key)
    other, _ = model.train(params, {}, x, mask, key)
    assert torch.equal(one, other) and one.shape == (4, 3)
