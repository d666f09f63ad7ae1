# SPDX-License-Identifier: Apache-2.0
"""FedSR: FedAvg on a stochastic representation that is kept short and, given the label, close to a class prior.

Nguyen, Torr, Lim: FedSR: a simple and effective domain generalization method for federated learning. NeurIPS 2022.

A dense layer more turns a sample's features into the mean and the width of a Gaussian, from which the representation
is drawn that the head gets. Two penalties: the length of the representation, and the divergence of the Gaussian from
one that belongs to the class and is learned, too, by each client for itself.

Symbols: mu, sigma: ``gaussian``, z: the representation, r_mu, r_sigma, c: ``prior.mean``, ``prior.width``,
``prior.scale``, a_L2: ``l2_weight``, a_CMI: ``cmi_weight``.

Sent down: the global parameters, the additional layer among them (and running statistics with ``batchnorm=averaged``).
Sent up: their change (and the running statistics), the number of samples, the training loss without the penalties.
    Evaluations as in FedAvg.
Kept by the client: the class priors, its optimiser's state, and running statistics that are not averaged.
Kept by the server: the global parameters and running statistics.
Reduces to: FedAvg with equal weights on a network with one dense layer more, if both penalties weigh 0 and sigma is 0.
Differs from the paper: as in the authors' code the length is a norm, not a squared one, and the class priors are not
averaged. The layer is added to the network and not put in the place of its last one, so that any network will do.
Predictions are made with the same draws for all samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.algorithms.fedavg import State, send
from fedloom.core.aggregate import mean_buffers, mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Model, Needs, Program, Seeds, Setup, composed
from fedloom.core.random import fold, normal, seed_of
from fedloom.core.training import Training, train_step
from fedloom.core.trees import Params, Tree, only, tree_map
from fedloom.looms.chunked import dense, dense_init
from fedloom.models.load import PredictorModule
from fedloom.models.per_sample import net
from fedloom.programs.allowed import of_participants
from fedloom.programs.class_means import feature_size
from fedloom.programs.local import local_training

DRAWS = seed_of("draws of FedSR's predictions")


@dataclass(frozen=True, kw_only=True)
class Config(fedavg.Config):
    """FedSR's options."""

    l2_weight: float = option(0.01, "Weight of the representation's length, a_L2 (the authors' code).", low=0)
    cmi_weight: float = option(5e-4, "Weight of the distance to the class prior, a_CMI (the authors' code).", low=0)
    test_draws: int = option(20, "Draws per sample in a prediction (the authors' code).", low=1)
    batchnorm: Literal["local", "averaged"] = option(
        "averaged", "Running statistics stay with the client, or are averaged like parameters (the authors' code)."
    )
    keep_optimiser: bool = option(True, "Keep a client's optimiser state from round to round (the authors' code).")


def init(setup: Setup[Any]) -> State:
    """The model as its module initialises it, and the layer as ``nn.Linear`` does."""
    plain, size = fedavg.init(setup), feature_size(setup.models[setup.clients[0]])
    layer = dense_init((size, 2 * size), seed_of(setup.seed, "gaussian"), setup.device, setup.dtype)
    return State({**plain.params, **{f"gaussian.{name}": value for name, value in layer.items()}}, plain.buffers)


def first_memory(model: Model, config: Any, seeds: Seeds) -> Tree:
    """The class priors: all classes have mean 0 and width softplus(1); c is 1."""
    zeros = torch.zeros(model.num_outputs, feature_size(model), dtype=model.dtype, device=model.device)
    return {"own": {"prior.mean": zeros, "prior.width": zeros + 1, "prior.scale": zeros[0, 0] + 1}}


def round(setup: Setup[Any], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Have the cohort train; average, each client alike."""
    replies = ask(training(setup.config), *send(setup, state, cohort.clients))
    params = tree_map(torch.add, state.params, weighted_mean(replies, "delta", None))
    averages = setup.config.batchnorm == "averaged"
    buffers = mean_buffers(replies, state.buffers, None) if averages else state.buffers
    return State(params, buffers), {"local_loss": mean_loss(replies)}


def training(config: Config) -> Program:
    """What a client of FedSR runs."""
    return replace(local_training(config), name="fedsr.train", step=client_step)


def gaussian(params: Params, features: Tensor) -> tuple[Tensor, Tensor]:
    """mu and sigma (samples, d)."""
    mean, width = dense(net(params, "gaussian"), features.flatten(1)).chunk(2, dim=1)
    return mean, F.softplus(width)


def head(model: Model, params: Params, z: Tensor) -> Tensor:
    """Outputs from representations (samples, d)."""
    return model.classify(only(params, model.shapes), z.reshape(-1, *(model.feature_shape or ())))


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """One step on CE + a_L2 |z| + a_CMI KL(N(c mu, (c sigma)^2) || N(r_mu, r_sigma^2)), one z per sample."""
    config, model = home.config, home.model

    def objective(params: Params, buffers: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tree]]:
        own = only(params, model.shapes)
        features, after = model.train_features(own, buffers, batch.x, batch.mask, batch.key)
        mean, width = gaussian(params, features)
        # dropout draws from the same key, by the numbers from 1 on
        z = mean + width * normal(fold(batch.key, -1), tuple(mean.shape), mean.dtype)
        loss = batch.mean(home.task.loss(head(model, params, z), batch.y))
        value = loss
        if config.l2_weight:
            length = (z.square().sum(1) + 1e-12).sqrt()  # the root of 0 has no slope
            value = value + config.l2_weight * batch.mean(length)
        if config.cmi_weight:
            value = value + config.cmi_weight * batch.mean(divergence(params, mean, width, batch.y))
        return value, (loss, after)

    return train_step(home, carry, batch, objective=objective)


def divergence(params: Params, mean: Tensor, width: Tensor, y: Tensor) -> Tensor:
    """KL(N(c mu, (c sigma)^2) || N(r_mu[y], r_sigma[y]^2)), summed over d: (samples,)."""
    # a product, not an index, whose gradient would be summed in another order every time on a GPU
    member = (y[:, None] == torch.arange(len(params["prior.mean"]), device=y.device)).to(mean.dtype)
    r_mean, r_width = member @ params["prior.mean"], member @ F.softplus(params["prior.width"])
    scale = params["prior.scale"]
    ratio = (scale * width / r_width).square()
    apart = ((scale * mean - r_mean) / r_width).square()
    return (ratio + apart - 1 - ratio.log()).sum(1) / 2


def client_deploy(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Tree:
    """The global model; class priors are for training."""
    return {**composed(home, shared, mine, memory), "params": shared["params"]}


def predict(home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """The logarithm of the mean probabilities over draws of the representation."""
    params, draws = deployed["params"], home.config.test_draws
    features = home.model.features(only(params, home.model.shapes), deployed["buffers"], x)
    mean, width = gaussian(params, features)
    seed = torch.full((), DRAWS, dtype=torch.int64, device=x.device)
    noise = normal(seed, (draws, mean.shape[1]), mean.dtype)
    z = mean + width * noise[:, None]  # (draws, samples, d)
    outputs: Tensor = head(home.model, params, z.flatten(0, 1)).unflatten(0, (draws, -1))
    return outputs.log_softmax(-1).logsumexp(0) - math.log(draws)


CITATION = """@inproceedings{nguyen2022fedsr,
  title={{FedSR}: A Simple and Effective Domain Generalization Method for Federated Learning},
  author={Nguyen, A. Tuan and Torr, Philip and Lim, Ser-Nam},
  booktitle={NeurIPS}, year={2022}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="FedSR",
    citation=CITATION,
    config=Config,
    init=init,
    round=round,
    means=(),
    first_memory=first_memory,
    client_deploy=client_deploy,
    predict=predict,
    module=partial(PredictorModule.of, predict),
    programs=of_participants(training),
    needs=Needs(same_model=True, class_labels=True, features="any"),
)
