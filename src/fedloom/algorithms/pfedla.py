# SPDX-License-Identifier: Apache-2.0
"""pFedLA: a client's model is, layer by layer, a mix of everybody's; a loom of its own learns the weights.

Ma, Zhang, Guo, Xu: Layer-wised model aggregation for personalized federated learning. CVPR 2022 (arXiv:2205.03993).

The server keeps the last model of every client. For each layer, a client's loom gives the shares with which the models
of all clients are mixed into what the client is sent. It trains the mix and replies with the change; the server pulls
the change back through the mix to the client's loom, and keeps mix plus change as its model.

Symbols: theta_j: a row of ``models``, v_i and psi_i: a row of ``looms``, alpha_i: what the loom gives.

Sent down: the client's own mix of parameters.
Sent up: the change of the parameters, the number of samples, the training loss. Evaluations as in FedAvg.
Kept by the client: its model's running statistics.
Kept by the server: for each client its last model and its loom.
Reduces to: training alone if every client's mix is its own model.
Differs from the paper: its formula, like pFedHN's, descends along the change itself; we descend along the negative
change, so that looms follow what clients learn; a negative ``server_lr`` goes the other way. Sizes are those of a third
party's code: docs/methods/pfedla.md. The variant that leaves some layers unmixed, HeurpFedLA, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Handover, Needs, Sent, Setup
from fedloom.core.device import to_device
from fedloom.core.random import seed_of
from fedloom.core.rows import for_everybody, mean_row, rows_of, with_rows
from fedloom.core.training import LocalConfig
from fedloom.core.trees import ClientId, Params, PerClient, tree_map
from fedloom.looms.attention import layers_of
from fedloom.looms.mixing import MixingLooms, mix
from fedloom.programs.local import local_training
from fedloom.programs.statistics import settle_statistics


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """pFedLA's options."""

    embed_dim: int = option(100, "Size of a client's embedding (a third party's code).", low=1)
    hidden: int = option(100, "Width of a loom's hidden layers (a third party's code).", low=1)
    layers: int = option(3, "Hidden layers of a loom (a third party's code).", low=1)
    server_lr: float = option(
        5e-3,
        "Rate of the looms (a third party's code). Below 0 they go along the change itself, as the formula is printed.",
    )


class State(NamedTuple):
    """A model and a loom for every client of the roster."""

    models: Mapping[str, Tensor]  # (clients, ...)
    looms: Mapping[str, Tensor]  # (clients, ...)


def looms_of(setup: Setup[Any]) -> MixingLooms:
    """The looms for a roster."""
    config = setup.config
    return MixingLooms(len(setup.clients), len(layers(setup)), config.embed_dim, config.hidden, config.layers)


def layers(setup: Setup[Any]) -> list[tuple[str, ...]]:
    """The parameters of each layer."""
    return list(layers_of(setup.models[setup.clients[0]].shapes).values())


def init(setup: Setup[Any]) -> State:
    """All models alike, as the module initialises them."""
    first = setup.models[setup.clients[0]].init(setup.common_seed)
    looms = looms_of(setup).init(seed_of(setup.seed, "loom"), setup.device, setup.dtype)
    return State(for_everybody(setup, first), looms)


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """theta-bar_i = sum_j alpha_ij theta_j, layer by layer."""
    with torch.no_grad():
        mixes = mix(shares(setup, rows_of(setup, state.looms, clients), clients), state.models, layers(setup))
    return Sent({}, PerClient([(clients, {"params": mixes})]))


def shares(setup: Setup[Any], looms: Params, clients: Sequence[ClientId]) -> Tensor:
    """alpha of these clients, whose looms are given: (clients, layers, everybody)."""
    return looms_of(setup)(looms, to_device(setup.rows(clients), setup.device))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Send mixes, have them trained, step on the looms, and keep what clients made of their mixes."""
    sent = send(setup, state, cohort.clients)
    replies = ask(local_training(setup.config), *sent)
    clients = sorted(replies, key=lambda client: setup.rows([client]))
    changes = replies.pick(clients)["delta"]
    looms, alpha = learn(setup, state, clients, changes)
    trained = tree_map(torch.add, sent.mine.pick(clients)["params"], changes)
    own = alpha[torch.arange(len(clients)), :, setup.rows(clients)].mean()
    after = State(with_rows(setup, state.models, clients, trained), with_rows(setup, state.looms, clients, looms))
    return after, {"local_loss": mean_loss(replies), "own_share": own}


def learn(
    setup: Setup[Any], state: State, clients: Sequence[ClientId], changes: Params
) -> tuple[dict[str, Tensor], Tensor]:
    """(v_i, psi_i) one step down along (d theta-bar_i / d .)' (-change), all models held; and alpha before it."""
    before = {name: rows.detach().requires_grad_() for name, rows in rows_of(setup, state.looms, clients).items()}
    alpha = shares(setup, before, clients)
    # the slope of alpha_ij: the product of theta_j with the pseudo-gradient
    slopes = []
    for names in layers(setup):
        moved, models = (torch.cat([tree[n].flatten(1) for n in names], dim=1) for tree in (changes, state.models))
        slopes.append(-moved @ models.T)
    grads = torch.autograd.grad(alpha, list(before.values()), torch.stack(slopes, dim=1))
    after = {
        name: (value - setup.config.server_lr * grad).detach() for (name, value), grad in zip(before.items(), grads)
    }
    return after, alpha.detach()


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer has no loom: it gets the plain mean of all models."""
    mean = tree_map(lambda models: models.mean(0), state.models)
    return settle_statistics(setup, Sent({"params": mean}, PerClient.empty(newcomers.clients)), ask)


def for_newcomers(setup: Setup[Any], state: State) -> State:
    """The mean of all models in the place of all."""
    return State(mean_row(state.models), {})


CITATION = """@inproceedings{ma2022pfedla,
  title={Layer-Wised Model Aggregation for Personalized Federated Learning},
  author={Ma, Xiaosong and Zhang, Jie and Guo, Song and Xu, Wenchao},
  booktitle={CVPR}, year={2022}}"""

ALGORITHM = Algorithm(
    name="pFedLA",
    family="loom",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    admit=admit,
    admit_labels=False,
    handover=Handover(newcomers=for_newcomers),
    cohort=10,  # a third party's code
    needs=Needs(same_model=True),
)
