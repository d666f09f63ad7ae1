# SPDX-License-Identifier: Apache-2.0
"""Fed-ensemble: several global models side by side, whose answers are averaged.

Shi, Lai, Al Kontar, Chowdhury: Fed-ensemble: improving generalization through model ensembling in federated learning.
2021 (arXiv:2107.10663).

There are K models from different starts. In K rounds, an age, every client trains each of them once, in an order drawn
anew for every age. A model becomes the mean of what the clients make of it who have it in this round. A sample's answer
is the mean of the K models' class probabilities.

Symbols: K: ``ensemble_size``, w_k: a row of ``params``.

Sent down: in a round the parameters and running statistics of one model; for use, those of all.
Sent up: the change of the parameters, the running statistics, the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: nothing.
Kept by the server: all models with their running statistics.
Reduces to: FedAvg with ``batchnorm=averaged`` at K = 1.
Differs from the paper: a model is the mean of its clients' results, as in the paper; the authors' code compares each
result with all models and shares it out by their likeness. Clients are weighted by their samples. Running statistics
are averaged with the parameters. The code's proximal term of 1e-8 and its falling rate are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import Ask, Cohort, Diagnostics, Home, Program, Sent, Setup
from fedloom.core.device import to_device
from fedloom.core.errors import ConfigError
from fedloom.core.random import seed_of, stream
from fedloom.core.training import LocalConfig, Training, begin, delta, like_report, report
from fedloom.core.trees import ClientId, PerClient, Tree, stack, tree_map
from fedloom.models.load import PredictorModule
from fedloom.programs.allowed import of_participants
from fedloom.programs.local import local_training


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """Fed-ensemble's options."""

    ensemble_size: int = option(5, "Models, K (the authors' code).", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_optimiser:
            raise ConfigError(
                "A client of Fed-ensemble trains another model in every round, for which the optimiser's state of the "
                "last one is of no use. Leave --keep-optimiser out."
            )


class State(NamedTuple):
    """A row for each of the K models."""

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def init(setup: Setup[Config]) -> State:
    """Each model from a seed of its own; the first one starts where FedAvg's does."""
    model = setup.models[setup.clients[0]]
    others = [seed_of(setup.common_seed, "ensemble", k) for k in range(1, setup.config.ensemble_size)]
    params = stack([model.init(seed) for seed in (setup.common_seed, *others)])
    return State(params, stack([model.fresh_buffers() for _ in (0, *others)]))


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """For use, all models for everybody."""
    return Sent(state._asdict(), PerClient.empty(clients))


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Clients train the model whose turn it is with them; each model becomes the mean of its clients' results."""
    turn = {client: turn_of(setup, client, cohort.round) for client in cohort.clients}
    at = to_device(list(turn.values()), setup.device)
    own = tree_map(lambda rows: rows.index_select(0, at), state._asdict())
    replies = ask(training(setup.config), {}, PerClient([(cohort.clients, own)]))
    ((clients, reply),) = replies.groups
    weights = weights_of(setup, [turn[client] for client in clients], reply["num_samples"])
    found = weights.sum(1) > 0  # (K,) models that somebody has trained

    def mean(old: Tensor, new: Tensor) -> Tensor:
        result = torch.tensordot(weights, new.to(weights.dtype), dims=1)
        result = (result if old.is_floating_point() else result.round()).to(old.dtype)  # counters are whole numbers
        return torch.where(found.reshape(-1, *[1] * (old.ndim - 1)), result, old)

    params = tree_map(lambda old, change: old + torch.tensordot(weights, change, dims=1), state.params, reply["delta"])
    buffers = tree_map(mean, state.buffers, reply["buffers"])
    return State(params, buffers), {"local_loss": mean_loss(replies)}


def turn_of(setup: Setup[Config], client: ClientId, number: int) -> int:
    """The model that a client has in the round of that number."""
    age, place = divmod(number - 1, setup.config.ensemble_size)
    order = stream(setup.seed, age, client, "turns of models").permutation(setup.config.ensemble_size)
    return int(order[place])


def weights_of(setup: Setup[Config], models: Sequence[int], samples: Tensor) -> Tensor:
    """(K, clients): each client's share in its model, by samples; a model that nobody has has a row of zeros."""
    has = to_device(np.arange(setup.config.ensemble_size)[:, None] == np.array(models), setup.device)
    weights = has * samples
    total = weights.sum(1, keepdim=True)
    return weights / torch.where(total > 0, total, 1)


def training(config: Config) -> Program:
    """What a client of Fed-ensemble runs."""
    plain = local_training(config)
    return replace(plain, name="fed_ensemble.train", init=client_init, final=client_final, expects=expects)


def client_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Training:
    """Start from the model that was sent, with its own running statistics."""
    return begin(home, mine["params"], {"buffers": mine["buffers"]})


def client_final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change and the running statistics; nothing is kept."""
    return {"delta": delta(carry), "buffers": carry.buffers, **report(home, carry)}, memory


def expects(shared: Tree, mine: Tree) -> Tree:
    """A change and running statistics for every tensor of the model."""
    return {"delta": mine["params"], "buffers": mine["buffers"], **like_report()}


def predict(home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """The logarithm of the mean of all models' class probabilities; for other tasks, the mean of their outputs."""
    params, buffers = deployed["params"], deployed["buffers"]
    each = torch.stack([
        home.model(tree_map(lambda rows, k=k: rows[k], params), tree_map(lambda rows, k=k: rows[k], buffers), x)
        for k in range(home.config.ensemble_size)
    ])  # fmt: skip
    if not home.task.class_scores:
        return each.mean(0)
    return F.log_softmax(each, dim=-1).logsumexp(0) - math.log(len(each))


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets all models; their running statistics come with them."""
    return send(setup, state, newcomers.clients)


CITATION = """@article{shi2021fedensemble,
  title={Fed-ensemble: Improving Generalization through Model Ensembling in Federated Learning},
  author={Shi, Naichen and Lai, Fan and Al Kontar, Raed and Chowdhury, Mosharaf},
  journal={arXiv:2107.10663}, year={2021}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="Fed-ensemble",
    family="ensemble",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    means=(),
    predict=predict,
    module=partial(PredictorModule.of, predict),
    programs=of_participants(training),
    admit=admit,
    cohort=10,  # the authors' code: 10 clients, all of them
)
