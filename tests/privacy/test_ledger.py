# SPDX-License-Identifier: Apache-2.0
"""Epsilon is what other accountants say it is; releases count once, or twice where they were drawn twice."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fedloom.core.errors import NeedsError
from fedloom.privacy.gaussian import delta_of
from fedloom.privacy.ledger import Release, epsilon, releases_of, rounds_within
from fedloom.tables.recipe import read

pytest.importorskip("dp_accounting", reason="needs the extra privacy")


def release(noise: float, clients: int, size: float, times: int, sampling: str = "poisson", **more) -> Release:
    return Release(1, "training", noise, sampling, clients, size, times=times, **more)


@pytest.mark.parametrize(
    ("rate", "noise", "times", "delta", "expected"),
    [(0.2, 1.0, 500, 1e-3, 30.61), (0.02, 1.0, 5000, 1e-3, 6.96), (0.01, 1.0, 1000, 1e-6, 2.13)],
)
def test_epsilon_is_that_of_two_other_accountants(rate, noise, times, delta, expected) -> None:
    """Figures on which Google's PLD and Opacus' PRV accountant agree to 0.5%."""
    assert epsilon([release(noise, 1000, 1000 * rate, times)], delta) == pytest.approx(expected, rel=5e-3)


def test_the_recipe_names_its_rows_by_what_they_spend() -> None:
    recipe = read(Path(__file__).parents[2] / "recipes" / "privacy-fashion-mnist.yaml")
    shared, named = recipe.options, [row for row in recipe.rows if row.name.startswith("epsilon")]
    assert len(named) == 4
    for row in named:
        noise = row.options["dp_noise"]
        spent = epsilon([release(noise, shared["clients"], shared["cohort"], shared["rounds"])], 1e-5)
        assert row.name == f"epsilon {spent:.3g} (noise {noise:g})"


def test_without_sampling_it_is_the_exact_gaussian_mechanism() -> None:
    """T answers with noise z are one with noise z / sqrt(T), whose delta Balle and Wang give in closed form."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        noise, times = float(rng.uniform(1, 8)), int(rng.integers(1, 60))
        found = epsilon([release(noise, 10, 10, times)], 1e-5)
        if found < 100:
            assert delta_of(found, noise / math.sqrt(times)) == pytest.approx(1e-5, rel=0.05)


@pytest.mark.slow
def test_epsilon_agrees_with_numerical_integration_of_the_privacy_loss() -> None:
    """200 random settings: the Renyi orders of the sampled Gaussian by quadrature bound ours from above, PLD's own
    finest steps agree within 1%."""
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    rng = np.random.default_rng(1)
    for _ in range(200):
        rate, noise = float(rng.uniform(0.01, 0.5)), float(rng.uniform(0.8, 5))
        times, delta = int(rng.integers(1, 60)), float(10 ** rng.uniform(-7, -3))
        exact = PLDAccountant(value_discretization_interval=2e-4)
        exact.compose(dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), times))
        ours = epsilon([release(noise, 1000, 1000 * rate, times)], delta)
        assert exact.get_epsilon(delta) <= ours * (1 + 1e-6) + 1e-6
        assert ours == pytest.approx(exact.get_epsilon(delta), rel=0.01, abs=2e-3)


def test_a_fixed_number_of_clients_costs_more_than_drawing_each() -> None:
    fixed = epsilon([release(4.0, 1000, 20, 100, "fixed")], 1e-5)
    assert fixed > 2 * epsilon([release(4.0, 1000, 20, 100)], 1e-5)


def test_everybody_in_every_round_is_not_sampled_however_it_is_called() -> None:
    assert epsilon([release(4.0, 20, 20, 9, "fixed")], 1e-5) == epsilon([release(4.0, 20, 20, 9)], 1e-5)


def test_what_is_drawn_again_from_the_seed_counts_once_and_from_elsewhere_twice() -> None:
    line = release(1.0, 100, 10, 1)._asdict()
    assert len(releases_of([line, line])) == 1
    assert len(releases_of([{**line, "draw": "a"}, {**line, "draw": "b"}])) == 2
    assert epsilon([], 1e-5) == 0


def test_two_ways_of_sampling_do_not_add_up() -> None:
    with pytest.raises(NeedsError, match="sampled in two ways"):
        epsilon([release(4.0, 100, 20, 1), release(4.0, 100, 20, 1, "fixed")], 1e-5)


def test_rounds_within_a_limit_are_as_many_as_fit() -> None:
    coming = release(2.0, 100, 10, 1)
    done = [coming._replace(round=r) for r in (1, 2, 3)]
    more = rounds_within(done, coming, 500, 2.0, 1e-5)
    assert 0 < more < 500
    assert epsilon([*done, coming._replace(times=more, round=9)], 1e-5) <= 2.0
    assert epsilon([*done, coming._replace(times=more + 1, round=9)], 1e-5) > 2.0
    assert rounds_within(done, coming, 500, 0.01, 1e-5) == 0
    assert rounds_within([], coming, 5, 1e6, 1e-5) == 5
