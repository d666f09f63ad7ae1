# SPDX-License-Identifier: Apache-2.0
"""Laplace noise on what a client sends: a mechanism, no guarantee, which needs a bound on what a sample can change."""

from __future__ import annotations

from torch import Tensor

from fedloom.core.contract import Home, Noise
from fedloom.core.random import fold, laplace


def laplace_noise(scale: float) -> Noise | None:
    """What a program with such noise on its reply declares."""
    return Noise("laplace", scale) if scale else None


def with_laplace_noise(home: Home, values: Tensor, scale: float) -> Tensor:
    """``values`` with noise of that scale, drawn by the client; as they are for scale 0."""
    if not scale:
        return values
    # -1, as steps fold their numbers, from 0, into the same key
    return values + scale * laplace(fold(home.key, -1), tuple(values.shape), values.dtype)
