# SPDX-License-Identifier: Apache-2.0
"""Trees as bytes (safetensors): the form in which they cross a network and lie in files. No pickle anywhere."""

from __future__ import annotations

import json
from typing import Any

import safetensors.torch
import torch

from fedloom.core.trees import Tree, faults, flatten, unflatten


def encode(tree: Tree) -> bytes:
    """The bytes of a tree; refuses anything else."""
    wrong = faults(tree)
    if wrong:
        raise TypeError(f"only trees of tensors travel; {wrong[0]}")
    flat = {path: leaf.detach().cpu().contiguous().clone() for path, leaf in flatten(tree).items()}
    return safetensors.torch.save(flat, {"order": json.dumps(list(flat))})


def decode(data: bytes, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The tree that ``encode`` was given, bit for bit and in its order: sums over leaves must not change either."""
    flat = safetensors.torch.load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    order = json.loads(header["__metadata__"]["order"])
    # a copy: inside of the bytes tensors lie unaligned, and the last bits of a sum can depend on that
    return unflatten({path: flat[path].clone().to(device) for path in order})
