# SPDX-License-Identifier: Apache-2.0
"""Parquet, by pyarrow: the columns of a table, and samples that stay on disk.

A Parquet file whose column ``x`` has lists of numbers is samples, not a table; so is a folder of such files, also with
folders ``client=NAME`` as other programs write them. Beside x there can be y, client, split and group_NAME, which are
read. x is not: Parquet is read in large pieces, of which a round would need a little each. It is unpacked once, piece
by piece, into a file beside it, NAME.x.npy, which is mapped (``mapped``), and unpacked again when it has changed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedloom.core.errors import DataError, NeedsError
from fedloom.data.arrays import Arrays
from fedloom.data.mapped import beside, opened
from fedloom.data.own import GROUP

SUFFIX, UNPACKED = ".parquet", ".x.npy"
BESIDE = ("y", "client", "split")
PIECE = 1 << 24
"""Bytes that are unpacked at a time."""

T = TypeVar("T")


def is_samples(path: Path) -> bool:
    """Whether this is samples in Parquet."""
    first = next(iter(_files(path)), None)
    if first is None:
        return False
    check_pyarrow()
    from pyarrow.parquet import read_schema

    with suppress(DataError):  # which is said when it is read
        schema = read(first, lambda: read_schema(first))
        return "x" in schema.names and _is_nested(schema.field("x").type)
    return False


def from_parquet(path: Path) -> Arrays:
    """The dataset in such a file or folder; its samples are unpacked, mapped, and stay on disk."""
    data = _dataset(path)
    names = [name for name in data.schema.names if name != "x"]
    strange = [name for name in names if name not in BESIDE and not name.startswith(GROUP)]
    if strange or "y" not in names:
        raise DataError(
            f"{path} has the columns {', '.join(data.schema.names)}; expected x and y, optionally "
            f"{', '.join(BESIDE[1:])} and {GROUP}NAME."
        )
    file = unpacked(path)
    table = read(path, lambda: data.to_table(columns=names))
    rest = {name: _column(path, name, table.column(name).combine_chunks()) for name in names}
    found = beside(path, opened(file), rest)
    return replace(found, notes=(*found.notes, f"samples were unpacked into {file}, which is read in their place"))


def unpacked(path: Path) -> Path:
    """The file with the samples of a Parquet file or folder, made if it is not there or they have changed since."""
    path = path.resolve()  # "." has no name
    file, data = path.with_name(path.name + UNPACKED), _dataset(path)
    rows = read(path, data.count_rows)
    changed = max(one.stat().st_mtime_ns for one in _files(path))
    if file.is_file() and file.stat().st_mtime_ns == changed and len(opened(file)) == rows:
        return file
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        _unpack(path, rows, part)
        os.utime(part, ns=(changed, changed))
        part.replace(file)
    except OSError as error:
        raise DataError(
            f"The samples of {path} cannot be unpacked into {file} ({error.strerror or error}); they need room there: "
            "make some, or copy the data to a folder of your own."
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return file


def here(file: Path) -> Path:
    """A file of samples; one that was unpacked elsewhere is unpacked on this machine if it is not here."""
    source = file.with_name(file.name.removesuffix(UNPACKED))
    return unpacked(source) if source != file and source.exists() and not file.exists() else file


def read(path: Path, function: Callable[[], T]) -> T:
    """What ``function`` reads by pyarrow."""
    check_pyarrow()
    import pyarrow

    try:
        return function()
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} cannot be read as a Parquet file ({reason}).") from error


def check_pyarrow() -> None:
    """Refuse Parquet where pyarrow is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise NeedsError("Parquet files need pyarrow, which is not installed; pip install 'fedloom[parquet]'.")


def _files(path: Path) -> list[Path]:
    if path.is_dir() and not any(path.glob("*.np[yz]")):  # which go before
        return sorted([*path.glob(f"*{SUFFIX}"), *path.glob(f"*=*/**/*{SUFFIX}")])
    return [path] if path.suffix.lower() == SUFFIX and path.is_file() else []


def _dataset(path: Path) -> Any:
    import pyarrow.dataset

    files, base = [str(file) for file in _files(path)], str(path if path.is_dir() else path.parent)
    of = {"format": "parquet", "partitioning": "hive", "partition_base_dir": base}
    return read(path, lambda: pyarrow.dataset.dataset(files, **of))


def _unpack(path: Path, rows: int, part: Path) -> None:
    shape: tuple[int, ...] | None = None
    with part.open("wb") as file:
        for x in _pieces(path):
            if x.dtype.kind != "f":
                raise DataError(
                    f"{path} has x of {x.dtype}; expected floating-point numbers, prepared as networks take them. Give "
                    "images of bytes, and tokens, as arrays in an .npz file."
                )
            if shape is None:
                shape = x.shape[1:]
                header = {"descr": "<f4", "fortran_order": False, "shape": (rows, *shape)}
                np.lib.format.write_array_header_1_0(file, header)
            if x.shape[1:] != shape:
                raise _uneven(path, "x")
            file.write(np.ascontiguousarray(x, "<f4").data)
    if shape is None:
        raise DataError(f"{path} has no samples; expected at least one.")


def _pieces(path: Path) -> Iterator[np.ndarray]:
    """The samples, some at a time."""
    from pyarrow.parquet import ParquetFile

    for name in _files(path):
        with read(path, partial(ParquetFile, name)) as file:
            for group in range(file.metadata.num_row_groups):  # of several at once all would stay in memory
                about = file.metadata.row_group(group)
                rows = max(1, PIECE * about.num_rows // max(1, about.total_byte_size))
                batches = file.iter_batches(rows, [group], ["x"], use_threads=False)
                while (batch := read(path, partial(next, batches, None))) is not None:
                    if len(batch):
                        yield _nested(path, "x", batch.column(0))


def _column(path: Path, name: str, column: Any) -> np.ndarray:
    """A column that is read whole."""
    import pyarrow.types as kinds

    kind = column.type.value_type if kinds.is_dictionary(column.type) else column.type
    if _is_nested(kind):
        return _nested(path, name, column)
    if column.null_count:
        raise DataError(f"{path} has nothing in the column {name!r} of some samples; give each its own.")
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        coded = column if kinds.is_dictionary(column.type) else column.dictionary_encode()
        found: np.ndarray = np.array(coded.dictionary.to_pylist(), str)[coded.indices.to_numpy()]
        return found
    if not (kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind)):
        raise DataError(f"{path} has the column {name!r} of type {column.type}; expected numbers or text.")
    return np.asarray(column.cast(kind).to_numpy(zero_copy_only=False))


def _nested(path: Path, name: str, column: Any) -> np.ndarray:
    """Lists of lists, or tensors, as an array; all must be of one shape."""
    import pyarrow.compute as compute
    import pyarrow.types as kinds

    if hasattr(column, "to_numpy_ndarray") and not column.null_count:
        return np.asarray(column.to_numpy_ndarray())
    dims = [len(column)]
    while _is_nested(column.type):
        lengths = (
            [column.type.list_size] if kinds.is_fixed_size_list(column.type)
            else compute.unique(compute.list_value_length(column)).to_pylist()
        )  # fmt: skip
        if column.null_count or len(lengths) != 1:
            raise _uneven(path, name)
        dims.append(lengths[0])
        column = column.flatten()
    if column.null_count:
        raise DataError(f"{path} has nothing in the place of a number in the column {name!r}; give each sample all.")
    return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(dims)


def _uneven(path: Path, name: str) -> DataError:
    return DataError(f"{path} has lists of several lengths in the column {name!r}, or none; give all one length.")


def _is_nested(kind: Any) -> bool:
    import pyarrow.types as kinds

    kind = getattr(kind, "storage_type", kind)
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))
