# SPDX-License-Identifier: Apache-2.0
"""One rule for all that is built for speed: the best form that works, with a note of those that do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fedloom.engines.cache import FastForms, Way, reason_of


def failing(error: Exception) -> Way:
    def build() -> str:
        raise error

    return Way(type(error).__name__, build)


def test_the_first_way_that_works_is_taken_and_the_others_are_noted_once() -> None:
    notes: list[str] = []
    forms: FastForms[str] = FastForms(notes, kept=9)

    def ways() -> Iterator[Way]:
        yield failing(ValueError("no compiler\n\nnone found\n\nSet TORCH_LOGS for more"))
        yield Way("recorded", lambda: "form")
        yield failing(AssertionError("never tried"))

    assert [forms.get(kind, "train", ways) for kind in ("a", "a", "b")] == ["form"] * 3
    assert notes == ["train cannot be ValueError: no compiler none found"]


def test_where_nothing_works_it_is_not_tried_again_until_it_is_forgotten() -> None:
    tried: list[int] = []

    def ways() -> list[Way]:
        tried.append(1)
        return [failing(RuntimeError("boom"))]

    forms: FastForms[str] = FastForms([], kept=9)
    assert [forms.get("kind", "train", ways) for _ in range(3)] == [None] * 3 and len(tried) == 1
    forms.forget("kind")
    assert forms.get("kind", "train", lambda: [Way("recorded", lambda: "form")]) == "form"
    forms.clear()
    assert not forms.kept


def test_the_forms_used_longest_ago_are_dropped() -> None:
    forms: FastForms[str] = FastForms([], kept=2)
    for kind in ("a", "b", "a", "c"):
        forms.get(kind, "train", lambda kind=kind: [Way("recorded", lambda: kind)])
    assert forms.kept == {"a": "a", "c": "c"}


def test_a_lack_of_memory_is_the_callers_affair() -> None:
    forms: FastForms[str] = FastForms([], kept=2)
    with pytest.raises(torch.OutOfMemoryError):
        forms.get("kind", "train", lambda: [failing(torch.OutOfMemoryError("full"))])
    assert not forms.notes and not forms.kept


def test_uses_are_counted_by_kind() -> None:
    forms: FastForms[str] = FastForms([], kept=2)
    assert [forms.seen(kind) for kind in ("a", "b", "a")] == [1, 1, 2]


def test_an_error_without_words_is_called_by_its_name() -> None:
    assert reason_of(KeyError()) == "KeyError" and reason_of(ValueError("one\ntwo\nthree")) == "one three"
