# SPDX-License-Identifier: Apache-2.0
"""What the server knows of clients on other machines, in the form that methods want: a federation without data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from fedloom.clients.federation import SPLITS, Client, Federation
from fedloom.core import contract
from fedloom.core.errors import NeedsError
from fedloom.core.task import Task
from fedloom.core.tokens import Tokens
from fedloom.core.trees import ClientId, Tree, flatten, unflatten
from fedloom.deploy.lobby import Greeting
from fedloom.models.model import Model
from fedloom.models.size_only import SizeOnly, SizeSpec
from fedloom.models.spec import ModelSpec
from fedloom.runs.roster import Member, Roster

MOST_TENSORS = 5_000
"""Tensors of a client's network; large ones of today have some hundreds."""


def federation_of(
    greetings: Sequence[Greeting],
    shape: tuple[int, ...],
    outputs: int,
    networks: Sequence[str],
    task: Task,
    device: torch.device,
    dtype: torch.dtype,
    tokens: Tokens | None,
) -> Federation:
    """A roster of those who told of themselves, in that order, and no samples. A split is one row if there is any."""
    models: dict[Any, contract.Model] = {}

    def model(one: Greeting) -> contract.Model:
        kind = one.model or one.size
        if kind not in models:
            models[kind] = _model(one, shape, outputs, networks, device, dtype, tokens)
        return models[kind]

    def client(one: Greeting) -> Client:
        rows = {split: np.arange(int(split in one.splits)) for split in SPLITS}
        return Client(one.client, model(one), rows, one.role == "newcomer")

    labels = torch.int64 if task.class_scores or task.per_token else dtype
    samples = torch.int64 if tokens else dtype
    nothing = torch.empty((0, *shape), dtype=samples, device=device), torch.empty(0, dtype=labels, device=device)
    ordered = sorted(greetings, key=lambda one: one.role == "newcomer")
    return Federation(*nothing, task, {one.client: client(one) for one in ordered})


def _model(
    one: Greeting,
    shape: tuple[int, ...],
    outputs: int,
    networks: Sequence[str],
    device: torch.device,
    dtype: torch.dtype,
    tokens: Tokens | None,
) -> contract.Model:
    """A client's network as the server knows it: its size alone, or one that can be built here."""
    if one.model is None:
        return SizeOnly(SizeSpec(one.size, shape, outputs, tokens), device, dtype)
    name, options = one.model
    if ":" in name and name not in networks:  # what a client names is imported only if the server's own config has it
        raise NeedsError(
            f"Client {one.client} has the network {name}, which the app does not list. Add it to networks."
        )
    return Model(ModelSpec(name, options, shape, outputs, tokens), device, dtype)


def check_model(
    one: Greeting,
    wanted: str,
    largest: int,
    shape: tuple[int, ...],
    outputs: int,
    networks: Sequence[str],
    tokens: Tokens | None = None,
) -> None:
    """Before a model is built: its client says of it what the method needs, and it is not too large."""
    if (one.model is None) != (wanted == "size"):
        raise NeedsError(f"the method needs to be told its {'size alone' if wanted == 'size' else 'network'}.")
    if one.model is None:
        if not 1 <= one.size <= largest:
            raise NeedsError(f"it has {one.size:,} parameters; expected 1 to {largest:,}, as the setting largest says.")
    elif ":" not in one.model[0] or one.model[0] in networks:
        _try_building(ModelSpec(*one.model, shape, outputs, tokens), largest)


def _try_building(spec: ModelSpec, largest: int) -> None:
    """Build a network up to the point where it is too large: options are a client's, and can ask for endless layers."""
    try:
        with torch.device("meta"), _counted(largest):  # shapes without memory
            spec.build()
    except TooLarge:
        raise
    except Exception:
        if ":" not in spec.name:
            raise
        with _counted(largest):  # a user's network may not be made for shapes alone
            spec.build()


class TooLarge(NeedsError):
    """A network that has more than the server wants to build."""


@contextmanager
def _counted(largest: int) -> Iterator[None]:
    """Within it, no module gets more than so many numbers, or more than ``MOST_TENSORS`` tensors."""
    tensors = total = 0

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal tensors, total
        if tensor is None or is_lazy(tensor):
            return
        tensors, total = tensors + 1, total + tensor.numel()
        if total > largest:
            raise TooLarge(f"it has more than {largest:,} parameters, which the setting largest allows.")
        if tensors > MOST_TENSORS:
            raise TooLarge(f"it has more than {MOST_TENSORS:,} tensors.")

    hooks = [register_module_parameter_registration_hook(count), register_module_buffer_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def roster_of(
    federation: Federation, greetings: Sequence[Greeting], classes: int, names: tuple[str, ...] = ()
) -> Roster:
    """The roster of a run over a network; ``names`` are those of the classes.

    Of validation and test data it says whether a client has any.
    """
    samples = {one.client: one.samples for one in greetings}
    members = []
    for client in federation.roster.values():
        model = client.model
        name = None if isinstance(model, SizeOnly) else str(model.spec)
        counts = {split: len(client.rows[split]) for split in SPLITS} | {"train": samples[client.id]}
        members.append(Member(client.id, client.unseen, name, model.size, counts))
    first = next(iter(federation.models.values()))
    targets: tuple[int, ...] = () if classes or first.num_outputs == 1 else (first.num_outputs,)
    if first.tokens and first.tokens.per_token:
        targets = first.input_shape
    return Roster(first.input_shape, first.num_outputs, classes, names, targets, members, tokens=first.tokens)


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
