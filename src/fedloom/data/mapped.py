# SPDX-License-Identifier: Apache-2.0
"""Samples that stay on disk: a folder with ``x.npy``, which is mapped and not read, and ``y.npy`` beside it.

A round reads the samples of its own clients, and the system forgets what it needs no more: the data may be larger than
memory. Beside x and y there can be ``client.npy``, ``split.npy``, ``classes.npy`` and ``group_NAME.npy``, as in an .npz
file; all but x are read.

x is used as it lies there: float32, prepared, channels first. It is looked through when it is opened, for NaN and
infinite values, and once more for its digest.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.arrays import Arrays
from fedloom.data.own import GROUP, from_arrays

FEW = 1000
"""Samples that are looked at for what a user should know of them."""
OPTIONAL = ("client", "split", "classes")


def is_mapped(path: Path) -> bool:
    """Whether this is a folder of that kind."""
    return (path / "x.npy").is_file()


def from_mapped(path: str | Path) -> Arrays:
    """The dataset in such a folder; ``x`` is mapped, and stays on disk."""
    path = Path(path)
    files = {file.stem: file for file in sorted(path.glob("*.npy"))}
    strange = [name for name in files if name not in ("x", "y", *OPTIONAL) and not name.startswith(GROUP)]
    if strange or "y" not in files:
        raise DataError(
            f"{path} has the files {', '.join(file.name for file in files.values())}; expected x.npy and y.npy, "
            f"optionally {', '.join(f'{name}.npy' for name in OPTIONAL)} and {GROUP}NAME.npy."
        )
    x = opened(files["x"])
    return beside(path, x, {name: _read(file, np.load) for name, file in files.items() if name != "x"})


def beside(path: Path, x: np.ndarray, rest: Mapping[str, np.ndarray]) -> Arrays:
    """The dataset with samples that are mapped, and the arrays beside them by name."""
    groups = {name.removeprefix(GROUP): array for name, array in rest.items() if name.startswith(GROUP)}
    given: dict[str, Any] = {name: rest.get(name) for name in OPTIONAL}
    without_x = np.zeros((len(rest["y"]), 1), np.float32)
    first = np.array(x[:FEW])
    notes = from_arrays(first, np.zeros(len(first), np.int64), name=path.name, axes="channels_first").notes
    return replace(from_arrays(without_x, rest["y"], name=path.name, groups=groups, **given), x=x, notes=notes)


def opened(file: Path) -> np.memmap:
    """The array of samples in a file, mapped."""
    # a private copy of what is written to, which nothing is: torch warns of memory that cannot be written
    x = _read(file, lambda file, **how: np.load(file, mmap_mode="c", **how))
    if not isinstance(x, np.memmap) or x.dtype != np.float32 or not x.flags.c_contiguous or x.ndim not in (2, 3, 4):
        order = "" if x.flags.c_contiguous else ", column by column"
        raise DataError(
            f"{file} has x of type {x.dtype} and shape {x.shape}{order}; expected float32, row by row: features "
            "(samples, F), windows (samples, C, L) or images (samples, C, H, W). Write it with np.save(file, "
            "np.ascontiguousarray(x, np.float32))."
        )
    return x


def _read(file: Path, load: Callable[..., np.ndarray]) -> np.ndarray:
    if not file.is_file():
        raise DataError(f"There is no file {file}.")
    try:
        array = load(file, allow_pickle=False)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can raise anything at all
        reason = str(error).partition(" If you trust")[0].rstrip(".")  # numpy then tells how to run what is in it
        raise DataError(
            f"{file} cannot be read as a plain array ({reason}); write it with np.save(file, array) and no objects."
        ) from error
    if not isinstance(array, np.ndarray) or not array.ndim:
        raise DataError(f"{file} has no array with axes; expected one entry per sample.")
    return array
