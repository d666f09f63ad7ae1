# SPDX-License-Identifier: Apache-2.0
"""Named streams: the same bits for the same name, and draws that look random."""

from __future__ import annotations

import hashlib
import re
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code
from torch.func import vmap

from fedloom.core.random import _GOLDEN, Fresh, fold, key, laplace, normal, seed_of, stream, uniform

NAMES = st.lists(st.one_of(st.integers(0, 10**6), st.text("ab1 ", max_size=3)), min_size=1, max_size=4)
MANY = 1 << 20
RANDOM_KEYS = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=100, deadline=None)
@given(NAMES, NAMES)
def test_seeds_are_equal_for_equal_names_only(one: list[int | str], other: list[int | str]) -> None:
    assert seed_of(*one) == seed_of(*one)
    assert 0 <= seed_of(*one) < 2**63
    assert (seed_of(*one) == seed_of(*other)) == (one == other)


def test_names_differ_by_type_order_and_boundaries() -> None:
    names: list[tuple[int | str, ...]] = [(1,), ("1",), (1, 2), (2, 1), (12,), ("a", "b"), ("ab",), ("b", "a")]
    assert len({seed_of(*name) for name in names}) == len(names)


def test_seeds_do_not_change_from_version_to_version() -> None:
    """A change here changes every run: it must be on purpose."""
    assert seed_of(0, 1, "client", "batches") == int.from_bytes(
        hashlib.blake2b(b"int:0\x1fint:1\x1fstr:client\x1fstr:batches", digest_size=8).digest(), "little"
    ) & ((1 << 63) - 1)
    assert [float(u) for u in uniform(torch.tensor(1), (2,))] == pytest.approx(splitmix(1, 2), abs=0)


def splitmix(seed: int, number: int) -> list[float]:
    """SplitMix64's outputs in Python's integers, from the state itself on; bits 39 to 62 as a fraction."""
    found, mask = [], (1 << 64) - 1
    for count in range(number):
        z = (seed + count * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        found.append((z >> 39 & 0xFFFFFF) / (1 << 24))
    return found


@settings(max_examples=50, deadline=None)
@given(RANDOM_KEYS)
def test_uniform_is_splitmix64_on_signed_integers(seed: int) -> None:
    assert uniform(torch.tensor(seed), (20,), torch.float64).tolist() == splitmix(seed, 20)


def test_streams_of_one_name_are_equal_and_of_two_names_are_not() -> None:
    draws = [stream(*name).standard_normal(100) for name in ((0, "a"), (0, "a"), (0, "b"), (1, "a"))]
    assert np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])
    assert not np.array_equal(draws[0], draws[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_has_the_moments_of_the_unit_interval(dtype: torch.dtype) -> None:
    """Mean 1/2, variance 1/12; four standard errors of the mean of n are 4 / sqrt(12 n) = 0.0011."""
    drawn = uniform(key("moments"), (MANY,), dtype)
    assert drawn.dtype == dtype
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert float(drawn.double().mean()) == pytest.approx(0.5, abs=0.0012)
    assert float(drawn.double().var()) == pytest.approx(1 / 12, abs=0.0004)


def test_each_of_the_24_bits_of_a_uniform_is_one_half_of_the_time() -> None:
    """The standard error of a share is 0.5 / sqrt(n) = 0.0005; five of them."""
    whole = (uniform(key("bits"), (MANY,), torch.float64) * (1 << 24)).long()
    for bit in range(24):
        assert float((whole >> bit & 1).double().mean()) == pytest.approx(0.5, abs=0.0025)


def test_the_cells_of_the_unit_square_are_hit_alike_by_neighbouring_draws() -> None:
    """Pairs (u_i, u_i+1) in 16 x 16 cells: chi squared of 255 degrees of freedom is below 370 (p = 1e-5)."""
    drawn = uniform(key("cells"), (MANY,), torch.float64).reshape(-1, 2)
    cell = (drawn * 16).long() @ torch.tensor([16, 1])
    counts = torch.bincount(cell, minlength=256).double()
    expected = len(cell) / 256
    assert float(((counts - expected).square() / expected).sum()) < 370


@pytest.mark.parametrize("lag", [1, 2, 7, 64])
def test_neighbouring_counters_are_uncorrelated(lag: int) -> None:
    drawn = uniform(key("lags"), (MANY,), torch.float64).numpy()
    assert abs(np.corrcoef(drawn[:-lag], drawn[lag:])[0, 1]) < 5 / MANY**0.5


def test_neighbouring_keys_are_uncorrelated() -> None:
    """Keys 0, 1, 2, ... and the keys folded from one key with 0, 1, 2, ..."""
    plain = torch.arange(256)
    for keys in (plain, fold(key("parent"), plain), fold(plain, 3)):
        drawn = np.stack([uniform(k, (1024,), torch.float64).numpy() for k in keys])
        corrcoef = np.corrcoef(drawn) - np.eye(256)
        assert np.abs(corrcoef).max() < 6 / 1024**0.5
        first = drawn[:, 1]
        assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 5 / 256**0.5


def test_normal_has_the_moments_of_the_standard_normal() -> None:
    """Mean 0, variance 1, skewness 0, kurtosis 3, and 31.73 % beyond one standard deviation."""
    drawn = normal(key("normal"), (MANY,), torch.float64)
    assert torch.isfinite(drawn).all()
    for power, wanted, tolerance in ((1, 0, 0.005), (2, 1, 0.007), (3, 0, 0.02), (4, 3, 0.05)):
        assert float(drawn.pow(power).mean()) == pytest.approx(wanted, abs=tolerance)
    assert float((drawn.abs() > 1).double().mean()) == pytest.approx(0.3173, abs=0.0025)


def test_fold_gives_other_keys_for_other_numbers_and_other_keys() -> None:
    parents = [key("a"), key("b"), torch.tensor(0), torch.tensor(1)]
    folded = {int(fold(parent, number)) for parent in parents for number in range(-50, 50)}
    assert len(folded) == 400
    assert int(fold(parents[0], 3)) == int(fold(parents[0], torch.tensor(3)))
    assert int(fold(fold(parents[0], 1), 2)) != int(fold(fold(parents[0], 2), 1))


@pytest.mark.parametrize("draw", [uniform, normal])
def test_draws_under_vmap_have_the_bits_of_a_loop(draw: Any) -> None:
    keys = torch.stack([key("client", i) for i in range(5)])
    together = vmap(lambda k: draw(fold(k, 2), (3, 4)))(keys)
    assert torch.equal(together, torch.stack([draw(fold(k, 2), (3, 4)) for k in keys]))


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    """Padding at the end of a batch changes no sample's draws."""
    assert torch.equal(uniform(key("k"), (7, 3, 2))[:4], uniform(key("k"), (4, 3, 2)))


def test_an_empty_and_a_single_draw_have_their_shapes() -> None:
    assert uniform(key("k"), (0, 3)).shape == (0, 3)
    assert uniform(key("k"), ()).shape == ()


def test_draws_of_the_machine_are_of_the_same_laws_and_never_come_twice() -> None:
    fresh = Fresh(torch.device("cpu"))
    assert fold(fresh, 3) is fresh
    drawn = uniform(fresh, (MANY,), torch.float64)
    assert float(drawn.min()) >= 0 and float(drawn.max()) < 1 and uniform(fresh, (2, 3)).shape == (2, 3)
    assert float(drawn.mean()) == pytest.approx(1 / 2, abs=2e-3)
    assert float(drawn.var()) == pytest.approx(1 / 12, abs=1e-3)
    for draw, variance in ((normal, 1.0), (laplace, 2.0)):
        one, other = draw(fresh, (MANY,), torch.float64), draw(fresh, (MANY,), torch.float64)
        assert float(one.mean()) == pytest.approx(0, abs=1e-2) and float(one.var()) == pytest.approx(variance, rel=0.02)
        assert float(torch.corrcoef(torch.stack([one, other]))[0, 1]) == pytest.approx(0, abs=1e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own affairs
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for a CPU with g++")
def test_compiled_draws_are_the_same_and_no_arithmetic_of_places() -> None:
    """As places in memory, rows of draws are multiples of the constant that Triton cannot write down."""

    def drawn(keys: torch.Tensor) -> torch.Tensor:
        return vmap(lambda key: normal(key, (5, 16)).softmax(-1))(keys)

    keys = torch.stack([key(i) for i in range(3)])
    found, codes = run_and_get_code(torch.compile(drawn), keys)
    torch.testing.assert_close(found, drawn(keys), rtol=0, atol=1e-6)
    assert codes and not any(re.search(rf"{_GOLDEN}L?\)\s*\*", code) for code in codes)
