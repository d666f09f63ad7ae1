# SPDX-License-Identifier: Apache-2.0
"""The Gaussian mechanism: how much noise makes a value (epsilon, delta)-differentially private.

``Delta`` is the sensitivity: the largest Euclidean distance between the values of two data sets that differ in one
sample. Two calibrations of sigma: the classical one (Dwork and Roth 2014, theorem A.1), proven for epsilon < 1 only,
and the exact one (Balle and Wang: Improving the Gaussian mechanism for differential privacy, ICML 2018, theorem 8),
which holds for every epsilon and is never larger where both hold.

Limits: the draws are those of ``core.random``, whose keys come from the run's seed. Whoever knows the seed can take the
noise away again, so the guarantee holds against readers of a simulation's results, and in a federation of machines
only if each draws its keys from a secret of its own. Draws reach 5.8 sigma (24 random bits), which adds less than 1e-8
to delta; floating-point rounding (Mironov 2012) is not accounted for.
"""

from __future__ import annotations

import math
from functools import cache

from torch import Tensor

from fedloom.core.errors import ConfigError
from fedloom.core.random import Key, normal


def delta_of(epsilon: float, sigma: float, sensitivity: float = 1.0) -> float:
    """The smallest delta for which noise of deviation ``sigma`` is (epsilon, delta)-private (their theorem 8).

    Phi(Delta / 2 sigma - epsilon sigma / Delta) - e^epsilon Phi(-Delta / 2 sigma - epsilon sigma / Delta).
    """
    from scipy.special import log_ndtr, ndtr  # slow to import, and few need it

    ratio = sigma / sensitivity
    lost, kept = 0.5 / ratio - epsilon * ratio, -0.5 / ratio - epsilon * ratio
    # in logarithms, as e^epsilon alone overflows
    return float(ndtr(lost) - math.exp(epsilon + log_ndtr(kept)))


@cache
def analytic_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """The smallest sigma that is (epsilon, delta)-private: the root of ``delta_of``, which falls with sigma."""
    from scipy.optimize import brentq

    def excess(log_ratio: float) -> float:
        return delta_of(epsilon, math.exp(log_ratio)) - delta

    # from a millionth to a billion sensitivities: beyond any epsilon and delta in use
    least, most = math.log(1e-6), math.log(1e9)
    if not excess(most) < 0 < excess(least):
        raise ConfigError(
            f"No noise from 1e-6 to 1e9 sensitivities gives epsilon {epsilon:g} with delta {delta:g} exactly; "
            "give values that are nearer to 1."
        )
    return sensitivity * math.exp(brentq(excess, least, most, xtol=1e-12))


def classical_sigma(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """sqrt(2 ln(1.25 / delta)) Delta / epsilon, for comparison with papers."""
    return math.sqrt(2.0 * math.log(1.25 / delta)) * sensitivity / epsilon


def perturb(value: Tensor, epsilon: float, delta: float, sensitivity: Tensor, key: Key) -> Tensor:
    """``value`` plus the noise that makes it private; inside a client program, with a key of the client's own."""
    sigma = analytic_sigma(epsilon, delta) * sensitivity
    return value + sigma * normal(key, tuple(value.shape), value.dtype)
