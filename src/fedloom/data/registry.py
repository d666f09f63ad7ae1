# SPDX-License-Identifier: Apache-2.0
"""The datasets that fedloom knows by name, found by scanning the readers: a file there is enough."""

import importlib
import os
import pkgutil
from functools import cache
from pathlib import Path

from fedloom.core.errors import DataError, unknown
from fedloom.data import readers
from fedloom.data.arrays import Arrays
from fedloom.data.files import Dataset
from fedloom.data.own import from_folder, from_npz

ROOT_VARIABLE = "FEDLOOM_DATA"


@cache
def _datasets() -> dict[str, Dataset]:
    modules = [importlib.import_module(f"{readers.__name__}.{m.name}") for m in pkgutil.iter_modules(readers.__path__)]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Dataset)]
    return {entry.name: entry for entry in sorted(found, key=lambda entry: entry.name)}


def names() -> list[str]:
    """The names of all datasets, sorted."""
    return list(_datasets())


def dataset(name: str) -> Dataset:
    """What is known of a dataset before reading it."""
    if name not in _datasets():
        raise unknown("dataset", name, names())
    return _datasets()[name]


def resolve_root(data_root: str | Path | None = None) -> Path:
    """The folder that the files of datasets lie below: the given one, else the environment's."""
    root = data_root or os.environ.get(ROOT_VARIABLE)
    if not root:
        raise DataError(
            f"No data root is given; set --data-root (data_root= in Python) or the environment variable "
            f"{ROOT_VARIABLE} to the folder that holds the datasets."
        )
    return Path(root).expanduser()


def load(name_or_path: str | Path, data_root: str | Path | None = None) -> Arrays:
    """A dataset by its name; or a user's own, from a path ending in .npz or a folder of one .npz per client.

    A name goes before a folder of the same name: write ``./mnist`` for the folder.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name in _datasets():
        known = dataset(name)
        return known.load(resolve_root(data_root) if known.files else Path())
    if path.suffix == ".npz":
        return from_npz(path)
    if path.is_dir():
        return from_folder(path)
    if path.is_file():
        raise DataError(
            f'{name} is no .npz file; write your samples with np.savez("mine.npz", x=x, y=y) and give that file.'
        )
    if "/" in name or os.sep in name:
        raise DataError(
            f"There is no folder {name}; give a folder with one .npz per client or a path that ends in .npz."
        )
    raise unknown("dataset", name, names())
