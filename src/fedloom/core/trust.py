# SPDX-License-Identifier: Apache-2.0
"""Which code outside of fedloom may run: code that the user names, not code that a file names.

Options that hold the name of a network or a task take import paths, ``package.module:Name``, and importing a module
runs it. What users type, or pass from Python, they mean. A run directory, a config file or a recipe may be by somebody
else: if it names code outside of fedloom it is refused before anything is imported, unless the user trusts it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.core.config import flag
from fedloom.core.errors import ConfigError

PACKAGE = "fedloom"


def check(file: Path | str, values: Mapping[str, Any], *config_types: type, trust: bool) -> None:
    """Refuse ``values``, which come from ``file``, if they name code outside of fedloom and the user gave no trust."""
    named = outside(values, *config_types)
    if named and not trust:
        raise ConfigError(
            f"{file} names code outside of fedloom, {', '.join(named)}, which can do anything on this machine; "
            "if you know what it does, give --trust (in Python, trust=True)."
        )


def outside(values: Mapping[str, Any], *config_types: type) -> list[str]:
    """Those of ``values`` that name code outside of fedloom, as flags; the types say which options can name any."""
    found = []
    for field in (field for config_type in config_types for field in dataclasses.fields(config_type)):
        value = values.get(field.name) if field.metadata.get("code") else None
        names = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else ()
        paths = [path for path in (path_in(str(name)) for name in names) if path]
        found += [f"{flag(field.name)} {path}" for path in paths if not is_own(path)]
    return found


def path_in(name: str) -> str | None:
    """The import path that begins a name: ``nets:Net`` of ``nets:Net:width=3``, None of ``lenet:kernels=8``."""
    module, colon, rest = name.strip().partition(":")
    attribute = rest.partition(":")[0]
    return f"{module}:{attribute}" if colon and "=" not in attribute else None


def is_own(path: str) -> bool:
    """Whether an import path leads into fedloom."""
    return path.partition(":")[0].partition(".")[0] == PACKAGE


def import_path(path: str, what: str) -> Any:
    """The object at ``package.module:Name``, for the option ``what``."""
    module, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"{what} {path}: {module!r} is no module's full name. Write package.module:Name.")
    if not attribute.isidentifier():
        raise ConfigError(f"{what} {path}: {attribute!r} is no name. Check the name after the colon.")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(f"{what} {path}: cannot import {module!r} ({error}). Check the path or install it.") from None
    except AttributeError:
        raise ConfigError(f"{what} {path}: {module!r} has no {attribute!r}. Check the name after the colon.") from None
