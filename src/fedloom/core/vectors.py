# SPDX-License-Identifier: Apache-2.0
"""Parameters as one vector and back, for servers that are told nothing of a model but its size."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.core.trees import Params


def to_vector(params: Params) -> Tensor:
    """All parameters in a row, in the tree's order."""
    return torch.cat([value.reshape(-1) for value in params.values()])


def from_vector(vector: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The parameters of these shapes that ``to_vector`` put in a row."""
    parts = torch.split(vector, [math.prod(shape) for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts)}
