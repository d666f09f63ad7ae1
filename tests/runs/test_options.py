# SPDX-License-Identifier: Apache-2.0
"""The options that every method shares."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, asdict, fields
from typing import Any

import pytest
import yaml

from fedloom import algorithms
from fedloom.api import parse_options
from fedloom.core.config import build
from fedloom.core.errors import ConfigError
from fedloom.runs.options import RunOptions


def test_the_defaults_are_a_run() -> None:
    options = RunOptions()
    assert (options.dataset, options.partition, options.clients, options.rounds) == ("digits", "auto", None, 100)
    assert (options.cohort, options.eval_every, options.eval_clients) == (0, 0, 0)
    assert (options.engine, options.device, options.model, options.task) == ("auto",) * 4


def test_every_option_has_a_sentence_of_help() -> None:
    for field in fields(RunOptions):
        assert re.fullmatch(r"\S.*\.", field.metadata["help"]), field.name


def test_options_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        RunOptions().rounds = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"clients": 0}, "--clients is 0; it must be at least 1."),
        ({"rounds": -1}, "--rounds is -1; it must be at least 0."),
        ({"unseen": -0.5}, "--unseen is -0.5; it must be at least 0"),
        ({"val_share": 0.95}, "--val-share is 0.95; it must be at least 0 and at most 0.9."),
        ({"test_share": float("nan")}, "--test-share is nan"),
        ({"seed": -1}, "--seed is -1"),
        ({"keep": 0}, "--keep is 0; it must be at least 1"),
        ({"eval_every": -1}, "--eval-every is -1"),
        ({"eval_clients": -1}, "--eval-clients is -1"),
        ({"dtype": "float16"}, "Unknown value for --dtype 'float16'; did you mean"),
        ({"clients": 3, "cohort": 4}, "--cohort is 4, but there are 3 clients; ask at most as many as there are."),
        ({"cohort": 2.5}, "--cohort is 2.5; give a whole number of clients, or a share below 1."),
    ],
)
def test_values_that_cannot_be(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunOptions(**given)
    assert sentence in str(caught.value)


def test_a_cohort_of_everybody() -> None:
    assert RunOptions(clients=3, cohort=3).cohort == 3


@pytest.mark.parametrize(
    ("cohort", "clients", "asked"), [(0, 50, 7), (0, 3, 3), (10, 50, 10), (0.2, 50, 10), (0.01, 50, 1), (1, 50, 1)]
)
def test_a_cohort_is_a_count_or_a_share(cohort: float, clients: int, asked: int) -> None:
    assert RunOptions(cohort=cohort).cohort_of(clients, papers=7) == asked


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("clients", "7", 7),
        ("unseen", "0.2", 0.2),
        ("unseen", "3", 3.0),
        ("data_root", "none", None),
        ("data_root", "/data", "/data"),
        ("adapt_clip", "2", 2.0),
        ("tracker", None, None),
        ("val_share", 0, 0.0),
    ],
)
def test_texts_become_values(name: str, text: Any, value: Any) -> None:
    found = getattr(build(RunOptions, {name: text}), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"unseen_shift": "blur"}, "--unseen-shift is about clients held out of training, and there are none."),
        ({"unseen_partition": "dirichlet:1"}, "--unseen-partition is about clients held out"),
        ({"unseen_model": "lenet_s"}, "--unseen-model is about clients held out"),
        ({"unseen": 2, "unseen_shift_strength": 0.5}, "--unseen-shift-strength needs --unseen-shift"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(RunOptions, options)
    assert str(error.value).startswith(reason)


def test_options_survive_a_yaml_file() -> None:
    options = RunOptions(unseen=0.1, unseen_shift="blur", unseen_shift_strength=1e-3, seed=2**40, dtype="float64")
    assert build(RunOptions, yaml.safe_load(yaml.safe_dump(asdict(options)))) == options


@pytest.mark.parametrize("method", algorithms.names())
def test_no_method_has_an_option_of_the_same_name(method: str) -> None:
    shared = {field.name for field in fields(RunOptions)} | {"method", "out", "progress", "config", "seeds"}
    assert not shared & {field.name for field in fields(algorithms.get(method).config)}


def test_one_flat_mapping_is_told_apart() -> None:
    shared, own = parse_options("pfedhn", {"clients": "6", "embed_dim": "3", "local_lr": "1e-2"})
    assert (shared.clients, own.embed_dim, own.local_lr) == (6, 3, 0.01)
    with pytest.raises(ConfigError, match="Unknown option of pfedhn 'embd_dim'; did you mean 'embed_dim'"):
        parse_options("pfedhn", {"embd_dim": 3})
