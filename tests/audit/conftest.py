# SPDX-License-Identifier: Apache-2.0
"""Finished runs to attack. Not to be changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.api import Run

SMALL = {"clients": 6, "partition": "dirichlet:0.3", "model": "mlp:hidden=16", "rounds": 2, "local_steps": 3}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``runs("fedavg", ...)``: a small finished run; the same one for equal options."""
    made: dict[Any, Path] = {}

    def run(method: str, **options: Any) -> Run:
        name = (method, *sorted(options.items()))
        if name not in made:
            out = tmp_path_factory.mktemp("audit") / "run"
            made[name] = fedloom.run(method, out=out, progress="quiet", **{**SMALL, **options}).path
        return fedloom.load(made[name])

    return run
