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
Kept by the client: its model's running statistics, the layers of ``keep_local``, which layers it cannot train.
Kept by the server: the loom, every client's vectors, the state of Adam for each of these pieces.
Reduces to: a plain chunked hypernetwork with ``heads=single``.
Differs from the paper: its Algorithm 1 descends along +delta; we descend along pseudo_grad = -delta, as its code does.
As in its code, a piece that a reply did not go through rests: Adam moves neither it nor its step count. What is sent
with ``top_share`` counts the places too, which Table 26 leaves out. Table 3's single head is read both ways: ``single``
(one layer for all positions, the text) and ``per_client`` (the caption, and what runs out of memory). Noise is added
before the largest entries are chosen. Newcomers are asked together, and a new head steps on the mean of those it is
for; the code asks one after another. Other decisions: docs/methods/mh_pfedhn.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.core.config import option
from fedloom.core.contract import Algorithm, Ask, Batch, Cohort, Home, Model, Program, Sent, Setup
from fedloom.core.errors import RoundError
from fedloom.core.optim import Optimiser
from fedloom.core.random import stream
from fedloom.core.training import LocalConfig, Training, begin, like_report, remember, report, train_step
from fedloom.core.trees import ClientId, Params, PerClient, Tree, squared_norm
from fedloom.core.vectors import from_vector, to_vector
from fedloom.hypernets.layers import check_ways, rest, selected, size_of
from fedloom.hypernets.multi_head import MultiHeadLoom, Place, pull_back, weave
from fedloom.privacy.laplace import with_laplace_noise

CODE_PRESET = {"local_epochs": 1, "local_lr": 5e-3, "weight_decay": 5e-4}
"""Local training in the authors' code, where it differs from the text."""


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """MH-pFedHN's options."""

    local_epochs: int = option(2, "Passes over the client's data (sec. 4.1; the code: 1); 0: use steps.", low=0)
    local_lr: float = option(1e-3, "Local learning rate, eta (sec. 4.1; the code: 5e-3).", low=0)
    weight_decay: float = option(1e-4, "Local weight decay (sec. 4.1; the code: 5e-4).", low=0)
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
    keep_local: tuple[str, ...] = option(
        (), "Layers that clients keep, e.g. conv1+head, *bn* or none; clients take several such ways in turn (D.12)."
    )
    frozen: tuple[str, ...] = option(
        (), "Layers woven but not trained, written as for keep-local; each client draws one of several ways (D.13)."
    )
    top_share: float = option(
        1.0, "Share of the change that is sent, its largest entries (D.11: 0.3).", above=0, high=1
    )
    laplace_noise: float = option(0.0, "Scale of Laplace noise on the change (E.2: 0.00625 to 0.0333).", low=0)
    admit_rounds: int = option(100, "Outer steps on a newcomer's vectors.", low=1)
    admit_lr: float = option(2e-4, "Rate of the steps on a newcomer's vectors (the authors' code).", low=0)


class State(NamedTuple):
    """The loom with every client's vectors, in pieces, and Adam's state for each piece."""

    pieces: Mapping[str, Params]
    optimiser: Mapping[str, Tree]


def init(setup: Setup[Config]) -> State:
    """Vectors from N(0, 0.002^2); a loom as ``nn.Linear`` initialises it."""
    return start(setup, places_of(setup, setup.clients).values())


def start(setup: Setup[Any], places: Iterable[Place]) -> State:
    """The state before round 1, with a piece for whatever ``places`` need."""
    check_ways("keep_local", setup.config.keep_local, setup.architectures.values(), told_by_size=True)
    check_ways("frozen", setup.config.frozen, setup.architectures.values(), told_by_size=False)
    pieces = loom_of(setup).grow({}, places, setup.seed, setup.device, setup.dtype)
    return State(pieces, {piece: Optimiser("adam").init(params) for piece, params in pieces.items()})


def loom_of(setup: Setup[Any]) -> MultiHeadLoom:
    """The loom that the options describe."""
    config = setup.config
    return MultiHeadLoom(config.chunk, config.embed_dim, config.hidden, config.layers, config.heads == "none")


def places_of(setup: Setup[Any], clients: Sequence[ClientId]) -> dict[ClientId, Place]:
    """Where each client's model comes from; a client that is not in the roster is a newcomer."""
    position, roster = {client: i for i, client in enumerate(setup.models)}, set(setup.clients)
    return {
        client: place(
            setup,
            f"vectors.{setup.rows([client])[0]}" if client in roster else f"newcomer.{client}",
            setup.models[client],
            told(setup.models[client], setup.config, position[client]),
        )
        for client in clients
    }


def told(model: Model, config: Config, position: int) -> int:
    """K_i, all that a client tells of its model. It does not count what it keeps."""
    ways = config.keep_local
    return size_of(rest(model, ways)[position % len(ways)]) if ways else model.size


def place(setup: Setup[Any], vectors: str, model: Model, size: int) -> Place:
    """tau = ceil(K / N) vectors, and the head for that number."""
    heads, tau = setup.config.heads, loom_of(setup).chunks(size) + setup.config.extra_vectors
    names = {"by_model": f"head.{tau}.{model.spec}", "per_client": f"head.{vectors}", "single": "head.all", "none": ""}
    return Place(vectors, names.get(heads, f"head.{tau}"), tau, 1 if heads == "single" else tau, size)


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, dict[str, float]]:
    """Algorithm 1 for each client of the cohort."""
    state, loss = learn(setup, state, cohort, ask, program(setup.config))
    return state, {"local_loss": loss}


def learn(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask, train: Program) -> tuple[State, float]:
    """Weave, ask and step, for the whole cohort or for one client after another; the mean training loss."""
    loom, config, places = loom_of(setup), setup.config, places_of(setup, cohort.clients)
    clients = sorted(cohort.clients, key=lambda c: setup.rows([c]))
    groups = [clients]
    if config.server_step == "in_turn":
        groups = [[clients[i]] for i in stream(setup.seed, cohort.round, "turns").permutation(len(clients))]
    losses: list[Tensor] = []
    silence: RoundError | None = None
    for group in groups:
        try:
            replies = ask(train, {}, weave(loom, state.pieces, {c: places[c] for c in group}))
        except RoundError as error:
            silence = error
            continue
        losses += [tree["loss"] for _, tree in replies.groups]
        for part in [replies] if config.server_step == "cohort_mean" else one_by_one(setup, replies):
            grads = pull_back(loom, state.pieces, places, part, change_in)
            state = step(state, grads, config.server_lr, config.server_clip)
    if silence and not losses:  # a client that fails in its turn ends the round only if all do
        raise silence
    return state, float(torch.cat(losses).mean())


def one_by_one(setup: Setup[Any], replies: PerClient) -> list[PerClient]:
    """Each reply, in the roster's order."""
    return [PerClient([([c], replies.pick([c]))]) for c in sorted(replies, key=lambda c: setup.rows([c]))]


def step(state: State, grads: Mapping[str, Params], lr: float, clip: float) -> State:
    """One step of Adam on the pieces that have gradients, clipped together; the others rest."""
    norm = squared_norm(grads).sqrt()
    scale = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
    pieces, optimiser = dict(state.pieces), dict(state.optimiser)
    for piece, grad in grads.items():
        before = optimiser[piece]
        scaled = {name: value * scale for name, value in grad.items()}
        pieces[piece], after = Optimiser("adam", lr).update(pieces[piece], scaled, before)
        # a change of nothing is no step
        optimiser[piece] = {**after, "count": torch.where(norm > 0, after["count"], before["count"])}
    return State(pieces, optimiser)


def change_in(reply: Tree, size: int) -> Tensor:
    """delta of a stack of replies, (clients, K); what was not sent is zero."""
    if "delta" in reply:
        dense: Tensor = reply["delta"]
        return dense
    values: Tensor = reply["values"]
    places = reply["places"].long().clamp(0, size - 1)  # a client could send anything
    return values.new_zeros(len(values), size).scatter(1, places, values)


@cache  # programs that are equal share a recorded graph
def program(config: Config) -> Program:
    """What a client of MH-pFedHN runs."""
    expected = partial(expects, config.top_share)
    return Program("mh_pfedhn.train", client_init, client_step, client_final, config.batches(), expected)


def expects(top_share: float, shared: Tree, mine: Tree) -> Tree:
    """A change for every woven parameter, or the largest ones with their places."""
    sent = mine["vector"][: number_sent(top_share, len(mine["vector"]))]
    change = {"delta": sent} if top_share == 1 else {"values": sent, "places": sent}
    return {**change, **like_report()}


def number_sent(top_share: float, size: int) -> int:
    """How many entries of a change are sent (App. D.11)."""
    return max(1, int(top_share * size))


class Carry(NamedTuple):
    """Local training, whose ``start`` is what was woven, and which layers it may move."""

    training: Training
    moves: Params  # {name: () 1 or 0}; a name that is missing moves


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """Give the vector its shapes, and put the client's own layers in."""
    woven = shaped(home, mine["vector"])
    kept = {name: value for name, value in memory.get("kept", {}).items() if name not in woven}
    training = begin(home, {**woven, **kept}, memory)
    return Carry(training._replace(start=woven), memory.get("moves", {}))


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """One step on the client's own loss; frozen layers stay, whatever momentum or decay would do."""
    moves, before = carry.moves, carry.training.params

    def hold(grads: Params) -> Params:
        return {name: grad * moves[name] if name in moves else grad for name, grad in grads.items()}

    after = train_step(home, carry.training, batch, correction=hold)
    params = {n: torch.where(moves[n] > 0, p, before[n]) if n in moves else p for n, p in after.params.items()}
    return carry._replace(training=after._replace(params=params))


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change of what was woven, keep the rest."""
    config, training = home.config, carry.training
    change = to_vector({name: training.params[name] - woven for name, woven in training.start.items()})
    change = with_laplace_noise(home, change, config.laplace_noise)
    reply = {"delta": change}
    if config.top_share < 1:
        places = torch.topk(change.abs(), number_sent(config.top_share, len(change))).indices
        reply = {"values": change.gather(0, places), "places": places.int()}
    after = remember(home, training, memory)
    if "kept" in memory:  # of every way to keep layers; this client has one
        own = {name: value for name, value in training.params.items() if name not in training.start}
        after["kept"] = {**memory["kept"], **own}
    return {**reply, **report(home, training)}, after


def shaped(home: Home, vector: Tensor) -> dict[str, Tensor]:
    """The woven parameters; which layers they are follows from their number."""
    return from_vector(vector, next(s for s in rest(home.model, home.config.keep_local) if size_of(s) == len(vector)))


def first_memory(model: Model, config: Config, seed: int) -> Tree:
    """The layers that clients keep, and which layers this client can train."""
    memory: dict[str, Any] = {}
    if config.keep_local:
        kept = selected(model, *config.keep_local)
        memory["kept"] = {name: value for name, value in model.init(seed).items() if name in kept}
    if config.frozen:
        some, drawn = selected(model, *config.frozen), selected(model, config.frozen[seed % len(config.frozen)])
        own = model.init(seed)
        memory["moves"] = {name: torch.full_like(own[name].sum(), float(name not in drawn)) for name in sorted(some)}
    return memory


def personalise(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """Each client's woven parameters."""
    return Sent({}, weave(loom_of(setup), state.pieces, places_of(setup, clients)))


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """The woven parameters in their shapes, and the client's own layers."""
    params = {**memory.get("kept", {}), **shaped(home, mine["vector"])}
    return {"params": {name: params[name] for name in home.model.shapes}, "buffers": memory["buffers"]}


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """Sec. 4.4: a newcomer gets vectors of its own, the loom frozen; a number of vectors that is new, also a head."""
    loom, config, places = loom_of(setup), setup.config, places_of(setup, newcomers.clients)
    pieces = loom.grow(state.pieces, places.values(), setup.seed, setup.device, setup.dtype)
    fresh = {piece: params for piece, params in pieces.items() if piece not in state.pieces}
    state = State(pieces, {piece: Optimiser("adam").init(params) for piece, params in fresh.items()})
    # newcomers whose head is known have nothing in common that moves
    sharing: dict[str, list[ClientId]] = {}
    for client, own in places.items():
        sharing.setdefault(own.head if own.head in fresh else own.vectors, []).append(client)
    for _ in range(config.admit_rounds):
        replies = ask(program(config), {}, weave(loom, state.pieces, places))
        for members in sharing.values():
            answers = PerClient.of({client: replies[client] for client in members if client in replies})
            if answers:
                grads = pull_back(loom, state.pieces, places, answers, change_in, fresh.__contains__)
                state = step(state, grads, config.admit_lr, config.server_clip)
    return Sent({}, weave(loom, state.pieces, places))


CITATION = """@misc{mhpfedhn,
  title={Revisiting Hypernetwork in Model-Heterogeneous Personalized Federated Learning},
  author={Anonymous},
  note={Under review; code: github.com/DangDang1895/MH-pFL}}"""

ALGORITHM = Algorithm(
    name="MH-pFedHN",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    round=round,
    personalise=personalise,
    first_memory=first_memory,
    client_deploy=client_deploy,
    admit=admit,
    cohort=1,  # Algorithm 1 in the authors' code: one client after another, a step each
    told="size",
)
