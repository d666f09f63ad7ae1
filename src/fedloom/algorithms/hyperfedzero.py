# SPDX-License-Identifier: Apache-2.0
"""HyperFedZero: a small loom on every client weaves a classifier for every sample.

Zhou, Lv, Tian, Si, Ye, Lv: Deploying models to non-participating clients in federated learning without fine-tuning: a
hypernetwork-based approach (2025).

An extractor maps a sample to e, P numbers that sum to 1; a loom weaves the parameters of the classifier from e, chunk
by chunk; the classifier answers. Extractor and loom are all that is trained, and they are averaged as in FedAvg. In
training, noise of a learned width is added before the softmax, and two penalties keep the e apart: a batch should use
all P dimensions evenly, a sample few of them. A newcomer gets the same networks and needs no labels and no training.

Symbols: f: ``extractor``, noisy: ``noise``, h: ``loom``, c: the client's target network, P: ``embed_dim``, alpha:
``balance``, beta: ``entropy``, K: ``local_steps``, eta: ``local_lr``.

Sent down: extractor, noise network and loom (with ``condition=input`` a classifier in place of the loom).
Sent up: their change, the number of samples, the training loss without the penalties. Evaluations as in FedAvg.
Kept by the client: nothing that counts; its model's constants.
Kept by the server: extractor, noise network and loom.
Reduces to: FedAvg on one reparametrised model with ``control=constant``.
Differs from the paper: nothing, but it leaves much open. f and noisy are linear, a chunk's embedding has 32 numbers and
joins e at the input, BatchNorm is refused. How eq. 4 is read, and all else: docs/methods/hyperfedzero.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.algorithms import fedavg
from fedloom.core.aggregate import mean_loss, weighted_mean
from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Cohort, Diagnostics, Home, Model, Needs, Program, Sent, Setup
from fedloom.core.errors import ConfigError
from fedloom.core.random import fold, normal, seed_of
from fedloom.core.training import LocalConfig, Training
from fedloom.core.trees import ClientId, Params, PerClient, Tree, tree_map
from fedloom.core.vectors import from_vector
from fedloom.looms.chunked import ChunkedLoom, dense, dense_init, dense_size, matched
from fedloom.models.load import PredictorModule
from fedloom.models.per_sample import append, append_init, classify, gradient_by_slices, net, slices
from fedloom.programs.allowed import of_participants
from fedloom.programs.local import local_training


@dataclass(frozen=True, kw_only=True)
class Config(LocalConfig):
    """HyperFedZero's options."""

    local_steps: int = option(5, "Mini-batch steps per client and round (sec. 5: K = 5).", low=0)
    batch_size: int = option(16, "Samples per step (sec. 5: 800 over all clients, of which there are 50).", low=1)
    local_lr: float = option(1e-3, "Local learning rate (sec. 5; other methods and data want other rates).", low=0)
    momentum: float = option(0.0, "Local momentum, for sgd (Algorithm 1 has none).", low=0, high=1)
    weight_decay: float = option(0.0, "Local weight decay (Algorithm 1 has none).", low=0)
    clip: float = option(0.0, "Largest norm of a local gradient; 0: no clipping (Algorithm 1 has none).", low=0)
    embed_dim: int = option(16, "Size of a sample's embedding, P (sec. 5).", low=2)
    balance: float = option(1.0, "Weight of the balancing penalty, alpha (sec. 5).", low=0)
    entropy: float = option(1.0, "Weight of the entropy penalty, beta (sec. 5).", low=0)
    hidden: tuple[int, ...] = option((300, 300), "Hidden layers of the loom (Table 3d).", low=1)
    chunk_size: int = option(576, "Parameters woven at a time (Table 3e).", low=1)
    chunk_dim: int = option(32, "Size of a chunk's embedding (fits the parameter counts of Table 3).", low=1)
    extractor_hidden: int = option(0, "Hidden units of f and of the noise network; 0: both are linear.", low=0)
    size_match: bool = option(
        False, "Choose the loom's width so that f and h have the classifier's number of parameters (sec. 4.3)."
    )
    condition: Literal["parameters", "input"] = option(
        "parameters", "What e acts on: all parameters (Opt. 2), or the input of one shared classifier (Opt. 1)."
    )
    control: Literal["none", "constant", "mean"] = option(
        "none", "A control: e is the same for everybody, or is replaced by its mean over the batch."
    )
    samples_at_once: int = option(16, "Classifiers that exist at a time, per client: bounds the memory.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size_match and self.condition == "input":
            raise ConfigError("--size-match is for the loom, which --condition input has none of. Leave one out.")


class State(NamedTuple):
    """Extractor, noise network and loom, side by side."""

    params: Mapping[str, Tensor]


def init(setup: Setup[Config]) -> State:
    """Every layer as ``nn.Linear`` initialises it, chunk embeddings from N(0, 1)."""
    config, model, place = setup.config, setup.models[setup.clients[0]], (setup.device, setup.dtype)
    seeds = {name: seed_of(setup.seed, name) for name in ("extractor", "noise", "loom", "global model", "append")}
    nets = {name: dense_init(widths(config, model), seeds[name], *place) for name in ("extractor", "noise")}
    if config.condition == "parameters":
        nets["loom"] = loom_of(config, model).init(seeds["loom"], *place)
    else:
        nets["classifier"] = model.init(seeds["global model"])
        nets["append"] = append_init(model, config.embed_dim, seeds["append"], *place)
    return State({f"{name}.{leaf}": value for name, net in nets.items() for leaf, value in net.items()})


def widths(config: Config, model: Model) -> tuple[int, ...]:
    """Of the extractor, and of the noise network."""
    inputs = math.prod(model.input_shape)
    return (inputs, *([config.extractor_hidden] if config.extractor_hidden else []), config.embed_dim)


def loom_of(config: Config, model: Model) -> ChunkedLoom:
    """The loom for a classifier; with ``size_match``, |f| + |h| is about |c|."""
    loom = ChunkedLoom(config.embed_dim, model.size, config.hidden, config.chunk_size, config.chunk_dim)
    return matched(loom, 2 * dense_size(widths(config, model))) if config.size_match else loom


def send(setup: Setup[Any], state: State, clients: Sequence[ClientId]) -> Sent:
    """The same networks for everybody."""
    return Sent({"params": state.params}, PerClient.empty(clients))


def round(setup: Setup[Config], state: State, cohort: Cohort, ask: Ask) -> tuple[State, Diagnostics]:
    """Algorithm 1: FedAvg on extractor and loom."""
    replies = ask(program(setup.config), *send(setup, state, cohort.clients))
    params = tree_map(torch.add, state.params, weighted_mean(replies, "delta"))
    return State(params), {"local_loss": mean_loss(replies)}


def program(config: Config) -> Program:
    """What a client of HyperFedZero runs: FedAvg's program with another step."""
    return replace(local_training(config), name="hyperfedzero.train", step=client_step)


def client_step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    """One step on eq. 4. Its gradient is a sum over samples and is taken slice by slice, in bounded memory."""
    config, count = home.config, len(batch.x)
    z = normal(fold(batch.key, 1), (count, config.embed_dim), batch.x.dtype)
    keys = fold(fold(batch.key, 2), torch.arange(count, device=batch.x.device))  # of dropout, one per sample
    share = batch.mask.to(batch.x.dtype) / batch.mask.sum().clamp(min=1)  # of each sample in a mean

    def objective(params: Params, part: slice) -> tuple[Tensor, Tensor]:
        log_e = embed(params, batch.x, z)
        e = controlled(config, log_e.exp(), share)
        outputs = answer(home, params, carry.buffers, e[part], batch.x[part], keys[part])
        loss = (share[part] * home.task.loss(outputs, batch.y[part])).sum()
        return (loss if part.start else loss + penalty(config, log_e, batch)), loss

    parts = slices(count, config.samples_at_once)
    grads, loss = gradient_by_slices(objective, carry.params, parts, carry.loss)
    params, state = config.local_optimiser().update(carry.params, grads, carry.optimiser)
    return carry._replace(params=params, optimiser=state, loss=loss, steps=carry.steps + 1)


def embed(params: Params, x: Tensor, z: Tensor | None = None) -> Tensor:
    """Eq. 3: log e, of shape (samples, P); without ``z`` no noise."""
    x = x.flatten(1)
    scores = dense(net(params, "extractor"), x)
    if z is not None:
        scores = scores + z * F.softplus(dense(net(params, "noise"), x))
    return F.log_softmax(scores, dim=1)


def penalty(config: Config, log_e: Tensor, batch: Batch) -> Tensor:
    """The last two terms of eq. 4, over the real samples."""
    e = log_e.exp()
    use = torch.where(batch.mask[:, None], e, 0).sum(0)  # (P,) how much the batch uses each dimension
    spread: Tensor = config.balance * use.var() / use.mean()
    return spread + config.entropy * batch.mean((-e * log_e).mean(1))


def controlled(config: Config, e: Tensor, share: Tensor) -> Tensor:
    """What the classifier is conditioned on: e, or a control that knows nothing of the sample."""
    if config.control == "constant":
        return torch.full_like(e, 1 / config.embed_dim)
    return (share @ e).expand_as(e) if config.control == "mean" else e


def answer(home: Home, params: Params, buffers: Tree, e: Tensor, x: Tensor, keys: Tensor | None = None) -> Tensor:
    """Eq. 6: the outputs of every sample's own classifier (Opt. 2), or of one that is told e (Opt. 1)."""
    if home.config.condition == "input":
        classifier = net(params, "classifier")
        told = append(home.model, classifier, net(params, "append"), e)
        return classify(home.model, classifier, told, buffers, x, keys)
    vectors = loom_of(home.config, home.model)(net(params, "loom"), e)  # (samples, |c|)
    woven = torch.vmap(partial(from_vector, shapes=home.model.shapes))(vectors)
    return classify(home.model, {}, woven, buffers, x, keys)


def predict(home: Home, deployed: Tree, x: Tensor) -> Tensor:
    """Eq. 7 at z = 0."""
    params, config = deployed["params"], home.config
    # for control=mean: padding repeats the first sample of a batch, and must not count
    first = (x == x[:1]).flatten(1).all(1)
    weight = torch.where(first, 1 / first.to(x.dtype).sum(), 1.0)
    e = controlled(config, embed(params, x).exp(), weight / weight.sum())
    # a graph for batches of any size cannot know how many parts there are
    parts = [slice(None)] if torch.compiler.is_exporting() else slices(len(x), config.samples_at_once)
    return torch.cat([answer(home, params, deployed["buffers"], e[part], x[part]) for part in parts])


def admit(setup: Setup[Any], state: State, newcomers: Cohort, ask: Ask) -> Sent:
    """A newcomer gets what everybody has."""
    return send(setup, state, newcomers.clients)


CITATION = """@article{zhou2025hyperfedzero,
  title={Deploying Models to Non-participating Clients in Federated Learning without Fine-tuning:
         A Hypernetwork-based Approach},
  author={Zhou, Yuhao and Lv, Jindi and Tian, Yuxin and Si, Dan and Ye, Qing and Lv, Jiancheng},
  year={2025}}"""

ALGORITHM = replace(
    fedavg.ALGORITHM,
    name="HyperFedZero",
    family="loom",
    citation=CITATION,
    config=Config,
    state=State,
    init=init,
    send=send,
    round=round,
    averaged=("params",),
    predict=predict,
    module=partial(PredictorModule.of, predict),
    programs=of_participants(program),
    admit=admit,
    cohort=50,  # sec. 5: all of 10 or 50 clients take part
    needs=Needs(same_model=True, no_batchnorm=True, numbers=True),
)
