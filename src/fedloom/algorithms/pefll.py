# SPDX-License-Identifier: Apache-2.0
"""PeFLL: pFedHN whose descriptors an encoder reads off a client's labelled samples, learned together with the loom.

Scott, Zakerinia, Lampert: PeFLL: personalized federated learning by learning to learn. ICLR 2024 (arXiv:2306.05515).

A client runs the encoder on a batch of its samples and labels and sends the mean of the outputs. The loom weaves a
model from it, which the client trains. The change is pulled back through the loom to the descriptor, and from there, by
the client and on the same batch, through the encoder. A newcomer with labels runs the encoder and gets its model.

Symbols: eta_v: ``encoder``, eta_h: ``loom``, v_i: the descriptor, theta_i: ``woven``, K: ``local_steps``.

Sent down: the encoder's parameters; the client's own woven parameters; the slope of its descriptor with the encoder.
Sent up: the descriptor; the change of the parameters, the number of samples, the training loss; the gradient of the
    encoder. For use, and by newcomers, the descriptor of all training data only. Evaluations as in FedAvg.
Kept by the client: its model's running statistics.
Kept by the server: the loom, the encoder, the state of the outer optimiser, how descriptors are standardised, and the
    descriptors that participants' models are woven from for use.
Reduces to: pFedHN with fixed descriptors if the encoder is frozen.
Differs from the paper: its objective also holds loom, encoder and models near 0; the authors' code, which we follow,
does not but for local weight decay. Other decisions: docs/methods/pefll.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import pfedhn
from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import (
    Algorithm,
    Ask,
    Batches,
    Cohort,
    Diagnostics,
    Handover,
    Model,
    Needs,
    Program,
    Sent,
    Setup,
)
from fedloom.core.optim import Optimiser
from fedloom.core.random import seed_of
from fedloom.core.rows import rows_of, with_rows
from fedloom.core.trees import ClientId, PerClient, Tree, tree_map
from fedloom.looms.encoder import Encoder
from fedloom.looms.labelled_encoder import describing, describing_all, learning
from fedloom.looms.per_tensor import PerTensorLoom
from fedloom.looms.weaving import pull_back, weave
from fedloom.programs.local import local_training
from fedloom.programs.statistics import settle_statistics

WIDTHS = (120, 84)
"""Of the encoder's layers after its convolutions, as in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class Config(pfedhn.LoomSize):
    """PeFLL's options."""

    descriptor_batches: int = option(1, "Batches that a descriptor is read off in training (the authors' code).", low=1)
    batch_size: int = option(32, "Samples per step, and in a batch for the descriptor (the authors' code).", low=1)
    local_lr: float = option(2e-3, "Local learning rate (the authors' code).", low=0)
    server_lr: float = option(2e-4, "Outer learning rate of Adam (the authors' code).", low=0)
    server_clip: float = option(50.0, "Largest norm of an outer gradient; 0: no clipping (the authors' code).", low=0)

    def outer(self) -> Optimiser:
        """The optimiser of loom and encoder."""
        return Optimiser("adam", self.server_lr, clip=self.server_clip)

    def descriptor_data(self) -> Batches:
        """What a descriptor is read off in training, and the encoder's gradient is taken on: the same in both asks."""
        return Batches("train", self.batch_size, steps=self.descriptor_batches, name="pefll.descriptor")


class State(NamedTuple):
    """Loom and encoder; a descriptor enters the loom as (descriptor - centre) / scale."""

    loom: Mapping[str, Tensor]
    encoder: Mapping[str, Tensor]
    optimiser: Tree
    centre: Tensor  # ()
    scale: Tensor  # (); 0: not known yet
    descriptors: Tensor  # (clients, embed_dim), of all training data


def loom_of(setup: Setup[Any]) -> Any:
    """The loom for a roster."""
    config, targets = setup.config, {str(spec): model.shapes for spec, model in setup.architectures.items()}
    loom = PerTensorLoom(config.dim(len(setup.clients)), targets, config.hidden, config.layers)
    return setup.elsewhere(loom) if setup.elsewhere else loom


def init(setup: Setup[Any]) -> State:
    """Loom and encoder as their layers initialise themselves."""
    loom, model, places = loom_of(setup), setup.models[setup.clients[0]], (setup.device, setup.dtype)
    channels, *sides = model.input_shape
    encoder = Encoder((channels + model.num_outputs, *sides), loom.embed_dim, widths=WIDTHS)
    phi = loom.init(seed_of(setup.seed, "loom"), *places, setup.shards)
    psi = encoder.init(seed_of(setup.seed, "encoder"), *places)
    table = torch.zeros(len(setup.clients), loom.embed_dim, device=setup.device, dtype=setup.dtype)
    zero = table.new_zeros(())
    return State(phi, psi, setup.config.outer().init({**phi, **psi}), zero, zero, table)


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """theta_i = h(v_i; eta_h), for use: v_i is of all of a client's training data, told when the state settled."""
    own = rows_of(setup, {"descriptors": state.descriptors}, clients)["descriptors"]
    return Sent({}, weave(setup, loom_of(setup), state.loom, inputs(state, own), clients))


def inputs(state: State, descriptors: Tensor) -> Tensor:
    """Descriptors as they enter the loom."""
    return (descriptors - state.centre) / torch.where(state.scale > 0, state.scale, 1)


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Algorithm 1: descriptors up, models down, changes up, slopes of descriptors down, gradients of the encoder up."""
    loom, config = loom_of(setup), setup.config
    clients, told = described(ask(describing(config.descriptor_data()), {"encoder": state.encoder},
                                  PerClient.empty(cohort.clients)))  # fmt: skip
    state = standardised(state, told[0])
    table = inputs(state, told)
    replies = ask(local_training(config), {}, weave(setup, loom, state.loom, table, clients))
    grads, slopes = pull_back(setup, loom, state.loom, table, clients, replies)
    # of a client's own change, not of the mean, and of its descriptor, not of what enters the loom
    slopes = slopes * len(replies) / torch.where(state.scale > 0, state.scale, 1)
    rows = [row for row, client in enumerate(clients) if client in replies]
    asked = PerClient([([clients[row] for row in rows], {"slope": slopes[rows]})])
    ((_, reply),) = ask(learning(config.descriptor_data()), {"encoder": state.encoder}, asked).groups
    grads |= tree_map(lambda grad: grad.mean(0), reply["gradient"])
    after, memory = config.outer().update({**state.loom, **state.encoder}, grads, state.optimiser)
    phi, psi = ({name: after[name] for name in part} for part in (state.loom, state.encoder))
    return state._replace(loom=phi, encoder=psi, optimiser=memory), {"local_loss": mean_loss(replies)}


def standardised(state: State, first: Tensor) -> State:
    """The first descriptor of all says, for ever, how descriptors are brought to mean 0 and deviation 1."""
    spread = first.std() if len(first) > 1 else torch.ones_like(state.scale)
    known = state.scale > 0
    centre = torch.where(known, state.centre, first.mean())
    scale = torch.where(known, state.scale, torch.where(spread > 0, spread, 1))
    return state._replace(centre=centre, scale=scale)


def described(replies: PerClient) -> tuple[tuple[ClientId, ...], Tensor]:
    """Who answered, and their descriptors."""
    ((clients, reply),) = replies.groups
    return clients, reply["descriptor"]


def settle(setup: Setup[Any], state: State, ask: Ask) -> State:
    """All participants tell the descriptors of all their training data."""
    clients, told = described(ask(describing_all(), {"encoder": state.encoder}, PerClient.empty(setup.clients)))
    after = with_rows(setup, {"descriptors": state.descriptors}, clients, {"descriptors": told})
    return state._replace(descriptors=after["descriptors"])


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer sends the descriptor of its labelled samples and gets its model."""
    clients, told = described(ask(describing_all(), {"encoder": state.encoder}, PerClient.empty(newcomers.clients)))
    sent = Sent({}, weave(setup, loom_of(setup), state.loom, inputs(state, told), clients))
    return settle_statistics(setup, sent, ask)


def for_participants(setup: Setup[Any], state: State) -> State:
    """The loom and the descriptors."""
    return state._replace(encoder={}, optimiser={})


def for_newcomers(setup: Setup[Any], state: State) -> State:
    """The loom and the encoder."""
    return state._replace(descriptors=state.descriptors[:0], optimiser={})


def sized(setup: Setup[Any]) -> Any:
    """The config with the descriptors' size."""
    return replace(setup.config, embed_dim=loom_of(setup).embed_dim)


def vector(config: Config) -> Literal["descriptor"]:
    """What a model is woven from: a descriptor, standardised."""
    return "descriptor"


def programs(config: Config, model: Model, newcomer: bool) -> list[Program]:
    """A participant describes its data, trains, and learns the encoder; a newcomer only describes its data."""
    if newcomer:
        return [describing_all()]
    return [
        describing(config.descriptor_data()),
        local_training(config),
        learning(config.descriptor_data()),
        describing_all(),
    ]


CITATION = """@inproceedings{scott2024pefll,
  title={{PeFLL}: Personalized Federated Learning by Learning to Learn},
  author={Scott, Jonathan and Zakerinia, Hossein and Lampert, Christoph H.},
  booktitle={ICLR}, year={2024}}"""

ALGORITHM = Algorithm(
    name="PeFLL",
    family="loom",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    handover=Handover(for_participants, for_newcomers, sized, "loom", vector, loom_of),
    programs=programs,
    settle=settle,
    admit=admit,
    cohort=5,  # the authors' code
    needs=Needs(class_labels=True, numbers=True),
)
