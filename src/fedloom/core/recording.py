# SPDX-License-Identifier: Apache-2.0
"""Pure functions of tensors, recorded as CUDA graphs at the second call of a kind and replayed at the next ones.

Launching the small kernels of a server's step costs ten times what running them costs. On other devices, and where a
function cannot be recorded (it reads a tensor back, say), it is simply called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

KEPT = 32
"""Recordings kept at a time: each has memory of its own."""


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """An array or a list as a tensor on ``device``, without waiting for what the device is doing."""
    made = torch.as_tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


class Replayer:
    """Calls functions by way of recordings. What a function uses besides its arguments must be fixed by ``name``."""

    def __init__(self) -> None:
        self.kept: dict[Hashable, Recording | None] = {}  # None: cannot be recorded; the one used last is last
        self._met: set[Hashable] = set()

    def __call__(self, name: Hashable, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(*arguments)``; arguments and result are trees of tensors."""
        leaves, structure = pytree.tree_flatten(arguments)
        if not all(leaf.is_cuda for leaf in leaves):
            return function(*arguments)
        kind = (name, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if kind not in self.kept:
            if kind not in self._met:  # cohorts of mixed architectures are seldom the same twice
                self._met.add(kind)
                return function(*arguments)
            try:
                self.kept[kind] = Recording(function, leaves, structure)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                self.kept[kind] = None
            for oldest in list(self.kept)[:-KEPT]:
                del self.kept[oldest]
        recording = self.kept[kind] = self.kept.pop(kind)
        return function(*arguments) if recording is None else recording(leaves)


class Recording:
    """One function on arguments of fixed shapes."""

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Tensor], structure: pytree.TreeSpec) -> None:
        self._inputs = [leaf.detach().clone() for leaf in leaves]
        arguments = pytree.tree_unflatten(self._inputs, structure)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # trial runs let libraries make their choices first
            for _ in range(2):
                function(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(), torch.cuda.graph(self._graph):
            warnings.simplefilter("ignore")  # a function that only passes on what it is given leaves an empty graph
            self._outputs, self._structure = pytree.tree_flatten(function(*arguments))

    def __call__(self, leaves: Sequence[Tensor]) -> Any:
        """The function's result on new values."""
        torch._foreach_copy_(self._inputs, list(leaves))
        self._graph.replay()
        results = [torch.empty_like(output) for output in self._outputs]
        torch._foreach_copy_(results, self._outputs)
        return pytree.tree_unflatten(results, self._structure)
