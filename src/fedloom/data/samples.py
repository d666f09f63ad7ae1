# SPDX-License-Identifier: Apache-2.0
"""Samples and labels that users give from Python, checked to be like a federation's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import DataError
from fedloom.data.arrays import Arrays
from fedloom.data.labels import coded
from fedloom.data.own import from_arrays, from_torch_dataset


def as_arrays(dataset: Any) -> Arrays:
    """Arrays, an (x, y) pair or a torch Dataset as checked arrays."""
    if isinstance(dataset, Arrays):
        return dataset
    if isinstance(dataset, tuple) and len(dataset) == 2:
        x, y = (part.detach().cpu() if isinstance(part, Tensor) else part for part in dataset)
        return from_arrays(x, y)
    return from_torch_dataset(dataset)


def checked_samples(x: Any, shape: tuple[int, ...]) -> Tensor:
    """Samples of that shape, all finite."""
    samples = _tensor(x, "samples")
    if not samples.ndim or tuple(samples.shape[1:]) != shape:
        raise DataError(
            f"Got samples of shape {tuple(samples.shape)}; expected (samples, {', '.join(map(str, shape))}), "
            "as in this federation."
        )
    if not samples.isfinite().all():
        raise DataError("Got samples with NaN or infinite values; remove or replace them.")
    return samples


def checked_labels(
    y: Any, shape: tuple[int, ...], classes: int, names: Sequence[str] = (), *, unknown_allowed: bool
) -> Tensor:
    """Labels of that shape: numbers or names of classes, or any finite numbers where there are no classes.

    ``unknown_allowed``: -1, or a text without letters, stands for a label that is not known.
    """
    y = numbered(y, names or [str(number) for number in range(classes)], unknown=unknown_allowed)
    labels = _tensor(y, "labels")
    if tuple(labels.shape) != shape:
        raise DataError(f"Got labels of shape {tuple(labels.shape)} for {shape[0]} samples; expected {shape}.")
    if not labels.isfinite().all():
        raise DataError("Got labels with NaN or infinite values; remove or replace those samples.")
    if not classes:
        return labels
    whole, lowest = labels.to(torch.int64), -1 if unknown_allowed else 0
    if bool((whole != labels).any()) or int(whole.min()) < lowest or int(whole.max()) >= classes:
        raise DataError(
            f"Got labels from {labels.min()} to {labels.max()}; expected whole numbers from 0 to {classes - 1}, "
            "as in this federation"
            + (", or -1 where a label is not known." if unknown_allowed else ", as the method trains on them.")
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
