# SPDX-License-Identifier: Apache-2.0
"""The Gaussian mechanism: its calibration by hand, by numeric integration and by counting draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from fedloom.core.errors import ConfigError
from fedloom.core.random import fold, key
from fedloom.privacy.gaussian import analytic_sigma, classical_sigma, delta_of, perturb

GRID = [(0.1, 1e-2), (0.3, 0.01), (0.5, 1e-5), (1.0, 1e-5), (4.0, 1e-3), (20.0, 1e-6), (100.0, 1e-6)]


def integrated_delta(epsilon: float, sigma: float, sensitivity: float) -> float:
    """The worst set's excess, from the definition: the integral of max(0, p(x) - e^epsilon q(x)).

    p = N(Delta, sigma^2) exceeds e^epsilon q, q = N(0, sigma^2), where x > sigma^2 epsilon / Delta + Delta / 2.
    """
    start = sigma**2 * epsilon / sensitivity + sensitivity / 2

    def excess(x: float) -> float:
        return norm.pdf(x, sensitivity, sigma) - math.exp(epsilon + norm.logpdf(x, 0, sigma))

    return quad(excess, start, start + 40 * sigma, epsabs=1e-14, epsrel=1e-10, limit=500)[0]


def test_delta_of_one_sensitivity_of_noise_by_hand() -> None:
    """sigma = Delta = 1, epsilon = 1/2: Phi(0) - e^0.5 Phi(-1) = 0.5 - 1.648721 * 0.158655 = 0.238421."""
    assert delta_of(0.5, 1.0) == pytest.approx(0.238421, abs=1e-6)


def test_no_epsilon_leaves_the_overlap_of_two_normals() -> None:
    """epsilon = 0: Phi(Delta / 2 sigma) - Phi(-Delta / 2 sigma), the total variation; at sigma = Delta / 2 0.682689."""
    assert delta_of(0.0, 1.5, 3.0) == pytest.approx(0.682689, abs=1e-6)


@pytest.mark.parametrize(("epsilon", "delta"), GRID)
@pytest.mark.parametrize("sensitivity", [1.0, 0.02])
def test_the_exact_sigma_spends_delta_and_no_more(epsilon: float, delta: float, sensitivity: float) -> None:
    sigma = analytic_sigma(epsilon, delta, sensitivity)
    assert delta_of(epsilon, sigma, sensitivity) == pytest.approx(delta, rel=1e-6)
    assert integrated_delta(epsilon, sigma, sensitivity) == pytest.approx(delta, rel=1e-4)
    assert integrated_delta(epsilon, 0.99 * sigma, sensitivity) > delta


def test_classical_sigma_by_hand() -> None:
    """epsilon = 0.5, delta = 1e-5: sqrt(2 ln 125,000) = sqrt(23.4721) = 4.84481; times Delta / epsilon = 4: 19.3792."""
    assert classical_sigma(0.5, 1e-5, 2.0) == pytest.approx(19.3792, abs=1e-3)


@pytest.mark.parametrize(("epsilon", "delta"), [(e, d) for e, d in GRID if e < 1])
def test_the_exact_sigma_is_smaller_than_the_classical_one_where_both_hold(epsilon: float, delta: float) -> None:
    assert analytic_sigma(epsilon, delta) < classical_sigma(epsilon, delta)
    assert integrated_delta(epsilon, classical_sigma(epsilon, delta), 1.0) < delta


def test_the_classical_sigma_is_not_private_enough_for_a_large_epsilon() -> None:
    assert delta_of(100.0, classical_sigma(100.0, 1e-6)) > 1e-6


def test_noise_has_the_deviation_asked_for_and_differs_from_key_to_key() -> None:
    """40,000 draws: the deviation of the sample deviation is 1 / sqrt(80,000) = 0.35 per cent."""
    sensitivity = torch.tensor(0.5, dtype=torch.float64)
    value = torch.full((40_000,), 3.0, dtype=torch.float64)
    noise = perturb(value, 1.0, 1e-3, sensitivity, key("noise")) - value
    sigma = analytic_sigma(1.0, 1e-3, 0.5)
    assert float(noise.std()) == pytest.approx(sigma, rel=0.015)
    assert abs(float(noise.mean())) < 5 * sigma / 200
    other = perturb(value, 1.0, 1e-3, sensitivity, fold(key("noise"), 1)) - value
    assert abs(np.corrcoef(noise, other)[0, 1]) < 0.025


def test_no_event_is_more_likely_than_the_guarantee_allows() -> None:
    """Thresholds on 200,000 outputs at two neighbours one sensitivity apart: P(A) <= e^epsilon P(B) + delta."""
    epsilon, delta, number = 0.7, 0.05, 200_000
    zero, one = torch.zeros(number, dtype=torch.float64), torch.ones(number, dtype=torch.float64)
    unit = torch.ones((), dtype=torch.float64)
    here = perturb(zero, epsilon, delta, unit, key("here")).numpy()
    there = perturb(one, epsilon, delta, unit, key("there")).numpy()
    thresholds = np.linspace(-6, 8, 60)
    gap = [(there > t).mean() - math.exp(epsilon) * (here > t).mean() for t in thresholds]
    # the worst event spends delta, up to the noise of counting
    assert max(gap) == pytest.approx(delta, abs=0.006)


@pytest.mark.parametrize(("epsilon", "delta"), [(1e15, 1e-12), (1e-12, 1e-12)])
def test_a_guarantee_that_no_noise_gives_is_refused(epsilon: float, delta: float) -> None:
    with pytest.raises(ConfigError, match="No noise from 1e-6 to 1e9 sensitivities"):
        analytic_sigma(epsilon, delta)
