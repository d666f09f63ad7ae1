# SPDX-License-Identifier: Apache-2.0
"""What counts as code outside of fedloom, and what is imported."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.config import option
from fedloom.core.errors import ConfigError
from fedloom.core.trust import check, import_path, outside, path_in


@dataclass(frozen=True)
class Config:
    network: str = option("auto", "A network.", code=True)
    several: tuple[str, ...] = option((), "Networks.", code=True)
    split: str = option("", "No network.")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("lenet", None),
        ("lenet:kernels=8", None),
        ("nets:Net", "nets:Net"),
        (" a.b:Net:width=3:kind=c:d ", "a.b:Net"),
        ("nets:", "nets:"),
        (":Net", ":Net"),
        ("os:system:command=x", "os:system"),
        ("mlp:hidden", "mlp:hidden"),  # a slip that would be imported
    ],
)
def test_the_import_path_in_a_name(name: str, path: str | None) -> None:
    assert path_in(name) == path


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({}, []),
        ({"network": "mlp,lenet:kernels=8", "split": "group:client"}, []),
        ({"network": "fedloom.models.zoo.mlp:MLP"}, []),
        ({"network": "mlp, nets:Net:width=3,os:system"}, ["--network nets:Net", "--network os:system"]),
        ({"network": "fedloom_methods.mine:Net"}, ["--network fedloom_methods.mine:Net"]),
        ({"network": "fedloomy:Net"}, ["--network fedloomy:Net"]),
        ({"network": ".fedloom:Net"}, ["--network .fedloom:Net"]),
        ({"several": ["mlp", "nets:Net"]}, ["--several nets:Net"]),
        ({"several": "mlp,nets:Net"}, ["--several nets:Net"]),
        ({"network": None, "several": 3}, []),
    ],
)
def test_what_is_outside(values: dict[str, Any], found: list[str]) -> None:
    assert outside(values, Config) == found


def test_a_file_needs_trust_in_one_sentence() -> None:
    values = {"network": "nets:Net"}
    with pytest.raises(ConfigError) as caught:
        check("run/config.yaml", values, Config, trust=False)
    assert str(caught.value) == (
        "run/config.yaml names code outside of fedloom, --network nets:Net, which can do anything on this machine; "
        "if you know what it does, give --trust (in Python, trust=True)."
    )
    check("run/config.yaml", values, Config, trust=True)
    check("run/config.yaml", {"network": "mlp"}, Config, trust=False)


@pytest.mark.parametrize("path", ["trap:", "trap:a=b", "trap:a:b", " trap:Net", "trap.:Net", ".trap:Net", "trap"])
def test_what_is_no_import_path_is_not_imported(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a value that ``path_in`` takes for something else could still be imported."""
    (tmp_path / "trap.py").touch()
    (tmp_path / " trap.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"is no (module's full )?name"):
        import_path(path, "--model")
    assert not {"trap", " trap"} & set(sys.modules)
