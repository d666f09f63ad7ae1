# SPDX-License-Identifier: Apache-2.0
"""Local training: gradients, penalties, corrections and what is kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fedloom
from fedloom.core.contract import Batch, Home
from fedloom.core.errors import ConfigError, RoundError
from fedloom.core.optim import Optimiser
from fedloom.core.random import key
from fedloom.core.task import REGRESSION
from fedloom.core.training import (
    LocalConfig,
    begin,
    delta,
    gradient,
    like_report,
    pulled,
    remember,
    report,
    train_step,
)
from fedloom.models.model import Model
from fedloom.models.spec import parse

PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "local_lr": 0.1}


def home_of(**config: Any) -> Home:
    """A client with y = w x + b, both 0-dimensional but for torch's sake."""
    model = Model(parse("mlp:hidden=x", (1,), 1), dtype=torch.float64)
    made = LocalConfig(**{**PLAIN, **config})
    return Home(model, REGRESSION, made, torch.tensor(3.0, dtype=torch.float64), key("ask"))


def line(w: float, b: float) -> dict[str, Tensor]:
    return {"output.weight": torch.tensor([[w]]).double(), "output.bias": torch.tensor([b]).double()}


def batch_of(x: list[float], y: list[float], padding: int = 0) -> Batch:
    size = len(x) - padding
    zero = torch.tensor(0)
    mask = torch.arange(len(x)) < size
    return Batch(torch.tensor(x).double()[:, None], torch.tensor(y).double(), mask, zero, zero, key("step"))


class Checkpointed(nn.Module):
    """Computes its only layer again in the backward pass."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.out = nn.Linear(math.prod(input_shape), num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.out, x.flatten(1), use_reentrant=False)


def test_a_network_that_computes_again_without_its_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RoundError, match=r"saves tensors by hooks, as torch\.utils\.checkpoint does"):
        fedloom.run(
            "fedavg", model=Checkpointed, clients=2, rounds=1, local_steps=1, progress="quiet", out=tmp_path / "run"
        )


def test_the_gradient_of_a_line_by_hand() -> None:
    """w = 2, b = 0 on (1, 1), (2, 1): errors 1, 3; loss 5; d/dw = mean(2 e x) = 7; d/db = mean(2 e) = 4."""
    grads, loss, _ = gradient(home_of(), line(2, 0), {}, batch_of([1, 2], [1, 1]))
    assert loss == 5
    assert grads["output.weight"].item() == 7
    assert grads["output.bias"].item() == 4


def test_padding_changes_neither_gradient_nor_loss() -> None:
    real = gradient(home_of(), line(2, 0), {}, batch_of([1, 2], [1, 1]))
    padded = gradient(home_of(), line(2, 0), {}, batch_of([1, 2, 9, 9], [1, 1, 0, 0], padding=2))
    assert padded[1] == real[1]
    assert all(torch.equal(padded[0][name], real[0][name]) for name in real[0])


def test_a_penalty_enters_the_gradient_and_not_the_loss() -> None:
    """Half of w squared adds w = 2 to d/dw."""
    grads, loss, _ = gradient(
        home_of(), line(2, 0), {}, batch_of([1, 2], [1, 1]), lambda p: p["output.weight"].square().sum() / 2
    )
    assert loss == 5
    assert grads["output.weight"].item() == 9
    assert grads["output.bias"].item() == 4


def test_a_correction_is_applied_to_the_gradient_before_the_step() -> None:
    """d/dw = 7 and d/db = 4 plus 1 each, at a rate of 0.1: w = 2 - 0.8, b = -0.5."""
    home = home_of()
    carry = begin(home, line(2, 0), {"buffers": {}})
    carry = train_step(
        home, carry, batch_of([1, 2], [1, 1]), correction=lambda g: {name: value + 1 for name, value in g.items()}
    )
    assert carry.params["output.weight"].item() == pytest.approx(1.2, abs=1e-15)
    assert carry.params["output.bias"].item() == pytest.approx(-0.5, abs=1e-15)


def test_what_pulls_to_a_centre_is_the_slope_of_a_squared_distance() -> None:
    """d/dw = 7 and d/db = 4; from (2, 0) to the centre (1, 3), with strength 0.5: 7 + 0.5 and 4 - 1.5.

    The step is a tenth of it, w = 1.25 and b = -0.25. A penalty of 0.25 (w - 1)^2 + 0.25 (b - 3)^2 gives the same.
    """
    home, start, centre = home_of(), line(2, 0), line(1, 3)
    carry = begin(home, start, {"buffers": {}})
    data = batch_of([1, 2], [1, 1])
    corrected = train_step(home, carry, data, correction=pulled(start, centre, 0.5))
    assert [corrected.params[name].item() for name in start] == pytest.approx([1.25, -0.25], abs=1e-15)
    apart = lambda p: sum((p[name] - centre[name]).square().sum() for name in p) * 0.25  # noqa: E731
    penalised = train_step(home, carry, data, penalty=apart)
    assert all(torch.allclose(penalised.params[name], corrected.params[name], atol=1e-15) for name in start)


def test_another_optimiser_takes_the_place_of_the_options() -> None:
    """d/dw = 7 at the rate 0.01 instead of 0.1: w = 2 - 0.07; and there is a momentum, which is 7."""
    home, optimiser = home_of(), Optimiser("sgd", 0.01, momentum=0.9)
    carry = begin(home, line(2, 0), {"buffers": {}}, optimiser)
    assert carry.optimiser["momentum"]["output.weight"].item() == 0
    carry = train_step(home, carry, batch_of([1, 2], [1, 1]), optimiser=optimiser)
    assert carry.params["output.weight"].item() == pytest.approx(1.93, abs=1e-15)
    assert carry.optimiser["momentum"]["output.weight"].item() == 7


def test_two_steps_sum_the_loss_and_tell_the_change() -> None:
    """(2, 0) -> (1.3, -0.4): errors -0.1, 1.2, loss 0.725, gradient 2.3, 1.1 -> (1.07, -0.51)."""
    home = home_of()
    carry = begin(home, line(2, 0), {"buffers": {}})
    for _ in range(2):
        carry = train_step(home, carry, batch_of([1, 2], [1, 1]))
    assert delta(carry)["output.weight"].item() == pytest.approx(-0.93, abs=1e-12)
    assert delta(carry)["output.bias"].item() == pytest.approx(-0.51, abs=1e-12)
    told = report(home, carry)
    assert told["num_samples"] == 3
    assert float(told["loss"]) == pytest.approx((5 + 0.725) / 2, abs=1e-12)
    assert {name: tuple(value.shape) for name, value in told.items()} == {
        name: tuple(value.shape) for name, value in like_report().items()
    }


def test_no_step_is_no_change_and_a_loss_of_zero() -> None:
    home = home_of()
    carry = begin(home, line(2, 1), {"buffers": {}})
    assert report(home, carry)["loss"] == 0
    assert all(not value.any() for value in delta(carry).values())


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"optimiser": "adam"}])
def test_a_kept_optimiser_goes_on_where_it_was(options: dict[str, Any]) -> None:
    """Two asks of one step are one ask of two steps if the state is kept, and are not if it is forgotten."""

    def train(asks: int, steps: int, keep: bool) -> dict[str, Tensor]:
        home, memory, params = home_of(keep_optimiser=keep, **options), {"buffers": {}}, line(2, 0)
        for _ in range(asks):
            carry = begin(home, params, memory)
            for _ in range(steps):
                carry = train_step(home, carry, batch_of([1, 2], [1, 1]))
            params, memory = dict(carry.params), remember(home, carry, memory)
            assert ("optimiser" in memory) == keep
        return params

    together, kept, forgotten = train(1, 2, True), train(2, 1, True), train(2, 1, False)
    assert all(torch.equal(kept[name], together[name]) for name in kept)
    assert all(not torch.equal(forgotten[name], together[name]) for name in kept)


def test_memory_keeps_what_is_not_of_training() -> None:
    home = home_of()
    carry = begin(home, line(2, 0), {"buffers": {"old": torch.tensor(1)}})
    after = remember(home, carry._replace(buffers={"new": torch.tensor(2)}), {"own": torch.tensor(3), "buffers": {}})
    assert after == {"own": torch.tensor(3), "buffers": {"new": torch.tensor(2)}}


def test_running_statistics_come_back_from_the_gradient() -> None:
    """BatchNorm over (1, 3): mean 2, unbiased variance 2, each weighing a tenth."""
    model = Model(parse("torch.nn:BatchNorm1d:num_features=1", (1,), 1), dtype=torch.float64)
    home = Home(model, REGRESSION, LocalConfig(), torch.tensor(2.0).double(), key("ask"))
    params, buffers = model.init(0), model.fresh_buffers()
    _, _, after = gradient(home, params, buffers, batch_of([1, 3, 50], [0, 0, 0], padding=1))
    assert after["running_mean"].item() == pytest.approx(0.2, abs=1e-15)
    assert after["running_var"].item() == pytest.approx(0.9 + 0.2, abs=1e-15)
    assert after["num_batches_tracked"] == 1
    assert buffers["running_mean"] == 0


def test_epochs_come_before_steps() -> None:
    by_steps, by_epochs = LocalConfig(local_steps=7).batches(), LocalConfig(local_steps=7, local_epochs=2).batches()
    assert (by_steps.steps, by_steps.epochs) == (7, 0)
    assert (by_epochs.steps, by_epochs.epochs) == (0, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 0}, "both 0"),
        ({"batch_size": 0}, "--batch-size is 0; it must be at least 1"),
        ({"momentum": 1.1}, "--momentum is 1.1; it must be at least 0 and at most 1"),
        ({"local_lr": math.nan}, "--local-lr is nan"),
        ({"optimiser": "sdg"}, "did you mean 'sgd'"),
    ],
)
def test_training_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalConfig(**options)
