# SPDX-License-Identifier: Apache-2.0
"""The methods: one file each, found by name. ``core.contract`` says what a file holds; ``fedavg`` is the example."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from fedloom.core.errors import unknown

if TYPE_CHECKING:
    from fedloom.core.contract import Algorithm


def names() -> list[str]:
    """The command-line names of all methods: the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get(name: str) -> Algorithm:
    """The method of that name."""
    if name not in names():
        raise unknown("method", name, names())
    algorithm: Algorithm = importlib.import_module(f"{__name__}.{name}").ALGORITHM
    return algorithm
