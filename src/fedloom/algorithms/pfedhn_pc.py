# SPDX-License-Identifier: Apache-2.0
"""pFedHN-PC: pFedHN whose clients keep a classifier of their own.

Shamsian, Navon, Fetaya, Chechik: Personalized federated learning using hypernetworks. ICML 2021 (arXiv:2103.04628),
sec. 3.3.

The loom weaves the feature extractor; the output layer is the client's, is trained with it and never leaves. Its
optimiser state persists from round to round, as in the authors' code, while that of the woven body starts afresh.

Symbols: omega_i: ``memory["own"]``; the others as in pFedHN.

Sent down: the client's woven body.
Sent up: the change of the body, the number of samples, the training loss; its label shares, once, with
    ``descriptor=class_shares``. Evaluations as in FedAvg.
Kept by the client: its head with its optimiser state, its model's running statistics.
Kept by the server: the loom, the embeddings, the state of the outer optimiser.
Reduces to: pFedHN if the head is empty.
Differs from the paper: omega_i steps at the local rate and is not clipped, as in the authors' code (sec. 3.3 writes
the outer rate). For newcomers, which the paper admits only to pFedHN, head and embedding are found together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fedloom.algorithms import fedper, pfedhn
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Model, Needs, Program, Seeds, Setup
from fedloom.core.training import Training, begin, delta, gradient, remember, report
from fedloom.core.trees import Tree
from fedloom.programs.local import expects


@dataclass(frozen=True, kw_only=True)
class Config(pfedhn.Config):
    """pFedHN-PC's options."""

    server_lr: float = option(5e-2, "Outer learning rate, alpha (the authors' code).", low=0)

    @property
    def weaves_head(self) -> bool:
        """The head is the client's own."""
        return False

    def train(self) -> Program:
        """What a client of pFedHN-PC runs."""
        return Program("pfedhn_pc.train", client_init, client_step, client_final, self.batches(), expects)


def first_memory(model: Model, config: Any, seeds: Seeds) -> Tree:
    """A head of the client's own, and its optimiser state."""
    first = fedper.first_memory(model, config, seeds)
    return {**first, "own_optimiser": config.local_optimiser().init(first["own"])}


def round(setup: Setup[Any], state: pfedhn.State, cohort: Cohort, ask: Ask) -> tuple[pfedhn.State, Diagnostics]:
    """A round of pFedHN, whose loom weaves the body alone."""
    return pfedhn.round(setup, state, cohort, ask)


class Carry(NamedTuple):
    """Training of the body, and the head beside it."""

    training: Training
    head: Tree
    optimiser: Tree


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """The woven body starts afresh, the head goes on, whatever head a server may have sent."""
    body = {name: value for name, value in mine["params"].items() if name not in memory["own"]}
    return Carry(begin(home, body, memory), memory["own"], memory["own_optimiser"])


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """Eq. 4: one step on theta_i and omega_i, each with its own optimiser."""
    training, optimiser = carry.training, home.config.local_optimiser()
    everything = {**training.params, **carry.head}
    grads, loss, buffers = gradient(home, everything, training.buffers, batch)
    params, state = optimiser.update(
        training.params, {name: grads[name] for name in training.params}, training.optimiser
    )
    head, head_state = replace(optimiser, clip=0.0).update(
        carry.head, {name: grads[name] for name in carry.head}, carry.optimiser
    )
    training = training._replace(
        params=params, buffers=buffers, optimiser=state, loss=training.loss + loss, steps=training.steps + 1
    )
    return Carry(training, head, head_state)


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change of the body, keep the head."""
    kept = {**remember(home, carry.training, memory), "own": carry.head, "own_optimiser": carry.optimiser}
    return {"delta": delta(carry.training), **report(home, carry.training)}, kept


ALGORITHM = replace(
    pfedhn.ALGORITHM,
    name="pFedHN-PC",
    family="loom",
    config=Config,
    round=round,
    first_memory=first_memory,
    needs=Needs(head=True),
)
