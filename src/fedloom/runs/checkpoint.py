# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as the bytes of its files, and back, bit for bit and in order.

The order of a tree's branches is kept because sums over a tree depend on it in their last bits. Memories of
equal shape are stored as one stack, so that thousands of clients make a file of a few tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fedloom.core.trees import ClientId, Tree

FORMAT = 2
STATE, MEMORY, META = "state.safetensors", "memory.safetensors", "meta.json"


class Checkpoint(NamedTuple):
    """All that a method's server and its clients keep after a round."""

    round: int
    state: dict[str, Any]
    memory: dict[ClientId, dict[str, Any]]
    meta: dict[str, Any]


class Content:
    """The bytes of a file, which are made while they are written, and their digest when they are."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self._digest = pieces, hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self._digest.update(piece)
            yield piece

    @property
    def sha256(self) -> str:
        """Of what was made so far."""
        return self._digest.hexdigest()


def pack(state: Tree, memory: Mapping[ClientId, Tree]) -> tuple[dict[str, Content], dict[str, Any]]:
    """The files by name, and what their reader must know besides their digests: for ``meta.json``.

    That is the order of the state's leaves and of the clients, and for each kind of memory the order of its leaves and
    which clients have it: safetensors keeps none.
    """
    from fedloom.core.trees import flatten
    from fedloom.core.wire import pieces

    memories = list(memory.values())
    groups = _alike(memories)
    stacks = {str(number): _stack([memories[row] for row in rows]) for number, (_, rows) in enumerate(groups)}
    files = {STATE: Content(pieces(state)), MEMORY: Content(pieces(stacks))}
    layout = {
        "state": list(flatten(state)),
        "clients": list(memory),
        "groups": [{"paths": paths, "clients": rows} for paths, rows in groups],
    }
    return files, {"format": FORMAT, "layout": layout}


def unpack(
    files: Mapping[str, bytes], layout: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[ClientId, dict[str, Any]]]:
    """State and memory as ``pack`` was given them, on the CPU."""
    from fedloom.core.trees import tree_map
    from fedloom.core.wire import decode

    # Clones, because the tensors lie in the file's bytes: unaligned, and each would keep all of them alive.
    state = tree_map(lambda leaf: leaf.clone(), _ordered(decode(files[STATE]), layout["state"]))
    stacks = decode(files[MEMORY])
    trees: list[Any] = [None] * len(layout["clients"])
    for number, group in enumerate(layout["groups"]):
        stack = _ordered(stacks[str(number)], group["paths"])
        for row, client in enumerate(group["clients"]):
            trees[client] = tree_map(lambda leaf, row=row: leaf[row].clone(), stack)
    if None in trees:
        raise ValueError("a client is in no group")
    return state, dict(zip(layout["clients"], trees, strict=True))


def digest(data: bytes) -> str:
    """The SHA-256 of a file's content."""
    return hashlib.sha256(data).hexdigest()


def _alike(trees: Sequence[Tree]) -> list[tuple[list[str], list[int]]]:
    """The paths of each kind of tree, and which trees are of it."""
    from fedloom.core.trees import faults, flatten

    kinds: dict[Any, tuple[list[str], list[int]]] = {}
    for row, tree in enumerate(trees):
        for wrong in faults(tree, "memory"):
            raise TypeError(f"only trees of tensors are saved; {wrong}")
        flat = flatten(tree)
        kind = tuple((path, leaf.shape, leaf.dtype) for path, leaf in flat.items())
        kinds.setdefault(kind, (list(flat), []))[1].append(row)
    return list(kinds.values())


def _stack(trees: Sequence[Tree]) -> Tree:
    """One leaf at a time leaves the device, so that it needs no room for the whole stack."""
    import torch

    from fedloom.core.trees import tree_map

    stacked: Tree = tree_map(lambda *rows: torch.stack([row.detach() for row in rows]).cpu(), trees[0], *trees[1:])
    return stacked


def _ordered(tree: Tree, paths: Sequence[str]) -> dict[str, Any]:
    from fedloom.core.trees import flatten, unflatten

    flat = flatten(tree)
    return unflatten({path: flat[path] for path in paths})
