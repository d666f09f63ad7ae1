# SPDX-License-Identifier: Apache-2.0
"""FedSAM: the two gradients of a step on paper, and what the first of them alone decides."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedsam import ALGORITHM
from tiny import HAND, Ears, lines


def test_one_round_on_paper() -> None:
    """rho = 0.5. First client: g = -4, uphill is 0.5; there 2 (0.5 - 3) = -5 leads from 1 to 1.5.

    Second: g = 2, uphill is 1.5; there 4 * 1.5 - 2 = 4 leads from 1 to 0.6. Together 1 + 0.5 / 4 - 0.4 * 3 / 4 = 0.825.
    """
    played = play(ALGORITHM, lines(), rounds=1, radius=0.5, **HAND)
    assert float(played.state.params["line.weight"]) == pytest.approx(0.825, abs=1e-12)


def test_a_client_steps_as_a_plain_torch_loop_does() -> None:
    """Two gradients by autograd on each batch; the momentum takes the second one."""
    federation, ears = small_federation(("testnets:Normed",)), Ears()
    play(ALGORITHM, federation, rounds=1, wrap=ears, radius=0.3, clip=0.0)
    model = federation.roster["0"].model
    module = model.module(model.init(play(ALGORITHM, federation, rounds=0).setup.common_seed), model.fresh_buffers())
    module.train()
    start = {name: value.detach().clone() for name, value in module.named_parameters()}
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-5)
    for rows in ears.plans[0]["0"].rows:
        x, y = federation.x[rows], federation.y[rows]
        before = [p.detach().clone() for p in module.parameters()]
        grads = torch.autograd.grad(torch.nn.functional.cross_entropy(module(x), y), list(module.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        statistics = {name: value.clone() for name, value in module.named_buffers()}
        with torch.no_grad():
            for p, g in zip(module.parameters(), grads):
                p.add_(g, alpha=float(0.3 / norm))
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for p, old in zip(module.parameters(), before):
                p.copy_(old)
            for name, value in module.named_buffers():
                value.copy_(statistics[name])  # they moved once
        optimiser.step()
    change = ears.replies[0]["0"]["delta"]
    for name, value in module.named_parameters():
        torch.testing.assert_close(change[name], value.detach() - start[name], rtol=0, atol=1e-12)


def test_running_statistics_are_those_of_one_pass() -> None:
    played = play(ALGORITHM, small_federation(("testnets:Normed",)), rounds=1)
    assert (
        int(played.memory["0"]["buffers"]["norm.num_batches_tracked"]) == 6
    )  # 9 samples: 3 batches in each of 2 passes


@pytest.mark.parametrize("batchnorm", ["local", "averaged"])
@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed", "testnets:Dropping"])
def test_with_no_radius_it_is_fedavg(model: str, batchnorm: str) -> None:
    federation = small_federation((model,))
    one, other = (
        play(method, federation, rounds=3, batchnorm=batchnorm, **extra).state
        for method, extra in ((ALGORITHM, {"radius": 0.0}), (fedavg.ALGORITHM, {}))
    )
    for branch in ("params", "buffers"):
        for name, value in getattr(other, branch).items():
            assert torch.equal(getattr(one, branch)[name], value)


def test_where_there_is_no_slope_it_stays() -> None:
    """At its minimum the direction is 0 / (0 + 1e-12), not 0 / 0."""
    played = play(ALGORITHM, lines([[(1, 1)]]), rounds=2, radius=0.5, **HAND)
    assert float(played.state.params["line.weight"]) == 1.0
