# SPDX-License-Identifier: Apache-2.0
"""Epsilon is what other accountants say it is; releases count once, or twice where they were drawn twice."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from fedloom.core.errors import NeedsError
from fedloom.privacy.gaussian import delta_of
from fedloom.privacy.ledger import Release, epsilon, most_steps, releases_of, rounds_within, worst
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


@pytest.mark.parametrize(
    ("name", "rows"), [("cifar10", 4), ("fashion-mnist", 4), ("looms-digits", 2), ("samples-digits", 3)]
)
def test_recipes_name_their_rows_by_what_they_spend(name: str, rows: int) -> None:
    """Of samples, for a client with 125 of them."""
    recipe = read(Path(__file__).parents[2] / "recipes" / f"privacy-{name}.yaml")
    named = [row for row in recipe.rows if row.name.startswith("epsilon")]
    assert len(named) == rows
    for row in named:
        options = {"dp_delta": 1e-5, **recipe.options, **row.options}
        if noise := options.get("sample_dp_noise"):
            likely, times = (125, options["batch_size"]), options["rounds"] * options["local_steps"]
        else:
            noise, likely, times = options["dp_noise"], (options["clients"], options["cohort"]), options["rounds"]
        spent = epsilon([release(noise, *likely, times)], options["dp_delta"])
        assert row.name == f"epsilon {spent:.3g} (noise {noise:g})"


def test_without_sampling_it_is_the_exact_gaussian_mechanism() -> None:
    """T answers with noise z are one with noise z / sqrt(T), whose delta Balle and Wang give in closed form."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        noise, times = float(rng.uniform(1, 8)), int(rng.integers(1, 60))
        found = epsilon([release(noise, 10, 10, times)], 1e-5)
        if found < 100:
            assert delta_of(found, noise / math.sqrt(times)) == pytest.approx(1e-5, rel=0.05)


def integrated(rate: float, noise: float, times: int, delta: float) -> float:
    """Epsilon by an accountant of our own: the privacy loss on a grid, in both directions, convolved by FFT.

    Mean and spread of a step's loss say how wide the grid must be; losses go to the nearest point of it.
    """
    return max(_composed(_one_way(rate, noise, add), times, delta) for add in (False, True))


def integrated_fixed(rate: float, noise: float, times: int, delta: float) -> float:
    """Likewise with one client replaced, by the pair itself: a loss above 0 is as likely as where others are sampled
    without it, at half the noise; one below 0 as the other way round; and the rest of the probability is at 0."""
    once = np.where(POINTS > 0, _one_way(rate, noise / 2, add=False), 0.0)
    once += np.where(POINTS < 0, _one_way(rate, noise / 2, add=True), 0.0)
    once[SIZE // 2] += 1 - once.sum()
    return _composed(once, times, delta)


SIZE, STEP = 1 << 18, 4e-4
POINTS = (np.arange(SIZE) - SIZE // 2) * STEP


def _one_way(rate: float, noise: float, add: bool) -> np.ndarray:
    """How likely each loss of a step is."""
    from scipy.special import ndtr

    def within(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """The probability that the loss log((1 - q) + q exp((2 x - 1) / 2 z^2)), or its negative, is there."""
        if add:
            low, high = -high, -low

        def place(loss: np.ndarray) -> np.ndarray:
            inner = np.expm1(loss) / rate + 1
            with np.errstate(divide="ignore"):
                return np.where(inner > 0, noise**2 * np.log(np.maximum(inner, 1e-300)) + 0.5, -np.inf)

        a, b = place(low), place(high)

        def between(shift: float) -> np.ndarray:
            one, other = (a - shift) / noise, (b - shift) / noise
            return np.where(one > 0, ndtr(-one) - ndtr(-other), ndtr(other) - ndtr(one))

        return between(0.0) if add else (1 - rate) * between(0.0) + rate * between(1.0)

    once = within(POINTS - STEP / 2, POINTS + STEP / 2)
    assert once.sum() == pytest.approx(1, abs=1e-12)
    return once


def _composed(once: np.ndarray, times: int, delta: float) -> float:
    mean, spread = (once * POINTS).sum(), math.sqrt((once * POINTS**2).sum())
    assert abs(times * mean) + 12 * math.sqrt(times) * spread < SIZE * STEP / 2, "the grid is wide enough"
    whole = np.fft.fftshift(np.fft.irfft(np.fft.rfft(np.fft.ifftshift(once)) ** times, SIZE))

    def excess(epsilon: float) -> float:
        beyond = epsilon < POINTS
        return float((whole[beyond] * -np.expm1(epsilon - POINTS[beyond])).sum()) - delta

    from scipy.optimize import brentq

    return float(brentq(excess, 0.0, SIZE * STEP / 2 - 1)) if excess(0.0) > 0 else 0.0


def agree(number: int, seed: int) -> None:
    """On random settings ours is no more than 1% from the integral, nor 0.002."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        rate, noise = float(rng.uniform(0.01, 0.5)), float(rng.uniform(0.8, 5))
        times, delta = int(rng.integers(1, 60)), float(10 ** rng.uniform(-7, -3))
        unit = ("client", "sample")[int(rng.integers(2))]
        ours = epsilon([release(noise, 10_000, 10_000 * rate, times, unit=unit)], delta)
        assert ours == pytest.approx(integrated(rate, noise, times, delta), rel=0.01, abs=2e-3)


def agree_fixed(number: int, seed: int) -> None:
    """Likewise for cohorts of a fixed size."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        size, noise = int(rng.integers(10, 500)), float(rng.uniform(2.5, 10))
        times, delta = int(rng.integers(1, 60)), float(10 ** rng.uniform(-7, -3))
        ours = epsilon([release(noise, 1000, size, times, "fixed")], delta)
        assert ours == pytest.approx(integrated_fixed(size / 1000, noise, times, delta), rel=0.01, abs=2e-3)


def test_epsilon_is_the_integral_of_the_privacy_loss() -> None:
    agree(4, seed=0)
    agree_fixed(4, seed=0)


@pytest.mark.slow
def test_epsilon_is_the_integral_of_the_privacy_loss_in_200_settings() -> None:
    agree(200, seed=1)
    agree_fixed(200, seed=1)


def agree_in_all(number: int, seed: int) -> None:
    """On random compositions, tiny epsilons among them, ours is 1% from Google's accountant on a finer grid at most."""
    import dp_accounting as dp
    import dp_accounting.pld

    rng = np.random.default_rng(seed)
    for _ in range(number):
        found = []
        for _ in range(int(rng.integers(1, 4))):
            clients, noise = int(10 ** rng.uniform(1, 4.5)), float(10 ** rng.uniform(-0.2, 1.2))
            size = max(1, round(clients * 10 ** rng.uniform(-3, 0)))
            found.append(release(noise, clients, size, int(10 ** rng.uniform(0, 2.7))))
        delta = float(10 ** rng.uniform(-7, -1.5))
        ours = epsilon(found, delta)
        if ours > 200:
            continue
        exact = dp.pld.PLDAccountant(value_discretization_interval=5e-5 if ours < 1 else 2e-4)
        for one in found:
            noised = dp.GaussianDpEvent(one.noise)
            sampled = dp.PoissonSampledDpEvent(one.size / one.clients, noised)
            exact.compose(noised if one.size >= one.clients else sampled, one.times)
        assert ours == pytest.approx(exact.get_epsilon(delta), rel=0.01, abs=1e-3)


def test_releases_of_all_kinds_add_up_as_others_say() -> None:
    agree_in_all(8, seed=0)


@pytest.mark.slow
def test_releases_of_all_kinds_add_up_as_others_say_in_200_settings() -> None:
    agree_in_all(200, seed=1)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize(("noise", "clients", "size", "times", "delta"), [
    (10.3, 2666, 18, 20, 0.024), (8.2, 98_017, 169, 512, 0.0065), (1e8, 3, 1, 10**5, 0.1), (1e-3, 3, 1, 10**5, 1e-12),
])  # fmt: skip
def test_next_to_nothing_and_far_too_much_have_an_epsilon(noise, clients, size, times, delta, sampling) -> None:
    found = epsilon([release(noise, clients, size, times, sampling)], delta)
    assert 0 <= found < 0.05 if noise > 1 else found > 500


def test_a_fixed_cohort_hides_any_client_of_any_small_federation() -> None:
    """By brute force: two of three clients are drawn, each replies with the bound, its opposite or nothing."""
    noise, x = 1.5, np.linspace(-20, 20, 40_001)

    def told(replies: tuple[float, ...]) -> np.ndarray:
        sums = [replies[i] + replies[j] for i, j in ((0, 1), (0, 2), (1, 2))]
        density = sum(np.exp(-((x - one) ** 2) / (2 * noise**2)) for one in sums)
        return density / density.sum()

    for delta in (1e-5, 1e-2):
        found = epsilon([release(noise, 3, 2, 1, "fixed")], delta)
        largest = 0.0
        for replies in itertools.product((-1.0, 0.0, 1.0), repeat=3):
            for other in (-1.0, 0.0, 1.0):
                one, two = told(replies), told((other, *replies[1:]))
                largest = max(largest, np.maximum(one - math.exp(found) * two, 0).sum())
        assert 0.99 * delta < largest <= delta * (1 + 1e-6), "and it could not be less"


@pytest.mark.parametrize(("clients", "size", "noise", "times"), [(1000, 100, 2.0, 100), (50, 10, 4.0, 60)])
def test_a_fixed_cohort_over_rounds_is_little_above_what_two_federations_show(clients, size, noise, times) -> None:
    """In one, all others reply with the bound and a client with its opposite, in the other everybody with the bound."""
    import dp_accounting.pld

    shown = dp_accounting.pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise, sensitivity=2, sampling_prob=size / clients, pessimistic_estimate=False, use_connect_dots=False,
        value_discretization_interval=1e-3,
    ).self_compose(times).get_epsilon_for_delta(1e-5)  # fmt: skip
    assert shown < epsilon([release(noise, clients, size, times, "fixed")], 1e-5) < 1.2 * shown


def test_rounds_with_everybody_and_sampled_ones_add_up_where_clients_are_replaced() -> None:
    sampled, all_of_them = release(4.0, 100, 20, 10, "fixed"), release(6.0, 100, 100, 2, "fixed")
    both = epsilon([sampled, all_of_them], 1e-5)
    halved = all_of_them._replace(noise=3.0)  # alone it is one that is left out, which moves half as much
    assert max(epsilon([one], 1e-5) for one in (sampled, halved)) < both
    assert both < sum(epsilon([one], 5e-6) for one in (sampled, halved))


def test_a_fixed_number_of_clients_costs_more_than_drawing_each() -> None:
    fixed = epsilon([release(4.0, 1000, 20, 100, "fixed")], 1e-5)
    assert fixed > 2 * epsilon([release(4.0, 1000, 20, 100)], 1e-5)


def test_a_fixed_number_of_clients_is_accounted_for_with_one_client_replaced() -> None:
    """No less than what tells two federations apart in which one client replies with the bound, or its opposite."""
    rate, noise, delta = 0.5, 2.0, 1e-5
    x = np.linspace(-40, 40, 800_001)
    one, other = ((1 - rate) * np.exp(-(x**2) / 8) + rate * np.exp(-((x - bound) ** 2) / 8) for bound in (1.0, -1.0))
    one, other = one / one.sum(), other / other.sum()
    found = epsilon([release(noise, 1000, 1000 * rate, 1, "fixed")], delta)
    assert np.maximum(one - math.exp(found) * other, 0).sum() < delta
    undivided = epsilon([release(2 * noise, 1000, 1000 * rate, 1, "fixed")], delta)
    assert np.maximum(one - math.exp(undivided) * other, 0).sum() > delta, (
        "a client that is left out moves half as much"
    )


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

    def rounds(number: int) -> list[Release]:
        return [coming._replace(times=number)]

    more = rounds_within(done, rounds, 500, 2.0, 1e-5)
    assert 0 < more < 500
    assert epsilon([*done, coming._replace(times=more, round=9)], 1e-5) <= 2.0
    assert epsilon([*done, coming._replace(times=more + 1, round=9)], 1e-5) > 2.0
    assert rounds_within(done, rounds, 500, 0.01, 1e-5) == 0
    assert rounds_within([], rounds, 5, 1e6, 1e-5) == 5


def test_samples_are_accounted_for_by_client_and_the_worst_one_is_named() -> None:
    often = release(1.0, 100, 10, 5, unit="sample", who=("a", "b"))
    small = release(1.0, 50, 10, 5, unit="sample", who=("c",))
    once_more = often._replace(round=2, who=("a",))
    found = worst([often, small, once_more], 1e-5)
    each = {"a": epsilon([often, once_more], 1e-5), "c": epsilon([small], 1e-5)}
    assert found.client == max(each, key=each.get) and found.epsilon == max(each.values())
    assert worst([release(1.0, 100, 10, 5)], 1e-5) is None


def test_only_clients_that_may_be_worst_are_accounted_for() -> None:
    """Of 300 clients with other numbers of samples and equally many steps, the smallest is the worst."""
    many = [release(1.0, 100 + n, 10, 5, unit="sample", who=(str(n),)) for n in range(300)]
    assert worst(many, 1e-5) == ("0", epsilon(many[:1], 1e-5))


def test_steps_within_a_limit_are_as_many_as_fit() -> None:
    step = release(1.0, 100, 10, 1, unit="sample", who=("a",))
    number = most_steps(step, 3.0, 1e-5)
    assert epsilon([step._replace(times=number)], 1e-5) <= 3.0 < epsilon([step._replace(times=number + 1)], 1e-5)
    assert most_steps(step, 0.01, 1e-5) == 0


def test_noise_without_a_bound_has_no_epsilon() -> None:
    with pytest.raises(NeedsError, match=r"Laplace noise of scale 0\.02 is on answers that have no bound"):
        epsilon([release(0.02, 10, 10, 1, "fixed", mechanism="laplace")], 1e-5)


def test_a_ledger_from_before_there_were_units_is_read() -> None:
    line = {"round": 1, "what": "training", "noise": 1.0, "sampling": "poisson", "clients": 10, "size": 2,
            "draw": "seed", "times": 1}  # fmt: skip
    assert releases_of([line]) == [release(1.0, 10, 2, 1)]
