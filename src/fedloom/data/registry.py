# SPDX-License-Identifier: Apache-2.0
"""The datasets that fedloom knows by name, found by scanning the readers: a file there is enough."""

import importlib
import os
import pkgutil
from functools import cache
from pathlib import Path

from fedloom.core.errors import DataError, unknown
from fedloom.data import parquet, readers
from fedloom.data.arrays import Arrays
from fedloom.data.files import Dataset
from fedloom.data.mapped import from_mapped, is_mapped
from fedloom.data.own import from_folder, from_npz
from fedloom.data.tables import Roles, from_folder_of_tables, from_table, is_table
from fedloom.data.text import from_leaf, from_texts, leaf_files

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


def load(name_or_path: str | Path, data_root: str | Path | None = None, roles: Roles | None = None) -> Arrays:
    """A dataset by its name; or a user's own: an .npz file, a table, or a folder with one of these or one text per
    client; a folder with x.npy, or Parquet with a column x of lists, whose samples stay on disk; LEAF's JSON.

    A name goes before a folder of the same name: write ``./mnist`` for the folder. ``roles`` says which columns of a
    table are no features.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    samples = name not in _datasets() and parquet.is_samples(path)
    own = _own_table(path, roles or Roles()) if name not in _datasets() and not samples else None
    if own is not None:
        return own
    if roles and roles[:2] != Roles()[:2]:
        raise DataError(f"--target and --groups are for tables, .csv or .parquet; {name} is none. Leave them out.")
    if name in _datasets():
        known = dataset(name)
        return known.load(resolve_root(data_root) if known.files else Path())
    if samples:
        return parquet.from_parquet(path)
    if path.suffix == ".npz":
        return from_npz(path)
    if is_mapped(path):
        return from_mapped(path)
    if path.is_dir() and any(path.glob("*.txt")) and not any(path.glob("*.npz")):
        return from_texts(path)
    if (path.suffix == ".json" and path.is_file()) or (path.is_dir() and leaf_files(path)):
        return from_leaf(path)
    if path.is_dir():
        return from_folder(path)
    if path.is_file():
        raise DataError(
            f"{name} is no .npz file, no table (.csv, .parquet) and no JSON; write your samples with "
            'np.savez("mine.npz", x=x, y=y) and give that file.'
        )
    if "/" in name or os.sep in name:
        raise DataError(
            f"There is no folder {name}; give a folder with one .npz per client or a path that ends in .npz."
        )
    raise unknown("dataset", name, names())


def _own_table(path: Path, roles: Roles) -> Arrays | None:
    """A table, or a folder of tables; None for what is neither."""
    if is_table(path):
        return from_table(path, roles)
    files = sorted(file for file in path.iterdir() if is_table(file)) if path.is_dir() else []
    return from_folder_of_tables(path, files, roles) if files and not any(path.glob("*.npz")) else None
