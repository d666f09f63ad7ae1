# SPDX-License-Identifier: Apache-2.0
"""What a run ran on is written down."""

import json
import platform
import sys
from datetime import datetime

import pytest

from fedloom.runs import environment as module
from fedloom.runs.environment import environment


def test_all_of_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fedloom", "train", "--out", "a b"])
    found = environment(3, "Some GPU")
    assert found["command"] == "fedloom train --out 'a b'"
    assert found["seed"] == 3 and found["device"] == "Some GPU" and found["cpus"] >= 1
    assert datetime.fromisoformat(found["started"]).tzinfo is not None
    assert found["platform"] == platform.platform()
    assert set(found["versions"]) == {"python", "fedloom", "torch", "numpy"}
    assert found["versions"]["python"] == platform.python_version() and found["versions"]["torch"]
    assert json.loads(json.dumps(found)) == found


def test_what_is_not_installed_has_no_version() -> None:
    assert module._version("no-such-package-as-this") is None
