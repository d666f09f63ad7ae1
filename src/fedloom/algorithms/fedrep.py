# SPDX-License-Identifier: Apache-2.0
"""FedRep: a common body, a head for each client, trained in turn: the head to its optimum, then the body a little.

Collins, Hassani, Mokhtari, Shakkottai: Exploiting shared representations for personalized federated learning. ICML 2021
(arXiv:2102.07078).

FedPer trains body and head together. Here a client first trains its head on the body that it was sent, for many steps,
and then the body below this head, for few; the server averages the bodies.

Symbols: phi: ``body``, h_i: ``memory["own"]``; the head's tau steps are ``head_steps`` or ``head_epochs``, the body's
``local_steps`` or ``local_epochs``.

Sent down: the body's parameters.
Sent up: the change of the body, the number of samples, the training loss. Evaluations as in FedAvg.
Kept by the client: its head and its model's running statistics.
Kept by the server: the body.
Reduces to: FedAvg if the head is empty and gets no steps.
Differs from the paper: bodies are weighted by the clients' samples, as in its code; Algorithm 1 weighs them equally.
The code trains all heads once more before the last score; here clients use the heads that they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedloom.algorithms import fedper
from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Batches, Cohort, Diagnostics, Home, Model, Program, Sent, Setup
from fedloom.core.training import LocalConfig, Training, gradient
from fedloom.core.trees import Tree, chosen, tree_map
from fedloom.programs import local
from fedloom.programs.part import training_of_own


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """FedRep's options."""

    local_steps: int = option(
        5, "Steps of the body per client and round (the paper: a tenth of the head's). Given alone, used instead of "
        "epochs.", low=0,
    )  # fmt: skip
    local_epochs: int = option(0, "Passes over the client's data for the body, instead of steps (the paper: 1).", low=0)
    head_steps: int = option(45, "Steps of the head before those of the body (ours: with them, 50 in all).", low=0)
    head_epochs: int = option(
        10, "Passes for the head instead of steps, where --local-epochs is given (sec. 5).", low=0
    )

    @property
    def before(self) -> int:
        """The head comes first."""
        return self.head_epochs if self.local_epochs else self.head_steps


def round(setup: Setup[Config], state: fedper.State, cohort: Cohort, ask: Ask) -> tuple[fedper.State, Diagnostics]:
    """Algorithm 1: ask the cohort to train head, then body; average the bodies."""
    replies = ask(training(setup.config), *fedper.send(setup, state, cohort.clients))
    body = tree_map(torch.add, state.body, weighted_mean(replies, "delta"))
    return fedper.State(body), {"local_loss": mean_loss(replies)}


def training(config: Config) -> Program:
    """What a client of FedRep runs."""
    return replace(local.local_training(config), name="fedrep.train", init=client_init, step=client_step)


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Training:
    """Start from the common body and the own head, each with an optimiser of its own."""
    carry, optimiser = local.client_init(home, shared, mine, memory), home.config.local_optimiser()
    parts = parts_of(home.model, carry.params)
    states = {part: optimiser.init(params) for part, params in parts.items() if params}
    return carry._replace(optimiser=memory.get("optimiser") or states)


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """A step of the part whose turn it is; the other has none, not of decay or momentum either."""
    grads, loss, buffers = gradient(home, carry.params, carry.buffers, batch)
    heads_turn = home.config.is_before(batch)
    optimiser, slopes = home.config.local_optimiser(), parts_of(home.model, grads)
    params, states = dict(carry.params), dict(carry.optimiser)
    for part, before in parts_of(home.model, carry.params).items():
        if not before:
            continue
        turn = heads_turn if part == "head" else ~heads_turn
        after, state = optimiser.update(before, slopes[part], carry.optimiser[part])
        params |= chosen(turn, after, before)
        states[part] = chosen(turn, state, carry.optimiser[part])
    return carry._replace(
        params=params, buffers=buffers, optimiser=states, loss=carry.loss + loss, steps=carry.steps + 1
    )


def parts_of(model: Model, params: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Head and body."""
    return {
        "head": {name: value for name, value in params.items() if name in model.head},
        "body": {name: value for name, value in params.items() if name not in model.head},
    }


def admit(setup: Setup[Any], state: fedper.State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets the body and trains a head on it, for as long as a participant does in a round."""
    sent = fedper.send(setup, state, newcomers.clients)
    ask(head_training(setup.config), *sent)
    return sent


def head_training(config: Config) -> Program:
    """Train the client's own head on the body as it is."""
    steps, epochs = (0, config.head_epochs) if config.local_epochs else (config.head_steps, 0)
    return replace(training_of_own(config), batches=Batches("train", config.batch_size, steps=steps, epochs=epochs))


def programs(config: Config, model: Model, newcomer: bool) -> list[Program]:
    """A participant trains both parts, a newcomer its head."""
    return [head_training(config)] if newcomer else [training(config)]


CITATION = """@inproceedings{collins2021fedrep,
  title={Exploiting Shared Representations for Personalized Federated Learning},
  author={Collins, Liam and Hassani, Hamed and Mokhtari, Aryan and Shakkottai, Sanjay},
  booktitle={ICML}, year={2021}}"""

ALGORITHM = replace(
    fedper.ALGORITHM,
    name="FedRep",
    citation=CITATION,
    config=Config,
    round=round,
    admit=admit,
    programs=programs,
)
