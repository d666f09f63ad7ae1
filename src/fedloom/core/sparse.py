# SPDX-License-Identifier: Apache-2.0
"""A change of which only the largest entries are sent, with their places; or all of it, without."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core.trees import Tree


def number_sent(share: float, size: int) -> int:
    """How many entries of a change are sent: one at least."""
    return max(1, int(share * size))


def largest(change: Tensor, share: float) -> dict[str, Tensor]:
    """What a client sends of its change: ``delta``, or ``values`` and ``places`` of the largest entries."""
    if share == 1:
        return {"delta": change}
    places = torch.topk(change.abs(), number_sent(share, len(change))).indices
    return {"values": change.gather(0, places), "places": places.int()}


def like_largest(vector: Tensor, share: float) -> dict[str, Tensor]:
    """The shapes of ``largest``, for a program's ``expects``."""
    sent = vector[: number_sent(share, len(vector))]
    return {"delta": sent} if share == 1 else {"values": sent, "places": sent.int()}


def change_in(reply: Tree, size: int) -> Tensor:
    """delta of a stack of replies, (clients, size); what was not sent is zero."""
    if "delta" in reply:
        dense: Tensor = reply["delta"]
        return dense
    values: Tensor = reply["values"]
    places = reply["places"].long().clamp(0, size - 1)  # a client could send anything
    return values.new_zeros(len(values), size).scatter(1, places, values)
