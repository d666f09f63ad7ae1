# SPDX-License-Identifier: Apache-2.0
"""Scores of many clients as named numbers: ``deployed/participants/test/accuracy`` and its like.

The parts of a name: whose model (``deployed``: what each client would use; ``global``: the method's global model;
``plain``: what clients of an adapted method would use without the adaptation), which clients (``participants`` or
``unseen``), which split, which metric. The plain metric is the mean over clients, each counted once (pFedHN's
"federated accuracy"); ``_pooled`` counts every sample once; ``_std`` is the spread over clients; ``_worst10`` and
``_best10`` are the means over the tenth of the clients that fare worst and best, one client at least. Where each token
has a label, ``perplexity`` is e to the power of the loss, that is the geometric mean of the clients' perplexities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from fedloom.core.task import Task
from fedloom.programs.evaluation import Score

MOST_NATS = 500.0
"""The largest loss that has a perplexity of its own: that of one larger is written as if it were this."""


class Group(NamedTuple):
    """Whose model, which clients, which split: what a set of scores is of."""

    model: Literal["deployed", "plain", "global"]
    clients: Literal["participants", "unseen"]
    split: str

    def __str__(self) -> str:
        return f"{self.model}/{self.clients}/{self.split}"


def summarise(scores: Mapping[str, Score], task: Task, group: Group) -> dict[str, float]:
    """The named numbers of a set of scores; none for no scores."""
    if not scores:
        return {}
    values = np.array([score.metric for score in scores.values()])
    weights = np.array([score.samples for score in scores.values()], dtype=float)
    ranked = np.sort(values) if task.higher_is_better else np.sort(values)[::-1]
    tenth = max(1, len(values) // 10)
    name = f"{group}/{task.metric_name}"
    loss = float(np.mean([score.loss for score in scores.values()]))
    return {
        name: float(values.mean()),
        f"{name}_pooled": float(values @ weights / weights.sum()),
        f"{name}_std": float(values.std()),
        f"{name}_worst10": float(ranked[:tenth].mean()),
        f"{name}_best10": float(ranked[-tenth:].mean()),
        f"{group}/loss": loss,
        **({f"{group}/perplexity": float(np.exp(min(loss, MOST_NATS)))} if task.per_token else {}),
    }
