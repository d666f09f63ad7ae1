# SPDX-License-Identifier: Apache-2.0
"""Choosing an engine, by a rule and not by a stopwatch: the same config must give the same bits on the next day too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fedloom.core.contract import Model
from fedloom.core.errors import unknown
from fedloom.engines.engine import AbstractEngine
from fedloom.engines.loopback import Loopback
from fedloom.engines.sequential import Sequential
from fedloom.engines.vectorised import Vectorised

ENGINES: Mapping[str, type[AbstractEngine]] = {e.name: e for e in (Sequential, Vectorised, Loopback)}


def choose(name: str, device: torch.device, models: Iterable[Model], cohort: int) -> tuple[str, str]:
    """The engine that ``name`` stands for, and why."""
    if name != "auto":
        if name not in ENGINES:
            raise unknown("engine", name, ["auto", *ENGINES])
        return name, "as asked"
    if device.type != "cpu":
        return "vectorised", f"on {device.type} a cohort is one batch"
    if cohort == 1:
        return "sequential", "a cohort of one client has nothing to batch"
    if any(len(shape) > 2 for model in models for shape in model.shapes.values()):
        return (
            "sequential",
            "on a CPU, convolutions of many clients at once are no faster than one after another",
        )
    return "vectorised", "on a CPU, dense models of many clients are faster in one batch"
