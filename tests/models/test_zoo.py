# SPDX-License-Identifier: Apache-2.0
"""The target networks: published parameter counts, shapes, heads, names, errors, and torch.func."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedloom.core.errors import ConfigError
from fedloom.models.zoo.conv1d import Conv1d
from fedloom.models.zoo.lenet import LeNet, LeNetS, MHLeNet
from fedloom.models.zoo.mlp import MLP
from fedloom.models.zoo.resnet import ResNet10, ResNet12, ResNet18
from fedloom.models.zoo.vgg import VGG8
from fedloom.models.zoo.zenkenet import ZenkeNet

Network = Any  # a class of this folder: called with (input_shape, num_outputs, **options), has name and head

LENETS: list[Network] = [LeNet, LeNetS, MHLeNet]
RESNETS: list[Network] = [ResNet10, ResNet12, ResNet18]
NETWORKS: list[Network] = [MLP, *LENETS, ZenkeNet, VGG8, *RESNETS]

MNIST, CIFAR, TINY, DIGITS = (1, 28, 28), (3, 32, 32), (3, 64, 64), (1, 8, 8)


def network_id(network: Network) -> str:
    return str(network.name)


every_network = pytest.mark.parametrize("network", NETWORKS, ids=network_id)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("network", "shape", "outputs", "options", "expected"),
    [
        # MH-pFedHN: the counts of its CIFAR-100 networks
        (MLP, CIFAR, 100, {}, 408_100),
        (MHLeNet, CIFAR, 100, {}, 239_856),
        (VGG8, CIFAR, 100, {}, 274_664),
        (ResNet10, CIFAR, 100, {}, 353_028),
        (ResNet12, CIFAR, 100, {}, 529_092),
        (ResNet18, CIFAR, 100, {}, 571_236),
        # pFedHN
        (LeNet, CIFAR, 10, {}, 121_182),
        (LeNet, CIFAR, 10, {"kernels": 8}, 62_958),
        (LeNet, CIFAR, 10, {"kernels": 32}, 256_830),
        # HyperFedZero
        (MLP, MNIST, 10, {"hidden": 200}, 159_010),
        (LeNetS, MNIST, 10, {}, 21_840),
        (LeNetS, MNIST, 10, {"channels": (20, 50), "hidden": 500}, 431_080),
        (ZenkeNet, CIFAR, 10, {}, 1_250_858),
    ],
)
def test_parameter_counts(
    network: Network, shape: tuple[int, ...], outputs: int, options: dict[str, Any], expected: int
) -> None:
    assert count(network(shape, outputs, **options)) == expected


@pytest.mark.parametrize(
    ("network", "cifar10", "tiny_imagenet", "emnist"),
    [
        (MHLeNet, 234_006, 246_356, 237_098),
        (VGG8, 268_814, 281_164, 271_906),
        (ResNet10, 347_178, 359_528, 350_270),
        (ResNet12, 523_242, 535_592, 526_334),
        (ResNet18, 565_386, 577_736, 568_478),
    ],
)
def test_mh_pfedhns_counts_on_its_other_data(network: Network, cifar10: int, tiny_imagenet: int, emnist: int) -> None:
    # From the configuration of the authors' code, which resizes every data set to 32x32.
    assert count(network(CIFAR, 10)) == cifar10
    assert count(network(CIFAR, 200)) == tiny_imagenet
    assert count(network((1, 32, 32), 62)) == emnist


@pytest.mark.parametrize(
    ("network", "published"),
    [(MHLeNet, 0.915), (VGG8, 1.048), (ResNet10, 1.347), (ResNet12, 2.018), (ResNet18, 2.179)],
)
def test_the_sizes_of_mh_pfedhns_table_26_are_mebibytes_of_float32(network: Network, published: float) -> None:
    assert count(network(CIFAR, 100)) * 4 / 2**20 == pytest.approx(published, abs=0.001)


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        pytest.param(network, shape, id=f"{network.name}-{shape}")
        for network in NETWORKS
        for shape in (MNIST, CIFAR, TINY, DIGITS, (3, 28, 40))
        if not (network is ZenkeNet and shape == DIGITS)  # zenkenet begins at 10x10
    ],
)
def test_forward_and_backward_on_images(network: Network, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = network(shape, 7)
    logits = model(torch.randn(2, *shape))
    assert logits.shape == (2, 7)
    logits.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("network", "size"),
    [(n, 4) for n in LENETS] + [(ZenkeNet, 10), (VGG8, 8)] + [(n, 8) for n in RESNETS],
)
def test_the_smallest_image_runs_and_one_pixel_less_is_refused(network: Network, size: int) -> None:
    assert network((1, size, size), 3)(torch.zeros(2, 1, size, size)).shape == (2, 3)
    with pytest.raises(ConfigError, match=f"at least {size}x{size} pixels"):
        network((1, size, size - 1), 3)


@pytest.mark.parametrize("network", [MLP, Conv1d, *LENETS], ids=network_id)
@pytest.mark.parametrize("shape", [(6, 128), (9, 12)], ids=str)
def test_time_windows(network: Network, shape: tuple[int, ...]) -> None:
    assert network(shape, 5)(torch.zeros(2, *shape)).shape == (2, 5)


def test_a_windows_network_has_as_many_parameters_for_any_length_and_runs_as_a_stack() -> None:
    """9 * 32 * 5 + 32, 32 * 64 * 5 + 64, 64 * 64 * 5 + 64 and 64 * 6 + 6 are 32,710."""
    assert count(Conv1d((9, 128), 6)) == count(Conv1d((9, 32), 6)) == 32_710
    models = [Conv1d((3, 16), 2, channels=(4, 5, 6), kernel=3) for _ in range(3)]
    params, buffers = stack_module_state(models)
    x = torch.randn(3, 7, 3, 16)
    found = vmap(lambda p, b, x: functional_call(models[0], (p, b), (x,)))(params, buffers, x)
    for own, model, x_own in zip(found, models, x):
        torch.testing.assert_close(own, model(x_own))
    for shape, kernel in (((3, 3), 5), ((3, 28, 28), 5), ((9,), 5), ((3, 16), 4)):
        with pytest.raises(ConfigError, match="conv1d needs windows"):
            Conv1d(shape, 2, kernel=kernel)


def test_mlp_takes_feature_vectors_and_no_hidden_layer() -> None:
    assert MLP((20,), 3)(torch.zeros(4, 20)).shape == (4, 3)
    assert count(MLP((20,), 3, hidden=())) == 63
    assert count(MLP((20,), 3, hidden=5)) == count(MLP((20,), 3, hidden=(5,))) == 123


@every_network
def test_head_is_the_output_layer_and_nothing_else(network: Network) -> None:
    model = network(CIFAR, 11)
    head = model.get_submodule(network.head)
    assert isinstance(head, nn.Linear)
    assert head is [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    under_head = [name for name, _ in model.named_parameters() if name.startswith(network.head + ".")]
    assert under_head == [f"{network.head}.weight", f"{network.head}.bias"]
    assert head.out_features == 11


@every_network
def test_docstring_is_one_line(network: Network) -> None:
    assert network.__doc__
    assert "\n" not in network.__doc__


def weights_and_biases(*layers: str) -> list[str]:
    return [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")]


@pytest.mark.parametrize(
    ("network", "layers"),
    [
        (MLP, ["hidden.0", "hidden.1", "output"]),
        (LeNet, ["conv1", "conv2", "fc1", "fc2", "fc3"]),
        (MHLeNet, ["conv1", "conv2", "fc1", "fc2", "fc3"]),
        (LeNetS, ["conv1", "conv2", "fc1", "fc2"]),
        (ZenkeNet, ["conv1", "conv2", "conv3", "conv4", "fc1", "fc2"]),
        (VGG8, ["conv1", "conv2", "conv3", "conv4", "conv5", "conv6", "fc1", "fc2", "fc3"]),
    ],
)
def test_state_dict_names(network: Network, layers: list[str]) -> None:
    assert list(network(CIFAR, 10).state_dict()) == weights_and_biases(*layers)


@pytest.mark.parametrize(
    ("network", "strided"),
    [(ResNet10, (3, 6)), (ResNet12, (1, 6)), (ResNet18, (6, 12))],
)
def test_resnet_parameter_names(network: Network, strided: tuple[int, int]) -> None:
    blocks = int(network.name.removeprefix("resnet"))
    layers = ["conv1", "bn1"]
    for i in range(blocks):
        layers += [f"blocks.{i}.{part}" for part in ("conv1", "bn1", "conv2", "bn2")]
        if i in strided:
            layers.append(f"blocks.{i}.shortcut")
    model = network(CIFAR, 10)
    assert [name for name, _ in model.named_parameters()] == weights_and_biases(*layers, "fc")
    assert len(model.state_dict()) == len(list(model.parameters())) + 3 * (2 * blocks + 1)  # BatchNorm's buffers


def test_lenet_pads_only_small_images() -> None:
    assert LeNet(DIGITS, 10).conv1.padding == (2, 2)
    assert LeNet((1, 16, 16), 10).conv1.padding == (0, 0)
    assert LeNet(DIGITS, 10).fc1.in_features == 32 * 2 * 2
    assert LeNet(CIFAR, 10).fc1.in_features == 32 * 5 * 5


@pytest.mark.parametrize(
    ("network", "shape", "options", "message"),
    [
        (
            LeNet,
            (1, 3, 3),
            {},
            "lenet needs images of at least 4x4 pixels; got (1, 3, 3). Use --model mlp.",
        ),
        (
            LeNet,
            (1, 3),
            {},
            "lenet needs time windows of at least 4 steps; got (1, 3). Use --model mlp.",
        ),
        (
            LeNet,
            (20,),
            {},
            "lenet needs images (channels, height, width) or time windows (channels, length); got (20,). "
            "Use --model mlp.",
        ),
        (
            ZenkeNet,
            DIGITS,
            {},
            "zenkenet needs images of at least 10x10 pixels; got (1, 8, 8). Use --model lenet or mlp.",
        ),
        (
            VGG8,
            (6, 128),
            {},
            "vgg8 needs images (channels, height, width); got (6, 128). "
            "Use --model mlp, or lenet for time windows (channels, length).",
        ),
        (
            ResNet10,
            (20,),
            {},
            "resnet10 needs images (channels, height, width); got (20,). Use --model mlp.",
        ),
        (
            MLP,
            (),
            {},
            "mlp needs an input shape whose every axis is at least 1 long; got (). "
            "Pass the shape of one example, such as (1, 28, 28).",
        ),
        (
            MLP,
            (4,),
            {"hidden": (8, 0)},
            "mlp needs whole numbers of at least 1 for hidden; got (8, 0). Write e.g. --model mlp:hidden=32x32.",
        ),
        (
            LeNet,
            CIFAR,
            {"kernels": "many"},
            "lenet needs a whole number of at least 1 for kernels; got 'many'. Write e.g. --model lenet:kernels=32.",
        ),
        (
            LeNetS,
            CIFAR,
            {"channels": 10},
            "lenet_s needs 2 whole numbers of at least 1 for channels; got 10. "
            "Write e.g. --model lenet_s:channels=32x32.",
        ),
        (
            VGG8,
            CIFAR,
            {"dropout": 1.0},
            "vgg8 needs a dropout from 0 to below 1; got 1.0. "
            "Leave it out for the default, or write --model vgg8:dropout=0 for none.",
        ),
        (
            ZenkeNet,
            CIFAR,
            {"dropout": 0.5},
            "zenkenet needs a dropout from 0 to below 0.5; got 0.5. "
            "Leave it out for the default, or write --model zenkenet:dropout=0 for none.",
        ),
    ],
)
def test_errors(network: Network, shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        network(shape, 10, **options)
    assert str(caught.value) == message


def loss(model: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(functional_call(model, (params, buffers), (x,)), y)


@pytest.mark.parametrize(
    ("network", "options", "train"),
    [(n, {}, True) for n in [MLP, *LENETS, *RESNETS]]
    + [(n, {"dropout": 0.0}, True) for n in [ZenkeNet, VGG8]]
    + [(n, {}, False) for n in [ZenkeNet, VGG8, *RESNETS]],
)
def test_vmap_over_clients_equals_a_loop(network: Network, options: dict[str, Any], train: bool) -> None:
    torch.manual_seed(0)
    shape = (2, 10, 10)
    models = [network(shape, 4, **options).double().train(train) for _ in range(3)]
    params, buffers = stack_module_state(models)
    x = torch.randn(3, 5, *shape, dtype=torch.float64)
    y = torch.randint(4, (3, 5))

    def client_grad(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return grad(loss, argnums=1)(models[0], p, b, x, y)

    # Each client has its own copy of the buffers: in training mode BatchNorm writes into them.
    together = vmap(client_grad)(params, buffers, x, y)
    for k, model in enumerate(models):
        F.cross_entropy(model(x[k]), y[k]).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(together[name][k], p.grad, rtol=1e-10, atol=1e-12)
        for name, b in model.named_buffers():
            torch.testing.assert_close(buffers[name][k], b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("network", [ZenkeNet, VGG8], ids=network_id)
def test_dropout_under_vmap_draws_for_each_client(network: Network) -> None:
    torch.manual_seed(0)
    model = network((1, 10, 10), 4)
    x = torch.randn(1, 10, 10).expand(3, 2, 1, 10, 10)  # the same input for three clients
    logits = vmap(model, randomness="different")(x)
    assert logits.shape == (3, 2, 4)
    assert not torch.equal(logits[0], logits[1])


@pytest.mark.parametrize(
    ("network", "shape"), [(n, CIFAR) for n in (*LENETS, ZenkeNet, VGG8)] + [(n, (3, 50)) for n in LENETS]
)
def test_relu_before_the_pool_as_papers_have_it_would_give_the_same(network: Network, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = network(shape, 10).eval()
    x = torch.randn(8, *shape)
    x[:4] = x[:4].mean(dim=tuple(range(2, x.dim())), keepdim=True)  # where all pixels are alike, so is what is pooled
    x.requires_grad_()

    def values_and_gradients() -> list[Tensor]:
        logits = model(x)
        return [logits, *torch.autograd.grad(logits.sum(), [x, *model.parameters()])]

    after = values_and_gradients()
    model.pool = nn.Sequential(nn.ReLU(), model.pool)  # and after it once more, which changes nothing
    assert all(torch.equal(one, other) for one, other in zip(values_and_gradients(), after))
