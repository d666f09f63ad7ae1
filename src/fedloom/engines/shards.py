# SPDX-License-Identifier: Apache-2.0
"""The parts of a sharded loom in Ray's actors: ``--loom-shards N``.

On this machine they are dealt over its GPUs, which clients train on too; on a cluster each has a GPU of its own.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom.core.errors import RunError
from fedloom.core.sharded import Held, Shard, Work, sent_to
from fedloom.engines.cluster import Actor, Cluster, first_line
from fedloom.engines.machine import Machine

MOST_UNSEEN = 256
"""Calls that nobody has waited for."""


class RayShards:
    """``core.sharded.Shards`` in actors, which end with this."""

    def __init__(self, machine: Machine, device: torch.device, number: int) -> None:
        self.number = number
        gpus = 0 if device.type == "cpu" else machine.gpus or torch.cuda.device_count()
        self._cluster = Cluster.at(machine.ray_address, machine.workers or number, gpus)
        here = self._cluster.local and gpus
        devices = [f"cuda:{i % gpus}" if here else device.type for i in range(number)]
        self._actors = self._cluster.begun(Host, devices, 1.0 if gpus and not here else 0.0)
        self._gone: list[int] = []
        self._unseen: list[Any] = []
        weakref.finalize(self, _end, self._cluster, self._actors, os.getpid())

    def run(self, work: Work, arguments: Sequence[Any], kept: Sequence[Held], *, answers: bool) -> list[Any]:
        """As ``Shards.run``."""
        gone = [self._gone.pop() for _ in range(len(self._gone))]
        names = [held.number for held in kept]
        for held in kept:
            weakref.finalize(held, self._gone.append, held.number).atexit = False
        threads = torch.get_num_threads()
        begun = [
            actor.handle.run.remote(threads, work, pytree.tree_map(_packed, sent_to(i, arguments)), names, gone)
            for i, actor in enumerate(self._actors)
        ]
        if not answers and len(self._unseen) < MOST_UNSEEN:
            self._unseen += begun
            return []
        try:
            self._cluster.ray.get(self._unseen)
            self._unseen = []
            found: list[Any] = pytree.tree_map(_unpacked, self._cluster.ray.get(begun))
        except self._cluster.ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise RunError(
                f"A shard of the loom failed: {type(cause).__name__}: {first_line(cause)}. What it held is lost; the "
                "last checkpoint is intact: resume the run."
            ) from error
        return found


class Host:
    """An actor with a ``Shard``."""

    def __init__(self, path: Sequence[str], device: str) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]
        self._device = device

    def greet(self) -> tuple[int, str, str]:
        """The process, its machine, and what keeps it from working."""
        try:
            self._shard = Shard(torch.zeros(1, device=self._device).device)
            fault = ""
        except (RuntimeError, AssertionError) as error:
            fault = f"it has no {self._device}: {first_line(error)}"
        return os.getpid(), socket.gethostname(), fault

    def run(self, threads: int, work: Work, arguments: Sequence[Any], kept: Sequence[int], gone: Sequence[int]) -> Any:
        """As ``Shard.run``, by as many threads as the run's own process has for an operator: last bits depend on it."""
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        answer = self._shard.run(work, pytree.tree_map(_unpacked, list(arguments)), kept, gone)
        return pytree.tree_map(_packed, answer)


def _packed(leaf: Any) -> Any:
    """Tensors as arrays, which Ray sends without another copy."""
    return leaf.detach().cpu().contiguous().numpy() if isinstance(leaf, Tensor) else leaf


def _unpacked(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    with warnings.catch_warnings():  # nobody writes to it
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(leaf)


def _end(cluster: Cluster, actors: Sequence[Actor], owner: int) -> None:
    if os.getpid() == owner and cluster.ray.is_initialized():
        for actor in actors:
            cluster.ray.kill(actor.handle)
