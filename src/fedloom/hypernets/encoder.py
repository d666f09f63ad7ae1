# SPDX-License-Identifier: Apache-2.0
"""IT-PFL-HN's client encoder: a deep set g(D) = psi(pool of phi(x) over x in D), from samples to a descriptor.

phi is the target's two convolutions and a fully connected layer of 200 units; half of them are averaged over the batch,
of the other half the maximum is taken; psi is the rest of the target's layers, 120 and 84, with the descriptor as
output (sec. 6.3, App. C). Inputs that are not images or windows have one layer of 500 as phi and one of 500 in psi
(App. C, real-world data). ``linear`` makes psi a single layer. ``private`` is the form of sec. 7, whose sensitivity is
known: all layers belong to phi, its output is scaled to the unit sphere, and the pool is the plain mean.

Ours: phi ends with a ReLU, like every other fully connected layer of the target. The paper names none; without it the
averaged half would see no more of a client than the mean of its convolutions.

A network gives one row per sample, a deep set one per batch: so ``Encoder`` is phi, holds psi's layers besides, and
``describe`` puts the two together and leaves padding out.

Two client programs bring it: one trains it to give the client's embedding, one describes the client's data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.config import option
from fedloom.core.contract import Batch, Batches, Home, Program
from fedloom.core.contract import Model as AnyModel
from fedloom.core.optim import Optimiser
from fedloom.core.training import LocalConfig
from fedloom.core.trees import Params, Tree, tree_map
from fedloom.models.model import Model
from fedloom.models.spec import ModelSpec

KERNELS = 16


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(LocalConfig):
    """The options of an encoder: its form, its training, its privacy."""

    preset: Literal["paper", "standardised"] = option(
        "paper", "As written, or with a linear read-out, one encoder step a round and standardised descriptors (ours)."
    )
    encoder_lr: float = option(0.0, "Rate of the encoder; 0: --local-lr, or 0.3 if standardised (ours).", low=0)
    encoder_steps: int = option(0, "Encoder steps a round; 0: as many as local, or 1 if standardised (ours).", low=0)
    descriptor_epsilon: float = option(0.0, "Epsilon of a newcomer's descriptor; 0: not private (sec. 7).", low=0)
    descriptor_delta: float = option(0.01, "Delta of a newcomer's descriptor (sec. 7).", above=0, high=0.5)

    @property
    def standardised(self) -> bool:
        """Whether the preset is ours."""
        return self.preset == "standardised"

    @property
    def private(self) -> bool:
        """Whether descriptors have a known sensitivity, and newcomers add noise."""
        return self.descriptor_epsilon > 0

    def encoder_optimiser(self) -> Optimiser:
        """The local optimiser with the encoder's rate."""
        return replace(self.local_optimiser(), lr=self.encoder_lr or (0.3 if self.standardised else self.local_lr))

    def encoder_batches(self) -> Batches:
        """The training data that one ask trains the encoder on."""
        steps = self.encoder_steps or int(self.standardised)
        return Batches("train", self.batch_size, steps=steps) if steps else self.batches()


class Encoder(nn.Module):
    """phi; with ``private`` it ends on the unit sphere."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        embed_dim: int,
        linear: bool = False,
        private: bool = False,
    ) -> None:
        super().__init__()
        self.private = private
        self.convs = _convolutions(input_shape) if _is_grid(input_shape) else nn.Flatten()
        with torch.no_grad():
            features = self.convs(torch.zeros(1, *input_shape)).shape[1]
        units = _units(input_shape)
        self.units = nn.Linear(features, units)
        hidden = () if linear else (120, 84) if _is_grid(input_shape) else (500,)
        self.psi = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((units, *hidden, embed_dim)))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> (batch, units), or (batch, embed_dim) on the unit sphere."""
        x = F.relu(self.units(self.convs(x)))
        if not self.private:
            return x
        for i, layer in enumerate(self.psi):
            x = layer(F.relu(x) if i else x)
        return F.normalize(x)


@cache
def encoder_model(
    input_shape: tuple[int, ...], embed_dim: int, linear: bool, private: bool, device: torch.device, dtype: torch.dtype
) -> Model:
    """The encoder as a network that programs can bring; the same object for the same arguments."""
    options = (("embed_dim", embed_dim), ("linear", linear), ("private", private))
    outputs = embed_dim if private else _units(input_shape)
    return Model(ModelSpec(f"{__name__}:{Encoder.__name__}", options, input_shape, outputs), device, dtype)


def describe(encoder: AnyModel, params: Params, x: Tensor, mask: Tensor, private: bool) -> Tensor:
    """The descriptor of a batch: (embed_dim,)."""
    rows = encoder(params, {}, x)
    return mean(rows, mask) if private else read_out(params, pool(rows, mask))


def mean(rows: Tensor, mask: Tensor) -> Tensor:
    """Over the real samples."""
    return torch.where(mask[:, None], rows, 0).sum(0) / mask.sum().clamp(min=1)


def pool(rows: Tensor, mask: Tensor) -> Tensor:
    """Over the real samples, the mean of the first half of the units and the maximum of the other."""
    half = rows.shape[1] // 2
    highest = torch.where(mask[:, None], rows[:, half:], -torch.inf).amax(0)
    return torch.cat([mean(rows[:, :half], mask), highest])


def read_out(params: Params, pooled: Tensor) -> Tensor:
    """psi: its layers with ReLU between them."""
    for i in range(_depth(params)):
        pooled = F.linear(F.relu(pooled) if i else pooled, params[f"psi.{i}.weight"], params[f"psi.{i}.bias"])
    return pooled


def descriptor_like(params: Params) -> Tensor:
    """A tensor of the descriptor's shape: psi's last bias."""
    return params[f"psi.{_depth(params) - 1}.bias"]


def fit_program(encoder: AnyModel, batches: Batches) -> Program:
    """How a client trains the encoder: ``{"encoder"}`` shared, ``{"embedding"}`` of its own, the change as reply."""
    return Program("encoder.fit", fit_init, fit_step, fit_final, batches, fit_expects, encoder)


class Fit(NamedTuple):
    """The encoder in training, and the embedding that it is to give."""

    params: Params
    start: Params
    optimiser: Tree
    embedding: Tensor
    loss: Tensor  # () summed over steps
    steps: Tensor  # ()


def fit_expects(shared: Tree, mine: Tree) -> Tree:
    """A change for every tensor of the encoder."""
    return {"delta": shared["encoder"], "loss": torch.empty(())}


def fit_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Fit:
    """Start from the common encoder."""
    encoder, zero = shared["encoder"], torch.zeros_like(home.num_samples)
    return Fit(encoder, encoder, home.config.encoder_optimiser().init(encoder), mine["embedding"], zero, zero)


def fit_step(home: Home, shared: Tree, carry: Fit, batch: Batch) -> Fit:
    """Eq. 8: a step towards the client's embedding."""

    def objective(params: Params) -> Tensor:
        return (describe_batch(home, params, batch) - carry.embedding).square().mean()

    grads, loss = torch.func.grad_and_value(objective)(carry.params)
    params, state = home.config.encoder_optimiser().update(carry.params, grads, carry.optimiser)
    return carry._replace(params=params, optimiser=state, loss=carry.loss + loss, steps=carry.steps + 1)


def fit_final(home: Home, shared: Tree, carry: Fit, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the change of the encoder."""
    change = tree_map(torch.sub, carry.params, carry.start)
    return {"delta": change, "loss": carry.loss / carry.steps.clamp(min=1)}, memory


def describe_program(encoder: AnyModel, batch_size: int) -> Program:
    """How a client describes its data: ``{"encoder"}`` shared, ``{"descriptor"}`` as reply."""
    # shuffled, as clients may hold their samples class by class
    batches = Batches("train", batch_size, epochs=1)
    return Program("encoder.describe", describe_init, describe_step, describe_final, batches, describe_expects, encoder)


class Described(NamedTuple):
    """The sum of descriptors so far, and of their weights."""

    total: Tensor  # (embed_dim,)
    weight: Tensor  # ()


def describe_expects(shared: Tree, mine: Tree) -> Tree:
    """One descriptor."""
    return {"descriptor": descriptor_like(shared["encoder"])}


def describe_init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Described:
    """Nothing yet."""
    return Described(torch.zeros_like(descriptor_like(shared["encoder"])), torch.zeros_like(home.num_samples))


def describe_step(home: Home, shared: Tree, carry: Described, batch: Batch) -> Described:
    """Every batch counts once; where the sensitivity must be known, every sample."""
    weight = batch.mask.sum() if home.config.private else 1
    return Described(carry.total + weight * describe_batch(home, shared["encoder"], batch), carry.weight + weight)


def describe_final(home: Home, shared: Tree, carry: Described, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the mean."""
    return {"descriptor": carry.total / carry.weight}, memory


def describe_batch(home: Home, params: Params, batch: Batch) -> Tensor:
    """g(batch) of the encoder that the program brought."""
    assert home.guest is not None
    return describe(home.guest, params, batch.x, batch.mask, home.config.private)


def _depth(params: Params) -> int:
    return sum(name.startswith("psi.") and name.endswith(".bias") for name in params)


def _is_grid(shape: tuple[int, ...]) -> bool:
    """An image (C, H, W) or a time window (C, L) that two convolutions and pools leave something of."""
    return len(shape) in (2, 3) and min(shape[1:]) >= 4


def _units(shape: tuple[int, ...]) -> int:
    return 200 if _is_grid(shape) else 500


def _convolutions(shape: tuple[int, ...]) -> nn.Module:
    """Those of ``zoo.lenet``: 5x5, 16 and 32 channels, each with a pool and ReLU; padded where a side is short."""
    padding = 2 if min(shape[1:]) < 16 else 0
    conv, halve = (nn.Conv2d, nn.MaxPool2d) if len(shape) == 3 else (nn.Conv1d, nn.MaxPool1d)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((shape[0], KERNELS, 2 * KERNELS)):
        layers += [conv(inputs, outputs, 5, padding=padding), halve(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten())
