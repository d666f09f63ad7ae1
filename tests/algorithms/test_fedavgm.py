# SPDX-License-Identifier: Apache-2.0
"""FedAvgM: the server's velocity on paper."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedavgm import ALGORITHM
from tiny import HAND, lines


def test_two_rounds_on_paper() -> None:
    """Round 1: u = 0.4 / 4 - 0.2 * 3 / 4 = -0.05, w = 0.95. Round 2: slopes 2 (0.95 - 3) = -4.1 and 4 * 0.95 - 2 = 1.8,
    the mean change 0.41 / 4 - 0.18 * 3 / 4 = -0.0325; u = 0.9 (-0.05) - 0.0325 = -0.0775, w = 0.8725.
    """
    one, two = (play(ALGORITHM, lines(), rounds=n, **HAND) for n in (1, 2))
    assert float(one.state.params["line.weight"]) == pytest.approx(0.95, abs=1e-12)
    assert float(two.state.params["line.weight"]) == pytest.approx(0.8725, abs=1e-12)


def test_the_servers_rate_scales_the_step_and_not_the_velocity() -> None:
    """At 0.5: w = 0.975; slopes -4.05 and 1.9, mean change 0.10125 - 0.1425 = -0.04125, u = -0.08625, w = 0.931875."""
    played = play(ALGORITHM, lines(), rounds=2, server_lr=0.5, **HAND)
    assert float(played.state.params["line.weight"]) == pytest.approx(0.931875, abs=1e-12)


@pytest.mark.parametrize("batchnorm", ["local", "averaged"])
def test_without_momentum_it_is_fedavg(batchnorm: str) -> None:
    federation = small_federation(("testnets:Normed",))
    played = play(ALGORITHM, federation, rounds=3, server_momentum=0.0, batchnorm=batchnorm)
    avg = play(fedavg.ALGORITHM, federation, rounds=3, batchnorm=batchnorm)
    for branch in ("params", "buffers"):
        for name, value in getattr(avg.state, branch).items():
            torch.testing.assert_close(getattr(played.state, branch)[name], value, rtol=0, atol=1e-15)
