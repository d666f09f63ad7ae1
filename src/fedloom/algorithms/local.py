# SPDX-License-Identifier: Apache-2.0
"""Local training: every client for itself. The control that every personal method must beat.

No paper; pFedHN's Table 1 reports it as "Local".

Sent down: nothing.
Sent up: the number of samples and the training loss, for the records. Evaluations as in FedAvg.
Kept by the client: its model and its running statistics.
Kept by the server: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Model, Seeds, Sent, Setup
from fedloom.core.training import LocalConfig
from fedloom.core.trees import ClientId, PerClient, Tree
from fedloom.programs.local import local_training


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """The options of local training."""

    keep_optimiser: bool = option(True, "Keep a client's optimiser state from round to round: training has no breaks.")


class State(NamedTuple):
    """The server has nothing to keep."""


def init(setup: Setup[Any]) -> State:
    """The server starts with nothing."""
    return State()


def first_memory(model: Model, config: Any, seeds: Seeds) -> Tree:
    """A model of the client's own."""
    return {"own": model.init(seeds.own)}


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """Nothing: a client has its model already."""
    return Sent({}, PerClient.empty(clients))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Ask the cohort to go on training."""
    replies = ask(local_training(setup.config), *send(setup, state, cohort.clients))
    return state, {"local_loss": mean_loss(replies)}


ALGORITHM = Algorithm(
    name="Local", family="personal", citation="", config=Config, state=State, init=init, send=send, round=round,
    first_memory=first_memory, cohort=5,
)  # fmt: skip
