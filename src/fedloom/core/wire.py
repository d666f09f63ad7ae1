# SPDX-License-Identifier: Apache-2.0
"""Trees as bytes (safetensors): the form in which they cross a network and lie in files. No pickle anywhere."""

from __future__ import annotations

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
    return safetensors.torch.save(flat)


def decode(data: bytes, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The tree that ``encode`` was given, bit for bit; branches and leaves in the order of their paths."""
    flat = safetensors.torch.load(data)
    return unflatten({path: flat[path].to(device) for path in sorted(flat)})
