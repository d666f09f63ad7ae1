# SPDX-License-Identifier: Apache-2.0
"""fedloom's own kernels give what torch's convolutions give, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from conftest import models_for, play, small_federation
from fedloom import algorithms
from fedloom.core.trees import flatten
from fedloom.engines import capture
from fedloom.engines.convolution import faster_for
from fedloom.engines.machine import set_precision

kernels = pytest.importorskip(
    "fedloom.engines.kernels", reason="Triton comes with torch for CUDA", exc_type=ImportError
)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def exact() -> None:
    set_precision("exact")  # torch's own convolutions would use TF32


SHAPES = [
    # clients, batch, inputs, height, width, outputs, high, wide, up, side
    (1, 64, 3, 32, 32, 16, 5, 5, 0, 0),  # pFedHN's LeNet
    (7, 64, 16, 14, 14, 32, 5, 5, 0, 0),
    (50, 5, 1, 9, 8, 5, 3, 2, 2, 1),
    (3, 1, 20, 7, 7, 70, 3, 3, 1, 1),
    (2, 3, 5, 6, 6, 300, 3, 3, 1, 1),  # more channels than one tile
    (2, 33, 64, 8, 8, 64, 3, 3, 4, 0),  # padded by more than the kernel takes off
    (4, 64, 16, 12, 12, 64, 3, 3, 1, 1),  # many channels, and enough of them to keep a GPU busy
]


def _tensors(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    clients, batch, inputs, height, width, outputs, high, wide, _, _ = shape
    torch.manual_seed(0)
    x = torch.randn(clients, batch, inputs, height, width, device="cuda", dtype=dtype)
    weight = torch.randn(clients, outputs, inputs, high, wide, device="cuda", dtype=dtype)
    return x, weight, 10 * torch.randn(clients, outputs, device="cuda", dtype=dtype)


def _results(convolve: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    def loss(*tensors: Tensor) -> Tensor:
        return torch.tanh(convolve(*tensors) / 50).sum()

    return (vmap(convolve)(*tensors), *vmap(grad(loss, argnums=tuple(range(len(tensors)))))(*tensors))


def _own(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y: Tensor = kernels.convolution(x, weight, bias, 0, 0, "tf32x3")
    return y


def _error(found: tuple[Tensor, ...], true: tuple[Tensor, ...]) -> list[float]:
    return [float((one.double() - other).abs().max() / other.abs().max()) for one, other in zip(found, true)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "dtype, precision, bound",
    [(torch.float32, "tf32x3", 2e-6), (torch.float32, "tf32", 4e-3), (torch.bfloat16, "tf32x3", 3e-2)],
)
def test_values_and_gradients_are_those_of_conv2d(
    shape: tuple[int, ...], dtype: torch.dtype, precision: str, bound: float
) -> None:
    tensors = _tensors(shape, dtype)
    up, side = shape[-2:]
    true = _results(lambda *given: torch.conv2d(*given, padding=(up, side)), *(one.double() for one in tensors))
    own = _results(lambda *given: kernels.convolution(*given, up, side, precision), *tensors)
    assert max(_error(own, true)) < bound
    alone = [kernels.convolution(*given, up, side, precision) for given in zip(*tensors)]
    assert max(_error((torch.stack(alone),), true)) < bound


def test_stacks_of_stacks_shared_weights_and_second_derivatives() -> None:
    x, weight, _ = _tensors((6, 2, 3, 8, 8, 4, 3, 3, 0, 0), torch.float32)

    def results(convolve: Callable[..., Tensor], x: Tensor, weight: Tensor) -> list[Tensor]:
        def loss(x: Tensor, weight: Tensor) -> Tensor:
            return torch.tanh(vmap(convolve, in_dims=(0, None))(x, weight) / 20).sum()

        def second(x: Tensor, weight: Tensor) -> Tensor:
            return grad(loss)(x, weight).square().sum()

        by_pairs = x.unflatten(0, (3, 2)), weight[:3]
        twice = vmap(grad(second, argnums=(0, 1)))(*by_pairs)
        turned = vmap(convolve)(x.transpose(3, 4), weight.transpose(3, 4))  # not contiguous
        return [*vmap(grad(loss, argnums=(0, 1)))(*by_pairs), *twice, turned]

    true = results(torch.conv2d, x.double(), weight.double())
    assert max(_error(tuple(results(_own, x, weight)), tuple(true))) < 1e-5


def test_exact_kernels_are_as_exact_as_the_librarys() -> None:
    for shape in SHAPES[:2]:
        tensors = _tensors(shape, torch.float32)
        true = _results(torch.conv2d, *(one.double() for one in tensors))
        library = _error(_results(torch.conv2d, *tensors), true)
        for mine, theirs in zip(_error(_results(_own, *tensors), true), library):
            assert mine < 2 * theirs


def test_they_are_used_where_they_gain_and_not_where_they_are_not_wanted() -> None:
    def called(dtype: torch.dtype, own_kernels: bool = True) -> set[str]:
        with faster_for(50, own_kernels):
            traced = make_fx(lambda *given: _results(torch.conv2d, *given))(*_tensors(SHAPES[0], dtype))
        return {str(node.target) for node in traced.graph.nodes}

    own = {"fedloom.convolve.default", "fedloom.convolve_by_weight.default"}
    assert own <= called(torch.float32) and own <= called(torch.bfloat16) and not own & called(torch.float64)
    assert not own & called(torch.float32, own_kernels=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own affairs
@pytest.mark.parametrize("method", algorithms.names())
def test_a_compiled_run_gives_what_the_plain_loop_gives(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MIN_RECORDED_STEPS", 1)
    monkeypatch.setattr(capture, "MIN_COMPILED_STEPS", 0)
    used = []
    plain_op = kernels.convolve
    monkeypatch.setattr(kernels, "convolve", lambda *given: used.append(1) or plain_op(*given))
    algorithm = algorithms.get(method)
    models = models_for(algorithm, "lenet:kernels=2")
    fast = play(algorithm, small_federation(models, device="cuda", dtype=torch.float32), "vectorised", rounds=5)
    assert used
    assert fast.engine.notes == []
    plain = play(algorithm, small_federation(models, dtype=torch.float32), "sequential", rounds=5)
    one, other = flatten(plain.state._asdict()), flatten(fast.state._asdict())
    for path in one:
        torch.testing.assert_close(other[path].cpu(), one[path], rtol=1e-4, atol=1e-5)
