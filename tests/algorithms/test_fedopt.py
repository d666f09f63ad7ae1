# SPDX-License-Identifier: Apache-2.0
"""FedOpt: the server's step of Algorithm 2 on paper, under each of its three rules."""

from __future__ import annotations

import pytest

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedopt import ALGORITHM
from tiny import HAND, lines

ADAM = {"server_lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}


@pytest.mark.parametrize(
    ("rule", "square"),
    [("adam", 0.99 * 1e-6 + 0.01 * 0.0025), ("yogi", 1e-6 + 0.01 * 0.0025), ("adagrad", 1e-6 + 0.0025)],
)
def test_one_round_on_paper(rule: str, square: float) -> None:
    """The mean change is 0.4 / 4 - 0.2 * 3 / 4 = -0.05, its square 0.0025, m = -0.005. v starts at tau^2 = 1e-6, which
    is less than the square, so that Yogi adds. w = 1 - 0.1 * 0.005 / (sqrt v + 0.001): 0.91801 under Adam.
    """
    played = play(ALGORITHM, lines(), rounds=1, server_optimiser=rule, **HAND, **ADAM)
    assert float(played.state.optimiser["square"]["line.weight"]) == pytest.approx(square, rel=1e-9)
    expected = 1 - 0.1 * 0.005 / (square**0.5 + 1e-3)
    assert float(played.state.params["line.weight"]) == pytest.approx(expected, abs=1e-12)
    if rule == "adam":
        assert expected == pytest.approx(0.91801, abs=1e-5)


@pytest.mark.parametrize(
    ("rule", "square"),
    [("adam", 0.99 + 0.01 * 0.0025), ("yogi", 1 - 0.01 * 0.0025), ("adagrad", 1.0025)],
)
def test_where_the_square_is_small_yogi_takes_it_away(rule: str, square: float) -> None:
    """tau = 1, v_0 = 1: more than the squared change, 0.0025."""
    played = play(ALGORITHM, lines(), rounds=1, server_optimiser=rule, **HAND, **{**ADAM, "tau": 1.0})
    assert float(played.state.optimiser["square"]["line.weight"]) == pytest.approx(square, abs=1e-12)


def test_the_second_round_keeps_a_part_of_the_first() -> None:
    """Adagrad at beta_1 = 0.5, tau = 1, rate 0.1: m = -0.025, v = 1.0025, w = 1 - 0.0025 / (sqrt v + 1) = 0.99875.

    Round 2: slopes 2 (w - 3) and 4 w - 2, so that the mean change is -0.1 (2 (w - 3) / 4 + (4 w - 2) * 3 / 4) = -0.1
    (3.5 w - 3) = d; m = -0.0125 + d / 2, v = 1.0025 + d^2.
    """
    options = {**HAND, "server_lr": 0.1, "beta1": 0.5, "tau": 1.0, "server_optimiser": "adagrad"}
    w = 1 - 0.0025 / (1.0025**0.5 + 1)
    d = -0.1 * (3.5 * w - 3)
    expected = w + 0.1 * (-0.0125 + d / 2) / ((1.0025 + d * d) ** 0.5 + 1)
    played = play(ALGORITHM, lines(), rounds=2, **options)
    assert float(played.state.params["line.weight"]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("batchnorm", ["local", "averaged"])
def test_with_a_large_tau_and_a_rate_of_twice_that_it_is_fedavg(batchnorm: str) -> None:
    """m / (sqrt v + tau) is Delta / (2 tau), as v starts at tau^2: with the rate 2 tau, Delta itself."""
    federation = small_federation(("testnets:Normed",))
    options = {"rounds": 2, "batchnorm": batchnorm}
    opt = play(ALGORITHM, federation, server_optimiser="adagrad", beta1=0.0, tau=1e6, server_lr=2e6, **options)
    avg = play(fedavg.ALGORITHM, federation, **options)
    for branch in ("params", "buffers"):
        for name, value in getattr(avg.state, branch).items():
            assert float((getattr(opt.state, branch)[name] - value).abs().max()) < 1e-12
