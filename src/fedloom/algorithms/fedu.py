# SPDX-License-Identifier: Apache-2.0
"""FedU: a model for every client, and the models of neighbours are pulled together.

T. Dinh, Vu, Tran, Dao, Zhang: FedU: a unified framework for federated multi-task learning with Laplacian
regularization. 2021 (arXiv:2102.07148).

The server has all models, and a graph that says who is whose neighbour. The clients of a cohort train their own models;
then each model takes a step towards those of its neighbours in the cohort, all at once: a gradient step on the sum of
a_kl ||w_k - w_l||^2.

Symbols: w_k: a row of ``models``, a_kl: the matrix in the file ``graph``, mu R eta: ``coupling``.

Sent down: the client's own parameters.
Sent up: the change of the parameters, the number of samples, the training loss. Evaluations as in FedAvg.
Kept by the client: its model's running statistics.
Kept by the server: the models of all clients.
Reduces to: Local, from one start, with ``coupling=0``; FedAvg with equal weights in a complete graph, if all clients
take part and ``coupling`` is one over their number.
Differs from the paper: the rate of the server's step, mu R eta there, is one option. Models step at once, as in the
paper; in the authors' code one after another, and in its last version not at all. Newcomers, who are not in the paper,
get the mean of all models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedloom.core.aggregate import mean_loss
from fedloom.core.config import option
from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Handover, Needs, Sent, Setup
from fedloom.core.device import to_device
from fedloom.core.errors import ConfigError
from fedloom.core.rows import for_everybody, mean_row, rows_of, with_rows
from fedloom.core.training import LocalConfig
from fedloom.core.trees import ClientId, PerClient, tree_map
from fedloom.programs.local import local_training
from fedloom.programs.statistics import settle_statistics


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """FedU's options."""

    coupling: float = option(
        2e-3,
        "Share of the way to each neighbour, times its weight in the graph, that a model goes in a round, mu R eta "
        "(the authors' code on CIFAR-10: 0.5 x 0.05 x 0.03 x 5 epochs x 0.5).",
        low=0,
    )
    graph: str = option(
        "", "A NumPy file (.npy) with the clients' weights for each other, a symmetric matrix; empty: 1 for all pairs."
    )


class State(NamedTuple):
    """A row for every client."""

    models: Mapping[str, Tensor]


def init(setup: Setup[Any]) -> State:
    """All models start where the module initialises them."""
    first = setup.models[setup.clients[0]].init(setup.common_seed)
    return State(for_everybody(setup, first))


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """To each client its own model."""
    return Sent({}, PerClient([(clients, {"params": rows_of(setup, state.models, clients)})]))


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Algorithm 1: clients train their models; w_k <- w_k - mu R eta sum_l a_kl (w_k - w_l), for all k at once."""
    replies = ask(local_training(setup.config), *send(setup, state, cohort.clients))
    ((clients, reply),) = replies.groups
    trained = tree_map(torch.add, rows_of(setup, state.models, clients), reply["delta"])
    step = mixing(setup, clients)
    mixed = tree_map(lambda rows: torch.tensordot(step, rows, dims=1), trained)
    return State(with_rows(setup, state.models, clients, mixed)), {"local_loss": mean_loss(replies)}


def mixing(setup: Setup[Config], clients: Sequence[ClientId]) -> Tensor:
    """The server's step as a matrix: (clients, clients), each row with the sum 1."""
    rows = setup.rows(clients)
    weights = np.ones((len(rows), len(rows)))
    if setup.config.graph:
        weights = weights_in(setup.config.graph, len(setup.clients))[np.ix_(rows, rows)]
    towards = setup.config.coupling * (weights - np.diag(weights.diagonal()))
    return to_device(np.diag(1 - towards.sum(1)) + towards, setup.device, setup.dtype)


@cache
def weights_in(path: str, clients: int) -> np.ndarray:
    """The matrix in a file, read once."""
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot read --graph {path}: {error}. Give a matrix that numpy.save wrote.") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf" or found.shape != (clients, clients):
        got = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else "several arrays"
        raise ConfigError(
            f"--graph {path} has {got}; expected numbers of shape {(clients, clients)}, a row per client."
        )
    matrix = found.astype(np.float64)
    if not (np.isfinite(matrix).all() and (matrix >= 0).all() and np.array_equal(matrix, matrix.T)):
        raise ConfigError(f"--graph {path} must be a symmetric matrix of numbers from 0 on; correct it.")
    return matrix


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets the mean of all models and settles its running statistics."""
    mean = tree_map(lambda rows: rows.mean(0), state.models)
    return settle_statistics(setup, Sent({"params": mean}, PerClient.empty(newcomers.clients)), ask)


def for_newcomers(setup: Setup[Any], state: State) -> State:
    """The mean of all models in the place of all."""
    return State(mean_row(state.models))


CITATION = """@article{dinh2021fedu,
  title={{FedU}: A Unified Framework for Federated Multi-Task Learning with {L}aplacian Regularization},
  author={T. Dinh, Canh and Vu, Tung T. and Tran, Nguyen H. and Dao, Minh N. and Zhang, Hongyu},
  journal={arXiv:2102.07148}, year={2021}}"""

ALGORITHM = Algorithm(
    name="FedU",
    family="similarity",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    admit=admit,
    admit_labels=False,
    handover=Handover(newcomers=for_newcomers),
    cohort=5,  # pFedHN, App. B: baselines aggregate over 5 clients
    needs=Needs(same_model=True),
)
