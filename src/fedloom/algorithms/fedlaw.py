# SPDX-License-Identifier: Apache-2.0
"""FedLAW: FedAvg whose server learns, on labelled samples of its own, how much of each client's model to take.

Li, Lin, Shang, Wu: Revisiting weighted aggregation in federated learning with neural networks. ICML 2023
(arXiv:2302.10911).

The global model is gamma times the weighted mean of the clients' models. Weights and gamma are learned anew in every
round, by steps on the global model's loss on the server's samples; gamma can shrink the model.

Symbols: lambda = softmax(u): the clients' weights, gamma = exp(v): the factor, w_i: the clients' models, E:
``server_epochs``.

Sent down: the global parameters and running statistics.
Sent up: the change of the parameters, the running statistics, the number of samples, the training loss.
    Evaluations as in FedAvg.
Kept by the client: nothing that counts; it begins with the running statistics that it is sent.
Kept by the server: the global parameters and running statistics.
Reduces to: FedAvg with averaged running statistics, at ``server_epochs=0``.
Differs from the paper: its samples are cut from the test set; here they are the server's own. Running statistics are
those of the global model on the server's samples, as in the authors' code. The code's variants, squared weights and
weights before the factor, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.algorithms.fedavg import State, send
from fedloom.algorithms.feddf import server_samples
from fedloom.core.aggregate import mean_buffers, mean_loss
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Batches, Cohort, Diagnostics, Model, Needs, Setup
from fedloom.core.optim import Optimiser
from fedloom.core.task import Task
from fedloom.core.training import LocalConfig
from fedloom.core.trees import Params, Tree, tree_map
from fedloom.programs.local import local_training
from fedloom.programs.server_steps import Objective, last, server_steps


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """FedLAW's options."""

    server_epochs: int = option(20, "Passes over the server's samples in a round, E (the authors' code).", low=0)
    server_lr: float = option(
        0.01, "Rate of the steps on weights and factor, for Adam (the authors' code on CIFAR-10; else 0.005).", low=0
    )
    server_batch_size: int = option(128, "Samples per step on them (the authors' code).", low=1)

    batchnorm: ClassVar[str] = "averaged"  # the server runs the clients' models


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Have the cohort train; learn weights and factor; put the models together."""
    config, model = setup.config, setup.models[setup.clients[0]]
    replies = ask(local_training(config), *send(setup, state, cohort.clients))
    ((_, reply),) = replies.groups
    models = tree_map(torch.add, reply["delta"], state.params)  # (clients, ...)
    start = first_weights(reply["num_samples"]), mean_buffers(replies, state.buffers)
    x, y = server_samples(setup)
    assert y is not None
    steps = server_steps(
        setup, f"fedlaw {model.spec}", objective(model, setup.task), start,
        Optimiser("adam", config.server_lr, betas=(0.5, 0.999)), (x, y),
        Batches(size=config.server_batch_size, epochs=config.server_epochs), cohort.round, constants=models,
    )  # fmt: skip
    weights, buffers = last(steps, start)
    told = {"local_loss": mean_loss(replies), "factor": weights["v"].exp()}
    return State(together(weights, models), buffers), told


def first_weights(num_samples: Tensor) -> dict[str, Tensor]:
    """u = log p, p being the clients' shares of the samples, and v = 0: what FedAvg does."""
    shares = num_samples.clamp(min=1e-12) / num_samples.clamp(min=1e-12).sum()
    return {"u": shares.log(), "v": shares.new_zeros(())}


def together(weights: Params, models: Params) -> dict[str, Tensor]:
    """gamma sum_i lambda_i w_i."""
    each = weights["v"].exp() * weights["u"].softmax(0)
    return {name: torch.tensordot(each, own, dims=1) for name, own in models.items()}


def objective(model: Model, task: Task) -> Objective:
    """The loss of the global model on the server's samples, as a function of weights and factor."""

    def loss_of(weights: Params, buffers: Tree, models: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tree]]:
        outputs, after = model.train(together(weights, models), buffers, batch.x, batch.mask, batch.key)
        loss = batch.mean(task.loss(outputs, batch.y))
        return loss, (loss, after)

    return loss_of


CITATION = """@inproceedings{li2023fedlaw,
  title={Revisiting Weighted Aggregation in Federated Learning with Neural Networks},
  author={Li, Zexi and Lin, Tao and Shang, Xinyi and Wu, Chao},
  booktitle={ICML}, year={2023}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="FedLAW",
    family="aggregation",
    citation=CITATION,
    config=Config,
    round=round,
    means=(),
    cohort=20,  # the authors' code: all of 20 clients
    needs=Needs(same_model=True, server_data="labelled"),
)
