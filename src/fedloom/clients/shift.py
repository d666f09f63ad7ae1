# SPDX-License-Identifier: Apache-2.0
"""Feature shifts: the sensor and environment corruptions of IT-PFL-HN section 6.6, for unseen clients or for each.

blur        7 x 7 Gaussian filter, sigma from U(0.1, 2.0) pixels
rotation    counter-clockwise about the centre, angle from U(0, 15) degrees, bilinear, filled with black
brightness  colours times a factor from U(0.5, 1.5)
contrast    away from or towards the image's mean grey by a factor from U(0.5, 1.5)
saturation  away from or towards the pixel's grey by a factor from U(0.5, 1.5)

A fixed strength applies to every image; without one, each image draws its own. With a camera for each client
(``with_cameras``) a client draws one strength for all of its images.

Images are usually normalised already, so "black" and "white" are not 0 and 1. Every shift works on values
mapped to [0, 1] by ``low`` (black) and ``high`` (white), clips to that range, and maps back.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from fedloom.core.errors import ConfigError, DataError, unknown
from fedloom.core.random import stream

_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601, the grey of colour images

Images = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Shift:
    """A shift of images (n, C, H, W) in [0, 1] by strengths (n, 1, 1, 1): drawn from where, at least what."""

    apply: Callable[[Images, Images], Images]
    weakest: float
    strongest: float
    least: float = 0.0


def shifts() -> tuple[str, ...]:
    """The names of all shifts."""
    return tuple(_SHIFTS)


def apply_shift(
    x: Images,
    name: str,
    strength: float | None,
    seed: int,
    *,
    low: float | np.ndarray | None = None,
    high: float | np.ndarray | None = None,
) -> Images:
    """Images ``x`` (n, C, H, W) shifted: a new float32 array.

    ``low`` and ``high`` are the values of black and white in ``x``, one for all channels or one per channel.
    Without them, the least and the greatest value of each channel of ``x`` stand in.
    """
    shift = _SHIFTS.get(name)
    if shift is None:
        raise unknown("shift", name, _SHIFTS)
    _check(x, name, strength)
    if x.size == 0:
        return x.astype(np.float32)
    black, span = _range(x, low, high)
    unit = ((x - black) / span).astype(np.float32)
    if strength is None:
        drawn = stream(seed, "shift", name).uniform(shift.weakest, shift.strongest, len(x))
    else:
        drawn = np.full(len(x), strength)
    shifted = shift.apply(unit, drawn.astype(np.float32).reshape(-1, 1, 1, 1))
    return (np.clip(shifted, 0, 1) * span + black).astype(np.float32)


def with_cameras(
    x: Images,
    rows: Mapping[str, np.ndarray],
    names: str,
    seed: int,
    *,
    low: float | np.ndarray | None = None,
    high: float | np.ndarray | None = None,
) -> Images:
    """Images of which each client's ``rows`` are shifted by strengths of its own: a new array.

    ``names`` are shifts separated by commas, each perhaps with the greatest strength to draw: ``rotation:40,blur``.
    """
    x = x.astype(np.float32)  # a copy
    for name, strongest in map(_ranged, names.split(",")):
        for client, own in rows.items():
            drawn = float(stream(seed, client, "camera", name).uniform(_SHIFTS[name].weakest, strongest))
            x[own] = apply_shift(x[own], name, drawn, seed, low=low, high=high)
    return x


def _ranged(given: str) -> tuple[str, float]:
    """A shift's name, and the greatest strength to draw."""
    name, _, number = given.strip().partition(":")
    shift = _SHIFTS.get(name)
    if shift is None:
        raise unknown("shift", name, _SHIFTS)
    try:
        strongest = float(number) if number else shift.strongest
    except ValueError:
        strongest = math.nan
    if not shift.weakest < strongest < math.inf:
        raise ConfigError(
            f"Got {given!r} as a shift; after the colon give the greatest strength, a number above {shift.weakest:g}."
        )
    return name, strongest


def _blur(x: Images, sigma: Images) -> Images:
    """Rows, then columns, by seven weighted shifted copies each; borders are mirrored."""
    offsets = np.arange(-3, 4, dtype=np.float32)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)  # (n, 1, 1, 7)
    weights /= weights.sum(axis=-1, keepdims=True)
    for axis in (2, 3):
        width = [(3, 3) if a == axis else (0, 0) for a in range(4)]
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, width, mode="reflect"), 7, axis=axis)
        x = np.einsum("nchwk,nk->nchw", windows, weights[:, 0, 0])
    return x


def _rotate(x: Images, degrees: Images) -> Images:
    angle = torch.from_numpy(degrees.reshape(-1)) * (math.pi / 180)
    cos, sin, zero = torch.cos(angle), torch.sin(angle), torch.zeros_like(angle)
    tall = x.shape[2] / x.shape[3]  # the grid runs from -1 to 1 along both sides, whatever their lengths
    rows = (torch.stack([cos, -sin * tall, zero], dim=1), torch.stack([sin / tall, cos, zero], dim=1))
    grid = F.affine_grid(torch.stack(rows, dim=1), list(x.shape), align_corners=False)
    return F.grid_sample(torch.from_numpy(x), grid, padding_mode="zeros", align_corners=False).numpy()


def _brighten(x: Images, factor: Images) -> Images:
    return x * factor


def _contrast(x: Images, factor: Images) -> Images:
    return _blend(x, _grey(x).mean(axis=(2, 3), keepdims=True), factor)


def _saturate(x: Images, factor: Images) -> Images:
    return _blend(x, _grey(x), factor)


def _blend(x: Images, base: Images, factor: Images) -> Images:
    """Factor 1 is the image, 0 is the base, more than 1 is beyond the image."""
    return base + factor * (x - base)


def _grey(x: Images) -> Images:
    """(n, 1, H, W)"""
    weights = _LUMA if x.shape[1] == 3 else np.full(x.shape[1], 1 / x.shape[1], dtype=np.float32)
    grey: Images = np.einsum("nchw,c->nhw", x, weights)[:, None]
    return grey


_SHIFTS = {
    "blur": Shift(_blur, 0.1, 2.0, least=1e-3),
    "rotation": Shift(_rotate, 0.0, 15.0, least=-360.0),
    "brightness": Shift(_brighten, 0.5, 1.5),
    "contrast": Shift(_contrast, 0.5, 1.5),
    "saturation": Shift(_saturate, 0.5, 1.5),
}


def _check(x: Images, name: str, strength: float | None) -> None:
    if x.ndim != 4:
        raise DataError(
            f"Shift {name!r} needs images of shape (n, C, H, W) but got an array of shape {x.shape}; leave "
            "the shift out for data that are not images."
        )
    if name == "saturation" and x.shape[1] != 3:
        raise DataError(
            f"Shift 'saturation' needs colour images with 3 channels but got {x.shape[1]}; use another "
            "shift, such as 'contrast'."
        )
    least = _SHIFTS[name].least
    if strength is not None and not least <= strength < math.inf:
        raise ConfigError(f"Got strength {strength} for shift {name!r}; give a finite number of at least {least:g}.")


def _range(x: Images, low: float | np.ndarray | None, high: float | np.ndarray | None) -> tuple[Images, Images]:
    """Black and the distance to white, both (C or 1, 1, 1)."""
    black = x.min(axis=(0, 2, 3)) if low is None else np.atleast_1d(low)
    white = x.max(axis=(0, 2, 3)) if high is None else np.atleast_1d(high)
    span = np.asarray(white - black, dtype=np.float32)
    if (span < 0).any() or (low is not None and high is not None and (span == 0).any()):
        raise ConfigError(f"Got low={low} and high={high}; black (low) must lie below white (high) in every channel.")
    span = np.where(span == 0, 1, span)  # a channel of one value only
    return np.asarray(black, dtype=np.float32).reshape(-1, 1, 1), span.astype(np.float32).reshape(-1, 1, 1)
