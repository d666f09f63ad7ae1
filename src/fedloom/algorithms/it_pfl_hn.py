# SPDX-License-Identifier: Apache-2.0
"""IT-PFL-HN: pFedHN with an encoder, so that a newcomer's unlabelled samples are enough to weave its model.

Amosy, Eyal, Chechik: Inference-time personalized federated learning. 2021 (arXiv:2111.08356, version 1).

While pFedHN trains, clients also train an encoder, a deep set over a batch of samples, to give their embedding e_i;
the server averages the encoders (eq. 8). After ``finetune_after`` rounds the encoder is frozen, and a copy of the loom
is fine-tuned on what the encoder makes of the participants' data (eq. 9). A newcomer runs the encoder, sends the
descriptor and nothing else, if wished with differential privacy (sec. 7), and gets a model from that copy; participants
keep the loom from before.

Symbols: theta: ``loom`` and ``tuned``, e_i: a row of ``embeddings``, gamma: ``encoder``, h_i: what ``weave`` gives.

Sent down: the client's woven parameters; the encoder and, while it is trained, the client's own embedding.
Sent up: the change of the parameters, the number of samples, the training loss, the change of the encoder and its
    loss; in fine-tuning the descriptor in place of these two. A newcomer sends its descriptor only.
    Evaluations as in FedAvg.
Kept by the client: its model's running statistics.
Kept by the server: the loom, its fine-tuned copy, the embeddings, the encoder, the states of the outer optimiser, how
    descriptors are standardised, the stage.
Reduces to: pFedHN for the participants.
Differs from the paper: it leaves open how long the stages are (ours: 80 rounds, and the rest of the run), the outer
rate, how the encoder is trained and how its changes are weighted. The noise is calibrated exactly, where the paper
takes the classical formula. ``preset=standardised`` is ours. All decisions: docs/methods/it_pfl_hn.md.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import pfedhn
from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import (
    Ask,
    Batches,
    Cohort,
    Diagnostics,
    Handover,
    Home,
    Model,
    Needs,
    Noise,
    Program,
    Sent,
    Setup,
    Woven,
)
from fedloom.core.optim import Optimiser
from fedloom.core.random import seed_of
from fedloom.core.training import Training, delta, report
from fedloom.core.trees import ClientId, PerClient, Tree, tree_map
from fedloom.looms.encoder import Encoder, describe_program, fit_program
from fedloom.looms.outer import outer_steps, rows_now
from fedloom.looms.weaving import one_by_one, pull_back, weave
from fedloom.privacy.gaussian import analytic_sigma
from fedloom.privacy.ledger import DESCRIPTOR
from fedloom.programs.local import local_training
from fedloom.programs.statistics import settle_statistics

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Config(pfedhn.LoomConfig):
    """IT-PFL-HN's options: those of pFedHN's loom, of the encoder, and when the one is tuned and the other frozen."""

    preset: Literal["paper", "standardised"] = option(
        "paper", "As written, or with a linear read-out, one encoder step a round and standardised descriptors (ours)."
    )
    finetune_after: int = option(80, "Rounds until the encoder is frozen and the loom fine-tuned (ours).", low=0)
    server_lr: float = option(3e-3, "Outer learning rate (ours: pFedHN's 0.01 is too high for a cohort).", low=0)
    encoder_lr: float = option(0.0, "Rate of the encoder; 0: --local-lr, or 0.3 if standardised (ours).", low=0)
    encoder_steps: int = option(0, "Encoder steps a round; 0: as many as local, or 1 if standardised (ours).", low=0)
    descriptor_epsilon: float = option(0.0, "Epsilon of a newcomer's descriptor; 0: not private (sec. 7).", low=0)
    descriptor_delta: float = option(0.01, "Delta of a newcomer's descriptor (sec. 7).", above=0, high=0.5)

    NEWCOMERS_PRIVACY: ClassVar = ("descriptor_epsilon", "descriptor_delta")
    """What a newcomer tells has noise by these: it may make the first smaller (``fedloom join --epsilon``)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.descriptor_noise()  # refuses what no noise can do

    @property
    def standardised(self) -> bool:
        """Whether the preset is ours."""
        return self.preset == "standardised"

    @property
    def private(self) -> bool:
        """Whether descriptors have a known sensitivity, and newcomers add noise."""
        return self.descriptor_epsilon > 0

    def descriptor_noise(self) -> Noise | None:
        """What a newcomer adds to its descriptor."""
        if not self.private:
            return None
        return Noise("gaussian", analytic_sigma(self.descriptor_epsilon, self.descriptor_delta), "sample", DESCRIPTOR)

    @property
    def form(self) -> tuple[str, ...]:
        """The encoder is made for private descriptors, or for others."""
        return ("private descriptors",) if self.private else ()

    def encoder_optimiser(self) -> Optimiser:
        """The local optimiser with the encoder's rate."""
        return replace(self.local_optimiser(), lr=self.encoder_lr or (0.3 if self.standardised else self.local_lr))

    def encoder_batches(self) -> Batches:
        """The training data that one ask trains the encoder on."""
        steps = self.encoder_steps or int(self.standardised)
        return Batches("train", self.batch_size, steps=steps) if steps else self.batches()


class State(NamedTuple):
    """pFedHN's, the encoder, and the loom for newcomers."""

    loom: Mapping[str, Tensor]
    embeddings: Tensor  # (clients, embed_dim)
    optimiser: Tree
    encoder: Mapping[str, Tensor]
    stage: Tensor  # () 0: loom and encoder are trained; 1: the loom is fine-tuned
    tuned: Mapping[str, Tensor]  # the loom itself until it is fine-tuned
    tuning: Tree  # the outer optimiser's state in fine-tuning
    centre: Tensor  # (embed_dim,) a descriptor enters the loom as (descriptor - centre) / scale
    scale: Tensor  # (embed_dim,)


def init(setup: Setup[Any]) -> State:
    """pFedHN's start, and an encoder as its layers initialise themselves."""
    first = pfedhn.init(setup)
    centre = torch.zeros_like(first.embeddings[0])
    return State(
        loom=first.loom,
        embeddings=first.embeddings,
        optimiser=first.optimiser,
        encoder=encoder_of(setup).init(seed_of(setup.seed, "encoder"), setup.device, setup.dtype),
        stage=torch.zeros((), dtype=torch.int64, device=setup.device),
        tuned=first.loom,
        tuning=setup.config.outer().init(first.loom),
        centre=centre,
        scale=torch.ones_like(centre),
    )


def encoder_of(setup: Setup[Any]) -> Encoder:
    """One encoder for all clients, whatever their architectures: its layers follow from the samples' shape."""
    shape = setup.models[setup.clients[0]].input_shape
    return Encoder(shape, pfedhn.loom_of(setup).embed_dim, setup.config.standardised)


def embeddings_of(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Tensor:
    """v_i of each of the clients."""
    return rows_now(setup, state.embeddings, state.optimiser, clients)


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """App. B: participants have the loom from before the fine-tuning."""
    own = embeddings_of(setup, state, clients)
    return Sent({}, weave(setup, pfedhn.loom_of(setup), state.loom, own, clients))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """A round of pFedHN, and beside it one of FedAvg for the encoder; later, a round of fine-tuning."""
    if cohort.round > setup.config.finetune_after:
        return finetune(setup, state, cohort, ask)
    loom, own = pfedhn.loom_of(setup), embeddings_of(setup, state, cohort.clients)
    replies = ask(setup.config.train(), {}, weave(setup, loom, state.loom, own, cohort.clients))
    phi, table, memory = outer_steps(setup, loom, state.loom, state.embeddings, state.optimiser, replies, learned=True)
    # the embedding that the encoder is to give is the one that the woven model came from
    fit = fit_program(setup.config.encoder_batches())
    fits = ask(fit, {"encoder": state.encoder}, PerClient([(cohort.clients, {"embedding": own})]))
    ((_, fitted),) = fits.groups
    gamma = tree_map(lambda value, change: value + change.mean(0), state.encoder, fitted["delta"])
    state = state._replace(loom=phi, embeddings=table, optimiser=memory, encoder=gamma, tuned=phi)
    return state, {"local_loss": mean_loss(replies), "encoder_loss": mean_loss(fits), "finetuning": 0.0}


def finetune(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Eq. 9: pFedHN with descriptors in place of embeddings; encoder and embeddings are left alone."""
    if not int(state.stage):
        state = begin_finetuning(setup, state, ask)
    clients, inputs = encode(setup, state, cohort.clients, ask)
    loom = pfedhn.loom_of(setup)
    replies = ask(tune_program(setup.config), {}, weave(setup, loom, state.tuned, inputs, clients))
    tuned, tuning = state.tuned, state.tuning
    for part in one_by_one(setup, replies) if setup.config.server_step == "per_client" else [replies]:
        grads, _ = pull_back(setup, loom, tuned, inputs, clients, part)
        tuned, tuning = setup.config.outer().update(tuned, grads, tuning)
    return state._replace(tuned=tuned, tuning=tuning), {"local_loss": mean_loss(replies), "finetuning": 1.0}


def begin_finetuning(setup: Setup[Any], state: State, ask: Ask) -> State:
    """The encoder is frozen; if standardised, all participants are asked what it makes of them."""
    state = state._replace(stage=torch.ones_like(state.stage))
    if not setup.config.standardised:
        return state
    _, table = encode(setup, state, setup.clients, ask)
    spread = table.std(0, correction=0)
    return state._replace(centre=table.mean(0), scale=torch.where(spread > 1e-6, spread, 1))


def encode(
    setup: Setup[Any], state: State, clients: Sequence[ClientId], ask: Ask, noise: Noise | None = None
) -> tuple[tuple[ClientId, ...], Tensor]:
    """The clients that answered, and their descriptors as they enter the loom."""
    describe = describe_program(setup.config.batch_size, noise)
    replies = ask(describe, {"encoder": state.encoder}, PerClient.empty(clients))
    ((members, reply),) = replies.groups
    return members, (reply["descriptor"] - state.centre) / state.scale


def tune_program(config: Any) -> Program:
    """What a client of pFedHN runs, but nothing is remembered: its statistics belong to the loom from before."""
    return replace(local_training(config), name="it_pfl_hn.finetune", final=tune_final)


def tune_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change."""
    return {"delta": delta(carry), **report(home, carry)}, memory


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """Fig. 2b: a newcomer sends its descriptor and gets its model."""
    if not int(state.stage):
        log.warning(
            "IT-PFL-HN's loom has not been fine-tuned, so that it does not know descriptors yet. Train for more than "
            f"{setup.config.finetune_after} rounds, or with a smaller --finetune-after."
        )
    clients, inputs = encode(setup, state, newcomers.clients, ask, setup.config.descriptor_noise())
    sent = Sent({}, weave(setup, pfedhn.loom_of(setup), state.tuned, inputs, clients))
    return Woven.of(settle_statistics(setup, sent, ask), clients, inputs)


def for_participants(setup: Setup[Any], state: State) -> State:
    """The loom from before the fine-tuning, and the embeddings."""
    own = rows_now(setup, state.embeddings, state.optimiser, setup.clients)
    return state._replace(embeddings=own, optimiser={}, encoder={}, tuned={}, tuning={})


def for_newcomers(setup: Setup[Any], state: State) -> State:
    """The encoder and the fine-tuned loom."""
    return state._replace(loom={}, embeddings=state.embeddings[:0], optimiser={}, tuning={})


def vector(config: Config) -> Literal["descriptor"]:
    """What a newcomer's model is woven from: its descriptor, standardised."""
    return "descriptor"


def programs(config: Config, model: Model, newcomer: bool) -> list[Program]:
    """A participant trains and describes itself to the server that it trains with; a newcomer may ask for noise."""
    if newcomer:
        return [describe_program(config.batch_size, config.descriptor_noise())]
    fit, describe = fit_program(config.encoder_batches()), describe_program(config.batch_size)
    return [config.train(), fit, describe, tune_program(config)]


CITATION = """@article{amosy2021itpfl,
  title={Inference-Time Personalized Federated Learning},
  author={Amosy, Ohad and Eyal, Gal and Chechik, Gal},
  journal={arXiv:2111.08356v1}, year={2021}}"""

ALGORITHM = replace(
    pfedhn.ALGORITHM,
    name="IT-PFL-HN",
    family="loom",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    one_step=None,  # the encoder has a step of its own, and the loom for newcomers another
    programs=programs,
    admit=admit,
    admit_labels=False,
    handover=Handover(for_participants, for_newcomers, pfedhn.sized, "tuned", vector, pfedhn.loom_of),
    embeddings=embeddings_of,
    newcomers_at="last",  # fine-tuning changes nothing for participants, whose validation data choose the best
    cohort=9,  # sec. 6.1: a tenth of 90 training clients
    needs=Needs(numbers=True),
)
