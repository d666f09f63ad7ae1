# SPDX-License-Identifier: Apache-2.0
"""pFedHN-PC: pFedHN whose clients keep a classifier of their own.

Shamsian, Navon, Fetaya, Chechik: Personalized federated learning using hypernetworks. ICML 2021 (arXiv:2103.04628),
sec. 3.3.

The loom weaves the feature extractor; the output layer is the client's, is trained with it and never leaves. Its
optimiser state persists from round to round, as in the authors' code, while that of the woven body starts afresh.

Symbols: omega_i: ``memory["head"]``; the others as in pFedHN.

Sent down: the client's woven body.
Sent up: the change of the body, the number of samples, the training loss; its class shares, once, with
    ``descriptor=class_shares``.
Kept by the client: its head with its optimiser state, its model's running statistics.
Kept by the server: the loom, the embeddings, the state of the outer optimiser.
Reduces to: pFedHN if the head is empty.
Differs from the paper: omega_i steps at the local rate and is not clipped, as in the authors' code (sec. 3.3 writes
the outer rate). For newcomers, which the paper admits only to pFedHN, head and embedding are found together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fedloom.algorithms import pfedhn
from fedloom.algorithms.fedper import body_of, head_of
from fedloom.algorithms.fedper import first_memory as first_head
from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Model, Needs, Program, Sent, Setup
from fedloom.core.training import Training, begin, delta, gradient, remember, report
from fedloom.core.trees import ClientId, Tree
from fedloom.hypernets.newcomers import embed
from fedloom.hypernets.per_tensor import Shapes
from fedloom.hypernets.weaving import weave


@dataclass(frozen=True, kw_only=True)
class Config(pfedhn.Config):
    """pFedHN-PC's options."""

    server_lr: float = option(5e-2, "Outer learning rate, alpha (the authors' code).", low=0)


def init(setup: Setup[Config]) -> pfedhn.State:
    """As pFedHN, for the body alone."""
    return pfedhn.start(setup, pfedhn.loom_of(setup, body))


def body(model: Model) -> Shapes:
    """pFedHN-PC weaves all but the output layer."""
    return {name: shape for name, shape in model.shapes.items() if name not in model.head}


def round(setup: Setup[Config], state: pfedhn.State, cohort: Cohort, ask: Ask) -> tuple[pfedhn.State, Diagnostics]:
    """A round of pFedHN with another client program."""
    loom = pfedhn.loom_of(setup, body)
    state = pfedhn.describe(setup, state, cohort.clients, ask)
    woven = weave(setup, loom, state.loom, pfedhn.embeddings_of(setup, state, cohort.clients), cohort.clients)
    replies = ask(program(setup.config), {}, woven)
    return pfedhn.learn(setup, loom, state, replies), {"local_loss": mean_loss(replies)}


def first_memory(model: Model, config: Any, seed: int) -> Tree:
    """A head of the client's own, and its optimiser state."""
    first = first_head(model, config, seed)
    return {**first, "head_optimiser": config.local_optimiser().init(first["head"])}


def program(config: Config) -> Program:
    """What a client of pFedHN-PC runs."""
    return Program("pfedhn_pc.train", client_init, client_step, client_final, config.batches(), pfedhn.expects)


class Carry(NamedTuple):
    """Training of the body, and the head beside it."""

    training: Training
    head: Tree
    optimiser: Tree


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """The woven body starts afresh, the head goes on."""
    return Carry(begin(home, mine["params"], memory), memory["head"], memory["head_optimiser"])


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """Eq. 4: one step on theta_i and omega_i, each with its own optimiser."""
    training, optimiser = carry.training, home.config.local_optimiser()
    everything = {**training.params, **carry.head}
    grads, loss, buffers = gradient(home, everything, training.buffers, batch)
    params, state = optimiser.update(training.params, body_of(home.model, grads), training.optimiser)
    head, head_state = replace(optimiser, clip=0.0).update(carry.head, head_of(home.model, grads), carry.optimiser)
    training = training._replace(
        params=params, buffers=buffers, optimiser=state, loss=training.loss + loss, steps=training.steps + 1
    )
    return Carry(training, head, head_state)


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change of the body, keep the head."""
    kept = {**remember(home, carry.training, memory), "head": carry.head, "head_optimiser": carry.optimiser}
    return {"delta": delta(carry.training), **report(home, carry.training)}, kept


def personalise(setup: Setup[Any], state: pfedhn.State, clients: Sequence[ClientId]) -> Sent:
    """Each client's woven body."""
    loom = pfedhn.loom_of(setup, body)
    return Sent({}, weave(setup, loom, state.loom, pfedhn.embeddings_of(setup, state, clients), clients))


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """The woven body under the client's head."""
    return {"params": {**mine["params"], **memory["head"]}, "buffers": memory["buffers"]}


def admit(setup: Setup[Any], state: pfedhn.State, newcomers: Cohort, ask: Ask) -> Sent:
    """As pFedHN; the newcomer's head is trained along with its embedding."""
    first = pfedhn.embeddings_of(setup, state, setup.clients).mean(0)
    loom, train = pfedhn.loom_of(setup, body), program(setup.config)
    return embed(setup, loom, state.loom, first, newcomers.clients, train, ask, keeps=True)


ALGORITHM = replace(
    pfedhn.ALGORITHM,
    name="pFedHN-PC",
    config=Config,
    init=init,
    round=round,
    personalise=personalise,
    first_memory=first_memory,
    client_deploy=client_deploy,
    admit=admit,
    needs=Needs(head=True),
)
