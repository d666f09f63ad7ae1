# SPDX-License-Identifier: Apache-2.0
"""Classes by name: labels of any kind become numbers from 0, and the names that they had are remembered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedloom.core.errors import DataError

UNKNOWN = -1
"""Stands for a label that is not known; among labels that are text, an empty one does."""

MANY, FEW_EACH = 20, 4
"""Whole numbers with gaps may be a regression's targets if there are more different ones, with fewer samples of each.
"""


def classes_of(what: str, y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as numbers from 0, and the classes' names; none for labels that are all of 0 to C - 1 already."""
    values, codes = np.unique(y, return_inverse=True)
    if y.dtype.kind in "bui" and np.array_equal(values, np.arange(len(values))):
        return y.astype(np.int64), ()
    if y.dtype.kind in "ui" and len(values) > MANY and len(y) < FEW_EACH * len(values):
        raise DataError(
            f"{what} has {len(values)} different whole numbers in y for {len(y)} samples; give classes as text, "
            "y.astype(str), or targets of a regression as y.astype(float)[:, None]; of a table, --task says which."
        )
    names = tuple(map(str, values.tolist()))
    if "" in names:
        raise DataError(f"{what} has labels without text; name every sample's class, or remove those samples.")
    return codes.reshape(y.shape).astype(np.int64), names


def coded(what: str, y: np.ndarray, names: Sequence[str], *, unknown: bool = False) -> np.ndarray:
    """Labels as the numbers of their classes, by name; whole numbers are numbers of classes unless names are others.

    ``unknown``: a label may be not known.
    """
    if y.dtype.kind != "U" and not _are_numbers(names):
        return y
    texts = y.astype(str)
    table = {name: number for number, name in enumerate(names)}
    if unknown:
        table = {"": UNKNOWN, str(UNKNOWN): UNKNOWN, **table}
    found, inverse = np.unique(texts, return_inverse=True)
    strange = [text for text in found.tolist() if text not in table]
    if strange:
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        raise DataError(f"{what} has the label {strange[0]!r}; the classes are {shown}. Give labels of these.")
    return np.array([table[text] for text in found.tolist()], np.int64)[inverse].reshape(y.shape)


def _are_numbers(names: Sequence[str]) -> bool:
    """Whether classes are named by whole numbers that are not simply theirs: 3 then is the class named 3."""
    try:
        return {int(name) for name in names} != set(range(len(names)))
    except ValueError:
        return False
