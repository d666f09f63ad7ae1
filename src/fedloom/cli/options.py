# SPDX-License-Identifier: Apache-2.0
"""Flags from the fields of a config. Their text stays text: ``core.config`` converts it, with its own sentences."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable
from dataclasses import Field
from typing import Annotated, Any, Optional

import typer

from fedloom.core.config import fields, flag

WORDS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}


def flags(config_type: type, panel: str, names: Collection[str] | None = None) -> list[inspect.Parameter]:
    """One optional parameter per field, under the heading ``panel``; only ``names`` if they are given."""
    return [_flag(field, kind, panel) for field, kind in fields(config_type) if names is None or field.name in names]


def with_flags(command: Callable[..., None], generated: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """``command``, which takes ``**flags``, with the generated parameters in their place."""

    @functools.wraps(command)
    def call(**values: Any) -> None:
        command(**values)

    own = inspect.signature(command, eval_str=True).parameters.values()
    kept = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
    call.__signature__ = inspect.Signature([*generated, *kept])  # type: ignore[attr-defined]
    return call


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The flags that were written down."""
    return {name: value for name, value in values.items() if value is not None}


def _flag(field: Field[Any], kind: Any, panel: str) -> inspect.Parameter:
    spelling, is_switch = flag(field.name), kind is bool
    about = typer.Option(
        f"{spelling}/--no-{spelling.removeprefix('--')}" if is_switch else spelling,
        metavar=None if is_switch else _metavar(kind),
        help=f"{field.metadata['help']}{_default(field.default)}",
        show_default=False,
        rich_help_panel=panel,
    )
    annotation = Annotated[Optional[bool], about] if is_switch else Annotated[Optional[str], about]  # noqa: UP045
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return "|".join(_metavar(one) for one in typing.get_args(kind) if one is not type(None))
    if typing.get_origin(kind) is tuple:
        return f"{_metavar(typing.get_args(kind)[0])},..."
    return WORDS[kind]


def _default(value: Any) -> str:
    """The default as it would be written, in a sentence: typer knows only that a flag may be left out."""
    if value is None:
        return ""
    if isinstance(value, bool):
        value = "on" if value else "off"
    return f" Default: {','.join(map(str, value)) if isinstance(value, tuple) else value}."
