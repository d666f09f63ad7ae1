# SPDX-License-Identifier: Apache-2.0
"""pFedHN: a loom on the server weaves a model for every client from its embedding.

Shamsian, Navon, Fetaya, Chechik: Personalized federated learning using hypernetworks. ICML 2021 (arXiv:2103.04628).

The server weaves theta_i = h(v_i; phi) and sends it; the client trains it for K steps and sends back the change; the
server pulls the change back through h and steps on phi and v_i. The loom itself never travels. Clients with other
architectures have their own heads on the same trunk (sec. 5.2). A newcomer gets an embedding of its own, the loom
frozen (sec. 5.3).

Symbols: phi: ``loom``, v_i: a row of ``embeddings``, theta_i: ``woven``, K: ``local_steps``, alpha: ``server_lr``.

Sent down: the client's own woven parameters.
Sent up: the change of the parameters, the number of samples, the training loss; its label shares, once, with
    ``descriptor=class_shares``. Evaluations as in FedAvg.
Kept by the client: its model's running statistics.
Kept by the server: the loom, the embeddings, the state of the outer optimiser.
Reduces to: nothing simpler; with one client it is the training of one reparametrised model.
Differs from the paper: its Algorithm 1 writes a descent step along +delta; we descend along pseudo_grad = -delta, as
its code does. A cohort of one with ``server_step=per_client`` is the paper's; larger ones are woven from one loom, each
reply making its own step, and can diverge. Other decisions: docs/methods/pfedhn.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Handover, Model, Program, Sent, Setup, Woven
from fedloom.core.errors import ConfigError
from fedloom.core.optim import Optimiser
from fedloom.core.random import seed_of, stream
from fedloom.core.training import LocalConfig
from fedloom.core.trees import ClientId, Tree
from fedloom.looms.outer import begin_outer, outer_steps, rows_as_in, rows_now
from fedloom.looms.per_tensor import PerTensorLoom, Shapes
from fedloom.looms.weaving import pull_back, weave
from fedloom.programs.labels import ask_label_shares, label_shares
from fedloom.programs.local import local_training

MAX_DEFAULT_DIM = 10_000
"""The paper has at most 500 clients; its rule for the size of an embedding is not meant for millions."""


@dataclass(frozen=True, kw_only=True)
class LoomSize(LocalConfig):
    """How large pFedHN's loom is."""

    embed_dim: int = option(0, "Size of an embedding; 0: 1 + clients // 4 (pFedHN, sec. 5).", low=0)
    hidden: int = option(100, "Width of the loom's trunk (pFedHN, App. B).", low=1)
    layers: int = option(3, "Hidden layers of the loom (pFedHN, App. B; C.3.3 tries 1 to 5).", low=1)

    def dim(self, clients: int) -> int:
        """The size of an embedding: as given, or by the paper's rule."""
        size = self.embed_dim or 1 + clients // 4
        if size > MAX_DEFAULT_DIM and not self.embed_dim:
            raise ConfigError(
                f"The paper's embeddings of {size:,} numbers are too large for {clients:,} clients. "
                "Give --embed-dim, e.g. 32."
            )
        return size


@dataclass(frozen=True, kw_only=True)
class LoomConfig(LoomSize):
    """The options of pFedHN's loom, which IT-PFL-HN has too: its size, and how the server steps."""

    spectral_norm: bool = option(False, "Divide the loom's weights by their largest singular value (App. C.4).")
    server_lr: float = option(1e-2, "Outer learning rate, alpha (pFedHN's code).", low=0)
    server_momentum: float = option(0.9, "Outer momentum (pFedHN's code).", low=0, high=1)
    server_weight_decay: float = option(1e-3, "Outer weight decay, embeddings included (pFedHN's code).", low=0)
    server_clip: float = option(50.0, "Largest norm of an outer gradient; 0: no clipping (pFedHN's code).", low=0)
    server_step: Literal["per_client", "cohort_mean"] = option(
        "per_client", "One outer step per reply (the paper), or one on the mean, which wants a higher rate."
    )

    @property
    def learned(self) -> bool:
        """Whether embeddings are trained; else they are the clients' label shares."""
        return True

    @property
    def weaves_head(self) -> bool:
        """Whether the loom weaves a client's head; else the client keeps one of its own."""
        return True

    def woven(self, model: Model) -> Shapes:
        """The tensors of a model that the loom weaves."""
        return {name: shape for name, shape in model.shapes.items() if self.weaves_head or name not in model.head}

    def train(self) -> Program:
        """What a client runs."""
        return local_training(self)

    def outer(self) -> Optimiser:
        """The optimiser of loom and embeddings."""
        return Optimiser("sgd", self.server_lr, self.server_momentum, self.server_weight_decay, self.server_clip)


@dataclass(frozen=True, kw_only=True)
class Config(LoomConfig):
    """pFedHN's options."""

    descriptor: Literal["trainable", "class_shares"] = option(
        "trainable", "Embeddings are learned, or fixed to each client's class shares (App. C.6)."
    )
    admit_rounds: int = option(50, "Outer steps on a newcomer's embedding.", low=1)
    admit_lr: float = option(0.1, "Rate of the steps on a newcomer's embedding.", low=0)

    @property
    def learned(self) -> bool:
        """Whether embeddings are trained; else they are the clients' label shares."""
        return self.descriptor == "trainable"


class State(NamedTuple):
    """The loom and one embedding per client of the roster."""

    loom: Mapping[str, Tensor]
    embeddings: Tensor  # (clients, embed_dim), read by ``embeddings_of``
    described: Tensor  # (clients,) bool: whose label shares are known; all True where embeddings are learned
    optimiser: Tree


def loom_of(setup: Setup[Any]) -> PerTensorLoom:
    """The loom for a roster."""
    config = setup.config
    targets = {str(spec): config.woven(model) for spec, model in setup.architectures.items()}
    dim = config.dim(len(setup.clients)) if config.learned else setup.models[setup.clients[0]].num_outputs
    loom = PerTensorLoom(dim, targets, config.hidden, config.layers, config.spectral_norm)
    return setup.elsewhere(loom) if setup.elsewhere else loom


def init(setup: Setup[Any]) -> State:
    """Embeddings from N(0, 1), or equal shares until a client has told its own; a loom as ``nn.Linear`` initialises."""
    loom, learned = loom_of(setup), setup.config.learned
    phi = loom.init(seed_of(setup.seed, "loom"), setup.device, setup.dtype, setup.shards)
    drawn = stream(setup.seed, "embeddings").standard_normal((len(setup.clients), loom.embed_dim))
    table = torch.as_tensor(drawn).to(setup.device, setup.dtype)
    table = table if learned else torch.full_like(table, 1 / loom.embed_dim)
    described = torch.full((len(table),), learned, device=setup.device)
    return State(phi, table, described, begin_outer(setup.config.outer(), phi, table, learned=learned))


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """theta_i = h(v_i; phi)."""
    return Sent({}, weave(setup, loom_of(setup), state.loom, embeddings_of(setup, state, clients), clients))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Algorithm 1 for each client of the cohort: send, train, step on phi and v along the pulled-back change."""
    state = describe(setup, state, cohort.clients, ask)
    replies = ask(setup.config.train(), *send(setup, state, cohort.clients))
    phi, table, memory = outer_steps(
        setup, loom_of(setup), state.loom, state.embeddings, state.optimiser, replies, learned=setup.config.learned
    )
    return State(phi, table, state.described, memory), {"local_loss": mean_loss(replies)}


def embeddings_of(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Tensor:
    """v_i of each of the clients."""
    if setup.config.learned:
        return rows_now(setup, state.embeddings, state.optimiser, clients)
    return state.embeddings[setup.rows(clients)]


def describe(setup: Setup[Any], state: State, clients: Sequence[ClientId], ask: Ask) -> State:
    """App. C.6: ask for the label shares of clients that have not told them yet."""
    known = state.described[setup.rows(clients)].tolist() if not setup.config.learned else [True] * len(clients)
    missing = [client for client, told in zip(clients, known, strict=True) if not told]
    if not missing:
        return state
    table, described = state.embeddings.clone(), state.described.clone()
    for members, reply in ask_label_shares(setup, missing, ask).groups:
        rows = setup.rows(members)
        table[rows], described[rows] = reply["shares"], True
    return state._replace(embeddings=table, described=described)


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """Sec. 5.3: freeze the loom and step on an embedding for each newcomer; or take its label shares (App. C.6)."""
    loom, phi, config, clients = loom_of(setup), state.loom, setup.config, newcomers.clients
    table = start(setup, state).repeat(len(clients), 1)
    if not config.learned:
        row = {client: i for i, client in enumerate(clients)}
        for members, reply in ask_label_shares(setup, clients, ask).groups:
            table[[row[m] for m in members]] = reply["shares"]
    # where embeddings are given, rounds are for what newcomers keep of them: a head, running statistics
    keeps = not config.weaves_head or any(setup.models[client].fresh_buffers() for client in clients)
    outer = Optimiser("sgd", config.admit_lr, config.server_momentum)
    memory = outer.init({"v": table})
    for _ in range(config.admit_rounds if keeps or config.learned else 0):
        replies = ask(config.train(), {}, weave(setup, loom, phi, table, clients))
        if config.learned:
            _, grad = pull_back(setup, loom, phi, table, clients, replies, through_loom=False)
            # every newcomer steps on its own change, not on a mean
            after, memory = outer.update({"v": table}, {"v": grad * len(replies)}, memory)
            table = after["v"]
    return Woven.of(Sent({}, weave(setup, loom, phi, table, clients)), clients, table)


def start(setup: Setup[Any], state: State) -> Tensor:
    """Where newcomers' embeddings begin: at the mean of the participants', which is all of them that is handed on."""
    return (embeddings_of(setup, state, setup.clients) if state.optimiser else state.embeddings).mean(0)


def for_participants(setup: Setup[Any], state: Any) -> Any:
    """The state without the outer optimiser's: embeddings have taken the steps that they waited for."""
    return state._replace(embeddings=embeddings_of(setup, state, setup.clients), optimiser={})


def for_newcomers(setup: Setup[Any], state: State) -> State:
    """The loom, and the mean of the embeddings in the place of all."""
    mean = start(setup, state)[None]
    return state._replace(embeddings=mean, described=torch.ones_like(mean[:, 0], dtype=torch.bool), optimiser={})


def sized(setup: Setup[Any]) -> Any:
    """The config with the embeddings' size."""
    return replace(setup.config, embed_dim=loom_of(setup).embed_dim) if setup.config.learned else setup.config


def vector(config: Config) -> Literal["embedding", "class shares"]:
    """What a model is woven from."""
    return "embedding" if config.learned else "class shares"


def steps(config: Config) -> int:
    """A newcomer's embedding is found by steps; its label shares are what they are."""
    return config.admit_rounds if config.learned else 0


def one_step(config: Config) -> bool:
    """Whether a round is one step of the loom."""
    return config.server_step == "cohort_mean"


def programs(config: Config, model: Model, newcomer: bool) -> list[Program]:
    """A client trains what was woven for it; if embeddings are label shares, it also tells those."""
    return [config.train(), *([] if config.learned else [label_shares()])]


CITATION = """@inproceedings{shamsian2021pfedhn,
  title={Personalized Federated Learning using Hypernetworks},
  author={Shamsian, Aviv and Navon, Aviv and Fetaya, Ethan and Chechik, Gal},
  booktitle={ICML}, year={2021}}"""

ALGORITHM = Algorithm(
    name="pFedHN",
    family="loom",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    one_step=one_step,
    averaged=("loom",),
    programs=programs,
    admit=admit,
    embeddings=embeddings_of,
    restored=rows_as_in,
    handover=Handover(for_participants, for_newcomers, sized, "loom", vector, loom_of, steps),
    cohort=1,  # Algorithm 1: one client a step
)
