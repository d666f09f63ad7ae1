# SPDX-License-Identifier: Apache-2.0
"""MH-pFedHNGD: MH-pFedHN with a small global model out of the same loom, which also teaches the personal ones.

Revisiting hypernetwork in model-heterogeneous personalized federated learning. Under review, authors not named;
their code is github.com/DangDang1895/MH-pFL.

A round asks twice. First the loom weaves a global model from vectors of its own, through the head of the clients with
the fewest parameters; every client trains it, and the server takes one step on the mean of their changes, weighted by
their numbers of samples. Then each client gets its personal model, as in MH-pFedHN, and trains it on its loss and on
the global model's answers: that model as it was sent, which the client has kept.

Two options are ours. With ``teacher=corrected`` the teacher is an exponential mean of the global model over rounds, as
in ``adaptation.average``, and each client adds the logarithms of its own class shares to its scores. With
``deploy=mixture`` clients predict with the mean of the class probabilities of that model, so corrected, and their own.

Symbols: v_g: the piece ``vectors.global``, w_g: ``shared["vector"]`` of the first ask and ``memory["teacher"]`` in the
second, a: ``distil_weight``, T: ``temperature``; the others as in MH-pFedHN.

Sent down: the global model, as a vector, and with ``teacher=corrected`` the mean of its past as another, the teacher;
then the client's own woven parameters. For use, the client's woven parameters; with ``deploy=mixture`` the mean too.
Sent up: the change of the global model; then what MH-pFedHN sends; each with the number of samples and the loss.
    Evaluations as in FedAvg.
Kept by the client: the teacher between the two asks, its running statistics for the global model; all as in MH-pFedHN;
with ``teacher=corrected`` how often it has met each label while it trained the global model.
Kept by the server: as in MH-pFedHN, and the global model's vectors; with ``teacher=corrected`` the mean.
Reduces to: MH-pFedHN with ``global_share=0``; MH-pFedHNG (Table 4) with ``distil_weight=0``.
Differs from the paper: eq. 8 puts lambda on the client's loss and lambda is 0.01 to 0.2; the code puts it on the
distillation, and so do we. The code's global step also moves, by Adam's momentum, all that the global model did not
come from; ours does not. Other decisions: docs/methods/mh_pfedhn_gd.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fedloom.adaptation.average import kept_of_past
from fedloom.algorithms import mh_pfedhn
from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import (
    Ask,
    Batch,
    Cohort,
    Diagnostics,
    Handover,
    Home,
    Model,
    Needs,
    Program,
    Seeds,
    Sent,
    Setup,
    Woven,
    predict_with_target,
    target_module,
)
from fedloom.core.errors import ConfigError, NeedsError
from fedloom.core.sparse import change_in
from fedloom.core.training import Training, begin, delta, like_report, report, train_step
from fedloom.core.trees import ClientId, PerClient, Tree
from fedloom.core.vectors import from_vector, to_vector
from fedloom.looms.multi_head import adam_step, pull_back, weave
from fedloom.looms.places import GLOBAL, deploying, global_network, global_place, named_network
from fedloom.models.layers import first_layers
from fedloom.models.load import PredictorModule, mixture
from fedloom.privacy.laplace import laplace_noise, with_laplace_noise
from fedloom.programs.distillation import answers_of, distilled, guest_of, log_shares, statistics_of, teacher_in
from fedloom.programs.labels import add_labels, have_labels_counted, label_counts


@dataclass(frozen=True, kw_only=True)
class Config(mh_pfedhn.Config):
    """MH-pFedHNGD's options."""

    server_step: Literal["per_client", "in_turn", "cohort_mean"] = option(
        "in_turn",
        "Personal models: one client after another, each woven after the step before (the authors' code); or all woven "
        "at once, each reply being a step; or one step on the mean.",
    )
    distil_weight: float = option(
        0.01,
        "Weight of the distillation, a (CIFAR-100: 0.01, Tiny-ImageNet: 0.2, EMNIST: 0.1); 0: none.",
        low=0,
        high=1,
    )
    temperature: float = option(
        15.0, "Temperature of the distillation, T (CIFAR-100: 15, Tiny-ImageNet: 24, EMNIST: 10).", above=0
    )
    global_model: str = option(
        "", "The global model's network (D.6), e.g. mh_lenet; empty: the smallest client's.", code=True
    )
    global_share: float = option(1.0, "Share of the clients that deploy the global model (D.13).", low=0, high=1)
    teacher: Literal["plain", "corrected"] = option(
        "plain",
        "The global model as it was sent (the paper), or its mean over rounds with the logarithms of the client's "
        "class shares added to its scores (ours).",
    )
    teacher_average: float = option(
        0.95, "Of a corrected teacher: what its past counts in the mean after each round; 0: nothing.", low=0, high=1
    )
    deploy: Literal["own", "mixture"] = option(
        "own",
        "What a client predicts with: its own model (the paper), or the mean of its probabilities and those of the "
        "corrected teacher (ours).",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deploy == "own":
            return
        if self.teacher != "corrected":
            raise ConfigError(
                "--deploy mixture is with the corrected teacher; got a plain one. Give --teacher corrected."
            )
        if not self.global_model:
            raise ConfigError(
                "--deploy mixture has every client run the global model, whose network they must know; got no name. "
                "Give --global-model."
            )
        if self.global_share < 1:
            raise ConfigError(
                f"--deploy mixture has every client run the global model; got --global-share {self.global_share:g}. "
                "Leave one of them out."
            )


class State(NamedTuple):
    """As MH-pFedHN's; and the global model's mean over rounds, where it teaches."""

    pieces: Mapping[str, Any]
    optimiser: Mapping[str, Tree]
    mean: Mapping[str, Tensor] = {}  # {"vector": (K_g,), "rounds": ()} or nothing


def init(setup: Setup[Any]) -> State:
    """As MH-pFedHN, and vectors for the global model."""
    network = global_network(setup)
    if setup.config.deploy == "mixture" and network.fresh_buffers():
        raise NeedsError(
            f"The global model {network.spec} has running statistics (BatchNorm), which newcomers have not and which "
            "would not be those of its mean. For --deploy mixture choose a --global-model without BatchNorm."
        )
    state = State(*mh_pfedhn.init(setup, global_place(setup)))
    if setup.config.teacher == "plain":
        return state
    vector = weave_global(setup, state)
    return state._replace(mean={"vector": vector, "rounds": vector.new_zeros(())})


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """Each client's woven parameters, and the mean global model where it is used."""
    return with_mean(setup, state, mh_pfedhn.send(setup, mh_pfedhn.State(*state[:2]), clients))


def with_mean(setup: Setup[Any], state: State, sent: Sent) -> Sent:
    """What is ``sent`` for use, and the mean global model for a mixture."""
    if setup.config.deploy == "own":
        return sent
    shared = {**sent.shared, "global": state.mean["vector"]}
    return Sent(shared, sent.mine)


def global_model(setup: Setup[Any], state: State) -> tuple[Model, dict[str, Tensor]]:
    """The global model's network and parameters, for evaluation and export; the server has no running statistics."""
    if not deploying(setup):
        raise NeedsError(
            "No client trains the global model (--global-share 0); there is nothing to evaluate or export."
        )
    network = global_network(setup)
    return network, from_vector(weave_global(setup, state), network.shapes)


def weave_global(setup: Setup[Any], state: State) -> Tensor:
    """Eq. 5: w_g = h(v_g; phi), cut to K_g."""
    woven: Tensor = weave(setup.config.loom(), state.pieces, {GLOBAL: global_place(setup)})[GLOBAL]["vector"]
    return woven


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Algorithm 2: a step on the global model, then a step on each personal one."""
    config, chosen = setup.config, deploying(setup)  # App. D.13
    trainers = [client for client in cohort.clients if client in chosen]
    found, silent = {}, set()
    if trainers:
        train = global_program(config, global_network(setup))
        shared = {"vector": weave_global(setup, state)}
        if config.teacher == "corrected" and config.distil_weight:
            shared["teacher"] = state.mean["vector"]
        replies = ask(train, shared, PerClient.empty(trainers))
        state = learn_global(setup, state, replies)
        found, silent = {"global_loss": mean_loss(replies)}, set(trainers) - set(replies)
    asked = cohort._replace(clients=tuple(client for client in cohort.clients if client not in silent))
    plain = mh_pfedhn.State(*state[:2])
    plain, loss = mh_pfedhn.learn(setup, plain, asked, ask, program(config, global_network(setup)))
    return averaged(setup, State(*plain, state.mean)), {"local_loss": loss, **found}


def averaged(setup: Setup[Any], state: State) -> State:
    """The state after a round, with the global model as it is now in its mean."""
    if not state.mean:
        return state
    rounds = state.mean["rounds"] + 1
    past = kept_of_past(rounds, setup.config.teacher_average)
    return state._replace(
        mean={"vector": torch.lerp(weave_global(setup, state), state.mean["vector"], past), "rounds": rounds}
    )


def learn_global(setup: Setup[Any], state: State, replies: PerClient) -> State:
    """One step on phi and v_g along the mean of the changes, weighted by m_i / M."""
    mean = PerClient([([GLOBAL], {"delta": weighted_mean(replies, "delta")[None]})])
    grads = pull_back(setup.config.loom(), state.pieces, {GLOBAL: global_place(setup)}, mean, change_in)
    return State(*adam_step(*state[:2], grads, setup.config.server_lr, setup.config.server_clip), state.mean)


def global_program(config: Config, network: Model) -> Program:
    """ClientUpdate1: training of the global model."""
    noise = laplace_noise(config.laplace_noise)
    return Program(
        "mh_pfedhn_gd.global", global_init, global_step, global_final, config.batches(), global_expects, network, noise
    )


def global_expects(shared: Tree, mine: Tree) -> Tree:
    """A change for every parameter of the global model."""
    return {"delta": shared["vector"], **like_report()}


class GlobalCarry(NamedTuple):
    """Training of the global model, and the labels met so far, if they are counted."""

    training: Training
    labels: Mapping[str, Tensor]  # {"label_counts": (classes,)} or nothing


def global_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> GlobalCarry:
    """Start from w_g, with the client's own running statistics for it."""
    guest = guest_of(home)
    training = begin(home, from_vector(shared["vector"], guest.shapes), {"buffers": statistics_of(guest, memory)})
    counted = home.config.teacher == "corrected"
    return GlobalCarry(training, {"label_counts": memory["label_counts"]} if counted else {})


def global_step(home: Home, shared: Tree, carry: GlobalCarry, batch: Batch) -> GlobalCarry:
    """One step of the global model on the client's own loss."""
    training = train_step(replace(home, model=guest_of(home)), carry.training, batch)
    return GlobalCarry(training, {name: add_labels(counts, batch) for name, counts in carry.labels.items()})


def global_final(home: Home, shared: Tree, carry: GlobalCarry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change; keep the teacher as it came, to learn from."""
    training = carry.training
    change = with_laplace_noise(home, to_vector(delta(training)), home.config.laplace_noise)  # App. E.2: here too
    after = {**memory, **carry.labels, "global_buffers": training.buffers}
    if home.config.distil_weight:
        after["teacher"] = shared.get("teacher", shared["vector"])
    return {"delta": change, **report(home, training)}, after


def first_memory(model: Model, config: Config, seeds: Seeds) -> Tree:
    """As MH-pFedHN; and no labels met, where they are counted."""
    memory = first_layers(model, config, seeds)
    if config.teacher == "corrected":
        memory["label_counts"] = torch.zeros(model.num_outputs, dtype=model.dtype, device=model.device)
    return memory


def program(config: Config, network: Model) -> Program:
    """ClientUpdate2: training of the personal model, with the global one as its teacher."""
    plain = mh_pfedhn.program(config)
    return replace(
        plain, name="mh_pfedhn_gd.train", init=client_init, step=client_step, final=client_final, guest=network
    )


class Carry(NamedTuple):
    """Training of the personal model, and its teacher, if there is one."""

    student: mh_pfedhn.Carry
    teacher: Mapping[str, Any]  # {"params", "buffers"}, a corrected one with "offset"; or nothing


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """Start from the woven parameters; load the teacher."""
    teacher = teacher_in(home, memory, corrected=home.config.teacher == "corrected")
    return Carry(mh_pfedhn.client_init(home, shared, mine, memory), teacher)


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """One step on the distilled loss."""
    if carry.teacher:
        answers = answers_of(guest_of(home), carry.teacher, batch.x)
        home = replace(home, task=distilled(home.task, answers, home.config.distil_weight, home.config.temperature))
    return carry._replace(student=mh_pfedhn.client_step(home, shared, carry.student, batch))


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply as in MH-pFedHN; the teacher has done its work."""
    reply, after = mh_pfedhn.client_final(home, shared, carry.student, memory)
    return reply, {name: branch for name, branch in after.items() if name != "teacher"}


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """As MH-pFedHN, and the corrected mean global model for a mixture."""
    deployed = mh_pfedhn.client_deploy(home, shared, mine, memory)
    if home.config.deploy == "own":
        return deployed
    params = from_vector(shared["global"], named(home).shapes)
    offset = log_shares(memory["label_counts"], home.num_samples)
    return {**deployed, "global": {"params": params, "offset": offset}}


def named(home: Home) -> Model:
    """The network of the global model, which the config names."""
    network = named_network(home.config, home.model)
    assert network is not None
    return network


def predict(home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """The client's own scores; of a mixture, the logarithm of the mean of both models' probabilities."""
    own = predict_with_target(home, deployed, x)
    if home.config.deploy == "own":
        return own
    return mixture(own, answers_of(named(home), deployed["global"], x), own.new_full((), 0.5))


def module(home: Home, deployed: Tree) -> nn.Module:
    """The client's network, or both with their mixture."""
    alone = home.config.deploy == "own"
    return target_module(home, deployed) if alone else PredictorModule.of(predict, home, deployed)


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """As MH-pFedHN; for a mixture newcomers also count their labels, and get the mean global model."""
    sent = mh_pfedhn.admit(setup, mh_pfedhn.State(*state[:2]), newcomers, ask)
    if setup.config.deploy == "own":
        return sent
    have_labels_counted(setup, newcomers.clients, ask)
    embeddings = torch.stack([sent.embeddings[client] for client in newcomers.clients])
    return Woven.of(with_mean(setup, state, sent), newcomers.clients, embeddings)


def used_mean(setup: Setup[Any], state: State) -> Mapping[str, Tensor]:
    """The mean, where it is used for more than training."""
    return state.mean if setup.config.deploy == "mixture" else {}


def for_participants(setup: Setup[Any], state: State) -> State:
    """As MH-pFedHN, and the mean global model for a mixture."""
    return State(*mh_pfedhn.for_participants(setup, mh_pfedhn.State(*state[:2])), used_mean(setup, state))


def for_newcomers(setup: Setup[Any], state: State) -> State:
    """As MH-pFedHN, and the mean global model for a mixture."""
    return State(*mh_pfedhn.for_newcomers(setup, mh_pfedhn.State(*state[:2])), used_mean(setup, state))


def programs(config: Config, model: Model, newcomer: bool) -> list[Program]:
    """A participant trains both models, a newcomer its own. The global network is the one that the config names."""
    if newcomer:
        own = mh_pfedhn.programs(config, model, newcomer)
        return [*own, label_counts()] if config.deploy == "mixture" else own
    network = named_network(config, model)
    return [global_program(config, network), program(config, network)] if network else []


ALGORITHM = replace(
    mh_pfedhn.ALGORITHM,
    name="MH-pFedHNGD",
    family="loom",
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    first_memory=first_memory,
    client_deploy=client_deploy,
    predict=predict,
    module=module,
    admit=admit,
    handover=Handover(for_participants, for_newcomers, loom="pieces"),
    programs=programs,
    global_model=global_model,
    cohort=500,  # everybody, in the paper's federations of 10 to 500 clients
    needs=Needs(class_labels=True),
)
