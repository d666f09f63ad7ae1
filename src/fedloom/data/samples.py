# SPDX-License-Identifier: Apache-2.0
"""Samples and labels that users give from Python, checked to be like a federation's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import DataError
from fedloom.core.tokens import Tokens
from fedloom.data.arrays import Arrays
from fedloom.data.labels import UNKNOWN, coded
from fedloom.data.own import from_arrays, from_torch_dataset, samples_from_npz
from fedloom.data.preparation import Preparation
from fedloom.data.tables import Roles, columns_of, from_table, is_columns, is_table, read_table, targets_of


def as_arrays(dataset: Any, roles: Roles | None = None) -> Arrays:
    """Arrays, an (x, y) pair, a table or a torch Dataset as checked arrays."""
    if isinstance(dataset, Arrays):
        return dataset
    if is_columns(dataset):
        return from_table(dataset, roles)
    if isinstance(dataset, tuple) and len(dataset) == 2:
        x, y = (part.detach().cpu() if isinstance(part, Tensor) else part for part in dataset)
        return from_arrays(x, y)
    return from_torch_dataset(dataset)


def samples_from(path: str | Path) -> tuple[Any, Any]:
    """A newcomer's samples and labels from a file; of a table, its columns, with the labels among them."""
    path = Path(path)
    return (read_table(path), None) if is_table(path) else samples_from_npz(path)


def raw_samples(x: Any, preparation: Preparation) -> np.ndarray:
    """Samples before they are prepared, checked to be of the kind that the preparation is for."""
    if isinstance(x, str | Path):
        x, _ = samples_from(x)
    if is_columns(x):
        if preparation.kind != "table":
            raise DataError("Got a table; this federation's samples are images of bytes. Give an array of them.")
        return preparation.encoded(columns_of(x), "The table")
    raw = np.asarray(x.detach().cpu() if isinstance(x, Tensor) else x)
    if preparation.kind == "table":
        if raw.dtype.kind not in "buif" or raw.ndim != 2 or raw.shape[1] != len(preparation.columns):
            raise _no_table(raw, preparation)
        return raw.astype(np.float64)
    whole = raw.dtype == np.uint8 or (
        raw.dtype.kind in "buif"
        and raw.size > 0
        and np.array_equal(raw, np.round(raw))
        and 0 <= raw.min() <= raw.max() <= 255
    )
    if not whole:
        raise DataError(
            f"Got samples of type {raw.dtype} that are no bytes; this federation's samples are images of bytes, from 0 "
            "to 255, which it centres and scales itself. Give them so."
        )
    return raw


def _no_table(given: Any, preparation: Preparation) -> DataError:
    plain = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    return DataError(
        f"Got samples of type {plain.dtype} and shape {plain.shape}; expected a table with the columns "
        f"{', '.join(column.name for column in preparation.columns)}, by name and in any order."
    )


def prepared_samples(
    x: Any, shape: tuple[int, ...], preparation: Preparation | None, tokens: Tokens | None = None
) -> Tensor:
    """Samples as networks take them: raw ones prepared, checked to be of that shape and finite, or tokens."""
    if preparation is not None:
        if preparation.kind == "table" and not (isinstance(x, str | Path) or is_columns(x)):
            raise _no_table(x, preparation)  # an array's columns may be in another order
        raw = raw_samples(x, preparation)
        if preparation.kind == "images":
            raw = arranged(raw, shape)
            if tuple(raw.shape[1:]) != shape:
                return checked_samples(raw, shape)  # says what is wrong
        return checked_samples(preparation.apply(raw), shape)
    if is_columns(x):
        raise DataError("Got a table; this federation's samples are arrays. Give an array of them.")
    plain = x.detach().cpu().numpy() if isinstance(x, Tensor) else x
    if isinstance(plain, np.ndarray) and plain.dtype == np.uint8 and plain.ndim == 4:
        return checked_samples(arranged(plain, shape).astype(np.float32) / 255, shape)
    return checked_samples(arranged(plain, shape) if isinstance(plain, np.ndarray) else x, shape, tokens)


def arranged(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Samples with their channels first, if that gives them the shape."""
    turned = (x.shape[-1], *x.shape[1:-1]) if x.ndim > 2 else ()
    return np.ascontiguousarray(np.moveaxis(x, -1, 1)) if x.shape[1:] != shape and turned == shape else x


def labels_among(x: Any, preparation: Preparation | None) -> Any:
    """The labels that a table has besides its features, or a file beside its samples; None without."""
    if isinstance(x, str | Path):
        x, y = samples_from(x)
        if y is not None:
            return y
    if preparation is None or preparation.kind != "table" or not is_columns(x):
        return None
    columns = columns_of(x)
    if not all(name in columns for name in preparation.targets):
        return None
    return targets_of(columns, preparation.targets, "The table", unknown=True)


def checked_samples(x: Any, shape: tuple[int, ...], tokens: Tokens | None = None) -> Tensor:
    """Samples of that shape, all finite; or tokens of the vocabulary."""
    samples = _tensor(x, "samples")
    if not samples.ndim or tuple(samples.shape[1:]) != shape:
        raise DataError(
            f"Got samples of shape {tuple(samples.shape)}; expected (samples, {', '.join(map(str, shape))}), "
            "as in this federation."
        )
    if tokens:
        if samples.is_floating_point() or samples.dtype == torch.bool:
            raise DataError(
                f"Got samples of type {samples.dtype}; expected tokens, whole numbers, as in this federation."
            )
        fault = tokens.fault(int(samples.min()), int(samples.max())) if len(samples) else ""
        if fault:
            raise DataError(f"Got {fault}, as in this federation.")
        return samples.to(torch.int64)
    if not samples.isfinite().all():
        raise DataError("Got samples with NaN or infinite values; remove or replace them.")
    return samples


def checked_labels(y: Any, shape: tuple[int, ...], classes: int, names: Sequence[str] = ()) -> Tensor:
    """Labels of that shape: numbers or names of classes, or any finite numbers where there are no classes.

    -1, or a text without letters, stands for the label of a class that is not known.
    """
    y = numbered(y, names or [str(number) for number in range(classes)], unknown=True)
    labels = _tensor(y, "labels")
    if tuple(labels.shape) != shape:
        raise DataError(f"Got labels of shape {tuple(labels.shape)} for {shape[0]} samples; expected {shape}.")
    if not labels.isfinite().all():
        raise DataError("Got labels with NaN or infinite values; remove or replace those samples.")
    if not classes:
        return labels
    whole = labels.to(torch.int64)
    if bool((whole != labels).any()) or int(whole.min()) < UNKNOWN or int(whole.max()) >= classes:
        raise DataError(
            f"Got labels from {labels.min()} to {labels.max()}; expected whole numbers from 0 to {classes - 1}, "
            "as in this federation, or -1 where a label is not known."
        )
    return whole


def numbered(y: Any, names: Sequence[str], *, unknown: bool = False) -> Any:
    """Labels as numbers of classes where they are text, or where classes are named by other numbers."""
    plain = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if plain.dtype.kind not in "buiUS" or not len(names):
        return y
    return coded("The data", plain.astype(str) if plain.dtype.kind == "S" else plain, names, unknown=unknown)


def _tensor(values: Any, what: str) -> Tensor:
    try:
        found = torch.as_tensor(values).detach()
        if found.is_complex():
            raise TypeError
        return found
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"The {what} cannot be made a tensor: got a {type(values).__name__}; expected an array of numbers."
        ) from None
