# SPDX-License-Identifier: Apache-2.0
"""What secure sums are made of: masks that cancel, shares that give a seed back, whole numbers that do not overflow."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from fedloom.deploy import masks
from fedloom.deploy.masks import HALF, SEED, Scale
from fedloom.deploy.store import Refusal
from fedloom.deploy.summing import shortened


def test_a_mask_is_the_stream_of_chacha20() -> None:
    """RFC 7539, appendix A.1, test vector 1: the stream of a key and a nonce of zeros."""
    assert masks.mask(bytes(32), 4).astype("<u4").tobytes() == bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28")


def test_two_seeds_agree_on_a_key_that_is_for_one_thing() -> None:
    one, other = masks.seed(), masks.seed()
    key = masks.agreed(one, masks.public_key(other), b"a")
    assert key == masks.agreed(other, masks.public_key(one), b"a") and len(one) == SEED and one != other
    assert key != masks.agreed(one, masks.public_key(other), b"b")
    with pytest.raises(ValueError):
        masks.agreed(one, bytes(32), b"a")  # with which anybody would agree on nothing
    assert masks.is_key(masks.public_key(one)) and not masks.is_key(bytes(32))


def test_a_letter_that_was_changed_is_not_opened() -> None:
    key = masks.seed() * 2
    letter = masks.sealed(key, b"share", b"from 1 to 2")
    assert masks.opened(key, letter, b"from 1 to 2") == b"share"
    assert letter != masks.sealed(key, b"share", b"from 1 to 2")
    for bad in ((key[::-1], letter, b"from 1 to 2"), (key, letter[:-1] + b"?", b"from 1 to 2"), (key, letter, b"to 3"),
                (key, b"", b"from 1 to 2")):  # fmt: skip
        with pytest.raises(masks.Unsealed):
            masks.opened(*bad)


def test_any_shares_that_are_enough_give_the_seed_back_and_fewer_do_not() -> None:
    seed = masks.seed()
    shares = masks.shares_of(seed, 3, 5)
    for places in combinations(range(5), 3):
        assert masks.joined({place: shares[place] for place in places}) == seed
    assert all(masks.joined({a: shares[a], b: shares[b]}) != seed for a, b in combinations(range(5), 2))
    assert masks.commitment(seed) != masks.commitment(seed[::-1])


@given(
    st.integers(1, 1000),
    st.floats(1e-6, 1e6),
    st.lists(st.floats(-1, 1), min_size=1, max_size=5),
)
def test_a_mean_of_whole_numbers_is_off_by_half_a_step_at_most(clients: int, bound: float, shares: list[float]) -> None:
    scale, numbers = Scale(bound, clients), np.array(shares) * bound
    total = np.zeros(len(numbers), np.uint32)
    for _ in range(clients):
        total += scale.whole(numbers)
    off = np.abs(scale.numbers(total) / clients - numbers).max()
    assert off <= scale.step / 2 * (1 + 1e-6) and scale.step <= bound * clients / (HALF - clients)


def test_the_largest_sum_does_not_overflow() -> None:
    scale = Scale(7.0, 3)
    for sign in (1, -1):
        total = 3 * scale.whole(np.array([sign * 9.0]))  # which counts as the bound
        assert scale.numbers(total)[0] == pytest.approx(sign * 21.0)


def test_a_change_is_no_longer_than_the_bound_after_rounding_either() -> None:
    """Noise for privacy is for changes of this norm; at three million numbers rounding alone could add to it."""
    scale = Scale(1.0, 1000)
    algorithm: Any = SimpleNamespace(means=("delta",))
    long = torch.from_numpy(np.random.default_rng(0).standard_normal(100_000))
    reply = {"delta": {"w": long}, "num_samples": torch.tensor(9.0), "loss": torch.tensor(300.0)}
    *change, loss, longer = scale.numbers(scale.whole(shortened(algorithm, reply, scale)))
    assert 0.9 < np.linalg.norm(change) <= 1.0 and loss == pytest.approx(1.0) and longer == pytest.approx(1.0)
    short = shortened(algorithm, {**reply, "delta": {"w": long * 1e-6}, "loss": torch.tensor(2.0)}, scale)
    assert np.allclose(short[:-2], long.numpy() * 1e-6) and short[-2:] == pytest.approx([0.02, 0.0])
    for spoilt in ({**reply, "loss": torch.tensor(float("nan"))}, {**reply, "delta": {"w": long * float("inf")}}):
        assert shortened(algorithm, spoilt, scale).tolist() == [*[0.0] * 100_000, 1.0, 1.0]
    with pytest.raises(Refusal, match="rank"):
        shortened(algorithm, {**reply, "rank": long}, scale)
