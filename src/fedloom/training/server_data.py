# SPDX-License-Identifier: Apache-2.0
"""Samples of the server's own (``--server-data``): a share of the training data, or another dataset."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fedloom.core.contract import Model, ServerData
from fedloom.core.errors import ConfigError, DataError
from fedloom.core.task import Task
from fedloom.core.tokens import Tokens
from fedloom.data.arrays import Arrays, check_tokens, digest_of
from fedloom.data.preparation import Preparation, images_as_shares
from fedloom.data.registry import load
from fedloom.data.samples import arranged, prepared_samples, samples_from
from fedloom.data.tables import SUFFIXES, Roles, is_table


class Form(NamedTuple):
    """What samples are like in a federation."""

    shape: tuple[int, ...]
    num_classes: int
    """0 for a task without classes."""
    target_shape: tuple[int, ...]
    """Of one target; () for a label."""
    class_names: tuple[str, ...] = ()
    preparation: Preparation | None = None
    tokens: Tokens | None = None

    @classmethod
    def of(
        cls,
        model: Model,
        task: Task,
        target_shape: tuple[int, ...] = (),
        names: tuple[str, ...] = (),
        preparation: Preparation | None = None,
    ) -> Form:
        """As this model takes them and this task has them."""
        classes = model.num_outputs if task.class_scores or task.per_token else 0
        return cls(model.input_shape, classes, target_shape, names, preparation, model.tokens)


class ServerSamples(NamedTuple):
    """The server's samples, and where they are from."""

    x: np.ndarray  # (samples, ...)
    y: np.ndarray | None  # None: without labels
    source: str

    @property
    def note(self) -> str:
        """For the records of a run."""
        kind = "unlabelled" if self.y is None else "labelled"
        return f"the server has {len(self.x)} {kind} samples of its own ({self.source})"

    def on(self, device: torch.device, dtype: torch.dtype) -> ServerData:
        """As methods get them."""
        y = None if self.y is None else torch.as_tensor(self.y)
        if y is not None:
            y = y.to(device, dtype if y.is_floating_point() else torch.int64)
        x = torch.as_tensor(self.x)
        return ServerData(x.to(device, dtype if x.is_floating_point() else torch.int64), y)

    def digest(self) -> str:
        """A fingerprint of the samples and their labels."""
        return digest_of(self.x, *(() if self.y is None else (self.y,)))


def read(name: str, data_root: str | None, form: Form, *, labelled: bool) -> ServerSamples:
    """The training data of a dataset, given by name, file or folder; of data without a split, all of them.

    They must be like the clients' (``form``): samples of one shape and kind and, if they are ``labelled``, of the same
    task. There may be fewer classes than the clients have; classes with names are matched by these. A file needs labels
    only if they are wanted.
    """
    path = Path(name).expanduser()
    if not labelled and path.suffix in (".npz", *SUFFIXES):
        x, y = samples_from(path)[0], None
        if form.preparation or not isinstance(x, np.ndarray) or x.dtype == np.uint8:
            x = prepared_samples(x, form.shape, form.preparation).numpy()
        x = arranged(x, form.shape)
        arrays, classes, targets = None, 0, ()
    else:
        arrays = load(name, data_root, _roles(path, form))
        if arrays.preparation:  # bytes among samples that are not raw are shares of white, as they are of a newcomer
            arrays = arrays.prepared(form.preparation or images_as_shares(arrays.x.shape[1]))
        rows = slice(None) if arrays.split is None else arrays.split == "train"
        x, y, classes, targets = arrays.x[rows], arrays.y[rows], arrays.num_classes, tuple(arrays.y.shape[1:])
    what = f"--server-data {name}"
    if not len(x):
        raise DataError(f"{what} has no training samples. Give a dataset that has some.")
    if x.shape[1:] != form.shape:
        raise DataError(
            f"{what} has samples of shape {x.shape[1:]}; the clients' have {form.shape}. Give data of the same shape."
        )
    if (x.dtype == np.int64) != (form.tokens is not None):
        has, wanted = ("numbers", "tokens") if form.tokens else ("tokens", "numbers")
        raise DataError(f"{what} has samples of {has}; the clients have {wanted}. Give data of the same kind.")
    if form.tokens:
        check_tokens(what, x, form.tokens.vocabulary)
    elif not np.isfinite(x).all():
        raise DataError(f"{what} has NaN or infinite values in x; remove or replace those samples.")
    if labelled and bool(classes) != bool(form.num_classes):
        has, wanted = ("class labels", "real-valued targets") if classes else ("real-valued targets", "class labels")
        raise DataError(f"{what} has {has}; the clients have {wanted}. Give data for the same task.")
    if labelled and (classes > form.num_classes or targets != form.target_shape):
        mine, theirs = (classes, form.num_classes) if classes else (targets, form.target_shape)
        kind = "{} classes" if classes else "targets of shape {}"
        raise DataError(f"{what} has {kind.format(mine)}; the clients have {kind.format(theirs)}. Give data that fit.")
    if labelled and arrays and classes and _are_named_alike(arrays, form):
        y = arrays.with_classes(form.class_names, form.num_classes).y[rows]
    return ServerSamples(x, y if labelled else None, name)


def _roles(path: Path, form: Form) -> Roles | None:
    """Which columns of the server's table are no features: those of the clients'."""
    if form.preparation is None or form.preparation.kind != "table" or not is_table(path):
        return None
    return Roles(form.preparation.targets)


def _are_named_alike(arrays: Arrays, form: Form) -> bool:
    """Whether classes are told by name; names that the clients' classes do not have say nothing of them."""
    return bool(form.class_names) or all(name.isdecimal() for name in arrays.class_names)


def share_is_refused(server_data: float | str) -> None:
    """Refuse a share of the training data, where clients alone have data."""
    if not isinstance(server_data, str) and server_data:
        raise ConfigError(
            f"server-data is {server_data:g}, a share of the training data, which the server of a deployed federation "
            "does not have. Give a dataset's name or an .npz file of its own."
        )
