# SPDX-License-Identifier: Apache-2.0
"""MH-pFedHNGD: MH-pFedHN with a small global model out of the same loom, which also teaches the personal ones.

Revisiting hypernetwork in model-heterogeneous personalized federated learning. Under review, authors not named;
their code is github.com/DangDang1895/MH-pFL.

A round asks twice. First the loom weaves a global model from vectors of its own, through the head of the clients with
the fewest parameters; every client trains it, and the server takes one step on the mean of their changes, weighted by
their numbers of samples. Then each client gets its personal model, as in MH-pFedHN, and trains it on its loss and on
the global model's answers: that model as it was sent, which the client has kept.

Two options are ours, ``teacher=corrected`` and ``deploy=mixture``: what they do, send and keep is in
``adaptation.corrected_teacher``. What follows is the paper's.

Symbols: v_g: the piece ``vectors.global``, w_g: ``shared["vector"]`` of the first ask and ``memory["teacher"]`` in the
second, a: ``distil_weight``, T: ``temperature``; the others as in MH-pFedHN.

Sent down: the global model, as a vector; then the client's own woven parameters. For use: the latter alone.
Sent up: the change of the global model; then what MH-pFedHN sends; each with the number of samples and the loss.
    Evaluations as in FedAvg.
Kept by the client: the teacher between the two asks, its running statistics for the global model; all as in MH-pFedHN.
Kept by the server: as in MH-pFedHN, and the global model's vectors.
Reduces to: MH-pFedHN with ``global_share=0``; MH-pFedHNG (Table 4) with ``distil_weight=0``.
Differs from the paper: eq. 8 puts lambda on the client's loss and lambda is 0.01 to 0.2; the code puts it on the
distillation, and so do we. The code's global step also moves, by Adam's momentum, all that the global model did not
come from; ours does not. Other decisions: docs/methods/mh_pfedhn_gd.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fedloom.adaptation.corrected_teacher import TeacherConfig, counting, first_mean, moved_mean, with_teacher
from fedloom.algorithms import mh_pfedhn
from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Model, Needs, Program, Setup
from fedloom.core.errors import NeedsError
from fedloom.core.sparse import change_in
from fedloom.core.training import Training, begin, delta, like_report, report, train_step
from fedloom.core.trees import PerClient, Tree
from fedloom.core.vectors import from_vector, to_vector
from fedloom.looms.multi_head import adam_step, pull_back, weave
from fedloom.looms.places import GLOBAL, deploying, global_network, global_place, named_network
from fedloom.privacy.laplace import laplace_noise, with_laplace_noise
from fedloom.programs.distillation import answers_of, distilled, guest_of, statistics_of, teacher_in


@dataclass(frozen=True, kw_only=True)
class Config(mh_pfedhn.Config, TeacherConfig):
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


class State(NamedTuple):
    """As MH-pFedHN's; and the global model's mean over rounds, where that is the teacher."""

    pieces: Mapping[str, Any]
    optimiser: Mapping[str, Tree]
    mean: Mapping[str, Tensor] = {}


def init(setup: Setup[Any]) -> State:
    """As MH-pFedHN, and vectors for the global model."""
    state = State(*mh_pfedhn.init(setup, global_place(setup)))
    return state._replace(mean=first_mean(weave_global(setup, state))) if setup.config.corrects else state


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
        shared = {"vector": weave_global(setup, state)}
        if config.corrects and config.distil_weight:
            shared["teacher"] = state.mean["vector"]
        replies = ask(global_program(config, global_network(setup)), shared, PerClient.empty(trainers))
        state = learn_global(setup, state, replies)
        found, silent = {"global_loss": mean_loss(replies)}, set(trainers) - set(replies)
    asked = cohort._replace(clients=tuple(client for client in cohort.clients if client not in silent))
    plain = mh_pfedhn.State(*state[:2])
    plain, loss = mh_pfedhn.learn(setup, plain, asked, ask, program(config, global_network(setup)))
    state = State(*plain, state.mean)
    if config.corrects:
        state = state._replace(mean=moved_mean(config, state.mean, weave_global(setup, state)))
    return state, {"local_loss": loss, **found}


def learn_global(setup: Setup[Any], state: State, replies: PerClient) -> State:
    """One step on phi and v_g along the mean of the changes, weighted by m_i / M."""
    mean = PerClient([([GLOBAL], {"delta": weighted_mean(replies, "delta")[None]})])
    grads = pull_back(setup.config.loom(), state.pieces, {GLOBAL: global_place(setup)}, mean, change_in)
    return State(*adam_step(*state[:2], grads, setup.config.server_lr, setup.config.server_clip), state.mean)


def global_program(config: Config, network: Model) -> Program:
    """ClientUpdate1: training of the global model."""
    batches, noise = config.batches(), laplace_noise(config.laplace_noise)
    train = Program(
        "mh_pfedhn_gd.global", global_init, global_step, global_final, batches, global_expects, network, noise
    )
    return counting(train) if config.corrects else train


def global_expects(shared: Tree, mine: Tree) -> Tree:
    """A change for every parameter of the global model."""
    return {"delta": shared["vector"], **like_report()}


def global_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Training:
    """Start from w_g, with the client's own running statistics for it."""
    guest = guest_of(home)
    return begin(home, from_vector(shared["vector"], guest.shapes), {"buffers": statistics_of(guest, memory)})


def global_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """One step of the global model on the client's own loss."""
    return train_step(replace(home, model=guest_of(home)), carry, batch)


def global_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change; keep the teacher as it came, to learn from."""
    change = with_laplace_noise(home, to_vector(delta(carry)), home.config.laplace_noise)  # App. E.2: here too
    after = {**memory, "global_buffers": carry.buffers}
    if home.config.distil_weight:
        after["teacher"] = shared.get("teacher", shared["vector"])
    return {"delta": change, **report(home, carry)}, after


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
    teacher = teacher_in(home, memory, corrected=home.config.corrects)
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


def programs(config: Config, model: Model, newcomer: bool) -> list[Program]:
    """A participant trains both models, a newcomer its own. The global network is the one that the config names."""
    if newcomer:
        return mh_pfedhn.programs(config, model, newcomer)
    network = named_network(config, model)
    return [global_program(config, network), program(config, network)] if network else []


ALGORITHM = with_teacher(
    replace(
        mh_pfedhn.ALGORITHM,
        name="MH-pFedHNGD",
        config=Config,
        state=State,
        init=init,
        round=round,
        programs=programs,
        global_model=global_model,
        cohort=500,  # everybody, in the paper's federations of 10 to 500 clients
        needs=Needs(class_labels=True),
    )
)
