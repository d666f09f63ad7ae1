# SPDX-License-Identifier: Apache-2.0
"""Trees as bytes (safetensors): the form in which they cross a network and lie in files. No pickle anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fedloom.core.sharded import Sharded
from fedloom.core.tensors import NAMES, bytes_of, header_of
from fedloom.core.trees import Tree, faults, flatten, unflatten


def encode(tree: Tree) -> bytes:
    """The bytes of a tree; refuses anything else."""
    return b"".join(pieces(tree))


def pieces(tree: Tree) -> Iterator[bytes]:
    """The bytes of a tree, some at a time: what is sharded is never here as a whole."""
    wrong = faults(tree)
    if wrong:
        raise TypeError(f"only trees of tensors travel; {wrong[0]}")
    flat = flatten(tree)
    odd = [f"{path} has {leaf.dtype}" for path, leaf in flat.items() if leaf.dtype not in NAMES]
    if odd:
        raise TypeError(f"only numbers of {', '.join(map(str, NAMES))} travel; {odd[0]}")
    return _pieces(flat)


def decode(data: bytes, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The tree that ``encode`` was given, bit for bit and in its order: sums over leaves must not change either."""
    flat = safetensors.torch.load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    order = json.loads(header["__metadata__"]["order"])
    # a copy: inside of the bytes tensors lie unaligned, and the last bits of a sum can depend on that
    return unflatten({path: flat[path].clone().to(device) for path in order})


def _pieces(flat: Mapping[str, Tensor]) -> Iterator[bytes]:
    forms = {path: (leaf.dtype, tuple(leaf.shape)) for path, leaf in flat.items()}
    yield header_of(forms, {"order": json.dumps(list(flat))})
    for leaf in flat.values():
        for part in leaf.parts() if isinstance(leaf, Sharded) else [leaf]:
            yield bytes_of(part)
