# SPDX-License-Identifier: Apache-2.0
"""The lines of a run's records: what one of each kind holds. Described for readers in docs/reference-records.md.

Every line is a JSON object in which what is of clients stands in columns: lists in one order, that of ``client``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

PANEL = 10_000
"""Clients whose numbers are written down, evenly from the roster; quantiles are of all."""

NO_ANSWER = "did not answer"
"""How the reason begins why a client that is late was dropped."""

FEW = 1_000
"""The same for embeddings and label shares, of which each client has many numbers."""

DIGITS = 5
"""Significant digits of such numbers."""

MIX, ADMISSION, AUDIT = "mix.json", "admission.json", "audit.json"
"""What is found out of a run when somebody asks for it: mixed models, an admission round by round, attacks."""

T = TypeVar("T")


def panel(clients: Sequence[T], most: int = PANEL) -> Sequence[T]:
    """At most so many of the clients, evenly spaced: the same ones each time."""
    return clients[:: -(-len(clients) // most)] if clients else clients


def by_client(cohort: Sequence[str], down: Mapping[str, int], up: Mapping[str, int]) -> dict[str, Any]:
    """Who was asked in a round, and what travelled to and from each."""
    shown = panel(cohort)
    return {
        "client": list(shown),
        "down": [down.get(client, 0) for client in shown],
        "up": [up.get(client, 0) for client in shown],
    }


def seconds_by_client(cohort: Sequence[str], seconds: Mapping[str, float]) -> dict[str, Any]:
    """How long each client of a round took, in the order of ``by_client``, where that is known of any."""
    return {"clients": [short(seconds.get(client)) for client in panel(cohort)]} if seconds else {}


def table_record(clients: Sequence[str], columns: Sequence[str], values: Any) -> dict[str, Any]:
    """Numbers of a round by client, with a row for each; ``values`` is a tensor or an array."""
    shown = panel(range(len(clients)), FEW)
    rows = values.tolist()
    return {"client": [clients[i] for i in shown], "columns": list(columns), "values": [rows[i] for i in shown]}


def scores_line(
    round: int, group: Sequence[str], task: Mapping[str, Any], clients: Sequence[str], columns: Mapping[str, list[Any]]
) -> dict[str, Any]:
    """The scores of a group of clients (whose model, which clients, which split), a column for each kind of number."""
    rows = panel(range(len(clients)))
    model, who, split = group
    line = {
        "round": round, "model": model, "group": who, "split": split, **task, "clients": len(clients),
        "client": [clients[i] for i in rows], **{name: [values[i] for i in rows] for name, values in columns.items()},
    }  # fmt: skip
    if len(rows) < len(clients):
        line["quantiles"] = {name: _quantiles(columns[name]) for name in ("metric", "loss")}
    return line


def embeddings_line(round: int, who: str, embeddings: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What the models of some clients are woven from."""
    rows = [[short(number) for number in row] for row in embeddings.values()]
    return {"round": round, "group": who, "client": list(embeddings), "embedding": rows}


def short(number: float | None) -> float | None:
    """A number with the digits that are worth a record."""
    return None if number is None else float(f"{number:.{DIGITS}g}")


def _quantiles(values: Sequence[float]) -> list[float]:
    """At 0, 1, ... 100 percent."""
    found: list[float] = np.quantile(np.asarray(values, dtype=float), np.linspace(0, 1, 101)).tolist()
    return found
