# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from fedloom.reports.statistics import (
    Interval,
    nearest,
    neighbours,
    over_clients,
    over_seeds,
    principal,
    shares,
    wilson,
    worst_tenth,
)


def test_wilson_on_paper():
    """7 of 10 right: z = 1.96, n + z^2 = 13.8415; centre (7 + 1.92073) / 13.8415 = 0.64449,
    half 1.96 sqrt(0.7 0.3 10 + 0.960365) / 13.8415 = 0.24770."""
    low, high = wilson(0.7, 10)
    assert low == pytest.approx(0.39678, abs=2e-5)
    assert high == pytest.approx(0.89221, abs=2e-5)


@pytest.mark.parametrize(("share", "samples"), [(0.0, 3), (1.0, 3), (1.0, 1), (0.5, 0)])
def test_wilson_stays_within_a_share_and_around_it(share, samples):
    low, high = wilson(share, samples)
    assert 0 <= low <= share <= high <= 1
    assert high - low > 0.4


def test_an_interval_over_seeds_on_paper():
    """1, 2, 3: mean 2, deviation 1, standard error 1 / sqrt 3; t of 2 degrees is 4.30265: 2.48414 each way."""
    assert over_seeds([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2 - 2.48414, 2 + 2.48414), abs=1e-4)


def test_one_seed_has_no_interval():
    assert over_seeds([0.5]) == Interval(0.5, None, None)
    assert not Interval(0.5, None, None).excludes_zero()
    assert Interval(0.5, 0.1, 0.9).excludes_zero() and Interval(-0.5, -0.9, -0.1).excludes_zero()
    assert not Interval(0.5, -0.1, 0.9).excludes_zero()


def test_a_bootstrap_over_clients_is_repeatable_and_narrows_with_clients():
    values = np.random.default_rng(0).normal(size=40)
    few, many = over_clients(values.tolist()), over_clients(np.tile(values, 25).tolist())
    assert few == over_clients(values.tolist())
    assert few.low < few.mean < few.high
    assert many.high - many.low < (few.high - few.low) / 3


@pytest.mark.parametrize(("better", "expected"), [(True, 0.5), (False, 18.5)])
def test_the_worst_tenth_is_the_low_or_the_high_end(better, expected):
    assert worst_tenth(np.arange(20.0), better) == expected


def test_the_nearest_by_total_variation():
    """(1, 0) is 0.5 from (0.5, 0.5) and 1 from (0, 1)."""
    at, away = nearest(shares([[4, 0]]), shares([[0, 7], [2, 2]]))
    assert (at.tolist(), away.tolist()) == ([1], [0.5])
    assert shares([[0, 0]]).tolist() == [[0.0, 0.0]]


def test_principal_components_on_paper():
    """Points on the line (1, 1): all variance is along it, and (3, 3) lies sqrt 2 further than the mean (2, 2)."""
    (own, other), explained = principal(np.array([[1.0, 1], [2, 2], [3, 3]]), np.array([[2.0, 2]]))
    assert explained == pytest.approx((1.0, 0.0))
    np.testing.assert_allclose(own[:, 0], [-(2**0.5), 0, 2**0.5], atol=1e-12)
    np.testing.assert_allclose(other, [[0, 0]], atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 4), (2, 1), (5, 1)])
def test_principal_components_of_next_to_nothing(shape):
    (points,), explained = principal(np.random.default_rng(0).normal(size=shape))
    assert points.shape == (shape[0], 2)
    assert np.isfinite(points).all() and 0 <= sum(explained) <= 1 + 1e-9


def test_a_map_of_neighbours_is_repeatable():
    points = np.random.default_rng(0).normal(size=(12, 3))
    one, perplexity = neighbours(points)
    assert perplexity == 3
    assert one.shape == (12, 2)
    np.testing.assert_array_equal(one, neighbours(points)[0])
