# SPDX-License-Identifier: Apache-2.0
"""Feature shifts against references, and what they refuse."""

import numpy as np
import pytest
from scipy import ndimage

from fedloom.clients.shift import apply_shift, shifts, with_cameras
from fedloom.core.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
IMAGES = RNG.random((6, 3, 16, 12)).astype(np.float32)


@pytest.mark.parametrize("name", shifts())
def test_shifts_are_seeded_and_keep_shape_range_and_input(name: str) -> None:
    before = IMAGES.copy()
    out = apply_shift(IMAGES, name, None, 1, low=0, high=1)
    assert out.shape == IMAGES.shape and out.dtype == np.float32
    assert out.min() >= 0 and out.max() <= 1
    assert (out == apply_shift(IMAGES, name, None, 1, low=0, high=1)).all()
    assert (out != apply_shift(IMAGES, name, None, 2, low=0, high=1)).any()
    assert (before == IMAGES).all()


@pytest.mark.parametrize(
    ("name", "strength"), [("blur", 1.3), ("rotation", 10), ("contrast", 0.6), ("saturation", 1.4)]
)
def test_normalised_images_are_shifted_as_raw_ones(name: str, strength: float) -> None:
    mean = np.array([0.5, 0.4, 0.3], dtype=np.float32)
    std = np.array([0.2, 0.3, 0.25], dtype=np.float32)
    scaled = (IMAGES - mean.reshape(3, 1, 1)) / std.reshape(3, 1, 1)
    out = apply_shift(scaled, name, strength, 0, low=-mean / std, high=(1 - mean) / std)
    raw = apply_shift(IMAGES, name, strength, 0, low=0, high=1)
    assert np.allclose(out * std.reshape(3, 1, 1) + mean.reshape(3, 1, 1), raw, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "strength"),
    [("blur", 1e-3), ("rotation", 0), ("brightness", 1), ("contrast", 1), ("saturation", 1)],
)
def test_neutral_strengths_change_nothing(name: str, strength: float) -> None:
    assert np.allclose(apply_shift(IMAGES, name, strength, 0), IMAGES, atol=1e-5)


def test_blur_is_a_gaussian_of_seven_by_seven() -> None:
    out = apply_shift(IMAGES, "blur", 1.5, 0, low=0, high=1)
    expected = ndimage.gaussian_filter(IMAGES, 1.5, mode="mirror", radius=3, axes=(2, 3))
    assert np.allclose(out, expected, atol=1e-5)


def test_rotation_is_counter_clockwise() -> None:
    square = IMAGES[..., :12, :]
    out = apply_shift(square, "rotation", 90, 0, low=0, high=1)
    assert np.allclose(out, np.rot90(square, axes=(2, 3)), atol=1e-4)


def test_rotation_of_oblong_images_is_rigid_and_fills_with_black() -> None:
    out = apply_shift(np.ones((1, 1, 16, 12), dtype=np.float32), "rotation", 90, 0, low=-1, high=1)
    assert np.allclose(out[0, 0, 2:14], 1, atol=1e-4)
    assert np.allclose(out[0, 0, [0, 1, 14, 15]], -1, atol=1e-4)


def test_brightness_contrast_and_saturation() -> None:
    bright = apply_shift(IMAGES, "brightness", 1.5, 0, low=0, high=1)
    assert np.allclose(bright, np.minimum(IMAGES * 1.5, 1), atol=1e-6)
    grey = np.einsum("nchw,c->nhw", IMAGES, [0.299, 0.587, 0.114])[:, None]
    flat = apply_shift(IMAGES, "contrast", 0, 0, low=0, high=1)
    assert np.allclose(flat, grey.mean(axis=(2, 3), keepdims=True) + 0 * IMAGES, atol=1e-5)
    faded = apply_shift(IMAGES, "saturation", 0.5, 0, low=0, high=1)
    assert np.allclose(faded, (IMAGES + grey) / 2, atol=1e-5)


@pytest.mark.parametrize(("name", "low", "high"), [("brightness", 0.5, 1.5), ("contrast", 0.5, 1.5)])
def test_each_image_draws_its_own_factor(name: str, low: float, high: float) -> None:
    ramp = np.tile(np.linspace(0.4, 0.6, 64, dtype=np.float32).reshape(1, 1, 8, 8), (200, 1, 1, 1))
    out = apply_shift(ramp, name, None, 0, low=0, high=1)
    factors = np.ptp(out, axis=(1, 2, 3)) / 0.2
    assert factors.min() >= low - 1e-4 and factors.max() <= high + 1e-4
    assert np.ptp(factors) > 0.9


def test_grey_small_constant_and_no_images() -> None:
    for name in ("blur", "rotation", "brightness", "contrast"):
        assert apply_shift(IMAGES[:, :1, :2, :1], name, None, 0).shape == (6, 1, 2, 1)
        assert np.isfinite(apply_shift(np.zeros((2, 2, 5, 5), dtype=np.float32), name, None, 0)).all()
        assert apply_shift(IMAGES[:0], name, None, 0).shape == (0, 3, 16, 12)


def test_errors() -> None:
    with pytest.raises(ConfigError, match=r"Unknown shift 'blurr'; did you mean 'blur'"):
        apply_shift(IMAGES, "blurr", None, 0)
    with pytest.raises(DataError, match=r"needs images of shape \(n, C, H, W\) but got an array of shape \(6, 5\)"):
        apply_shift(np.zeros((6, 5), dtype=np.float32), "blur", None, 0)
    with pytest.raises(DataError, match=r"'saturation' needs colour images with 3 channels but got 1; use another"):
        apply_shift(IMAGES[:, :1], "saturation", None, 0)
    with pytest.raises(ConfigError, match=r"Got strength -1 for shift 'contrast'; give a finite number of at least 0"):
        apply_shift(IMAGES, "contrast", -1, 0)
    with pytest.raises(ConfigError, match=r"Got strength nan for shift 'rotation'; give a finite number"):
        apply_shift(IMAGES, "rotation", float("nan"), 0)
    with pytest.raises(ConfigError, match=r"Got low=1 and high=0; black \(low\) must lie below white"):
        apply_shift(IMAGES, "blur", None, 0, low=1, high=0)


def test_each_client_has_a_camera_of_its_own():
    """Brightness by a factor from U(0.5, 2): one for all images of a client, another for another."""
    x = np.random.default_rng(0).uniform(0.1, 0.4, (6, 1, 4, 4)).astype(np.float32)
    rows = {"a": np.array([0, 2, 4]), "b": np.array([1, 3, 5])}
    shifted = with_cameras(x, rows, "brightness:2", 1, low=0, high=1)
    factors = (shifted / x).reshape(6, -1)
    assert np.allclose(factors, factors[:, :1], rtol=1e-4)
    a, b = factors[0, 0], factors[1, 0]
    assert np.allclose(factors[:, 0], [a, b] * 3, rtol=1e-4) and abs(a - b) > 0.01
    assert min(a, b) >= 0.5 and max(a, b) <= 2
    alone = with_cameras(x, {"b": rows["b"]}, "brightness:2", 1, low=0, high=1)
    assert np.array_equal(alone[rows["b"]], shifted[rows["b"]]) and np.array_equal(alone[rows["a"]], x[rows["a"]])


@pytest.mark.parametrize("given", ["rotation:x", "brightness:0.4", "rotation:inf", "rotation:nan", "", "spin"])
def test_cameras_that_cannot_be_are_refused(given):
    x, rows = np.zeros((2, 1, 4, 4), np.float32), {"a": np.arange(2)}
    with pytest.raises(ConfigError, match=r"Unknown shift|greatest strength"):
        with_cameras(x, rows, given, 0, low=0, high=1)
