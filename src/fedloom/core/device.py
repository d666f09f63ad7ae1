# SPDX-License-Identifier: Apache-2.0
"""Moving values to a device, and between places on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """An array or a list as a tensor on ``device``, without waiting for what the device is doing."""
    made = torch.as_tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def copy_all(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into places of the same type, many at a time."""
    alike: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in zip(places, values):
        into, new = alike.setdefault(place.dtype, ([], []))
        into.append(place)
        new.append(value)
    for into, new in alike.values():
        torch._foreach_copy_(into, new)
