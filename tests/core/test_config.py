# SPDX-License-Identifier: Apache-2.0
"""Configs from text and YAML values, and every way in which they are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.algorithms import mh_pfedhn
from fedloom.core.config import build, check, convert, describe, fields, flag, option
from fedloom.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Config:
    """One field of every kind."""

    batch_size: int = option(64, "A whole number.", low=1)
    rate: float = option(0.1, "A number.", above=0, high=1)
    free: float = option(0.0, "A number without a range.")
    keep: bool = option(False, "A switch.")
    label: str = option("run", "A text.")
    kind: Literal["sgd", "adam"] = option("sgd", "A choice.")
    widths: tuple[int, ...] = option((3, 4), "Whole numbers.", low=1)
    limit: int | None = option(None, "A whole number or none.", low=2)

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("batch_size", "7", 7),
        ("batch_size", 7, 7),
        ("batch_size", 7.0, 7),
        ("rate", "1e-3", 0.001),
        ("rate", 1, 1.0),
        ("rate", "1", 1.0),
        ("keep", "true", True),
        ("keep", "Yes", True),
        ("keep", "on", True),
        ("keep", 1, True),
        ("keep", "0", False),
        ("keep", "off", False),
        ("keep", "No", False),
        ("keep", False, False),
        ("label", "x=1, y", "x=1, y"),
        ("label", 3, "3"),
        ("label", "", ""),
        ("kind", "adam", "adam"),
        ("widths", "5", (5,)),
        ("widths", "5,", (5,)),
        ("widths", "5,6", (5, 6)),
        ("widths", [5, 6], (5, 6)),
        ("widths", 5, (5,)),
        ("widths", "", ()),
        ("limit", "none", None),
        ("limit", "None", None),
        ("limit", None, None),
        ("limit", "9", 9),
    ],
)
def test_text_and_yaml_values_become_the_fields_type(name: str, given: Any, wanted: Any) -> None:
    got = getattr(build(Config, {name: given}), name)
    assert got == wanted
    assert type(got) is type(wanted)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("batch_size", "many", "--batch-size is 'many'; expected a whole number. Give such a value or leave it out."),
        ("batch_size", "1.5", "--batch-size is '1.5'; expected a whole number. Give such a value or leave it out."),
        ("batch_size", 1.5, "--batch-size is 1.5; expected a whole number. Give such a value or leave it out."),
        ("batch_size", True, "--batch-size is True; expected a whole number. Give such a value or leave it out."),
        (
            "batch_size",
            float("inf"),
            "--batch-size is inf; expected a whole number. Give such a value or leave it out.",
        ),
        (
            "batch_size",
            float("nan"),
            "--batch-size is nan; expected a whole number. Give such a value or leave it out.",
        ),
        ("batch_size", None, "--batch-size is none; it needs a value: a whole number. Give one or leave it out."),
        ("batch_size", [1], "--batch-size is [1]; expected a whole number. Give such a value or leave it out."),
        ("batch_size", 0, "--batch-size is 0; it must be at least 1. Leave it out to use 64."),
        ("rate", "fast", "--rate is 'fast'; expected a number. Give such a value or leave it out."),
        ("rate", 0, "--rate is 0.0; it must be more than 0 and at most 1. Leave it out to use 0.1."),
        ("rate", 1.5, "--rate is 1.5; it must be more than 0 and at most 1. Leave it out to use 0.1."),
        ("rate", "nan", "--rate is nan; it must be more than 0 and at most 1, and finite. Leave it out to use 0.1."),
        ("free", float("nan"), "--free is nan; it must be a number, and finite. Leave it out to use 0.0."),
        ("keep", "maybe", "--keep is 'maybe'; expected true or false. Give such a value or leave it out."),
        ("keep", 2, "--keep is 2; expected true or false. Give such a value or leave it out."),
        ("label", [1], "--label is [1]; expected a text. Give such a value or leave it out."),
        ("kind", "adm", "Unknown value for --kind 'adm'; did you mean 'adam'? Choose from: adam, sgd."),
        ("kind", None, "Unknown value for --kind 'None'. Choose from: adam, sgd."),
        (
            "widths",
            "3,x",
            "--widths is '3,x'; expected whole numbers separated by commas. Give such a value or leave it out.",
        ),
        ("widths", "3,0", "--widths is 0; it must be at least 1. Leave it out to use (3, 4)."),
        ("limit", "few", "--limit is 'few'; expected a whole number or none. Give such a value or leave it out."),
        ("limit", 1, "--limit is 1; it must be at least 2. Leave it out."),
        (
            "bach_size",
            1,
            "Unknown option 'bach_size'; did you mean 'batch_size'? "
            "Choose from: batch_size, free, keep, kind, label, limit, rate, widths.",
        ),
        (True, 1, "Unknown option True. Choose from: batch_size, free, keep, kind, label, limit, rate, widths."),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(name: Any, given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Config, {name: given})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("values", "steps", "epochs"),
    [
        ({}, 50, 2),
        ({"local_steps": "5"}, 5, 0),
        ({"local_steps": 5, "preset": "code"}, 5, 0),
        ({"local_steps": 0}, 0, 2),
        ({"local_steps": "00"}, 0, 2),
        ({"local_steps": "10"}, 10, 0),
        ({"local_steps": 5, "local_epochs": 3}, 5, 3),
        ({"preset": "code"}, 50, 1),
    ],
)
def test_steps_that_are_given_are_used_instead_of_epochs(values: dict[str, Any], steps: int, epochs: int) -> None:
    made = build(mh_pfedhn.Config, values)
    assert (made.local_steps, made.local_epochs) == (steps, epochs)


@pytest.mark.parametrize("preset", [["code"], {"a": 1}, 3, None])
def test_a_preset_that_is_no_name_is_refused_like_any_other_value(preset: Any) -> None:
    with pytest.raises(ConfigError, match=r"Unknown value for --preset .* Choose from: code, text\."):
        build(mh_pfedhn.Config, {"preset": preset})


def test_options_that_are_known_elsewhere_are_among_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'rounds'"):
        build(Config, {"round": 1}, also_known=["rounds"])


def test_nothing_given_is_the_defaults() -> None:
    assert build(Config, {}) == Config()


def test_ranges_are_checked_without_build_too() -> None:
    with pytest.raises(ConfigError, match="--rate is 2"):
        Config(rate=2)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "a whole number"),
        (float, "a number"),
        (bool, "true or false"),
        (str, "a text"),
        (Literal["a", "b"], "a | b"),
        (tuple[int, ...], "whole numbers separated by commas"),
        (tuple[float, ...], "numbers separated by commas"),
        (int | None, "a whole number or none"),
        (tuple[str, ...] | None, "texts separated by commas or none"),
    ],
)
def test_a_fields_type_in_words(kind: Any, words: str) -> None:
    assert describe(kind) == words


def test_fields_come_with_resolved_types_and_their_help() -> None:
    found = {field.name: (kind, field.metadata["help"]) for field, kind in fields(Config)}
    assert found["widths"] == (tuple[int, ...], "Whole numbers.")
    assert found["limit"] == (int | None, "A whole number or none.")


def test_a_flag_is_a_fields_name_with_dashes() -> None:
    assert flag("keep_it_all") == "--keep-it-all"


@settings(max_examples=100, deadline=None)
@given(st.integers(), st.floats(allow_nan=False), st.booleans(), st.lists(st.integers(), max_size=4))
def test_what_python_writes_is_read_back(whole: int, number: float, switch: bool, several: list[int]) -> None:
    assert convert(str(whole), int, "x") == whole
    assert convert(str(number), float, "x") == number
    assert convert(str(switch), bool, "x") is switch
    assert convert(",".join(map(str, several)), tuple[int, ...], "x") == tuple(several)


KINDS = [int, float, bool, str, tuple[int, ...], tuple[float, ...], int | None, float | None, str | None]
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=1), st.integers(), max_size=1), st.just(10**400), st.lists(st.none(), max_size=2),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(VALUES, st.sampled_from(KINDS))
def test_any_value_is_converted_or_refused(value: Any, kind: Any) -> None:
    try:
        converted = convert(value, kind, "--x")
    except ConfigError as error:
        assert str(error).startswith("--x is ")
    else:
        assert converted is None or isinstance(converted, int | float | str | tuple)
