# SPDX-License-Identifier: Apache-2.0
"""The methods, by name: files of this folder, of folders that the user gives, and of installed packages.

``core.contract`` says what a file holds; ``fedavg`` is the example. Users give a folder by ``fedloom --methods DIR``,
by the variable FEDLOOM_METHODS or by ``add_folder``; a package declares entry points of the group ``fedloom.methods``.
A run directory has the name of its method, never its place: no file can have code looked for somewhere.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fedloom.core.errors import ConfigError, unknown

if TYPE_CHECKING:
    from fedloom.core.contract import Algorithm

VARIABLE = "FEDLOOM_METHODS"
"""The environment variable with the user's folders, separated as those of PATH are."""
GROUP = "fedloom.methods"
"""Entry points: a method's name, and the module that has its ALGORITHM."""
PACKAGE = "fedloom_methods"
"""The package that files of the user's folders are imported as, whichever folder they lie in."""

_DEFINES = re.compile(rb"^ALGORITHM\b", re.MULTILINE)


class Place(NamedTuple):
    """Where a method is."""

    module: str
    """The name that it is imported by."""
    where: Path | str
    """Its file, or the package that declares it."""


def names() -> list[str]:
    """The command-line names of all methods."""
    return sorted(places())


def built_in() -> list[str]:
    """The names of fedloom's own methods."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def get(name: str, what: str = "method") -> Algorithm:
    """The method of that name; ``what`` says in an error whose name it is."""
    from fedloom.core.contract import Algorithm

    module, where = place(name, what)
    if module.startswith(f"{PACKAGE}."):
        _open_folders()
    try:
        found = getattr(importlib.import_module(module), "ALGORITHM", None)
    except Exception as error:  # whatever is wrong with a user's file, other methods go on
        if module.startswith(f"{__name__}."):
            raise
        raise ConfigError(f"The method {name!r} cannot be imported: {_fault(error)}; correct it.") from error
    if not isinstance(found, Algorithm):
        raise ConfigError(f"The method {name!r} has no ALGORITHM of type Algorithm; define one in {where}.")
    return found


def place(name: str, what: str = "method") -> Place:
    """Where the method of that name is."""
    known = places()
    if name not in known:
        raise ConfigError(
            f"{unknown(what, name, known)} For one of your own, give its folder: `fedloom --methods DIR`, "
            f"{VARIABLE}=DIR or, in Python, fedloom.algorithms.add_folder."
        )
    return known[name]


def places() -> dict[str, Place]:
    """Where each method is; nothing is imported for it."""
    home = Path(__path__[0])
    known = {name: Place(f"{__name__}.{name}", home / f"{name}.py") for name in built_in()}
    for name, found in [*_in_folders(), *_in_packages()]:
        if name in known:
            raise ConfigError(f"Two methods are called {name!r}, {known[name].where} and {found.where}; rename one.")
        known[name] = found
    return known


def add_folder(folder: str | Path) -> None:
    """Have methods found in ``folder`` too, by this process and those that it starts."""
    os.environ[VARIABLE] = os.pathsep.join(map(str, [*folders(), _folder(folder)]))


def folders() -> list[Path]:
    """The folders that the user gave, each once."""
    given = [_folder(one) for one in os.environ.get(VARIABLE, "").split(os.pathsep) if one]
    return [folder for folder in dict.fromkeys(given) if folder != Path(__path__[0]).resolve()]


def _folder(given: str | Path) -> Path:
    folder = Path(given).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"{given} is not a folder; give one with methods in it (--methods, {VARIABLE}).")
    return folder


def _in_folders() -> Iterator[tuple[str, Place]]:
    """The files that define an ALGORITHM. Others may lie beside them, to be imported by them."""
    known: dict[str, Path] = {}
    for file in (file for folder in folders() for file in sorted(folder.glob("*.py"))):
        name = file.stem
        if name in known and name != "__init__":  # as modules they would have one name
            raise ConfigError(f"Two files in folders of methods have one name, {known[name]} and {file}; rename one.")
        known[name] = file
        if name.isidentifier() and not name.startswith("_") and file.is_file() and _defines_method(file):
            yield name, Place(f"{PACKAGE}.{name}", file)


def _defines_method(file: Path) -> bool:
    """Whether it assigns ALGORITHM, by its text: a file that is not Python yet must not stop other commands."""
    try:
        return bool(_DEFINES.search(file.read_bytes()))
    except OSError:
        return False


@cache
def _in_packages() -> list[tuple[str, Place]]:
    """The entry points of installed packages.

    The folder that the user is in may be on Python's path. Whatever looks installed there may be somebody else's file.
    """
    from importlib.metadata import distributions

    here = Path.cwd()
    path = [entry for entry in sys.path if entry and Path(entry).resolve() != here]
    found = [
        (point.name, Place(point.module, f"the package {package.name}"))
        for package in distributions(path=path)
        for point in package.entry_points
        if point.group == GROUP
    ]
    return list(dict.fromkeys(found))  # one package may be on the path twice


def _open_folders() -> None:
    """Have the user's folders imported from as one package, in which files can import each other."""
    if PACKAGE not in sys.modules:
        spec = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
        sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE].__path__ = [str(folder) for folder in folders()]
    importlib.invalidate_caches()  # files that were written a moment ago


def _fault(error: Exception) -> str:
    """What is wrong with a file, and in which line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (last.filename, last.lineno)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__} in line {line} of {file} ({text})"
