# SPDX-License-Identifier: Apache-2.0
"""The page on deployments names what a node decides for itself, with the defaults that it has."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from fedloom.core.errors import ConfigError
from fedloom.deploy.options import DeployOptions, NodeOptions, check_name, in_toml

PAGE = (Path(__file__).parents[2] / "docs" / "how-to-deploy.md").read_text()


def rows() -> dict[str, str]:
    """Of the tables: options, and what they are unless set."""
    found = {}
    for names, usual in re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+)[^|]*\|([^|]*)\|", PAGE, re.M):
        found |= dict.fromkeys(re.findall(r"`([\w-]+)`", names), usual.strip(" `"))
    return found


def test_every_option_of_a_node_is_documented_with_its_default() -> None:
    for field in fields(NodeOptions):
        usual = rows()[field.name.replace("_", "-")]
        assert usual in ("", "the app's", str(field.default)), field.name
    assert rows()["min-batch"] == "8"


def test_the_server_s_bounds_are_documented_with_their_defaults() -> None:
    assert float(rows()["max-norm"]) == DeployOptions().max_norm
    assert float(rows()["max-weight"]) == DeployOptions().max_weight


@pytest.mark.parametrize("value", ["/home/\U0001f41c/app", "a\x7fb", 'a\\"b', "caf\u00e9", True, 3, 0.5])
def test_any_value_can_stand_in_an_app(value: bool | float | str) -> None:
    assert tomllib.loads(f"value = {in_toml(value)}")["value"] == value


@pytest.mark.parametrize("name", ["", "..", ".a", "a/b", "/a", "a b", "a\n", "x" * 65])
def test_names_that_no_node_can_have(name: str) -> None:
    with pytest.raises(ConfigError, match="A client cannot be called"):
        check_name(name)
    check_name("ward-3.b_ü")
