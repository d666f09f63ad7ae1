# SPDX-License-Identifier: Apache-2.0
"""pFedHN: a loom on the server weaves a model for every client from its embedding.

Shamsian, Navon, Fetaya, Chechik: Personalized federated learning using hypernetworks. ICML 2021 (arXiv:2103.04628).

The server weaves theta_i = h(v_i; phi) and sends it; the client trains it for K steps and sends back the change; the
server pulls the change back through h and steps on phi and v_i. The loom itself never travels. Clients with other
architectures have their own heads on the same trunk (sec. 5.2). A newcomer gets an embedding of its own, the loom
frozen (sec. 5.3).

Symbols: phi: ``loom``, v_i: a row of ``embeddings``, theta_i: ``woven``, K: ``local_steps``, alpha: ``server_lr``.

Sent down: the client's own woven parameters.
Sent up: the change of the parameters, the number of samples, the training loss; its class shares, once, with
    ``descriptor=class_shares``.
Kept by the client: its model's running statistics.
Kept by the server: the loom, the embeddings, the state of the outer optimiser.
Reduces to: nothing simpler; with one client it is the training of one reparametrised model.
Differs from the paper: its Algorithm 1 writes a descent step along +delta; we descend along pseudo_grad = -delta, as
its code does. A cohort of one with ``server_step=per_client`` is the paper's; larger ones are woven from one loom, each
reply making its own step, and can diverge. Other decisions: docs/methods/pfedhn.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import Algorithm, Ask, Batch, Cohort, Diagnostics, Home, Model, Program, Sent, Setup
from fedloom.core.random import seed_of, stream
from fedloom.core.shares import ask_class_shares
from fedloom.core.training import Training, begin, delta, like_report, remember, report, train_step
from fedloom.core.trees import ClientId, PerClient, Tree
from fedloom.hypernets.newcomers import embed
from fedloom.hypernets.outer import begin_outer, outer_steps, rows_now
from fedloom.hypernets.per_tensor import PerTensorConfig, PerTensorLoom, Shapes
from fedloom.hypernets.weaving import weave


@dataclass(frozen=True, kw_only=True)
class Config(PerTensorConfig):
    """pFedHN's options."""

    descriptor: Literal["trainable", "class_shares"] = option(
        "trainable", "Embeddings are learned, or fixed to each client's class shares (App. C.6)."
    )
    spectral_norm: bool = option(False, "Divide the loom's weights by their largest singular value (App. C.4).")
    admit_rounds: int = option(50, "Outer steps on a newcomer's embedding.", low=1)
    admit_lr: float = option(0.1, "Rate of the steps on a newcomer's embedding.", low=0)


class State(NamedTuple):
    """The loom and one embedding per client of the roster."""

    loom: Mapping[str, Tensor]
    embeddings: Tensor  # (clients, embed_dim), read by ``embeddings_of``
    described: Tensor  # (clients,) bool: whose class shares are known; all True where embeddings are learned
    optimiser: Tree


def init(setup: Setup[Config]) -> State:
    """Embeddings from N(0, 1); a loom as ``nn.Linear`` initialises it."""
    return start(setup, loom_of(setup))


def whole(model: Model) -> Shapes:
    """pFedHN weaves every parameter."""
    return model.shapes


def loom_of(setup: Setup[Any], part: Callable[[Model], Shapes] = whole) -> PerTensorLoom:
    """The loom for a roster; ``part`` says which tensors of a model it weaves."""
    config = setup.config
    targets = {str(spec): part(model) for spec, model in setup.architectures.items()}
    described = config.descriptor == "class_shares"
    dim = setup.models[setup.clients[0]].num_outputs if described else config.dim(len(setup.clients))
    return PerTensorLoom(dim, targets, config.hidden, config.layers, config.spectral_norm)


def start(setup: Setup[Any], loom: PerTensorLoom) -> State:
    """The state before round 1."""
    phi = loom.init(seed_of(setup.seed, "loom"), setup.device, setup.dtype)
    drawn = stream(setup.seed, "embeddings").standard_normal((len(setup.clients), loom.embed_dim))
    table = torch.as_tensor(drawn).to(setup.device, setup.dtype)
    told = setup.config.descriptor == "trainable"
    if not told:
        table = torch.full_like(table, 1 / loom.embed_dim)  # until a client has told its shares
    described = torch.full((len(table),), told, device=setup.device)
    return State(phi, table, described, begin_outer(setup.config.outer(), phi, table, learned=told))


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Algorithm 1 for each client of the cohort."""
    loom = loom_of(setup)
    state = describe(setup, state, cohort.clients, ask)
    woven = weave(setup, loom, state.loom, embeddings_of(setup, state, cohort.clients), cohort.clients)
    replies = ask(program(setup.config), {}, woven)
    return learn(setup, loom, state, replies), {"local_loss": mean_loss(replies)}


def learn(setup: Setup[Any], loom: PerTensorLoom, state: State, replies: PerClient) -> State:
    """Step on phi and v along the replies' pseudo-gradients, pulled back through the loom."""
    learned = setup.config.descriptor == "trainable"
    phi, table, memory = outer_steps(
        setup, loom, state.loom, state.embeddings, state.optimiser, replies, learned=learned
    )
    return State(phi, table, state.described, memory)


def embeddings_of(setup: Setup[Any], state: Any, clients: Sequence[ClientId]) -> Tensor:
    """v_i of each of the clients."""
    if setup.config.descriptor == "class_shares":
        fixed: Tensor = state.embeddings[setup.rows(clients)]
        return fixed
    return rows_now(setup, state.embeddings, state.optimiser, clients)


def describe(setup: Setup[Any], state: State, clients: Sequence[ClientId], ask: Ask) -> State:
    """Ask for the class shares of clients that have not told them yet (App. C.6)."""
    if setup.config.descriptor == "trainable":
        return state
    known = state.described[setup.rows(clients)].tolist()
    missing = [client for client, told in zip(clients, known) if not told]
    if not missing:
        return state
    table, described = state.embeddings.clone(), state.described.clone()
    for members, reply in ask_class_shares(setup, missing, ask).groups:
        rows = setup.rows(members)
        table[rows], described[rows] = reply["shares"], True
    return state._replace(embeddings=table, described=described)


def program(config: Config) -> Program:
    """What a client of pFedHN runs."""
    return Program("pfedhn.train", client_init, client_step, client_final, config.batches(), expects)


def expects(shared: Tree, mine: Tree) -> Tree:
    """A change for every woven tensor."""
    return {"delta": mine["params"], **like_report()}


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Training:
    """Start from the woven parameters."""
    return begin(home, mine["params"], memory)


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """One step on the client's own loss."""
    return train_step(home, carry, batch)


def client_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change."""
    return {"delta": delta(carry), **report(home, carry)}, remember(home, carry, memory)


def personalise(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """Each client's woven model."""
    return Sent({}, weave(setup, loom_of(setup), state.loom, embeddings_of(setup, state, clients), clients))


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """Sec. 5.3: freeze the loom and find an embedding for each newcomer."""
    first = embeddings_of(setup, state, setup.clients).mean(0)
    keeps = any(setup.models[client].fresh_buffers() for client in newcomers.clients)
    train = program(setup.config)
    return embed(setup, loom_of(setup), state.loom, first, newcomers.clients, train, ask, keeps=keeps)


CITATION = """@inproceedings{shamsian2021pfedhn,
  title={Personalized Federated Learning using Hypernetworks},
  author={Shamsian, Aviv and Navon, Aviv and Fetaya, Ethan and Chechik, Gal},
  booktitle={ICML}, year={2021}}"""

ALGORITHM = Algorithm(
    name="pFedHN",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    round=round,
    personalise=personalise,
    admit=admit,
    cohort=1,  # Algorithm 1: one client a step
)
