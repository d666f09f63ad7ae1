# SPDX-License-Identifier: Apache-2.0
"""What a server's state will weigh, before there is one: a loom can have hundreds of times a client's parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fedloom.core.contract import Algorithm, Setup
from fedloom.core.errors import NeedsError
from fedloom.core.memory import total
from fedloom.core.trees import leaves

LARGE = 50_000_000
"""Parameters of a loom from which smaller ones are advised: four times those of pFedHN for CIFAR-10."""

AT_WORK = 4
"""How many times its size a state takes at most while it steps, with its gradients: pFedHN's SGD measured three times,
MH-pFedHN's Adam four."""

OPTIMISERS = ("optimiser", "tuning")
"""The fields of a state that are of no loom but of how it is stepped."""

ADVICE = (
    "For a smaller one give a smaller --hidden or --model, or take mh_pfedhn with --heads single, which weaves a model "
    "chunk by chunk with one head."
)


class Weight(NamedTuple):
    """Of a server's state."""

    parameters: int
    """Of the loom and of what it weaves from."""
    bytes: int
    """With the state of its optimiser."""
    working_bytes: int
    """About what is needed while it steps, at most."""
    memory_bytes: int
    """Of the device that it is on."""
    shards: int = 1
    """How many processes have a part of it."""

    def __str__(self) -> str:
        return (
            f"the loom has {self.parameters:,} parameters: {self.bytes / 1e6:,.0f} MB with its optimiser, and up to "
            f"about {self.working_bytes / 1e6:,.0f} MB while it steps"
            + (f", divided over {self.shards} processes" if self.shards > 1 else "")
        )

    @property
    def note(self) -> str:
        """For the notes of a run, with advice where it is large, or memory scarce."""
        if self.working_bytes > self.memory_bytes * self.shards:
            return f"{self}, which may be too much: there are {self.memory_bytes / 1e6:,.0f} MB. {ADVICE}"
        return f"{self}. {ADVICE}" if self.parameters >= LARGE else str(self)


def weigh(algorithm: Algorithm, setup: Setup[Any]) -> Weight | None:
    """The weight of a loom's first state, by shapes alone; None for a method without a loom, or if that cannot be told.

    Fails where memory certainly does not suffice.
    """
    if (algorithm.base or algorithm).family != "loom":
        return None
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            state = algorithm.init(replace(setup, shards=None))._asdict()
    except NeedsError:
        raise
    except Exception:  # what is drawn is read, by a method of a user's own, or to try a network of the server's
        return None
    parameters, size = _counted(state)
    shards = setup.shards.number if setup.shards else 1
    found = Weight(parameters, size, AT_WORK * size, memory_of(setup.device), shards)
    if found.bytes > found.memory_bytes * shards:
        raise NeedsError(
            f"{algorithm.name} does not fit into memory: {found}, and there are {found.memory_bytes / 1e6:,.0f} MB. "
            f"{ADVICE}"
        )
    return found


def memory_of(device: torch.device) -> int:
    """The bytes of a device's memory."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else total()


def _counted(state: dict[str, Any]) -> tuple[int, int]:
    """Parameters and bytes; a tensor that is in two places is one."""
    parameters = size = 0
    seen: set[int] = set()
    for path, leaf in leaves(state):
        if id(leaf) in seen:
            continue
        seen.add(id(leaf))
        size += leaf.numel() * leaf.element_size()
        if leaf.is_floating_point() and path.partition("/")[0] not in OPTIMISERS:
            parameters += leaf.numel()
    return parameters, size
