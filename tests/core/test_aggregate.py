# SPDX-License-Identifier: Apache-2.0
"""Means over clients, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.aggregate import mean_buffers, mean_loss, weighted_mean
from fedloom.core.trees import PerClient


def reply(weight: float, value: list[float], loss: float = 0.0) -> dict[str, Any]:
    return {
        "num_samples": torch.tensor(weight, dtype=torch.float64),
        "delta": {"w": torch.tensor(value, dtype=torch.float64), "deep": {"b": torch.tensor(value[0]).double()}},
        "counts": torch.tensor(int(weight)),
        "loss": torch.tensor(loss),
    }


REPLIES = {"a": reply(1, [1, 2], 1.0), "b": reply(3, [5, -2], 2.0), "c": reply(4, [0, 1], 6.0)}


def test_the_weighted_mean_by_hand() -> None:
    """(1 * (1, 2) + 3 * (5, -2) + 4 * (0, 1)) / 8 = (2, 0)."""
    mean = weighted_mean(PerClient.of(REPLIES), "delta")
    assert mean["w"].tolist() == [2.0, 0.0]
    assert mean["deep"]["b"] == 2.0


def test_whole_numbers_are_averaged_in_the_weights_type() -> None:
    """(1 * 1 + 3 * 3 + 4 * 4) / 8 = 3.25, of a branch that is a single tensor."""
    assert weighted_mean(PerClient.of(REPLIES), "counts") == 3.25


def test_another_number_can_be_the_weight() -> None:
    """(1 * 1 + 2 * 5 + 6 * 0) / 9 = 11 / 9."""
    replies = {client: {**tree, "loss": tree["loss"].double()} for client, tree in REPLIES.items()}
    mean = weighted_mean(PerClient.of(replies), "delta", weight="loss")
    assert float(mean["w"][0]) == pytest.approx(11 / 9, abs=1e-15)


def test_replies_in_several_groups_count_as_if_in_one() -> None:
    """Replies whose other branches differ in shape are stacked apart."""
    apart = {client: {**tree, "own": torch.zeros(i)} for i, (client, tree) in enumerate(REPLIES.items())}
    made = PerClient.of(apart)
    assert len(made.groups) == 3
    assert weighted_mean(made, "delta")["w"].tolist() == [2.0, 0.0]
    assert mean_loss(made) == 3.0


def test_the_mean_loss_counts_each_client_once() -> None:
    """(1 + 2 + 6) / 3, whatever the sizes."""
    assert mean_loss(PerClient.of(REPLIES)) == 3.0


def test_an_empty_branch_has_an_empty_mean() -> None:
    replies = PerClient.of({"a": {"num_samples": torch.tensor(2.0), "buffers": {}}})
    assert weighted_mean(replies, "buffers") == {}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(-10, 10)), min_size=1, max_size=6), st.integers(1, 50))
def test_the_mean_lies_between_the_replies_and_ignores_the_scale_of_weights(
    given: list[tuple[int, float]], scale: int
) -> None:
    means = [
        weighted_mean(PerClient.of({str(i): reply(n * factor, [v, 0]) for i, (n, v) in enumerate(given)}), "delta")
        for factor in (1, scale)
    ]
    values = [value for _, value in given]
    assert min(values) - 1e-9 <= float(means[0]["w"][0]) <= max(values) + 1e-9
    torch.testing.assert_close(means[0]["w"], means[1]["w"], rtol=1e-12, atol=1e-12)


def test_counters_are_averaged_to_the_nearest_whole_number_and_keep_their_type() -> None:
    """Weights 1 and 3: (1 * 3 + 3 * 4) / 4 = 3.75 is 4; equal weights: 3.5, of which the even one is taken, 4."""
    replies = PerClient.of({
        name: {"num_samples": torch.tensor(weight).double(), "buffers": {"mean": torch.tensor(mean).double(),
                                                                        "count": torch.tensor(count)}}
        for name, weight, mean, count in (("a", 1, 2.0, 3), ("b", 3, 6.0, 4))
    })  # fmt: skip
    before = {"mean": torch.tensor(0.0).double(), "count": torch.tensor(0)}
    weighted, equal = mean_buffers(replies, before), mean_buffers(replies, before, None)
    assert (float(weighted["mean"]), float(equal["mean"])) == (5.0, 4.0)
    assert weighted["count"].dtype == torch.int64 and (int(weighted["count"]), int(equal["count"])) == (4, 4)
