# SPDX-License-Identifier: Apache-2.0
"""IT-PFL-HN's client encoder: a deep set g(D) = psi(pool of phi(x) over x in D), from samples to a descriptor.

phi is the target's two convolutions and a fully connected layer of 200 units; half of them are averaged over the batch,
of the other half the maximum is taken; psi is the rest of the target's layers, 120 and 84, with the descriptor as
output (sec. 6.3, App. C). Inputs that are not images or windows have one layer of 500 as phi and one of 500 in psi
(App. C, real-world data). ``linear`` makes psi a single layer. ``private`` is the form of sec. 7, whose sensitivity is
known: all layers belong to phi, its output is scaled to the unit sphere, and the pool is the plain mean.

Ours: phi ends with a ReLU, like every other fully connected layer of the target. The paper names none; without it the
averaged half would see no more of a client than the mean of its convolutions.

Everything is a function of the encoder's parameters: a client needs nothing but the tensors that it is sent. Two
client programs use it: one trains it to give the client's embedding, one describes the client's data, with noise if
the client wants its descriptor private.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.contract import Batch, Batches, Home, Noise, Program
from fedloom.core.trees import Params, Tree, tree_map
from fedloom.privacy.gaussian import perturb

KERNELS = 16


@dataclass(frozen=True)
class Encoder:
    """The encoder's structure; its parameters are a tree that ``init`` makes."""

    input_shape: tuple[int, ...]
    embed_dim: int
    linear: bool = False
    widths: tuple[int, ...] = ()
    """Of the layers after the convolutions; without any, those of IT-PFL-HN."""

    def init(self, seed: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every layer as torch initialises it."""
        units, *hidden = self.widths or ((200, 120, 84) if _is_grid(self.input_shape) else (500, 500))
        made = nn.ModuleDict()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            made["convs"] = _convolutions(self.input_shape)
            with torch.no_grad():
                features = made["convs"](torch.zeros(1, *self.input_shape)).shape[1]
            made["units"] = nn.Linear(features, units)
            widths = (units, *(() if self.linear else hidden), self.embed_dim)
            made["psi"] = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        return {name: value.detach().to(device, dtype) for name, value in made.named_parameters()}


def rows_of(params: Params, x: Tensor, private: bool) -> Tensor:
    """phi: (batch, ...) -> (batch, units); if ``private``, psi too: (batch, embed_dim) on the unit sphere."""
    x = F.relu(F.linear(_convolved(params, x), params["units.weight"], params["units.bias"]))
    if not private:
        return x
    rows = F.normalize(read_out(params, x))
    # a row that is not finite would show through any noise on the mean
    return torch.where(rows.isfinite().all(1, keepdim=True), rows, 0)


def describe(params: Params, x: Tensor, mask: Tensor, private: bool) -> Tensor:
    """The descriptor of a batch: (embed_dim,)."""
    rows = rows_of(params, x, private)
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


def fit_program(batches: Batches) -> Program:
    """How a client trains the encoder: ``{"encoder"}`` shared, ``{"embedding"}`` of its own, the change as reply."""
    return Program("encoder.fit", fit_init, fit_step, fit_final, batches, fit_expects)


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


def describe_program(batch_size: int, noise: Noise | None = None) -> Program:
    """How a client describes its data: ``{"encoder"}`` shared, ``{"descriptor"}`` as reply, perhaps with noise."""
    # shuffled, as clients may hold their samples class by class
    batches = Batches("train", batch_size, epochs=1)
    plain = Program("encoder.describe", describe_init, describe_step, describe_final, batches, describe_expects)
    if noise is None:
        return plain
    return replace(plain, name="encoder.describe_privately", final=private_final, noise=noise, of_data_alone=True)


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


def private_final(home: Home, shared: Tree, carry: Described, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the mean and noise. IT-PFL-HN, lemma 7.1: its sensitivity is 2 L B / |D|, here with L = B = 1."""
    epsilon, chance = home.config.descriptor_epsilon, home.config.descriptor_delta
    clean, sensitivity = carry.total / carry.weight, 2 / carry.weight
    return {"descriptor": perturb(clean, epsilon, chance, sensitivity, home.key)}, memory


def describe_batch(home: Home, params: Params, batch: Batch) -> Tensor:
    """g(batch)."""
    return describe(params, batch.x, batch.mask, home.config.private)


def _depth(params: Params) -> int:
    return sum(name.startswith("psi.") and name.endswith(".bias") for name in params)


def _is_grid(shape: tuple[int, ...]) -> bool:
    """An image (C, H, W) or a time window (C, L) that two convolutions and pools leave something of."""
    return len(shape) in (2, 3) and min(shape[1:]) >= 4


def _convolutions(shape: tuple[int, ...]) -> nn.Module:
    """Those of ``zoo.lenet``: 5x5, 16 and 32 channels, each with a pool and ReLU; padded where a side is short."""
    if not _is_grid(shape):
        return nn.Flatten()
    conv, halve = (nn.Conv2d, nn.MaxPool2d) if len(shape) == 3 else (nn.Conv1d, nn.MaxPool1d)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((shape[0], KERNELS, 2 * KERNELS)):
        layers += [conv(inputs, outputs, 5, padding=_padding(shape[1:])), halve(2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten())


def _padding(sides: Sequence[int]) -> int:
    return 2 if min(sides) < 16 else 0


def _convolved(params: Params, x: Tensor) -> Tensor:
    """The convolutions, where the encoder has some: (batch, ...) -> (batch, features)."""
    sides = x.shape[2:]
    for layer in ("convs.0", "convs.3") if "convs.0.weight" in params else ():
        weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"]
        if weight.dim() == 4:
            x = F.max_pool2d(F.conv2d(x, weight, bias, padding=_padding(sides)), 2)
        else:
            x = F.max_pool1d(F.conv1d(x, weight, bias, padding=_padding(sides)), 2)
        x = F.relu(x)
    return x.flatten(1)
