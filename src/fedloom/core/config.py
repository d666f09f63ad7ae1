# SPDX-License-Identifier: Apache-2.0
"""Configs: frozen dataclasses whose fields are the flags, each with its help text and its allowed values."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from fedloom.core.errors import ConfigError, unknown

C = TypeVar("C")


def option(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    code: bool = False,
) -> Any:
    """A field of a config: its default, what it means and where the default comes from, and its range.

    ``low`` and ``high`` are allowed themselves; a value must be greater than ``above``. ``code`` is for names of
    networks and the like, which can be import paths: files may not name any without the user's trust (``core.trust``).
    """
    about = {"help": help, "low": low, "above": above, "high": high, "code": code}
    return dataclasses.field(default=default, metadata=about)


def flag(name: str) -> str:
    """The spelling of a field on the command line; one that Python has a word of its own for ends in an underscore."""
    return "--" + name.rstrip("_").replace("_", "-")


def check(config: Any) -> None:
    """Refuse values outside of the declared ranges and choices; call it from ``__post_init__``."""
    for field, kind in fields(type(config)):
        value = getattr(config, field.name)
        choices = _choices(kind)
        if choices and value not in choices:
            raise unknown(f"value for {flag(field.name)}", str(value), [str(c) for c in choices])
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_range(field, number)


def _check_range(field: dataclasses.Field[Any], number: float) -> None:
    low, above, high = (field.metadata.get(name) for name in ("low", "above", "high"))
    wanted = [f"at least {low}"] if low is not None else []
    wanted += [f"more than {above}"] if above is not None else []
    wanted += [f"at most {high}"] if high is not None else []
    # written so that NaN fails
    fine = (low is None or number >= low) and (above is None or number > above) and (high is None or number <= high)
    if not math.isfinite(number) or not fine:
        raise ConfigError(
            f"{flag(field.name)} is {number}; it must be {' and '.join(wanted) or 'a number'}"
            f"{'' if math.isfinite(number) else ', and finite'}. "
            f"Leave it out{'' if field.default is None else f' to use {field.default}'}."
        )


def fields(config_type: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    """Fields with their resolved types."""
    hints = typing.get_type_hints(config_type)
    return [(field, hints[field.name]) for field in dataclasses.fields(config_type)]


def build(config_type: type[C], values: Mapping[str, Any], also_known: Iterable[str] = ()) -> C:
    """A config from flags or a YAML file: text is converted to the field's type, unknown keys are refused."""
    kinds = {field.name: kind for field, kind in fields(config_type)}
    values = with_implied(config_type, values)
    for name in values:
        if name not in kinds:
            raise unknown("option", name, [*kinds, *also_known])
    return config_type(**{name: convert(value, kinds[name], flag(name)) for name, value in values.items()})


def with_implied(config_type: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, and those of other options that follow from them.

    A type with a field ``preset`` can have ``PRESETS``, values by name of preset, which those given win over. A type
    can have ``INSTEAD``: by name of an option, what others are if it is given and they are not.
    """
    presets, chosen = getattr(config_type, "PRESETS", {}), values.get("preset")
    preset = presets.get(chosen, {}) if isinstance(chosen, str) else {}
    return {**preset, **instead(config_type, values), **values}


def by_preset(config_type: type) -> set[str]:
    """The options that presets have values for."""
    return {name for values in getattr(config_type, "PRESETS", {}).values() for name in values}


def instead(config_type: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """What other options are because of those in ``values``; one that is given as 0 is left to the others."""
    rules = getattr(config_type, "INSTEAD", {})
    meant = [name for name in rules if values.get(name) is not None and str(values[name]).strip("0.")]
    return {other: value for name in meant for other, value in rules[name].items()}


def convert(value: Any, kind: Any, name: str) -> Any:
    """``value``, a text or a YAML value, as ``kind``."""
    if _choices(kind):
        return value
    kinds = _alternatives(kind)
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        if type(None) in kinds:
            return None
        raise ConfigError(f"{name} is none; it needs a value: {describe(kind)}. Give one or leave it out.")
    for one in kinds:
        converted = _as(value, one)
        if converted is not None:
            return converted
    raise ConfigError(f"{name} is {value!r}; expected {describe(kind)}. Give such a value or leave it out.")


def describe(kind: Any) -> str:
    """A field's type in words."""
    choices = _choices(kind)
    if choices:
        return " | ".join(str(c) for c in choices)
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "none",
    }
    return " or ".join(
        f"{words[typing.get_args(k)[0]].removeprefix('a ')}s separated by commas"
        if typing.get_origin(k) is tuple
        else words[k]
        for k in _alternatives(kind)
    )


def _choices(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _alternatives(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def _as(value: Any, kind: Any) -> Any:
    """``value`` as ``kind``, or None if it is not one."""
    if typing.get_origin(kind) is tuple:
        parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
        converted = tuple(_as(part, typing.get_args(kind)[0]) for part in parts if part != "")
        return None if None in converted else converted
    if kind is bool:
        known = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        return value if isinstance(value, bool) else known.get(str(value).lower())
    if kind is str:
        return value if isinstance(value, str) else str(value) if isinstance(value, int | float) else None
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = kind(value)
        except (TypeError, ValueError, OverflowError):
            return None
        return None if kind is int and isinstance(value, float) and value != number else number
    return None
