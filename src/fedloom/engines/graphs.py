# SPDX-License-Identifier: Apache-2.0
"""Pure functions of tensors, recorded as CUDA graphs when they come again, and replayed from then on.

Launching the small kernels of a server's step costs ten times what running them costs. On other devices, and where a
function cannot be recorded (it reads a tensor back, say), it is simply called.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom.core.device import copy_all
from fedloom.engines.cache import FastForms, Way

KEPT = 32
"""Recordings kept at a time: each has memory for what goes in and out."""

LARGE = 1 << 29
"""Bytes of arguments that are not worth copying into place: their kernels take longer than launching them."""


class Pool:
    """Memory that recordings share. None leaves anything there between two replays, and no two run at a time."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    @contextmanager
    def recording(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Record into a new graph. Garbage is left lying meanwhile: freeing another graph would spoil it."""
        graph = torch.cuda.CUDAGraph()
        other = next(iter(self._graphs), None)  # torch has a pool only as long as a graph of it
        enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=None if other is None else other.pool()):
                yield graph
            self._graphs.add(graph)
        except BaseException:
            self._graphs.clear()  # torch takes a pool in which a recording failed for one that is still recorded into
            raise
        finally:
            if enabled:
                gc.enable()


def warm_up(function: Callable[[], Any]) -> Any:
    """Two trial runs on a stream of their own, in which libraries make their choices; the result of the last."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
        found = function()
    torch.cuda.current_stream().wait_stream(stream)
    return found


class Reading:
    """Numbers of a device on their way to the host, which can do other things until they are there.

    Made from scalars, at least one, which go over in one copy; on a CPU they are there at once.
    """

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        device = numbers[0].device
        there = torch.stack([number.to(device).double().reshape(()) for number in numbers])
        self._here, self._copied = there, None
        if there.is_cuda:
            self._here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
            self._here.copy_(there, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[float]:
        """The numbers. Nothing that was begun after them is waited for."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._here.tolist()
        return numbers


class Replayer:
    """Calls functions by way of recordings. What a function uses besides its arguments must be fixed by ``name``."""

    def __init__(self, notes: list[str]) -> None:
        self.pool = Pool()
        self._recordings: FastForms[Recording] = FastForms(notes, KEPT)

    def __call__(self, name: Hashable, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(*arguments)``; arguments and result are trees of tensors."""
        leaves, structure = pytree.tree_flatten(arguments)
        if not self.pays(leaves):
            return function(*arguments)
        kind = (name, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if self._recordings.seen(kind) == 1:  # cohorts of mixed architectures are seldom the same twice
            return function(*arguments)
        label = str(name[0] if isinstance(name, tuple) else name)
        record = Way("recorded", lambda: Recording(function, leaves, structure, self.pool))
        recording = self._recordings.get(kind, label, lambda: [record])
        if recording is None or recording.structure != structure:  # the same leaves in other places
            return function(*arguments)
        return recording(leaves)

    def pays(self, leaves: Sequence[Tensor]) -> bool:
        """Whether a recording is worth having: on a GPU, and where arguments are not large."""
        on_gpu = bool(leaves) and all(leaf.is_cuda for leaf in leaves)
        return on_gpu and sum(leaf.nbytes for leaf in leaves) <= LARGE

    def clear(self) -> None:
        """Forget all recordings, and give their memory back."""
        self._recordings.clear()


class Recording:
    """One function on arguments of fixed shapes."""

    def __init__(
        self, function: Callable[..., Any], leaves: Sequence[Tensor], structure: pytree.TreeSpec, pool: Pool
    ) -> None:
        self.structure, self._inputs = structure, Slots(leaves)
        self._inputs.fill(leaves)
        arguments = pytree.tree_unflatten(self._inputs.places, structure)
        trial = warm_up(lambda: function(*arguments))
        # what is kept of one part of a result must not hold on to the others: a block for each
        self._parts = [Slots(pytree.tree_leaves(part)) for part in _parts(trial)]
        del trial
        with warnings.catch_warnings(), pool.recording() as self._graph:
            warnings.simplefilter("ignore")  # a function that only passes on what it is given leaves an empty graph
            result = function(*arguments)
            for slots, part in zip(self._parts, _parts(result)):
                slots.fill(pytree.tree_leaves(part))
        self._structure = pytree.tree_structure(result)

    def __call__(self, leaves: Sequence[Tensor]) -> Any:
        """The function's result on new values."""
        self._inputs.fill(leaves)
        self._graph.replay()
        return pytree.tree_unflatten([leaf for slots in self._parts for leaf in slots.copies()], self._structure)


def _parts(result: Any) -> Sequence[Any]:
    return result if type(result) is tuple else [result]


ALIGNED = 256
"""Bytes: where tensors of a block begin, as torch's allocator has it."""


class Slots:
    """Places for tensors of given shapes, side by side in a block per type: few copies for many tensors."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._spans: list[tuple[torch.dtype, torch.Size, int]] = []
        sizes: dict[torch.dtype, int] = {}
        for leaf in like:
            start, step = sizes.get(leaf.dtype, 0), max(1, ALIGNED // leaf.element_size())
            self._spans.append((leaf.dtype, leaf.shape, start))
            sizes[leaf.dtype] = start + -(-leaf.numel() // step) * step
        device = like[0].device if like else None
        self._blocks = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()}
        self.places = self._within(self._blocks)

    def fill(self, values: Sequence[Tensor]) -> None:
        """Copy the values into their places."""
        copy_all(self.places, values)

    def copies(self) -> list[Tensor]:
        """What is in the places, as tensors of its own."""
        return self._within({dtype: block.clone() for dtype, block in self._blocks.items()})

    def _within(self, blocks: dict[torch.dtype, Tensor]) -> list[Tensor]:
        return [blocks[dtype][start : start + shape.numel()].view(shape) for dtype, shape, start in self._spans]
