# SPDX-License-Identifier: Apache-2.0
"""HyperGenFL: FedAvg whose weights, one per client and layer, come from a loom that learns without data.

Chen, Lu, Tian, Niu, Li: HyperGenFL: hypernetwork-generated model aggregation in federated learning. CIKM 2025
(doi:10.1145/3746252.3761368).

Every client has an embedding on the server. The embeddings of a cohort attend to each other; one linear head per
layer, a ReLU and a floor lambda turn them into scores, whose shares are the weights with which that layer of the
clients' models is averaged. The loom has no data: the mean of the clients' changes stands for the negative gradient of
their loss and is pulled back through the average to the weights, and so to loom and embeddings.

Symbols: sigma: ``embeddings``, phi: ``loom``, alpha: ``last_weights``, lambda: ``score_floor``, theta_g: ``params``,
Delta theta_c: ``delta``, eta: ``server_lr``, |C|: the clients that replied.

Sent down: the global parameters (and running statistics with ``batchnorm=averaged``), as in FedAvg.
Sent up: the change of the parameters (and the running statistics), the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: its model's running statistics, unless they are averaged.
Kept by the server: the global parameters, the loom, the embeddings, the state of the outer optimiser, the weights and
    the living heads of the last round.
Reduces to: FedAvg with equal weights when ``server_lr`` is 0 and embeddings are ones (all clients then look alike).
Differs from the paper:
    Sign. Eq. 17 has start minus end as the gradient, eq. 15 sets in end minus start, and Algorithm 1 subtracts: the two
    together climb the clients' loss. ``direction=descent`` subtracts the pull-back of start minus end; ``literal`` is
    the algorithm box as printed.
    Order. Algorithm 1 averages the cohort's models before it sends anything, though all clients have just been given
    one and the same model. The loop is read from line 10 on: send, train, step on the loom (lines 14 to 17), and then
    average, by the loom that has stepped, the models that have just been trained (lines 8 and 9).
    Clients use SGD, and ``start=alive`` is ours. These and other decisions: docs/methods/hypergenfl.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import Ask, Cohort, Diagnostics, Handover, Setup, Table
from fedloom.core.errors import ConfigError
from fedloom.core.optim import Optimiser
from fedloom.core.random import seed_of
from fedloom.core.trees import ClientId, Params, Tree
from fedloom.looms.attention import AttentionLoom, first_embeddings, layers_of
from fedloom.programs.local import local_training

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """HyperGenFL's options."""

    embed_dim: int = option(128, "Size of an embedding and of the attention (sec. 4.1).", low=1)
    embed_init: Literal["ones", "random", "one_hot"] = option(
        "ones", "Embeddings start at 1, at N(0, 1), or are one-hot and fixed (sec. 5.1)."
    )
    attention_layers: int = option(1, "Layers of attention (sec. 5.2 tries 1 to 3).", low=1)
    attention_heads: int = option(4, "Heads of the attention (not given in the paper).", low=1)
    score_floor: float = option(0.01, "What is added to every score, lambda (not given in the paper).", above=0)
    start: Literal["paper", "alive"] = option(
        "paper", "Initial loom: torch's defaults, or one whose heads stay on; best with --embed-init random."
    )
    local_epochs: int = option(10, "Passes over the client's data; 0: use --local-steps (sec. 4.1).", low=0)
    batch_size: int = option(32, "Samples per step; the last batch of a pass has what is left (sec. 4.1).", low=1)
    local_lr: float = option(1e-2, "Local learning rate (sec. 4.1, there with AdamW).", low=0)
    weight_decay: float = option(1e-5, "Local weight decay (sec. 4.1).", low=0)
    server_lr: float = option(1e-2, "Outer learning rate of AdamW, eta (sec. 4.1).", low=0)
    server_weight_decay: float = option(1e-5, "Outer weight decay (sec. 4.1).", low=0)
    server_loss: Literal["difference", "mse", "log_cosh"] = option(
        "difference", "What the loom learns from: eq. 10 and 11, or a loss of Table 9."
    )
    direction: Literal["descent", "literal"] = option(
        "descent", "Sign of the step along the difference: down the clients' loss, or as Algorithm 1 is printed."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embed_dim % self.attention_heads:
            raise ConfigError(
                f"--embed-dim is {self.embed_dim} and --attention-heads {self.attention_heads}; the first must be a "
                "multiple of the second. Change one of them."
            )
        if self.direction == "literal" and self.server_loss != "difference":
            raise ConfigError(
                f"--direction literal is a reading of eq. 10 and 11; got --server-loss {self.server_loss}, which has "
                "one direction only. Leave one of them out."
            )

    def loom(self, clients: int, names: Iterable[str]) -> AttentionLoom:
        """The loom for so many clients with a model of these parameters."""
        dim = clients if self.embed_init == "one_hot" else self.embed_dim
        return AttentionLoom(
            dim, layers_of(names), self.embed_dim, self.attention_heads, self.attention_layers, self.score_floor
        )

    def outer(self) -> Optimiser:
        """The optimiser of loom and embeddings."""
        return Optimiser("adamw", self.server_lr, weight_decay=self.server_weight_decay)


class State(NamedTuple):
    """The global model, the loom and one embedding per client of the roster."""

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    loom: Mapping[str, Tensor]
    embeddings: Tensor  # (clients, embed_dim)
    optimiser: Tree
    last_weights: Tensor  # (clients, layers) alpha of the last round, 0 for who was not there; at first, of the roster
    alive: Tensor  # (layers,) bool: whose ReLU was on for some client of the last round


def init(setup: Setup[Any]) -> State:
    """The model as FedAvg's; all embeddings alike, unless an ablation is asked for."""
    config, (params, buffers), loom = setup.config, fedavg.init(setup), loom_of(setup)
    phi = loom.init(seed_of(setup.seed, "loom"), setup.device, setup.dtype, alive=config.start == "alive")
    table = first_embeddings(config.embed_init, len(setup.clients), loom.embed_dim, setup.seed).to(phi["head.bias"])
    activations = loom.activations(phi, table)
    alive = (activations > 0).any(0)
    optimiser = config.outer().init({**phi, "embeddings": table})
    return State(params, buffers, phi, table, optimiser, loom.weights(activations), alive)


def loom_of(setup: Setup[Config]) -> AttentionLoom:
    """The loom for a roster."""
    return setup.config.loom(len(setup.clients), setup.models[setup.clients[0]].shapes)


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Algorithm 1 from line 10 on, then lines 8 and 9."""
    replies = ask(local_training(setup.config), *fedavg.send(setup, state, cohort.clients))
    active = sorted(replies, key=lambda client: setup.rows([client]))
    deltas, loom = replies.pick(active)["delta"], loom_of(setup)
    learned = learn(setup, loom, state, active, deltas)
    after = aggregate(setup, loom, learned, active, deltas)
    if setup.config.server_lr and not after.alive.any():
        warn_if_it_died(loom, cohort, state, after)
    buffers = fedavg.average_buffers(setup, state.buffers, replies)
    weights = after.last_weights[setup.rows(active)]
    return after._replace(buffers=buffers), {
        "local_loss": mean_loss(replies),
        "alive_heads": float(after.alive.sum()),
        **loom.effective_clients(weights),
        "weights": Table(tuple(active), tuple(loom.layers), weights),
    }


def embeddings_of(setup: Setup[Config], state: State, clients: Sequence[ClientId]) -> Tensor:
    """sigma of each of the clients."""
    return state.embeddings[setup.rows(clients)]


def learn(setup: Setup[Config], loom: AttentionLoom, state: State, active: list[ClientId], deltas: Params) -> State:
    """Lines 14 to 17: one outer step on phi and on the embeddings of the active clients."""
    if not any(bool(delta.any()) for delta in deltas.values()):
        return state  # nobody has moved: nothing to learn from, and no step that AdamW should count
    rows, moments = setup.rows(active), {name: state.optimiser[name] for name in ("mean", "square")}
    grads = gradient(setup.config, loom, state, rows, deltas)
    own = {name: {**tree, "embeddings": tree["embeddings"][rows]} for name, tree in moments.items()}
    before = {**state.loom, "embeddings": state.embeddings[rows]}
    after, optimiser = setup.config.outer().update(before, grads, {**state.optimiser, **own})

    def with_rows(table: Tensor, new: Tensor) -> Tensor:
        fixed = setup.config.embed_init == "one_hot"  # sec. 5.1
        return table if fixed else table.index_copy(0, torch.tensor(rows, device=table.device), new)

    for name, tree in moments.items():
        table = with_rows(tree["embeddings"], optimiser[name]["embeddings"])
        optimiser = {**optimiser, name: {**optimiser[name], "embeddings": table}}
    phi = {name: after[name] for name in state.loom}
    embeddings = with_rows(state.embeddings, after["embeddings"])
    return state._replace(loom=phi, embeddings=embeddings, optimiser=optimiser)


def gradient(config: Config, loom: AttentionLoom, state: State, rows: list[int], deltas: Params) -> dict[str, Tensor]:
    """Eq. 10 and 11, as the gradient of the loss of loom and embeddings in ``rows``: what a descent step subtracts."""
    before = {**state.loom, "embeddings": state.embeddings[rows]}
    return loom.pull_back(before, deltas, partial(loss_gradient, config))


def loss_gradient(config: Config, moved: Tensor, weights: Tensor) -> Tensor:
    """dL / d theta_g for one layer, from the clients' changes (active, parameters) and their weights (active,)."""
    if config.server_loss == "difference":
        difference = moved.mean(0)  # eq. 15, averaged: -eta dL / d theta_g by eq. 17
        return difference if config.direction == "literal" else -difference
    apart = weights @ moved - moved  # theta_g - theta_c
    # d / d theta_g of the mean over clients of sum (theta_g - theta_c)^2, or of sum log cosh(theta_g - theta_c)
    return 2 * apart.mean(0) if config.server_loss == "mse" else torch.tanh(apart).mean(0)


def aggregate(setup: Setup[Config], loom: AttentionLoom, state: State, active: list[ClientId], deltas: Params) -> State:
    """Lines 8 and 9: the average of the clients' models, layer by layer, with the loom's weights."""
    rows = setup.rows(active)
    activations = loom.activations(state.loom, state.embeddings[rows])
    alpha = loom.weights(activations)
    params = {
        name: state.params[name] + torch.tensordot(weights, deltas[name], dims=1)
        for weights, names in zip(alpha.T, loom.layers.values())
        for name in names
    }
    everybody = torch.zeros_like(state.last_weights)
    everybody[rows] = alpha
    return state._replace(params=params, last_weights=everybody, alive=(activations > 0).any(0))


def warn_if_it_died(loom: AttentionLoom, cohort: Cohort, before: State, after: State) -> None:
    """Say so when no head is on for anybody: weights are equal, the gradient is zero, and nothing more is learned.

    A cohort without a head is not enough: another one may have some. So the whole roster is looked at, in cohorts.
    """
    size = len(cohort.clients)
    alive_before, alive_after = (loom.is_alive(state.loom, state.embeddings, size) for state in (before, after))
    if (alive_before or cohort.round == 1) and not alive_after:
        log.warning(
            "HyperGenFL's loom is dead: no head has a positive score, so that all clients weigh the same and nothing "
            "more is learned. Use --start alive --embed-init random."
        )


def for_newcomers(setup: Setup[Any], state: State) -> State:
    """The global model alone, which is all that participants get too."""
    nothing = state.last_weights[:0]
    return state._replace(loom={}, embeddings=nothing, optimiser={}, last_weights=nothing, alive=state.alive[:0])


CITATION = """@inproceedings{chen2025hypergenfl,
  title={{HyperGenFL}: Hypernetwork-Generated Model Aggregation in Federated Learning},
  author={Chen, Jerry and Lu, Qikai and Tian, Ruiqing and Niu, Di and Li, Baochun},
  booktitle={CIKM}, year={2025}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="HyperGenFL",
    family="loom",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    round=round,
    means=(),
    averaged=("params", "buffers"),
    handover=Handover(for_newcomers, for_newcomers),
    embeddings=embeddings_of,
    cohort=20,  # the advanced and the extreme setting of Table 1
)
