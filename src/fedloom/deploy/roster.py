# SPDX-License-Identifier: Apache-2.0
"""What the server knows of clients on other machines, in the form that methods want: a federation without data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fedloom.clients.federation import SPLITS, Client, Federation
from fedloom.core import contract
from fedloom.core.errors import NeedsError
from fedloom.core.task import Task
from fedloom.core.trees import ClientId, Params, Tree, flatten, unflatten
from fedloom.engines.flower.lobby import Told
from fedloom.models.model import Model
from fedloom.models.spec import ModelSpec


class SizeSpec(NamedTuple):
    """All that a server is told of a model by clients of a method such as MH-pFedHN."""

    size: int
    input_shape: tuple[int, ...]
    num_outputs: int

    def __str__(self) -> str:
        return f"{self.size} parameters"


@dataclass(frozen=True)
class SizeOnly:
    """A client's model of which only the number of parameters is known; whatever else is asked of it is refused."""

    spec: SizeSpec
    device: torch.device
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.spec.size

    @property
    def num_outputs(self) -> int:
        return self.spec.num_outputs

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        raise self._unknown("the shapes")

    @property
    def head(self) -> frozenset[str]:
        raise self._unknown("the output layer")

    def init(self, seed: int) -> dict[str, Tensor]:
        raise self._unknown("the first values")

    def fresh_buffers(self) -> dict[str, Tensor]:
        raise self._unknown("the statistics")

    def train(
        self, params: Params, buffers: Tree, x: Tensor, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        raise self._unknown("the layers")

    def __call__(self, params: Params, buffers: Tree, x: Tensor) -> Tensor:
        raise self._unknown("the layers")

    def _unknown(self, what: str) -> NeedsError:
        return NeedsError(
            f"The server is told only how many parameters a client's model has, and these options need {what} of it. "
            "Leave out the options that name layers."
        )


def federation_of(
    told: Sequence[Told],
    shape: tuple[int, ...],
    outputs: int,
    networks: Sequence[str],
    task: Task,
    device: torch.device,
    dtype: torch.dtype,
) -> Federation:
    """A roster of those who told of themselves, in that order, and no samples. A split is one row if there is any."""
    models: dict[Any, contract.Model] = {}

    def model(one: Told) -> contract.Model:
        kind = one.model or one.size
        if kind not in models:
            models[kind] = _model(one, shape, outputs, networks, device, dtype)
        return models[kind]

    def client(one: Told) -> Client:
        rows = {split: np.arange(int(split in one.splits)) for split in SPLITS}
        return Client(one.client, model(one), rows, one.role == "newcomer")

    labels = torch.int64 if task.class_scores else dtype
    nothing = torch.empty((0, *shape), dtype=dtype, device=device), torch.empty(0, dtype=labels, device=device)
    ordered = sorted(told, key=lambda one: one.role == "newcomer")
    return Federation(*nothing, task, {one.client: client(one) for one in ordered})


def _model(
    one: Told, shape: tuple[int, ...], outputs: int, networks: Sequence[str], device: torch.device, dtype: torch.dtype
) -> contract.Model:
    if one.model is None:
        return SizeOnly(SizeSpec(one.size, shape, outputs), device, dtype)
    name, options = one.model
    if ":" in name and name not in networks:  # what a client names is imported only if the server's own config has it
        raise NeedsError(
            f"Client {one.client} has the network {name}, which the app does not list. Add it to networks."
        )
    return Model(ModelSpec(name, options, shape, outputs), device, dtype)


def check_model(
    one: Told, told: str, largest: int, shape: tuple[int, ...], outputs: int, networks: Sequence[str]
) -> None:
    """Before a model is built: its client says of it what the method needs (``told``), and it is not too large."""
    if (one.model is None) != (told == "size"):
        raise NeedsError(f"the method needs to be told its {'size alone' if told == 'size' else 'network'}.")
    size = one.size
    if one.model is not None:
        size = (
            1 if ":" in one.model[0] and one.model[0] not in networks else _size(ModelSpec(*one.model, shape, outputs))
        )
    if not 1 <= size <= largest:
        raise NeedsError(f"it has {size:,} parameters; expected 1 to {largest:,}, as the setting largest says.")


def _size(spec: ModelSpec) -> int:
    """The number of parameters, at least 1; those that a network sizes when it is used are not counted."""
    try:
        with torch.device("meta"):  # shapes without memory
            return max(1, sum(p.numel() for p in spec.build().parameters() if not is_lazy(p)))
    except Exception:
        if ":" in spec.name:  # a user's network may not be made for this; the app lists it
            return 1
        raise


def in_order(clients: Sequence[ClientId]) -> list[ClientId]:
    """Sorted by name, numbers in names by value: everything is ordered by who clients are, not by who came first."""

    def key(name: ClientId) -> tuple[Any, ...]:
        return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in _parts(name)], name  # 1 and 01 are two

    return sorted(clients, key=key)


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"(\d+)", name) if part]


def grown(old: Tree, fresh: Tree, before: int, after: int) -> dict[str, Any] | None:
    """A state for more clients: what was learned, and ``fresh`` for the new ones; None if the method has no room.

    A tensor with a row per client gets rows more; one that only the new clients have is taken as it is; any other must
    have the shape it had.
    """
    was, new = flatten(old), flatten(fresh)
    if not set(was) <= set(new):
        return None
    found: dict[str, Tensor] = {}
    for path, leaf in new.items():
        kept = was.get(path, leaf)
        rows = kept.shape[:1] == (before,) and leaf.shape[:1] == (after,) and kept.shape[1:] == leaf.shape[1:]
        if kept.shape == leaf.shape:
            found[path] = kept
        elif rows:
            found[path] = torch.cat([kept, leaf[before:]])
        else:
            return None
    return unflatten(found)
