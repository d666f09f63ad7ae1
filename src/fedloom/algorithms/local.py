# SPDX-License-Identifier: Apache-2.0
"""Local training: every client for itself. The control that every personal method must beat.

No paper; pFedHN's Table 1 reports it as "Local".

Sent down: nothing.
Sent up: the number of samples and the training loss, for the records.
Kept by the client: its model and its running statistics.
Kept by the server: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import Algorithm, Ask, Batch, Cohort, Diagnostics, Home, Model, Program, Sent, Setup
from fedloom.core.training import LocalConfig, Training, begin, like_report, remember, report, train_step
from fedloom.core.trees import ClientId, PerClient, Tree


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """The options of local training."""

    keep_optimiser: bool = option(True, "Keep a client's optimiser state from round to round: training has no breaks.")


class State(NamedTuple):
    """The server has nothing to keep."""


def init(setup: Setup[Config]) -> State:
    """Nothing."""
    return State()


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Ask the cohort to go on training."""
    replies = ask(program(setup.config), {}, PerClient.empty(cohort.clients))
    return state, {"local_loss": mean_loss(replies)}


def first_memory(model: Model, config: Any, seed: int) -> Tree:
    """A model of the client's own."""
    return {"params": model.init(seed)}


def program(config: Config) -> Program:
    """What a client runs."""
    return Program("local.train", client_init, client_step, client_final, config.batches(), expects)


def expects(shared: Tree, mine: Tree) -> Tree:
    """Nothing but the report."""
    return like_report()


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Training:
    """Go on where training stopped."""
    return begin(home, memory["params"], memory)


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """One step on the client's own loss."""
    return train_step(home, carry, batch)


def client_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """Keep the model."""
    return report(home, carry), {**remember(home, carry, memory), "params": carry.params}


def personalise(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """Nothing: a client has its model already."""
    return Sent({}, PerClient.empty(clients))


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """The client's own model."""
    return {"params": memory["params"], "buffers": memory["buffers"]}


ALGORITHM = Algorithm(
    name="Local",
    citation="",
    config=Config,
    state=State,
    init=init,
    round=round,
    personalise=personalise,
    first_memory=first_memory,
    client_deploy=client_deploy,
    cohort=5,
)
