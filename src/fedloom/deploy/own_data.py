# SPDX-License-Identifier: Apache-2.0
"""A node's own samples: prepared as the federation's are, and checked before a program sees them.

What is wrong is told to the server in words that hold nothing of the data; the rest is in the node's own log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.clients.federation import SPLITS, Client, Federation
from fedloom.core.errors import DataError
from fedloom.core.trees import ClientId
from fedloom.data.preparation import Preparation
from fedloom.data.samples import arranged, labels_among, numbered, raw_samples
from fedloom.deploy.options import Settings
from fedloom.deploy.store import Refusal
from fedloom.models.model import Model

log = logging.getLogger(__name__)


class OwnSamples(NamedTuple):
    """How a node's samples are to be."""

    settings: Settings
    preparation: Preparation | None
    """Of raw samples: how they are prepared."""
    raw: bool
    """They are left as they are: what they are prepared by is not known yet."""

    def federation(self, client: ClientId, model: Model, data: Any) -> Federation:
        """A federation of this client alone, on the model's device; ``data`` is what the user's ``load_data`` gave."""
        task, dtype = self.settings.task, model.dtype
        parts = data if isinstance(data, Mapping) else {"train": data}
        rows: dict[str, np.ndarray] = {}
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        start = 0
        for split in SPLITS:
            if split in parts:
                x, y = self._checked(split, *parts[split])
                xs.append(x.to(model.device, torch.float64 if self.raw else model.input_dtype))
                ys.append(y.to(model.device, dtype if y.is_floating_point() else torch.int64))
            length = len(xs[-1]) if split in parts else 0
            rows[split] = np.arange(start, start + length)
            start += length
        if not start:
            raise Refusal("has no samples: load_data gave none.")
        return Federation(torch.cat(xs), torch.cat(ys), task, {client: Client(client, model, rows)})

    def _prepared(self, split: str, x: Any) -> np.ndarray:
        """Raw samples of a split, or what is made of them."""
        assert self.preparation is not None
        try:
            raw = raw_samples(x, self.preparation)
        except DataError as error:
            log.warning("%s", error)  # it may have something of the data in it
            raise Refusal(f"has {split} samples that are no such raw ones as the federation's; see its log.") from error
        if self.preparation.kind == "images":
            raw = arranged(raw, self.settings.deploy.shape)
            if raw.shape[1:] != self.settings.deploy.shape:
                return raw  # which is refused
        return raw.astype(np.float64) if self.raw else self.preparation.apply(raw)

    def _checked(self, split: str, x: Any, y: Any) -> tuple[Tensor, Tensor]:
        """Samples and labels of a split, checked against what the federation is for.

        Samples are (number, *shape) and finite, tokens in the vocabulary; labels are (number,), or one for each token,
        -1 where there is none. Names of classes are turned into the federation's numbers.
        """
        shape, outputs, task = self.settings.deploy.shape, self.settings.deploy.num_outputs, self.settings.task
        if self.preparation:
            y = labels_among(x, self.preparation) if y is None else y
            x = self._prepared(split, x)
        x = torch.as_tensor(x)
        if not self.raw and tuple(x.shape[1:]) != shape:
            raise Refusal(f"has {split} samples of shape {tuple(x.shape[1:])}; this federation's have {shape}.")
        if not self.raw and not x.isfinite().all():
            raise Refusal(f"has {split} samples with NaN or infinite values.")
        tokens = self.settings.tokens
        if tokens and len(x):
            if x.is_floating_point():
                raise Refusal(f"has {split} samples of type {x.dtype}; this federation's are tokens, whole numbers.")
            fault = tokens.fault(int(x.min()), int(x.max()))
            if fault:
                raise Refusal(f"has {split} samples with {fault}.")
        targets = shape if task.per_token else ()
        if y is None:  # no program may read these: any use of them as classes fails
            y = torch.full((len(x), *targets), -1)
        try:
            y = numbered(y, self.settings.deploy.class_names if task.class_scores else (), unknown=True)
        except DataError as error:
            log.warning("%s", error)  # what its labels are is nobody's business
            raise Refusal(f"has {split} labels that are not among the federation's classes.") from error
        y = torch.as_tensor(y)
        if len(y) != len(x):
            raise Refusal(f"has another number of {split} labels than of {split} samples.")
        if task.per_token and tuple(y.shape[1:]) != targets:
            raise Refusal(f"has {split} labels of shape {tuple(y.shape[1:])}; expected one for each token, {targets}.")
        if (task.class_scores or task.per_token) and len(y) and (int(y.min()) < -1 or int(y.max()) >= outputs):
            raise Refusal(f"has {split} labels outside of 0 to {outputs - 1}.")
        return x, y
