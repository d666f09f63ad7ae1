# SPDX-License-Identifier: Apache-2.0
"""FedBN: FedAvg of everything but the normalisation layers, which stay with the clients.

Li, Jiang, Zhang, Kamp, Dou: FedBN: federated learning on non-IID features via local batch normalization. ICLR 2021
(arXiv:2102.07623).

Where clients differ in how their samples look, their normalisation layers take that up: so each client keeps its own,
scale, shift and running statistics. A newcomer gets the mean of the participants' scales and shifts, which they tell
when a state settles, and finds its running statistics on its own samples.

Sent down: the parameters outside of normalisation layers; in settling, the mean of those inside as it was.
Sent up: the change of the parameters that were sent, the number of samples, the training loss; in settling, the
    parameters of the normalisation layers and the number of samples. Evaluations as in FedAvg.
Kept by the client: its normalisation layers: parameters and running statistics.
Kept by the server: the other parameters; for newcomers, the mean of those of the normalisation layers.
Reduces to: FedAvg for a model without normalisation layers.
Differs from the paper: changes are weighted by the clients' samples; its code weighs five equally large clients
equally. The normalisation layers are those by type, BatchNorm or another; its code goes by their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedloom.algorithms import fedper
from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.contract import Ask, Cohort, Diagnostics, Home, Model, Needs, Program, Seeds, Sent, Setup
from fedloom.core.training import LocalConfig
from fedloom.core.trees import ClientId, PerClient, Tree, tree_map
from fedloom.programs.local import local_training
from fedloom.programs.statistics import settle_statistics


class State(NamedTuple):
    """The common part of the model, and normalisation layers for newcomers."""

    params: Mapping[str, Tensor]
    norm: Mapping[str, Tensor]


def init(setup: Setup[Any]) -> State:
    """The model as its module initialises it."""
    model = setup.models[setup.clients[0]]
    first = model.init(setup.common_seed)
    common = {name: value for name, value in first.items() if name not in model.norm}
    return State(common, {name: first[name] for name in first if name in model.norm})


def first_memory(model: Model, config: LocalConfig, seeds: Seeds) -> Tree:
    """Normalisation layers of the client's own, which start alike."""
    return {"own": {name: value for name, value in model.init(seeds.common).items() if name in model.norm}}


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """The common part for everybody."""
    return Sent({"params": state.params}, PerClient.empty(clients))


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Ask the cohort to train the whole model; average the common part."""
    replies = ask(local_training(setup.config), *send(setup, state, cohort.clients))
    params = tree_map(torch.add, state.params, weighted_mean(replies, "delta"))
    return state._replace(params=params), {"local_loss": mean_loss(replies)}


def settle(setup: Setup[Any], state: State, ask: Ask) -> State:
    """All participants tell their normalisation layers, whose plain mean is for newcomers."""
    if not state.norm:
        return state
    replies = ask(telling(), {"norm": state.norm}, PerClient.empty(setup.clients))
    return state._replace(norm=weighted_mean(replies, "norm", weight=None))


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer takes the mean of the participants' normalisation layers, and settles its running statistics."""
    if state.norm:
        ask(adopting(), {"norm": state.norm}, PerClient.empty(newcomers.clients))
    return settle_statistics(setup, send(setup, state, newcomers.clients), ask)


def notes(setup: Setup[Any]) -> list[str]:
    """A model without normalisation layers has nothing to keep."""
    model = setup.models[setup.clients[0]]
    return [] if model.norm else [f"this is FedAvg: {model.spec} has no normalisation layers"]


def telling() -> Program:
    """Reply with the parameters of the normalisation layers; nothing is trained."""
    return Program("fedbn.tell", _nothing, _no_step, _tell, None, _expects_norm)


def adopting() -> Program:
    """Take the parameters of the normalisation layers that were sent; the reply is empty."""
    return Program("fedbn.adopt", _nothing, _no_step, _adopt, None, _expects_nothing)


def _nothing(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    return {}


def _no_step(home: Home, shared: Tree, carry: Tree, batch: Any) -> Tree:
    return carry


def _tell(home: Home, shared: Tree, carry: Tree, memory: Tree) -> tuple[Tree, Tree]:
    return {"norm": memory["own"], "num_samples": home.num_samples}, memory


def _adopt(home: Home, shared: Tree, carry: Tree, memory: Tree) -> tuple[Tree, Tree]:
    return {}, {**memory, "own": shared["norm"]}


def _expects_norm(shared: Tree, mine: Tree) -> Tree:
    return {"norm": shared["norm"], "num_samples": torch.empty(())}


def _expects_nothing(shared: Tree, mine: Tree) -> Tree:
    return {}


def programs(config: LocalConfig, model: Model, newcomer: bool) -> list[Program]:
    """A participant trains and tells its normalisation layers; a newcomer takes their mean."""
    own = bool(model.norm)
    if newcomer:
        return [adopting()] if own else []
    return [local_training(config), *([telling()] if own else [])]


CITATION = """@inproceedings{li2021fedbn,
  title={{FedBN}: Federated Learning on Non-{IID} Features via Local Batch Normalization},
  author={Li, Xiaoxiao and Jiang, Meirui and Zhang, Xiaofei and Kamp, Michael and Dou, Qi},
  booktitle={ICLR}, year={2021}}"""

ALGORITHM = replace(
    fedper.ALGORITHM,
    name="FedBN",
    citation=CITATION,
    state=State,
    init=init,
    send=send,
    round=round,
    averaged=(),  # clients' normalisation layers go with the last body
    first_memory=first_memory,
    settle=settle,
    admit=admit,
    admit_labels=False,
    programs=programs,
    needs=Needs(same_model=True),
    notes=notes,
)
