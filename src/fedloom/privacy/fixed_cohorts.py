# SPDX-License-Identifier: Apache-2.0
"""Privacy loss of cohorts of a fixed size, drawn without replacement, when one client's data are replaced by others.

Let a share gamma of the clients be drawn, each of whom moves the noised sum by the bound C at most. With the client
drawn, the sum is up to 2 C from that of the other data, and from those with somebody else in its place. By joint
convexity (Balle, Barthe, Gaboardi: Privacy amplification by subsampling, NeurIPS 2018) a round has, for epsilon >= 0,

    delta'(epsilon') = gamma delta(epsilon),    exp(epsilon') = 1 + gamma (exp(epsilon) - 1),

where delta is that of Gaussian noise for a distance of 2 C; and there are data that reach it. As data and replaced data
can change places, delta'(-epsilon') = 1 - exp(-epsilon') + exp(-epsilon') delta'(epsilon'). Both together are convex in
exp(epsilon'), hence what some pair of distributions has that dominates the round, and rounds compose as such pairs do
(Zhu, Dong, Wang: Optimal accounting of differential privacy via characteristic function, AISTATS 2022). The pair is
rounded upwards (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi: Connect the dots, PoPETs 2022).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

TAIL = 10.0
"""Deviations of the noise beyond which a loss counts as infinite: of probability 1e-23."""


def loss_of_round(noise: float, share: float, step: float) -> Any:
    """The privacy loss distribution of one round, on multiples of ``step``; ``noise`` is in units of the bound."""
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    apart = 2 / noise
    largest = math.log1p(share * math.expm1(apart**2 / 2 + TAIL * apart))
    losses = np.arange(math.ceil(largest / step) + 1)
    gained = share * _gaussian(np.log1p(np.expm1(losses * step) / share), apart)
    shrunk = np.exp(-losses[:0:-1] * step)
    lost = 1 - shrunk + shrunk * gained[:0:-1]
    # rounding may leave them in disorder
    deltas = np.minimum.accumulate(np.concatenate([lost, gained]).clip(0, 1))
    pmf = pld_pmf.create_pmf_pessimistic_connect_dots(step, np.concatenate([-losses[:0:-1], losses]), deltas)
    return privacy_loss_distribution.PrivacyLossDistribution(pmf)


def _gaussian(epsilons: Floats, apart: float) -> Floats:
    """delta of two normal distributions of deviation 1, so far apart (``gaussian.delta_of``)."""
    from scipy.special import log_ndtr, ndtr

    near, far = apart / 2 - epsilons / apart, -apart / 2 - epsilons / apart
    found: Floats = ndtr(near) - np.exp(epsilons + log_ndtr(far))
    return found
