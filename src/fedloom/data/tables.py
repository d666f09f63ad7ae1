# SPDX-License-Identifier: Apache-2.0
"""Tables: CSV by the standard library, Parquet by pyarrow, and columns given from Python, as datasets.

A column whose every entry is a number, or nothing, has numbers; any other has categories. Nothing stands where the text
is empty, NA, N/A, NaN, null, None or <NA>. How columns become features is fitted later, on training rows alone
(``preparation``).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data import parquet
from fedloom.data.arrays import Arrays
from fedloom.data.own import from_arrays
from fedloom.data.preparation import Column, Preparation, as_numbers, as_texts, is_number

SUFFIXES = (".csv", ".parquet")
NOTHING = {"", "na", "n/a", "nan", "null", "none", "<na>"}
"""In small letters; the last is how pandas writes it."""
CLIENT, SPLIT, TARGET = "client", "split", "y"
MANY = 20
"""So many different texts, and one in four rows with another: this is no category, but a name."""

COMMA = re.compile(r"[+-]?\d+(,\d+)?")

Columns = dict[str, np.ndarray]


class Roles(NamedTuple):
    """Which columns are no features."""

    target: tuple[str, ...] = (TARGET,)
    """What is predicted."""
    groups: tuple[str, ...] = ()
    """Whose a sample is; besides the column client."""
    task: str = "auto"

    @classmethod
    def of(cls, target: str | None, groups: str | None, task: str = "auto") -> Roles:
        """From names separated by commas."""
        wanted = tuple(target.split(",")) if target else (TARGET,)
        return cls(wanted, tuple(groups.split(",")) if groups else (), task)


def is_table(path: Path) -> bool:
    """Whether a file is one, by its name."""
    return path.suffix.lower() in SUFFIXES


def read_table(path: Path) -> Columns:
    """The columns of a file by name: text, or float64 where a Parquet file has numbers."""
    if not path.is_file():
        raise DataError(f"There is no file {path}; give the path of a table, .csv or .parquet.")
    columns = _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_csv(path)
    if not columns or not len(next(iter(columns.values()))):
        raise DataError(f"{path} has no rows; expected a line with the columns' names, and a line for each sample.")
    return columns


def is_columns(given: Any) -> bool:
    """Whether something given from Python is a table: a mapping of columns, or a data frame."""
    return isinstance(given, Mapping) or (hasattr(given, "columns") and hasattr(given, "__getitem__"))


def columns_of(given: Any) -> Columns:
    """The columns of a mapping or of a data frame."""
    found = {}
    for name in given if isinstance(given, Mapping) else given.columns:
        values = np.asarray(given[name])
        if values.ndim != 1:
            raise DataError(f"The column {name!r} has the shape {values.shape}; expected one entry per sample.")
        if values.dtype.kind not in "buifUSO":
            raise DataError(f"The column {name!r} is of type {values.dtype}; expected numbers or text.")
        found[str(name)] = values if values.dtype.kind in "buif" else np.array([_text(one) for one in values.tolist()])
    if len({len(values) for values in found.values()}) != 1:
        raise DataError("The columns are of several lengths, or there are none; expected one entry per sample in each.")
    return found


def _text(value: Any) -> str:
    missing = value is None or (isinstance(value, float) and np.isnan(value))
    text = "" if missing else value.decode() if isinstance(value, bytes) else str(value)
    return "" if text.strip().lower() in NOTHING else text


def _read_csv(path: Path) -> Columns:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            delimiter = max(",;\t", key=first.count)
            rows = [row for row in csv.reader(file, delimiter=delimiter, strict=True) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table ({error}); write it as UTF-8 with commas.") from error
    if not rows:
        raise DataError(f"{path} is empty; expected a line with the columns' names, and a line for each sample.")
    names = [name.strip() for name in rows[0]]
    twice = [name for name in names if names.count(name) > 1 or not name]
    if twice:
        raise DataError(f"{path} has the column {twice[0]!r} twice, or without a name; give each one of its own.")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(names):
            raise DataError(
                f"{path} has {len(row)} entries in row {number} for {len(names)} columns; give one for each."
            )
    texts = [[_text(entry.strip()) for entry in column] for column in zip(*rows[1:])] or [[] for _ in names]
    return {name: np.array(column, str) for name, column in zip(names, texts)}


def _read_parquet(path: Path) -> Columns:
    parquet.check_pyarrow()
    import pyarrow.parquet
    import pyarrow.types as kinds

    table = parquet.read(path, lambda: pyarrow.parquet.read_table(path))
    found: Columns = {}
    for name, column in zip(table.column_names, table.columns):
        kind = column.type.value_type if kinds.is_dictionary(column.type) else column.type
        if kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind) or kinds.is_decimal(kind):
            plain = column.cast(kind).cast("int8") if kinds.is_boolean(kind) else column.cast(kind)
            found[name] = plain.cast("float64").to_numpy(zero_copy_only=False)
        elif kinds.is_string(kind) or kinds.is_large_string(kind):
            found[name] = np.array([_text(one) for one in column.to_pylist()], str)
        else:
            raise DataError(f"{path} has the column {name!r} of type {column.type}; expected numbers or text.")
    return found


def from_table(given: Any, roles: Roles | None = None, name: str = "table") -> Arrays:
    """A dataset from a path, a mapping of columns or a data frame, its samples raw."""
    roles, path = roles or Roles(), isinstance(given, str | Path)
    columns = read_table(Path(given)) if path else columns_of(given)
    return _dataset(columns, roles, Path(given).stem if path else name)


def from_folder_of_tables(path: Path, files: Sequence[Path], roles: Roles) -> Arrays:
    """A dataset from tables with the same columns in any order, one per client and named after it."""
    tables = [read_table(file) for file in files]
    names = set(tables[0])
    for file, table in zip(files, tables):
        different = sorted(set(table) ^ names)
        if different:
            fault = "the unknown column" if different[0] in table else "no column"
            raise DataError(f"{file} has {fault} {different[0]!r}, unlike {files[0]}; give every client the same ones.")
        table[CLIENT] = np.full(len(next(iter(table.values()))), file.stem)
    joined = {name: np.concatenate([_alike(one[name], tables, name) for one in tables]) for name in tables[0]}
    return _dataset(joined, roles, path.resolve().name)


def _alike(values: np.ndarray, tables: Sequence[Columns], name: str) -> np.ndarray:
    """Text, if the column is text in any of the tables."""
    return as_texts(values) if any(table[name].dtype.kind == "U" for table in tables) else values


def _dataset(columns: Columns, roles: Roles, name: str) -> Arrays:
    what = f"Dataset {name!r}"
    for wanted in (*roles.target, *roles.groups):
        if wanted not in columns:
            flag = "--target" if wanted in roles.target else "--groups"
            shown = ", ".join(list(columns)[:20])
            raise DataError(f"{what} has no column {wanted!r}; name one of {shown} as {flag}.")
    apart = [one for one in dict.fromkeys((*roles.groups, CLIENT, SPLIT)) if one in columns and one not in roles.target]
    features = [one for one in columns if one not in {*roles.target, *apart}]
    if not features:
        raise DataError(f"{what} has no columns left to predict {', '.join(roles.target)} from; expected one at least.")
    preparation = Preparation(
        "table", tuple(_column(what, one, columns[one]) for one in features), roles.target, tuple(apart)
    )
    y = targets_of(columns, roles.target, what)
    task: Any = None if roles.task == "auto" or ":" in roles.task else roles.task
    several = len(roles.target) > 1
    if task == "regression" or (several and task is None and not np.isin(y, (0.0, 1.0)).all()):
        task, y = "regression", y.astype(np.float64)
    elif several and y.dtype.kind == "f":
        task, y = "multilabel", y.astype(bool)
    found = from_arrays(
        np.zeros((len(y), 1)),
        y,
        split=columns[SPLIT] if SPLIT in apart else None,
        name=name,
        task=task,
        classes=roles.target if several else None,
        groups={one: as_texts(columns[one]) for one in apart if one != SPLIT},
    )
    if task is None and y.dtype.kind == "i" and found.sample_classes > 2:
        name = roles.target[0]
        found = replace(
            found, notes=(*found.notes, f"whole numbers in {name!r} are classes; else give --task regression")
        )
    found = replace(found, notes=(*found.notes, *_mixed(preparation)))
    return found.raw(preparation.encoded(columns, what), preparation)


def _mixed(preparation: Preparation) -> list[str]:
    """Notes on columns that have categories because of some text among their numbers."""
    return [
        f"the column {column.name!r} has {others[0]!r} among numbers, so all of it is categories; if this stands for "
        "nothing, leave the entry empty"
        for column in preparation.columns
        if (others := [text for text in column.categories or () if not is_number(text)])
        and len(others) < len(column.categories or ())
    ]


def targets_of(columns: Columns, names: Sequence[str], what: str, *, unknown: bool = False) -> np.ndarray:
    """What is to be predicted: whole numbers, numbers with a decimal point, or text; of several columns, numbers.

    ``unknown``: some may be missing; they are text without letters, or NaN.
    """
    found = []
    for name in names:
        values = columns[name]
        if not unknown and bool((as_texts(values) == "").any()):
            row = int(np.flatnonzero(as_texts(values) == "")[0]) + 1
            raise DataError(f"{what} has nothing in the column {name!r} of sample {row}, which is to be predicted.")
        found.append(values)
    if len(found) > 1:
        return np.stack([as_numbers(v, f"{what} has in the column {n!r}") for v, n in zip(found, names)], axis=1)
    try:
        numbers = as_numbers(found[0], "")
    except DataError:
        return as_texts(found[0])
    if np.isnan(numbers).any():
        return as_texts(found[0])
    return numbers.astype(np.int64) if np.array_equal(numbers, np.round(numbers)) else numbers


def _column(what: str, name: str, values: np.ndarray) -> Column:
    """A column that is not fitted yet: numbers if every entry is one, or nothing."""
    try:
        as_numbers(values, f"{what} has in the column {name!r}")
    except DataError as error:
        if "infinite" in str(error):
            raise
    else:
        return Column(name)
    categories = [text for text in np.unique(values).tolist() if text]
    if categories and all(COMMA.fullmatch(text) for text in categories):
        raise DataError(
            f"{what} has numbers with a decimal comma in the column {name!r}, such as {categories[0]!r}; write a point."
        )
    others = [text for text in categories if not is_number(text)]
    if len(categories) - len(others) > MANY:
        raise DataError(
            f"{what} has {others[0]!r} among the numbers of the column {name!r}; leave the entry empty where nothing "
            "is known or, if these are categories, write them with a letter, such as 'c12'."
        )
    if len(categories) > MANY and 4 * len(categories) > len(values):
        raise DataError(
            f"{what} has {len(categories)} different texts in the column {name!r} for {len(values)} samples, too many "
            "for categories; leave the column out, or name it in --groups, which makes it no feature."
        )
    return Column(name, categories=tuple(categories))
