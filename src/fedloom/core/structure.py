# SPDX-License-Identifier: Apache-2.0
"""Equality by structure, for records that hold functions.

Two programs that are made in two rounds from one config must be equal: engines keep traces and graphs by program. A
``functools.partial`` compares by identity, so it is taken apart here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields
from functools import cached_property, partial
from typing import Any


class Structural:
    """Base of frozen dataclasses with ``eq=False``: equal if all fields are, partials by function and arguments."""

    @cached_property
    def _structure(self) -> Hashable:
        return (type(self), *(_taken_apart(getattr(self, field.name)) for field in fields(self)))  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structural) and self._structure == other._structure

    def __hash__(self) -> int:
        return hash(self._structure)


def _taken_apart(value: Any) -> Hashable:
    if isinstance(value, partial):
        options = sorted(value.keywords.items())
        return (partial, _taken_apart(value.func), *map(_taken_apart, value.args), *map(_taken_apart, options))
    if isinstance(value, Mapping):
        return tuple((name, _taken_apart(one)) for name, one in value.items())
    if isinstance(value, tuple | list):
        return (type(value), *map(_taken_apart, value))
    found: Hashable = value
    return found
