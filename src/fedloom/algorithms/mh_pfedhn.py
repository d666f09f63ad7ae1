# SPDX-License-Identifier: Apache-2.0
"""MH-pFedHN: a loom for clients of any architecture, of which the server is told only the number of parameters.

Revisiting hypernetwork in model-heterogeneous personalized federated learning. Under review, authors not named;
their code is github.com/DangDang1895/MH-pFL.

A client with K_i parameters has tau_i = ceil(K_i / N) embedding vectors. A common trunk and a head with one linear
layer per vector make N parameters of each; side by side and cut to K_i they are the client's model, sent as a vector,
which the client gives its shapes. Clients with as many vectors share a head, whatever their architectures. The client
trains and sends the change; the server pulls it back through the loom and steps on trunk, head and vectors.

Symbols: K_i: ``Place.size``, tau_i: ``Place.tau``, N: ``chunk``, phi_f: the piece ``trunk``, phi_H: the pieces
``head.*``, v_i: the pieces ``vectors.*``, theta_i: ``vector``, alpha: ``server_lr``.

Sent down: the client's own woven parameters, as a vector.
Sent up: the change of that vector, or its largest entries with their places; the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: its model's running statistics, the layers of ``keep_local``, which layers it cannot train.
Kept by the server: the loom, every client's vectors, the state of Adam for each of these pieces.
Reduces to: a plain chunked hypernetwork with ``heads=single``.
Differs from the paper: its Algorithm 1 descends along +delta; we descend along pseudo_grad = -delta, as its code does.
As in its code, a piece that a reply did not go through rests: Adam moves neither it nor its step count. What is sent
with ``top_share`` counts the places too, which Table 26 leaves out. Other decisions: docs/methods/mh_pfedhn.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.core.config import option
from fedloom.core.contract import (
    Algorithm,
    Ask,
    Batch,
    Cohort,
    Diagnostics,
    Handover,
    Home,
    Model,
    Program,
    Sent,
    Setup,
    Woven,
)
from fedloom.core.sparse import change_in, largest, like_largest
from fedloom.core.training import LocalConfig, Training, begin, like_report, remember, report
from fedloom.core.trees import ClientId, Params, PerClient, Tree
from fedloom.core.vectors import to_vector
from fedloom.looms.multi_head import MultiHeadLoom, Pieces, Place, adam_states, adam_step, pull_back, weave
from fedloom.looms.places import GLOBAL, first_pieces, grown, places_of
from fedloom.looms.weaving import one_by_one, turns
from fedloom.models.layers import check_told, first_layers, keep_layers, not_woven, shaped, train_unfrozen
from fedloom.privacy.laplace import laplace_noise, with_laplace_noise


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """MH-pFedHN's options."""

    chunk: int = option(3072, "Parameters woven from one embedding vector, N (sec. 4.1; F.4: 1024 to 5120).", low=1)
    embed_dim: int = option(64, "Size of an embedding vector (sec. 4.1; F.2 tries 16 to 256).", low=1)
    hidden: int = option(128, "Width of the loom's trunk (the authors' code).", low=1)
    layers: int = option(3, "Layers of the loom's trunk (F.3 tries 1 to 5).", low=1)
    heads: Literal["by_count", "by_model", "per_client", "single", "none"] = option(
        "by_count",
        "Who shares a head: clients with as many vectors (the paper), with the same architecture too (D.8), or nobody; "
        "single: one layer for all positions of all clients; none: the trunk alone (Table 3).",
    )
    extra_vectors: int = option(0, "Embedding vectors more than a model needs; their chunks are cut off (D.7).", low=0)
    server_lr: float = option(2e-4, "Outer learning rate of Adam, alpha (sec. 4.1).", low=0)
    server_clip: float = option(50.0, "Largest norm of an outer gradient; 0: no clipping (the authors' code).", low=0)
    server_step: Literal["per_client", "in_turn", "cohort_mean"] = option(
        "per_client",
        "All of a cohort are woven at once and each reply is a step; or one client after another, each woven after the "
        "step before (the authors' code; the same for a cohort of one); or one step on the mean.",
    )
    preset: Literal["text", "code"] = option(
        "text", "Where local training is not given: as the paper's text has it, or the authors' code."
    )
    local_epochs: int = option(2, "Passes over the client's data (sec. 4.1; the code: 1); 0: use steps.", low=0)
    local_lr: float = option(1e-3, "Local learning rate, eta (sec. 4.1; the code: 5e-3).", low=0)
    weight_decay: float = option(1e-4, "Local weight decay (sec. 4.1; the code: 5e-4).", low=0)
    keep_local: tuple[str, ...] = option(
        (),
        "Layers that clients keep, e.g. conv1+head, body, none, or resnet*/*bn*+head for such networks; of "
        "several such choices, clients with one architecture take each in turn (D.12).",
    )
    frozen: tuple[str, ...] = option(
        (), "Layers woven but not trained, written as for keep-local; each client draws one of several choices (D.13)."
    )
    top_share: float = option(
        1.0, "Share of the change that is sent, its largest entries (D.11: 0.3).", above=0, high=1
    )
    laplace_noise: float = option(0.0, "Scale of Laplace noise on the change (E.2: 0.00625 to 0.0333).", low=0)
    admit_rounds: int = option(100, "Outer steps on a newcomer's vectors.", low=1)
    admit_lr: float = option(2e-4, "Rate of the steps on a newcomer's vectors (the authors' code).", low=0)

    PRESETS: ClassVar = {"code": {"local_epochs": 1, "local_lr": 5e-3, "weight_decay": 5e-4}}

    def loom(self) -> MultiHeadLoom:
        """The loom that the options describe."""
        return MultiHeadLoom(self.chunk, self.embed_dim, self.hidden, self.layers, self.heads == "none")

    def place(self, vectors: str, model: Model, size: int) -> Place:
        """tau = ceil(K / N) vectors, and the head for that number."""
        heads, tau = self.heads, self.loom().chunks(size) + self.extra_vectors
        special = {"by_model": f"head.{tau}.{model.spec}", "per_client": f"head.{vectors}", "single": "head.all"}
        head = "" if heads == "none" else special.get(heads, f"head.{tau}")
        return Place(vectors, head, tau, 1 if heads == "single" else tau, size)


class State(NamedTuple):
    """The loom with every client's vectors, in pieces, and Adam's state for each piece."""

    pieces: Mapping[str, Params]
    optimiser: Mapping[str, Tree]


def init(setup: Setup[Any], *others: Place) -> State:
    """Vectors from N(0, 0.002^2), for the models of ``others`` too; a loom as ``nn.Linear`` initialises it."""
    pieces = first_pieces(setup, [*places_of(setup, setup.clients).values(), *others])
    return State(pieces, adam_states(pieces))


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """Each client's woven parameters."""
    return Sent({}, weave(setup.config.loom(), state.pieces, places_of(setup, clients)))


def embeddings_of(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Tensor:
    """The mean of each client's vectors: models of other sizes come from other numbers of them."""
    return means(state.pieces, places_of(setup, clients))


def means(pieces: Mapping[str, Params], places: Mapping[ClientId, Place]) -> Tensor:
    """(clients, embed_dim)"""
    return torch.stack([pieces[place.vectors]["v"].mean(0) for place in places.values()])


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Algorithm 1 for each client of the cohort."""
    state, loss = learn(setup, state, cohort, ask, program(setup.config))
    return state, {"local_loss": loss}


def learn(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask, train: Program) -> tuple[State, Tensor]:
    """Weave, ask and step, for the whole cohort or for one client after another; the mean training loss."""
    loom, config, places = setup.config.loom(), setup.config, places_of(setup, cohort.clients)

    def answers(clients: Sequence[ClientId]) -> PerClient:  # of models woven from the state as it is then
        return ask(train, {}, weave(loom, state.pieces, {client: places[client] for client in clients}))

    losses: list[Tensor] = []
    for replies in turns(setup, cohort, answers):
        losses += [tree["loss"] for _, tree in replies.groups]
        for part in [replies] if config.server_step == "cohort_mean" else one_by_one(setup, replies):
            grads = pull_back(loom, state.pieces, places, part, change_in)
            state = State(*adam_step(*state, grads, config.server_lr, config.server_clip))
    return state, torch.cat(losses).mean()


def program(config: Config) -> Program:
    """What a client of MH-pFedHN runs."""
    expected, noise = partial(expects, config.top_share), laplace_noise(config.laplace_noise)
    return Program("mh_pfedhn.train", client_init, client_step, client_final, config.batches(), expected, noise=noise)


def expects(top_share: float, shared: Tree, mine: Tree) -> Tree:
    """A change for every woven parameter, or the largest ones with their places."""
    return {**like_largest(mine["vector"], top_share), **like_report()}


class Carry(NamedTuple):
    """Local training, whose ``start`` is what was woven, and which layers it may move."""

    training: Training
    moves: Params  # {name: () 1 or 0}; a name that is missing moves


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """Give the vector its shapes, and put the client's own layers in."""
    woven = shaped(home.model, home.config.keep_local, mine["vector"])
    training = begin(home, {**woven, **not_woven(memory.get("own", {}), woven)}, memory)
    return Carry(training._replace(start=woven), memory.get("moves", {}))


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """One step on the client's own loss; frozen layers stay."""
    return carry._replace(training=train_unfrozen(home, carry.training, batch, carry.moves))


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change of what was woven, keep the rest."""
    config, training = home.config, carry.training
    change = to_vector({name: training.params[name] - woven for name, woven in training.start.items()})
    change = with_laplace_noise(home, change, config.laplace_noise)
    after = keep_layers(remember(home, training, memory), not_woven(training.params, training.start))
    return {**largest(change, config.top_share), **report(home, training)}, after


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """The woven parameters in their shapes, and the client's own layers."""
    params = {**memory.get("own", {}), **shaped(home.model, home.config.keep_local, mine["vector"])}
    return {"params": {name: params[name] for name in home.model.shapes}, "buffers": memory["buffers"]}


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Woven:
    """Sec. 4.4: a newcomer gets vectors of its own, the loom frozen; a number of vectors that is new, also a head."""
    loom, config, places = setup.config.loom(), setup.config, places_of(setup, newcomers.clients)
    check_told(config.keep_local, [setup.models[client] for client in places])  # a newcomer's network can be new
    pieces: Pieces = grown(setup, state.pieces, places.values())
    fresh = {piece: params for piece, params in pieces.items() if piece not in state.pieces}
    memory: Mapping[str, Tree] = adam_states(fresh)
    # newcomers whose head is known have nothing in common that moves
    sharing: dict[str, list[ClientId]] = {}
    for client, own in places.items():
        sharing.setdefault(own.head if own.head in fresh else own.vectors, []).append(client)
    for _ in range(config.admit_rounds):
        replies = ask(program(config), {}, weave(loom, pieces, places))
        for members in sharing.values():
            answers = PerClient.of({client: replies[client] for client in members if client in replies})
            if answers:
                grads = pull_back(loom, pieces, places, answers, change_in, fresh.__contains__)
                pieces, memory = adam_step(pieces, memory, grads, config.admit_lr, config.server_clip)
    return Woven.of(Sent({}, weave(loom, pieces, places)), list(places), means(pieces, places))


def for_participants(setup: Setup[Any], state: State) -> State:
    """The pieces without the optimiser's state."""
    return State(state.pieces, {})


def for_newcomers(setup: Setup[Any], state: State) -> State:
    """The trunk and the heads, but neither vectors nor heads that are one client's own."""
    owned = {place.vectors for place in places_of(setup, setup.clients).values()} | {f"vectors.{GLOBAL}"}
    owned |= {f"head.{vectors}" for vectors in owned}
    return State({name: piece for name, piece in state.pieces.items() if name not in owned}, {})


def programs(config: Config, model: Model, newcomer: bool) -> list[Program]:
    """A client trains what was woven for it."""
    return [program(config)]


CITATION = """@misc{mhpfedhn,
  title={Revisiting Hypernetwork in Model-Heterogeneous Personalized Federated Learning},
  author={Anonymous},
  note={Under review; code: github.com/DangDang1895/MH-pFL}}"""

ALGORITHM = Algorithm(
    name="MH-pFedHN",
    family="loom",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    averaged=("pieces",),
    first_memory=first_layers,
    client_deploy=client_deploy,
    programs=programs,
    admit=admit,
    handover=Handover(for_participants, for_newcomers, loom="pieces"),
    embeddings=embeddings_of,
    cohort=1,  # Algorithm 1 in the authors' code: one client after another, a step each
    told="size",
)
