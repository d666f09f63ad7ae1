# SPDX-License-Identifier: Apache-2.0
"""Errors: their family, and the sentence for a name that is not known."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from fedloom import core
from fedloom.core import errors
from fedloom.core.errors import ConfigError, FedloomError, unknown

MODULES = [module.name for module in pkgutil.iter_modules(core.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"fedloom.core.{name}")).failed == 0


def test_the_errors_module_has_an_example() -> None:
    assert doctest.testmod(errors).attempted > 0


@pytest.mark.parametrize("name", ["ConfigError", "DataError", "NeedsError", "RunError", "RoundError"])
def test_every_error_is_a_fedloom_error_and_an_ordinary_one(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, FedloomError)
    assert issubclass(error, ValueError | RuntimeError)


def test_a_name_near_to_nothing_gets_no_hint() -> None:
    assert str(unknown("model", "zzz", ["mlp", "lenet"])) == "Unknown model 'zzz'. Choose from: lenet, mlp."


def test_several_near_names_are_all_offered() -> None:
    message = str(unknown("method", "fedxvg", iter(["fedavg", "fedavg2", "other"])))
    assert message.startswith("Unknown method 'fedxvg'; did you mean 'fedavg' or 'fedavg2'?")


def test_a_key_that_is_no_text_is_unknown_like_any_other() -> None:
    """YAML gives numbers and booleans as keys."""
    error = unknown("option", 3, ["seed"])  # type: ignore[arg-type]
    assert isinstance(error, ConfigError)
    assert str(error) == "Unknown option 3. Choose from: seed."
