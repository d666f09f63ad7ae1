# SPDX-License-Identifier: Apache-2.0
"""FedDF: FedAvg, after which the server teaches the average to answer as the clients' models do together.

Lin, Kong, Stich, Jaggi: Ensemble distillation for robust model fusion in federated learning. NeurIPS 2020
(arXiv:2006.07242).

The server has samples without labels. The mean of the scores that the clients' models give them is what the average of
these models learns to answer. With several architectures there is one average for each, and all clients teach all.

Symbols: x: ``Setup.server_data``, the student of an architecture: ``params[architecture]``, N: ``server_steps``.

Sent down: the global parameters and running statistics of the client's architecture.
Sent up: the change of the parameters, the running statistics, the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: nothing that counts; it begins with the running statistics that it is sent.
Kept by the server: the global parameters and running statistics of each architecture.
Reduces to: FedAvg with averaged running statistics, at ``server_steps=0`` and with one architecture.
Differs from the paper: it stops early by the accuracy on labelled samples. The server has no labels here: a tenth of
its samples are held out, and the divergence from the ensemble on these decides. The ensemble's answers are computed
once a round. Leaving out clients that are no better than chance takes labels, too, and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.core.aggregate import mean_buffers, mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import (
    Algorithm,
    Ask,
    Batches,
    Cohort,
    Diagnostics,
    Home,
    Model,
    Needs,
    Program,
    Sent,
    Setup,
)
from fedloom.core.errors import NeedsError
from fedloom.core.optim import Optimiser
from fedloom.core.random import stream
from fedloom.core.training import LocalConfig, Training
from fedloom.core.trees import ClientId, PerClient, Tree, tree_map
from fedloom.programs import local
from fedloom.programs.allowed import of_participants
from fedloom.programs.ensemble import distilling, divergence
from fedloom.programs.server_steps import answers, server_steps

LOOK = 100
"""Steps between looks at the samples that are held out (the authors' code)."""


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """FedDF's options."""

    server_steps: int = option(10_000, "Most steps of distillation in a round, N (sec. 4.1).", low=0)
    server_patience: int = option(1000, "Stop after so many steps without gain (the authors' code).", low=1)
    server_lr: float = option(1e-3, "Rate of the distillation, for Adam; falls to 0 by a cosine (sec. 4.1).", low=0)
    server_batch_size: int = option(128, "Samples per step of the distillation (sec. 4.1).", low=1)
    server_clip: float = option(5.0, "Largest norm of its gradient; 0: no clipping (the authors' code).", low=0)


class State(NamedTuple):
    """A global model for each architecture, by its name."""

    params: Mapping[str, Mapping[str, Tensor]]
    buffers: Mapping[str, Mapping[str, Tensor]]


def init(setup: Setup[Any]) -> State:
    """The models as their modules initialise them."""
    models = {str(spec): model for spec, model in setup.architectures.items()}
    return State(
        {name: model.init(setup.common_seed) for name, model in models.items()},
        {name: model.fresh_buffers() for name, model in models.items()},
    )


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """To each client the model of its architecture."""
    groups = []
    for spec, members in setup.by_model(clients).items():
        if str(spec) not in state.params:
            raise NeedsError(
                f"FedDF has models for {', '.join(state.params)}; client {members[0]} has {spec}. Admit it with an "
                "architecture that took part in training."
            )
        model, count = {"params": state.params[str(spec)], "buffers": state.buffers[str(spec)]}, len(members)
        groups.append((members, tree_map(lambda leaf, count=count: leaf.expand(count, *leaf.shape), model)))
    return Sent({}, PerClient(groups))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Have the cohort train; average the models of each architecture; distil the ensemble of all into each average."""
    replies = ask(training(setup.config), *send(setup, state, cohort.clients))
    after = averaged(setup, state, replies)
    diagnostics: dict[str, float | Tensor] = {"local_loss": mean_loss(replies)}
    if setup.config.server_steps:
        x, _ = server_samples(setup)
        target = ensemble(setup, state, replies, x).softmax(-1)
        for name, model in {str(spec): model for spec, model in setup.architectures.items()}.items():
            start = after.params[name], after.buffers[name]
            params, buffers, steps = distilled(setup, model, start, x, target, cohort.round)
            after = State({**after.params, name: params}, {**after.buffers, name: buffers})
            diagnostics[f"steps_{name}" if len(after.params) > 1 else "steps"] = float(steps)
    return after, diagnostics


def by_architecture(setup: Setup[Any], replies: PerClient) -> dict[str, PerClient]:
    """The replies by architecture: two can have parameters of the same shapes."""
    found: dict[str, list[tuple[Sequence[ClientId], Tree]]] = {}
    for group, _ in replies.groups:
        for spec, members in setup.by_model(group).items():
            found.setdefault(str(spec), []).append((members, replies.pick(members)))
    return {name: PerClient(parts) for name, parts in found.items()}


def averaged(setup: Setup[Any], state: State, replies: PerClient) -> State:
    """FedAvg within each architecture; one of which nobody has replied stays as it is."""
    params, buffers = dict(state.params), dict(state.buffers)
    for name, own in by_architecture(setup, replies).items():
        params[name] = tree_map(torch.add, params[name], weighted_mean(own, "delta"))
        buffers[name] = mean_buffers(own, buffers[name])
    return State(params, buffers)


def ensemble(setup: Setup[Any], state: State, replies: PerClient, x: Tensor) -> Tensor:
    """The mean scores (samples, classes) of the models of all clients that have replied, with their own statistics."""
    models = {str(spec): model for spec, model in setup.architectures.items()}
    scores = []
    for name, own in by_architecture(setup, replies).items():
        for _, reply in own.groups:
            params = tree_map(torch.add, reply["delta"], state.params[name])
            scores.append(answers(models[name], params, reply["buffers"], x))
    return torch.cat(scores).mean(0)


def server_samples(setup: Setup[Any]) -> tuple[Tensor, Tensor | None]:
    """The server's own, which are checked to be there before round 1."""
    assert setup.server_data is not None
    return setup.server_data.x, setup.server_data.y


def distilled(
    setup: Setup[Any], model: Model, start: tuple[Tree, Tree], x: Tensor, target: Tensor, round: int
) -> tuple[Tree, Tree, int]:
    """The student that is nearest to the ensemble on the samples held out, and after how many steps it was."""
    config, count = setup.config, len(x)
    if count < 2:
        raise NeedsError(f"FedDF holds out a tenth of the server's samples; there is {count}. Give --server-data more.")
    order = torch.as_tensor(stream(setup.seed, "held out").permutation(count), device=x.device)
    held, rest = order[: max(1, count // 10)], order[max(1, count // 10) :]

    def apart(params: Tree, buffers: Tree) -> float:
        one = tree_map(lambda leaf: leaf[None], {"params": params, "buffers": buffers})
        return float(divergence(target[held], answers(model, one["params"], one["buffers"], x[held])[0]).mean())

    def cosine(step: int) -> float:
        return (1 + math.cos(math.pi * step / config.server_steps)) / 2

    best, nearest, when = start, apart(*start), 0
    steps = server_steps(
        setup, f"distil {model.spec}", distilling(model), start,
        Optimiser("adam", config.server_lr, clip=config.server_clip), (x[rest], target[rest]),
        Batches(size=config.server_batch_size, steps=config.server_steps), round, rate=cosine,
    )  # fmt: skip
    for number, now in enumerate(steps, 1):
        if number % LOOK and number != config.server_steps:
            continue
        distance = apart(now.params, now.buffers)
        if distance < nearest:
            best, nearest, when = (now.params, now.buffers), distance, number
        elif number - when >= config.server_patience:
            break
    return *best, when


def training(config: Any) -> Program:
    """Local training that tells the running statistics, too: the server runs the clients' models."""
    return replace(local.local_training(config), name="feddf.train", final=client_final, expects=expects)


def client_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change and the running statistics."""
    reply, after = local.client_final(home, shared, carry, memory)
    return {**reply, "buffers": carry.buffers}, after


def expects(shared: Tree, mine: Tree) -> Tree:
    """As local training, and running statistics."""
    return {**local.expects(shared, mine), "buffers": mine["buffers"]}


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets the model of its architecture."""
    return send(setup, state, newcomers.clients)


CITATION = """@inproceedings{lin2020feddf,
  title={Ensemble Distillation for Robust Model Fusion in Federated Learning},
  author={Lin, Tao and Kong, Lingjing and Stich, Sebastian U. and Jaggi, Martin},
  booktitle={NeurIPS}, year={2020}}"""

ALGORITHM = Algorithm(
    name="FedDF",
    family="ensemble",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    programs=of_participants(training),
    admit=admit,
    admit_labels=False,
    carries_prior=False,
    cohort=2,  # the authors' commands: 2 of 20 clients
    needs=Needs(class_labels=True, server_data="unlabelled"),
)
