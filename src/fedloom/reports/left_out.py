# SPDX-License-Identifier: Apache-2.0
"""How much of honest clients a rule of ``--aggregate`` left out, and of those that are least like the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedloom.runs.roster import Roster


class LeftOut(NamedTuple):
    """Some clients, and what of their replies did not count, as a mean over rounds."""

    who: str
    clients: int
    share: float


def left_out(records: Sequence[Mapping[str, Any]], roster: Roster | None) -> list[LeftOut]:
    """Of all honest clients, of the third of them with the most skewed labels, and of liars; empty without a rule."""
    shares: dict[str, list[float]] = {}
    lying: set[str] = set()
    for record in records:
        table = record.get("tables", {}).get("kept", {"client": [], "values": []})
        for client, (kept, *lies) in zip(table["client"], table["values"]):
            shares.setdefault(client, []).append(1 - kept)
            if any(lies):
                lying.add(client)
    honest = [client for client in shares if client not in lying]
    far = _skew(roster)
    known = sorted((client for client in honest if client in far), key=far.__getitem__)
    groups = {"honest": honest, "honest, most skewed third": known[-(len(known) // 3) :] if len(known) > 2 else [],
              "liars": sorted(lying)}  # fmt: skip
    return [
        LeftOut(who, len(clients), float(np.mean([np.mean(shares[client]) for client in clients])))
        for who, clients in groups.items()
        if clients
    ]


def _skew(roster: Roster | None) -> dict[str, float]:
    """How far each participant's label shares are from those of all together, in total variation."""
    members = [member for member in roster.members if any(member.labels) and not member.unseen] if roster else []
    if not members:
        return {}
    counts = np.array([member.labels for member in members], dtype=float)
    shares, together = counts / counts.sum(1, keepdims=True), counts.sum(0) / counts.sum()
    return dict(zip((member.id for member in members), np.abs(shares - together).sum(1) / 2))
