# SPDX-License-Identifier: Apache-2.0
"""FedJETs (reconstruction): experts on the server, of which each client trains a few that a gate picks for its data.

Dun, Hipolito Garcia, Zheng, Awadallah, Sim, Kyrillidis, Dimitriadis: FedJETs: efficient just-in-time personalization
with federated mixture of experts. R0-FoMo workshop at NeurIPS, 2023 (arXiv:2306.08586).

A reconstruction: we had reviews of the paper and neither text nor code. The first rounds are FedAvg's; they train the
common expert, which is then frozen and makes the features that the gate looks at. From then on a client is asked how
the gate spreads its samples over the M experts. It gets the K experts with the largest shares and trains them with the
gate, its prediction being their mean, weighted by the gate. Some clients are anchors: each is tied to an expert of its
own, which it always trains and to which it teaches the gate to send its samples. Each sample is predicted by the expert
that the gate prefers, so that newcomers need no labels.

Symbols: s: ``common`` up to its head, g: ``gate``, e_k: ``experts``, M: ``experts`` of the options, K:
``experts_each``, r: the gate's softmax over the K experts.

Sent down: in the first rounds the parameters of the common expert; then the common expert and the gate; then these and
    the parameters of the client's K experts, which they are, and which is its own. At the start of the second stage,
    how many classes there are. To use: common expert, gate and all experts.
Sent up: the change of what was sent to be trained, the number of samples, the training loss; the shares of the experts
    by the gate; at the start of the second stage, the shares of its labels. Evaluations as in FedAvg.
Kept by the client: nothing that counts; its model's constants.
Kept by the server: common expert, gate and experts, and whose expert each is.
Reduces to: FedAvg with one expert and no anchors.
Differs from the paper: unknown. The common expert's rounds, that experts start from it, the gate's size, how anchors
are chosen (of the first cohort those whose labels differ most), and the loss are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Model, Needs, Program, Sent, Setup
from fedloom.core.errors import ConfigError
from fedloom.core.random import fold, seed_of
from fedloom.core.training import LocalConfig, Training, train_step
from fedloom.core.trees import ClientId, Params, PerClient, Tree, tree_map
from fedloom.looms.chunked import dense_init
from fedloom.looms.gate import gate_scores, routing
from fedloom.models.load import PredictorModule
from fedloom.models.per_sample import net
from fedloom.programs import local
from fedloom.programs.class_means import feature_size
from fedloom.programs.labels import ask_label_shares, label_shares


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """FedJETs' options."""

    experts: int = option(5, "Experts on the server, M (5 on CIFAR-10, 10 on CIFAR-100, by a review).", low=1)
    experts_each: int = option(2, "Experts that a client trains in a round, K (by a review).", low=1)
    common_rounds: int = option(20, "Rounds of FedAvg that train the common expert first (ours).", low=0)
    gate_hidden: int = option(64, "Hidden units of the gate (ours).", low=1)
    anchors: bool = option(True, "Tie a client to each expert; without, training stagnates, by a review.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.experts_each > self.experts:
            raise ConfigError(
                f"--experts-each is {self.experts_each} and --experts {self.experts}; a client can train as many as "
                "there are. Change one of them."
            )


class State(NamedTuple):
    """All that is trained, and the anchors."""

    common: Mapping[str, Tensor]
    gate: Mapping[str, Tensor]
    experts: Mapping[str, Tensor]  # (M, ...)
    anchors: Tensor  # (M,) the row of the roster of each expert's anchor; -1: none


def init(setup: Setup[Any]) -> State:
    """All experts are the model as its module initialises it; the gate is as ``nn.Linear`` does."""
    config, model = setup.config, setup.models[setup.clients[0]]
    common = model.init(setup.common_seed)
    widths = (feature_size(model), config.gate_hidden, config.experts)
    gate = dense_init(widths, seed_of(setup.seed, "gate"), setup.device, setup.dtype)
    nobody = torch.full((config.experts,), -1, device=setup.device)
    return State(common, gate, copies(common, config.experts), nobody)


def copies(common: Params, count: int) -> dict[str, Tensor]:
    """So many experts that are the common one."""
    return {name: value.repeat(count, *[1] * value.dim()) for name, value in common.items()}


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """To use: everything."""
    everything = {"common": state.common, "gate": state.gate, "experts": state.experts}
    return Sent(everything, PerClient.empty(clients))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Train the common expert, or pick experts for each client and train these with the gate."""
    config = setup.config
    if cohort.round <= config.common_rounds:
        replies = ask(local.local_training(config), {"params": state.common}, PerClient.empty(cohort.clients))
        common = tree_map(torch.add, state.common, weighted_mean(replies, "delta"))
        after = state._replace(common=common, experts=copies(common, config.experts))
        return after, {"local_loss": mean_loss(replies)}
    clients = list(cohort.clients)
    if config.anchors and not bool((state.anchors >= 0).any()):
        told = ask_label_shares(setup, clients, ask)
        state, clients = state._replace(anchors=anchored(setup, told, state.anchors)), list(told)
    clients, picked = route(setup, state, clients, ask)
    replies = ask(training(config), *to_train(setup, state, clients, picked))
    return learned(state, replies, PerClient([(clients, {"which": picked})])), {"local_loss": mean_loss(replies)}


def anchored(setup: Setup[Any], told: PerClient, nobody: Tensor) -> Tensor:
    """One client after another whose label shares are farthest from those chosen already, the first client first."""
    ((clients, tree),) = told.groups
    apart = torch.cdist(tree["shares"], tree["shares"], p=1).cpu()
    chosen = [0]
    while len(chosen) < min(len(nobody), len(clients)):
        nearest = apart[:, chosen].min(1).values
        nearest[chosen] = -1
        chosen.append(int(nearest.argmax()))
    anchors = nobody.clone()
    anchors[: len(chosen)] = torch.tensor(setup.rows([clients[i] for i in chosen]), device=anchors.device)
    return anchors


def route(setup: Setup[Any], state: State, clients: list[ClientId], ask: Ask) -> tuple[list[ClientId], Tensor]:
    """Those that answer, and their experts (clients, K), the own one of an anchor first."""
    config = setup.config
    if config.experts_each == config.experts:  # whatever the gate says
        everybody = torch.arange(config.experts, device=setup.device)
        return clients, everybody.expand(len(clients), -1)
    sent = {"common": state.common, "gate": state.gate}
    ((members, told),) = ask(routing(), sent, PerClient.empty(clients)).groups
    own = owned(setup, state, members)
    shares = told["shares"] + (torch.arange(config.experts, device=setup.device) == own[:, None])
    return list(members), shares.topk(config.experts_each, dim=1).indices


def owned(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Tensor:
    """The number of each client's own expert; -1 for those that are no anchors."""
    rows = torch.tensor(setup.rows(clients), device=setup.device)
    match = rows[:, None] == state.anchors
    return torch.where(match.any(1), match.to(torch.int64).argmax(1), -1)


def to_train(setup: Setup[Any], state: State, clients: list[ClientId], picked: Tensor) -> Sent:
    """The gate for all, the frozen common expert, and to each client its experts, which they are, and its own."""
    slots = {f"expert{slot}.{n}": v[which] for slot, which in enumerate(picked.T) for n, v in state.experts.items()}
    mine = {"params": slots, "which": picked, "own": owned(setup, state, clients)}
    shared = {"params": {f"gate.{name}": value for name, value in state.gate.items()}, "common": state.common}
    return Sent(shared, PerClient([(clients, mine)]))


def learned(state: State, replies: PerClient, picked: PerClient) -> State:
    """The mean change of the gate; of each expert, the mean change over those that have trained it."""
    ((clients, reply),) = replies.groups
    which, delta = picked.pick(clients)["which"], reply["delta"]
    gate = tree_map(torch.add, state.gate, net(weighted_mean(replies, "delta"), "gate"))
    count = len(state.anchors)
    trained = F.one_hot(which, count).to(reply["num_samples"].dtype) * reply["num_samples"][:, None, None]
    share = trained / trained.sum((0, 1)).clamp(min=1e-12)  # (clients, K, M)
    change = {
        name: sum(torch.tensordot(share[:, slot].T, delta[f"expert{slot}.{name}"], dims=1)
                  for slot in range(which.shape[1]))
        for name in state.experts
    }  # fmt: skip
    return state._replace(gate=gate, experts=tree_map(torch.add, state.experts, change))


def training(config: Config) -> Program:
    """What a client of FedJETs runs in the second stage."""
    plain = local.local_training(config)
    return replace(plain, name="fedjets.train", init=client_init, step=client_step, final=client_final)


class Carry(NamedTuple):
    """Training of the gate and K experts, and which they are."""

    training: Training
    which: Tensor  # (K,)
    own: Tensor  # () of an anchor; else -1


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Carry:
    """Start from what was sent."""
    return Carry(local.client_init(home, shared, mine, memory), mine["which"], mine["own"])


def client_step(home: Home, shared: Tree, carry: Carry, batch: Batch) -> Carry:
    """One step on CE(sum_k r_k(x) e_k(x)), and for anchors on CE(g(s(x)), own expert)."""
    model = home.model

    def objective(params: Params, buffers: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tree]]:
        scores = gate_scores(model, shared["common"], buffers, net(params, "gate"), batch.x)
        weights = scores.gather(1, carry.which.expand(len(scores), -1)).softmax(1)  # (samples, K)
        outputs: Tensor | float = 0.0
        for slot in range(len(carry.which)):
            drawn = fold(batch.key, -slot) if slot else batch.key
            each, buffers = model.train(net(params, f"expert{slot}"), buffers, batch.x, batch.mask, drawn)
            outputs = outputs + weights[:, slot, None] * each
        assert isinstance(outputs, Tensor)
        loss = batch.mean(home.task.loss(outputs, batch.y))
        tied = F.cross_entropy(scores, carry.own.clamp(min=0).expand(len(scores)), reduction="none")
        return loss + (carry.own >= 0) * batch.mean(tied), (loss, buffers)

    return carry._replace(training=train_step(home, carry.training, batch, objective=objective))


def client_final(home: Home, shared: Tree, carry: Carry, memory: Tree) -> tuple[Tree, Tree]:
    """Reply as in local training."""
    return local.client_final(home, shared, carry.training, memory)


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """Everything that is sent to use."""
    return {**shared, "buffers": memory["buffers"]}


def predict(home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """The answer of the expert that the gate prefers, sample by sample."""
    model, buffers = home.model, deployed["buffers"]
    best = gate_scores(model, deployed["common"], buffers, deployed["gate"], x).argmax(1)
    outputs = torch.vmap(lambda expert: model(expert, buffers, x))(deployed["experts"])  # (M, samples, outputs)
    return outputs.gather(0, best[None, :, None].expand(1, *outputs.shape[1:]))[0]


def programs(config: Config, model: Model, newcomer: bool) -> list[Program]:
    """A participant does all of it; a newcomer nothing."""
    return [] if newcomer else [local.local_training(config), label_shares(), routing(), training(config)]


def notes(setup: Setup[Any]) -> list[str]:
    """A run that is over before there are experts is FedAvg."""
    first = setup.config.common_rounds
    if not 0 < setup.rounds <= first:
        return []
    return [f"this is FedAvg: experts are trained after round {first}; give more --rounds or fewer --common-rounds"]


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets what everybody has."""
    return send(setup, state, newcomers.clients)


CITATION = """@inproceedings{dun2023fedjets,
  title={{FedJETs}: Efficient Just-In-Time Personalization with Federated Mixture of Experts},
  author={Dun, Chen and Hipolito Garcia, Mirian and Zheng, Guoqing and Awadallah, Ahmed Hassan and Sim, Robert and
          Kyrillidis, Anastasios and Dimitriadis, Dimitrios},
  booktitle={R0-FoMo Workshop, NeurIPS}, year={2023}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="FedJETs (reconstruction)",
    family="ensemble",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    means=(),
    averaged=("common", "gate", "experts"),
    client_deploy=client_deploy,
    predict=predict,
    module=partial(PredictorModule.of, predict),
    programs=programs,
    admit=admit,
    cohort=10,
    needs=Needs(same_model=True, class_labels=True, features="any", no_batchnorm=True),
    notes=notes,
)
