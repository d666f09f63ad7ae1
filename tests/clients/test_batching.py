# SPDX-License-Identifier: Apache-2.0
"""Schedules: every sample once a pass, exactly as many steps as asked, and padding that repeats real rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.clients.batching import PaddedSchedule, Schedule, schedule
from fedloom.core.contract import Batches

BATCHES = st.builds(
    lambda size, steps, epochs, by_epochs, shuffle: Batches(
        size=size, steps=0 if by_epochs else steps, epochs=epochs if by_epochs else 0, shuffle=shuffle
    ),
    st.integers(1, 70),
    st.integers(0, 40),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
PROPERTIES = settings(max_examples=100, deadline=None)


def plan_of(size: int, batches: Batches | None, seed: int = 0) -> Schedule:
    return schedule(np.arange(100, 100 + size), batches, np.random.default_rng(seed))


@PROPERTIES
@given(st.integers(1, 50), BATCHES, st.integers(0, 99))
def test_a_pass_sees_each_sample_once_and_all_batches_but_its_last_are_full(
    size: int, batches: Batches, seed: int
) -> None:
    plan = plan_of(size, batches, seed)
    per_pass = -(-size // batches.size)
    assert len(plan.rows) == len(plan.epochs) == (batches.epochs * per_pass or batches.steps)
    assert plan.epochs == [step // per_pass for step in range(len(plan.rows))]
    for epoch in set(plan.epochs):
        parts = [rows for rows, e in zip(plan.rows, plan.epochs) if e == epoch]
        assert all(len(rows) == batches.size for rows in parts[: per_pass - 1])
        seen = np.concatenate(parts)
        if len(parts) == per_pass:
            assert sorted(seen) == list(range(100, 100 + size))
        assert len(set(seen)) == len(seen)
        if not batches.shuffle:
            assert list(seen) == list(range(100, 100 + len(seen)))


@PROPERTIES
@given(st.integers(1, 50), BATCHES, st.integers(1, 80), st.integers(0, 99))
def test_no_batch_is_smaller_than_the_least_unless_all_data_are(
    size: int, batches: Batches, least: int, seed: int
) -> None:
    plan = plan_of(size, replace(batches, least=least), seed)
    assert all(len(rows) >= min(least, size, batches.size) for rows in plan.rows)
    assert batches.epochs or len(plan.rows) == batches.steps
    for epoch in set(plan.epochs[:-1]) if not batches.epochs else set(plan.epochs):
        seen = np.concatenate([rows for rows, e in zip(plan.rows, plan.epochs) if e == epoch])
        assert len(set(seen)) == len(seen)
        assert len(seen) == size or epoch == plan.epochs[-1]


def test_what_is_left_goes_to_the_batch_before_it() -> None:
    sizes = [[len(rows) for rows in plan_of(17, Batches(size=8, epochs=1, least=least)).rows] for least in (1, 2)]
    assert sizes == [[8, 8, 1], [8, 9]]


def test_a_batch_larger_than_the_data_is_all_of_it_again_and_again() -> None:
    plan = plan_of(3, Batches(size=10**12, steps=4))
    assert [sorted(rows) for rows in plan.rows] == [[100, 101, 102]] * 4
    assert plan.epochs == [0, 1, 2, 3]


def test_passes_are_shuffled_anew_and_the_stream_decides_how() -> None:
    orders = [plan_of(20, Batches(size=20, epochs=3), seed) for seed in (1, 1, 2)]
    assert all(np.array_equal(a, b) for a, b in zip(orders[0].rows, orders[1].rows))
    distinct = {tuple(rows) for plan in orders for rows in plan.rows}
    assert len(distinct) == 6


@pytest.mark.parametrize(
    ("size", "batches"), [(0, Batches(steps=5)), (0, Batches(epochs=2)), (5, None), (5, Batches())]
)
def test_no_samples_or_no_batches_are_no_steps(size: int, batches: Batches | None) -> None:
    plan = plan_of(size, batches)
    assert plan.rows == []
    assert plan.epochs == []


@PROPERTIES
@given(st.lists(st.integers(0, 30), max_size=6), BATCHES)
def test_a_padded_schedule_holds_the_schedules_and_nothing_else(sizes: list[int], batches: Batches) -> None:
    rows, start = [], 0
    for size in sizes:
        rows.append(np.arange(start, start + size))
        start += size
    plans = [schedule(own, batches, np.random.default_rng(i)) for i, own in enumerate(rows)]
    order = sorted(range(len(plans)), key=lambda c: -len(plans[c].rows))
    padded = PaddedSchedule.of([plans[c] for c in order])
    steps = max((len(plan.rows) for plan in plans), default=0)
    assert padded.rows.shape[:2] == padded.sizes.shape == padded.epochs.shape == (steps, len(plans))
    assert padded.rows.shape[2] <= batches.size
    for at, c in enumerate(order):
        for t in range(steps):
            active = t < len(plans[c].rows)
            assert active == (at < padded.active[t])
            size = padded.sizes[t, at]
            assert size == (len(plans[c].rows[t]) if active else 0)
            if active:
                assert np.array_equal(padded.rows[t, at, :size], plans[c].rows[t])
                assert padded.epochs[t, at] == plans[c].epochs[t]
                assert set(padded.rows[t, at]) == set(plans[c].rows[t])
    counted = Counter(padded.sizes.sum(0).tolist())
    assert counted == Counter(sum(map(len, plan.rows)) for plan in plans)


def test_a_padded_schedule_by_hand() -> None:
    """Three samples and one, in batches of two: the second client is done after a step."""
    long = Schedule([np.array([4, 5]), np.array([6])], [0, 0])
    short = Schedule([np.array([9])], [0])
    padded = PaddedSchedule.of([long, short])
    assert padded.rows.tolist() == [[[4, 5], [9, 9]], [[6, 6], [0, 0]]]
    assert padded.sizes.tolist() == [[2, 1], [1, 0]]
    assert padded.active.tolist() == [2, 1]
