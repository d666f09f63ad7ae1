# SPDX-License-Identifier: Apache-2.0
"""Which replies are usable, and why the others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedloom.engines.acceptance import finite, refusals

CPU = torch.device("cpu")
EXPECTED = {"a": torch.zeros(2), "b": torch.zeros((), dtype=torch.int64)}


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        ({"a": torch.zeros(3, 2)}, "replied with shape None for b; expected ()"),
        (
            {"a": torch.zeros(3, 2), "b": torch.zeros(3, dtype=torch.int64), "c": torch.zeros(3)},
            "replied with shape () for c; expected None",
        ),
        ({"a": torch.zeros(3, 4), "b": torch.zeros(3)}, "replied with shape (4,) for a; expected (2,)"),
        (
            {"a": torch.zeros(3, 2), "b": torch.zeros(3)},
            "replied with numbers of type torch.float32 for b; expected torch.int64",
        ),
        (
            {"a": torch.zeros(3, 2, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.int64)},
            "replied with numbers of type torch.float64 for a; expected torch.float32",
        ),
        (
            {"a": 1.0},
            "replied with something that is not a tree of tensors: "
            "reply/a is a float, not a tensor or a dict of tensors",
        ),
    ],
)
def test_a_reply_of_another_form_is_refused_for_all_of_its_stack(replies: Any, reason: str) -> None:
    assert refusals(EXPECTED, replies, 3, torch.float32) == [reason] * 3


def test_a_reply_of_the_right_form_is_not_refused_whatever_type_stands_for_fractions() -> None:
    replies = {"a": torch.zeros(3, 2, dtype=torch.float64), "b": torch.zeros(3, dtype=torch.int64)}
    assert refusals(EXPECTED, replies, 3, torch.float64) == [None] * 3


def test_it_is_found_in_which_rows_of_which_tree_numbers_are_not_finite() -> None:
    replies = {"a": torch.zeros(3, 2), "b": torch.tensor([0.0, float("inf"), 1.0])}
    kept = {"c": torch.tensor([1.0, 1.0, torch.nan])}
    assert finite(3, CPU, replies, kept).tolist() == [[True, False, True], [True, True, False]]
    assert finite(3, CPU, {}).tolist() == [[True, True, True]]


def test_numbers_are_finite_though_their_sum_is_not() -> None:
    huge, bad = torch.full((2, 3), 3e38), torch.tensor([[1.0, 2.0, 3.0], [1.0, float("inf"), -float("inf")]])
    assert finite(2, CPU, {"a": huge}, {"a": bad}).tolist() == [[False, False], [True, False]]
    assert finite(2, CPU, {"a": huge}, {"a": bad}, exactly=True).tolist() == [[True, True], [True, False]]
