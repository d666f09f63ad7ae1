# SPDX-License-Identifier: Apache-2.0
"""The clients of a simulated federation: one tensor of data on the compute device, and who owns which rows of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.clients.partition import Partition
from fedloom.core.contract import Model
from fedloom.core.errors import DataError
from fedloom.core.task import Task
from fedloom.core.trees import ClientId

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Client:
    """A client of the roster: its model and the rows of the federation's data that are its own."""

    id: ClientId
    model: Model
    rows: Mapping[str, np.ndarray]  # split -> int64 rows
    unseen: bool = False

    def of(self, split: str) -> np.ndarray:
        """The rows of a split; ``all`` is every row the client has."""
        return np.concatenate([self.rows[s] for s in SPLITS]) if split == "all" else self.rows[split]


class OnDisk(NamedTuple):
    """Samples that are mapped, not read."""

    x: Tensor
    file: Path


@dataclass(frozen=True)
class Federation:
    """Data and roster. Participants come first; unseen clients take no part in training."""

    x: Tensor  # (samples, ...), int64 for tokens
    y: Tensor  # (samples,) or (samples, targets)
    task: Task
    roster: Mapping[ClientId, Client]
    on_disk: OnDisk | None = None
    """Where the samples come from that ``x`` was at first."""

    @property
    def file(self) -> Path | None:
        """The file that ``x`` is a map of; None where it is in memory."""
        return self.on_disk.file if self.on_disk and self.on_disk.x is self.x else None

    @cached_property
    def position(self) -> dict[ClientId, int]:
        """Where each client stands in the roster: the order of all sums."""
        return {client: row for row, client in enumerate(self.roster)}

    @property
    def participants(self) -> tuple[ClientId, ...]:
        return tuple(c.id for c in self.roster.values() if not c.unseen)

    @property
    def unseen(self) -> tuple[ClientId, ...]:
        return tuple(c.id for c in self.roster.values() if c.unseen)

    @property
    def models(self) -> dict[ClientId, Model]:
        return {c.id: c.model for c in self.roster.values()}

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of all that is computed."""
        return self.x.dtype if self.x.is_floating_point() else next(iter(self.roster.values())).model.dtype

    def having(self, split: str, clients: Iterable[ClientId]) -> tuple[ClientId, ...]:
        """Those of ``clients`` that have samples in ``split``."""
        return tuple(c for c in clients if len(self.roster[c].of(split)))

    def joined_by(self, newcomer: ClientId, model: Model, x: Tensor, y: Tensor) -> Federation:
        """This federation and one unseen client more, whose data are its training data."""
        if x.shape[1:] != self.x.shape[1:]:
            raise DataError(
                f"The newcomer's samples have shape {tuple(x.shape[1:])}; this federation's have "
                f"{tuple(self.x.shape[1:])}. Give data of the same shape."
            )
        if newcomer in self.roster:
            raise DataError(f"A client {newcomer!r} is in this federation already. Give the newcomer another name.")
        rows = np.arange(len(self.x), len(self.x) + len(x))
        client = Client(newcomer, model, {"train": rows, "val": rows[:0], "test": rows[:0]}, unseen=True)
        together = {"x": torch.cat([self.x, x.to(self.x)]), "y": torch.cat([self.y, y.to(self.y)])}
        return Federation(together["x"], together["y"], self.task, {**self.roster, newcomer: client})


def federate(
    x: np.ndarray | Tensor,
    y: np.ndarray | Tensor,
    partition: Partition,
    models: Sequence[Model],
    task: Task,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    unseen_models: Sequence[Model] = (),
) -> Federation:
    """A federation on ``device``. Clients take the ``models`` in turn: client i has the (i mod m)-th of m.

    Unseen clients can have models of their own, which they take in turn likewise.
    """
    y = torch.as_tensor(y)

    def model(i: int, unseen: bool) -> Model:
        chosen = unseen_models if unseen and unseen_models else models
        return chosen[i % len(chosen)]

    roster = {
        split.id: Client(
            split.id,
            model(i, split.unseen),
            {"train": split.train, "val": split.val, "test": split.test},
            split.unseen,
        )
        for i, split in enumerate(partition.clients)
    }
    given = torch.as_tensor(x)
    placed = given.to(device, torch.int64 if models[0].tokens else dtype)
    file = x.filename if isinstance(x, np.memmap) and placed is given else None
    return Federation(
        placed,
        y.to(device, dtype if y.is_floating_point() else torch.int64),
        task,
        roster,
        OnDisk(placed, Path(file)) if file else None,
    )
