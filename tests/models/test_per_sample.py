# SPDX-License-Identifier: Apache-2.0
"""Networks per sample, against the modules that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedloom.core.errors import NeedsError
from fedloom.core.random import fold, key
from fedloom.core.vectors import from_vector
from fedloom.models.model import Model
from fedloom.models.per_sample import append, append_init, classify, gradient_by_slices, slices
from fedloom.models.spec import parse

DOUBLE = (torch.device("cpu"), torch.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ["mlp:hidden=5", "lenet:kernels=2", "testnets:Dropping"])
def test_each_sample_goes_through_the_module_with_its_own_parameters(name: str) -> None:
    model = Model(parse(name, (1, 6, 6), 3), dtype=torch.float64)
    own = torch.vmap(lambda vector: from_vector(vector, model.shapes))(random(4, model.size))
    x = random(4, 1, 6, 6, seed=1)
    outputs = classify(model, {}, own, {}, x)
    for i in range(4):
        module = model.module({leaf: value[i] for leaf, value in own.items()}, {})
        torch.testing.assert_close(outputs[i], module(x[i : i + 1])[0].detach(), rtol=0, atol=1e-10)
    if name != "testnets:Dropping":
        trained = classify(model, {}, own, {}, x, fold(key(0), torch.arange(4)))
        torch.testing.assert_close(trained, outputs, rtol=0, atol=1e-10)


def test_dropout_is_drawn_for_each_sample() -> None:
    model = Model(parse("testnets:Dropping", (1, 6, 6), 3), dtype=torch.float64)
    common, x = model.init(0), torch.ones(3, 1, 6, 6, dtype=torch.float64)
    own = {"out.bias": common["out.bias"].expand(3, 3)}
    keys = torch.stack([key(0), key(1), key(0)])
    first, second, third = classify(model, common, own, {}, x, keys)
    assert torch.equal(first, third) and not torch.equal(first, second)


def test_appending_to_the_input_of_a_dense_layer_is_a_bias_per_sample() -> None:
    """hidden.0 on [x; e] with the weight [W, V]."""
    model = Model(parse("mlp:hidden=5", (1, 6, 6), 3), dtype=torch.float64)
    common, added, e = model.init(0), append_init(model, 4, 0, *DOUBLE), random(2, 4)
    assert added["weight"].shape == (5, 4) and added["weight"].abs().max() <= 40**-0.5
    x = random(2, 1, 6, 6, seed=1)
    outputs = classify(model, common, append(model, common, added, e), {}, x)
    wide = torch.cat([common["hidden.0.weight"], added["weight"]], 1)
    units = torch.cat([x.flatten(1), e], 1) @ wide.T + common["hidden.0.bias"]
    expected = units.relu() @ common["output.weight"].T + common["output.bias"]
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)


def test_the_first_layer_of_a_vit_is_its_patches_and_not_its_class_token() -> None:
    model = Model(parse("vit", (1, 8, 8), 3), dtype=torch.float64)
    assert next(iter(model.shapes)) == "class_token"
    common, e = model.init(0), random(2, 4)
    own = append(model, common, append_init(model, 4, 0, *DOUBLE), e)
    assert list(own) == ["patches.bias"]
    first, second = classify(model, common, own, {}, torch.ones(2, 1, 8, 8, dtype=torch.float64))
    assert not torch.isclose(first, second).any()  # one image, told two things


def test_appending_needs_a_bias() -> None:
    model = Model(parse("tiny:Line", (4,), 2))
    with pytest.raises(NeedsError) as caught:
        append_init(model, 4, 0, *DOUBLE)
    assert str(caught.value) == (
        "Appending to the input needs a bias in the first layer; tiny:Line has no line.bias. Choose another --model."
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_a_gradient_by_slices_is_the_gradient(size: int) -> None:
    """Of sum (w x)^2 over five samples, which is 2 w sum x^2; beside it, the number of samples."""
    x, w = random(5), {"w": random(1, seed=1)}

    def objective(params: dict[str, Tensor], part: slice) -> tuple[Tensor, Tensor]:
        return (params["w"] * x[part]).square().sum(), torch.ones_like(x[part]).sum()

    grads, count = gradient_by_slices(objective, w, slices(5, size), torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(grads["w"], 2 * w["w"] * x.square().sum())
    assert float(count) == 5
