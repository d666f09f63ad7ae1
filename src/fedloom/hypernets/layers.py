# SPDX-License-Identifier: Apache-2.0
"""Layers of a model named in an option: which a client keeps, which it cannot train.

``conv1+head`` names the layer ``conv1`` and the output layer, ``*bn*`` all parameters with bn in their names, and
``none`` nothing. An option gives several such ways, of which each client has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import combinations

from fedloom.core.config import flag
from fedloom.core.contract import Model
from fedloom.core.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]


def selected(model: Model, *ways: str) -> set[str]:
    """The parameters that any of ``ways`` names."""
    layers = [layer for way in ways for layer in way.split("+")]
    found = set(model.head) if "head" in layers else set()
    return found | {
        name for name in model.shapes for layer in layers if name.startswith(f"{layer}.") or fnmatchcase(name, layer)
    }


def rest(model: Model, ways: Sequence[str]) -> list[Shapes]:
    """The model without what each of ``ways`` names; the whole model where there are none."""
    kept = [selected(model, way) for way in ways] or [set()]
    return [{name: shape for name, shape in model.shapes.items() if name not in names} for names in kept]


def size_of(shapes: Shapes) -> int:
    """The number of parameters."""
    return sum(math.prod(shape) for shape in shapes.values())


def check_ways(option: str, ways: Sequence[str], models: Iterable[Model], *, told_by_size: bool) -> None:
    """Refuse layers that no model has and, where clients tell their way by the size of what is left, what they cannot.

    Nothing may be left of no model, and no two ways may leave different layers of one size.
    """
    models = list(models) if ways else []
    for layer in (layer for way in ways for layer in way.split("+") if layer != "none"):
        if not any(selected(model, layer) for model in models):
            known = sorted({name.rpartition(".")[0] or name for model in models for name in model.shapes})
            raise ConfigError(
                f"{flag(option)} names {layer!r}, which no model has. Choose from head, none, {', '.join(known)}."
            )
    for model in models if told_by_size else ():
        left = rest(model, ways)
        if not all(left):
            raise ConfigError(f"{flag(option)} leaves nothing of {model.spec}. Name fewer layers.")
        for (one, a), (other, b) in combinations(zip(ways, left), 2):
            if size_of(a) == size_of(b) and a != b:
                raise ConfigError(
                    f"{flag(option)} {one} and {other} leave as many parameters of {model.spec}, {size_of(a)}, by "
                    "which a client tells what is its own. Name other layers."
                )
