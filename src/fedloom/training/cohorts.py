# SPDX-License-Identifier: Apache-2.0
"""Who of so many clients a round asks. What ``--dp-noise`` promises, and what canaries test, rests on it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedloom.privacy.ledger import Sampling


def drawn(draw: np.random.Generator, clients: int, size: float, sampling: Sampling) -> npt.NDArray[np.int64]:
    """The rows of those drawn, in order: ``size`` of them, or ``size`` on average, each by itself (``poisson``)."""
    if sampling == "poisson":
        return np.flatnonzero(draw.random(clients) * clients < size)
    return np.sort(draw.choice(clients, min(int(size), clients), replace=False))
