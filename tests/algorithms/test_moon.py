# SPDX-License-Identifier: Apache-2.0
"""MOON: the contrast on paper, the first round and the second, and what is kept for next time."""

from __future__ import annotations

from math import exp, log

import pytest
import torch
import torch.nn.functional as F

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.moon import ALGORITHM, contrast, direction
from tiny import Ears


def compared(z: torch.Tensor, common: torch.Tensor, before: torch.Tensor, temperature: float) -> torch.Tensor:
    return contrast(z, direction(before) - direction(common), temperature)


def test_the_contrast_and_its_slope_on_paper() -> None:
    """z = (1, 0) is as the last model has it and at a right angle to the global one: s_p = 1, s_g = 0, tau = 0.5.

    log(1 + exp(2)) = 2.126928. s_p is at its top, and s_g grows by 1 along (0, 1): the slope is (0, -2 / (1 + exp(-2)))
    = (0, -1.761594). The other way round it is log(1 + exp(-2)) = 0.126928; with both equal, log 2, without a slope.
    """
    z = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    one, other = (torch.tensor([row], dtype=torch.float64) for row in ((0.0, 3.0), (2.0, 0.0)))
    value = compared(z, one, other, 0.5)
    (slope,) = torch.autograd.grad(value.sum(), z)
    assert float(value.detach()) == pytest.approx(log(1 + exp(2)), abs=1e-9)
    assert slope[0].tolist() == pytest.approx([0, -2 / (1 + exp(-2))], abs=1e-9)
    (flat,) = torch.autograd.grad(compared(z, one, one, 0.5).sum(), z)
    assert flat.abs().max() < 1e-12
    z = z.detach()
    assert float(compared(z, other, one, 0.5)) == pytest.approx(log(1 + exp(-2)), abs=1e-9)
    assert float(compared(z, one, one, 0.5)) == pytest.approx(log(2), abs=1e-12)


def test_it_is_stable_at_low_temperatures() -> None:
    z = torch.tensor([[1.0, 0.0]])
    assert float(compared(z, -z, z, 1e-3)) == pytest.approx(2000.0) and float(compared(z, z, -z, 1e-3)) == 0.0


def gap(one, other) -> float:
    return max(float((one.state.params[name] - value).abs().max()) for name, value in other.state.params.items())


@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed", "testnets:Dropping"])
@pytest.mark.parametrize("batchnorm", ["local", "averaged"])
def test_without_the_contrast_it_is_fedavg(model: str, batchnorm: str) -> None:
    federation = small_federation((model,))
    one, other = (
        play(method, federation, rounds=3, batchnorm=batchnorm, **extra)
        for method, extra in ((ALGORITHM, {"mu": 0.0}), (fedavg.ALGORITHM, {}))
    )
    assert gap(one, other) < 1e-12


def test_a_clients_first_round_is_fedavgs_and_its_second_is_not() -> None:
    """Client 4 takes part for the first time in round 2, alone."""
    federation = small_federation(("lenet:kernels=2",))
    for cohorts, same in (([["0", "1"], ["4"]], True), ([["0", "1"], ["0"]], False)):
        one, other = (
            play(method, federation, cohorts=cohorts, **extra)
            for method, extra in ((ALGORITHM, {"mu": 5.0}), (fedavg.ALGORITHM, {}))
        )
        assert (gap(one, other) < 1e-12) == same


@pytest.mark.parametrize("batchnorm", ["local", "averaged"])
def test_the_second_round_is_that_of_a_plain_torch_loop(batchnorm: str) -> None:
    federation, ears = small_federation(("testnets:Normed",)), Ears()
    options = {"mu": 2.0, "temperature": 0.5, "clip": 0.0, "batchnorm": batchnorm}
    first = play(ALGORITHM, federation, rounds=1, **options)
    play(ALGORITHM, federation, rounds=2, wrap=ears, **options)
    model, memory = federation.roster["0"].model, first.memory["0"]
    start = first.state.buffers if batchnorm == "averaged" else memory["buffers"]
    module, common = (model.module(first.state.params, start) for _ in range(2))
    before = model.module(memory["previous"]["params"], memory["previous"]["buffers"])
    assert not torch.equal(before.out.weight, common.out.weight)
    features = lambda net, x: F.relu(net.norm(net.conv(x))).flatten(1)  # noqa: E731
    module.train()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-5)
    for rows in ears.plans[1]["0"].rows:
        x, y = federation.x[rows], federation.y[rows]
        z = features(module, x)
        with torch.no_grad():
            others = features(common, x), features(before, x)
        near, far = (F.cosine_similarity(z, other) / 0.5 for other in others)
        apart = -torch.log(near.exp() / (near.exp() + far.exp()))
        optimiser.zero_grad()
        (F.cross_entropy(module.out(z), y) + 2.0 * apart.mean()).backward()
        optimiser.step()
    change = ears.replies[1]["0"]["delta"]
    for name, value in module.named_parameters():
        torch.testing.assert_close(change[name], value.detach() - first.state.params[name], rtol=0, atol=1e-11)


def test_the_model_of_last_time_is_kept_however_long_ago_and_the_global_one_deployed() -> None:
    federation, ears = small_federation(("lenet:kernels=2",)), Ears()
    played = play(ALGORITHM, federation, rounds=3, cohorts=[["0", "1"], ["1"], ["1"]], wrap=ears)
    start = ALGORITHM.init(played.setup).params
    for name, change in ears.replies[0]["0"]["delta"].items():
        kept = played.memory["0"]["previous"]["params"][name]
        torch.testing.assert_close(kept, start[name] + change, rtol=0, atol=1e-12)
    assert played.deployed("0")["params"] == played.state.params
    assert ears.up == {f"delta/{name}" for name in start} | {"num_samples", "loss"}
