# SPDX-License-Identifier: Apache-2.0
"""MH-pFedHN's loom: a trunk for all, and heads that weave a model in chunks, told nothing of it but its size.

A model of K parameters comes from tau = ceil(K / N) embedding vectors. The trunk takes each of them to its features,
the head's t-th linear layer takes the t-th features to N numbers, and the chunks side by side are cut to K.

A loom's parameters are kept in *pieces*, small trees by name: the trunk, each head, and each client's vectors. What a
reply went through is some of the pieces, and only those have a gradient. Heads may be sharded, by their layers, which
are next to all of a loom: then each layer is asked for where it lives (``core.sharded``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom.core.optim import Optimiser
from fedloom.core.random import seed_of, stream
from fedloom.core.sharded import Each, Sharded, Shards, made, ranges, through
from fedloom.core.trees import ClientId, Params, PerClient, Tree, squared_norm

Pieces = Mapping[str, Params]

TRUNK = "trunk"
EMBED_STD = 0.002  # of an embedding's initial values, in the authors' code


class Place(NamedTuple):
    """Where a model comes from: the pieces that hold its vectors and its head, and its size."""

    vectors: str
    head: str  # "": the trunk itself ends in N numbers
    tau: int  # the number of vectors
    channels: int  # linear layers in the head: tau, or 1 for a head that all positions share
    size: int  # K


@dataclass(frozen=True)
class MultiHeadLoom:
    """The loom's structure."""

    chunk: int = 3072  # N
    embed_dim: int = 64
    hidden: int = 128
    layers: int = 3
    headless: bool = False

    def chunks(self, size: int) -> int:
        """tau: how many chunks make ``size`` parameters."""
        return -(-size // self.chunk)

    def grow(
        self,
        pieces: Pieces,
        places: Iterable[Place],
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        shards: Shards | None = None,
    ) -> dict[str, Params]:
        """``pieces`` and what ``places`` need besides, each piece drawn from a stream of its own name.

        Heads with a layer for each of ``shards`` are drawn there: the same numbers.
        """
        grown = dict(pieces)
        if TRUNK not in grown:
            widths = [self.embed_dim, *[self.hidden] * self.layers]
            if self.headless:
                widths[-1] = self.chunk
            drawn = torch.Generator().manual_seed(seed_of(seed, "loom", TRUNK))
            grown[TRUNK] = {
                f"{i}.{part}": value.to(device, dtype)
                for i, (inputs, outputs) in enumerate(pairwise(widths))
                for part, value in _linear(drawn, (), inputs, outputs).items()
            }
        for place in places:
            if place.head and place.head not in grown:
                shape = place.channels, self.hidden, self.chunk
                grown[place.head] = _head(seed_of(seed, "loom", place.head), shape, device, dtype, shards)
            if place.vectors not in grown:
                values = stream(seed, "embeddings", place.vectors).standard_normal((place.tau, self.embed_dim))
                grown[place.vectors] = {"v": torch.as_tensor(EMBED_STD * values).to(device, dtype)}
        return grown

    def __call__(self, pieces: Pieces, places: Sequence[Place]) -> Tensor:
        """The models of places that are alike: (models, K)."""
        trunk, first = pieces[TRUNK], places[0]
        x = torch.stack([pieces[place.vectors]["v"] for place in places])  # (models, tau, embed_dim)
        for i in range(self.layers):
            x = F.linear(x, trunk[f"{i}.weight"], trunk[f"{i}.bias"])
            if not (self.headless and i == self.layers - 1):
                x = F.relu(x)
        if first.head:
            weight, bias = pieces[first.head]["weight"], pieces[first.head]["bias"]
            if isinstance(weight, Sharded) and isinstance(bias, Sharded):
                x = through(_layers, x, weight, bias, cut=True)
            else:
                x = _layers(x, weight, bias)
        return x.reshape(len(places), -1)[:, : first.size]


def _layers(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer for each position, or one for all: (models, tau, hidden) -> (models, tau, N)."""
    # position by position: (tau, models, hidden) times (tau, hidden, N)
    return (x.transpose(0, 1) @ weight.transpose(1, 2) + bias[:, None]).transpose(0, 1)


def _head(
    seed: int, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype, shards: Shards | None
) -> dict[str, Tensor]:
    channels, inputs, outputs = shape
    if shards is None or channels < shards.number:
        layers = _linear(torch.Generator().manual_seed(seed), (channels,), inputs, outputs)
        return {part: value.to(device, dtype) for part, value in layers.items()}
    rows = Each(ranges(channels, shards.number))
    shapes = [(channels, outputs, inputs), (channels, outputs)]
    weight, bias = made(shards, shapes, dtype, device, _some_layers, seed, *shape, rows, dtype)
    return {"weight": weight, "bias": bias}


def _some_layers(
    seed: int, channels: int, inputs: int, outputs: int, rows: range, dtype: torch.dtype
) -> tuple[list[Tensor], None]:
    """Some of a head's layers, drawn as if all were, one after another."""
    drawn = torch.Generator().manual_seed(seed)
    found = []
    for shape in ((outputs, inputs), (outputs,)):
        own = torch.empty(len(rows), *shape, dtype=dtype)
        for channel in range(channels):
            layer = _uniform(drawn, shape, inputs)
            if channel in rows:
                own[channel - rows.start] = layer
        found.append(own)
    return found, None


def _linear(drawn: torch.Generator, channels: tuple[int, ...], inputs: int, outputs: int) -> dict[str, Tensor]:
    """Linear layers as ``nn.Linear`` initialises them: uniform within 1 / sqrt(inputs)."""
    shapes = {"weight": (*channels, outputs, inputs), "bias": (*channels, outputs)}
    return {part: _uniform(drawn, shape, inputs) for part, shape in shapes.items()}


def _uniform(drawn: torch.Generator, shape: tuple[int, ...], inputs: int) -> Tensor:
    bound = 1 / math.sqrt(inputs)
    return torch.rand(shape, generator=drawn) * 2 * bound - bound


def alike(places: Mapping[ClientId, Place]) -> list[list[ClientId]]:
    """The clients whose models come out of one head and have one size."""
    found: dict[Place, list[ClientId]] = {}
    for client, place in places.items():
        found.setdefault(place._replace(vectors=""), []).append(client)
    return list(found.values())


def weave(loom: MultiHeadLoom, pieces: Pieces, places: Mapping[ClientId, Place]) -> PerClient:
    """Every client's model, as a vector: the server knows no shapes."""
    with torch.no_grad():
        return PerClient((members, {"vector": loom(pieces, [places[m] for m in members])}) for members in alike(places))


def pull_back(
    loom: MultiHeadLoom,
    pieces: Pieces,
    places: Mapping[ClientId, Place],
    replies: PerClient,
    change: Callable[[Tree, int], Tensor],
    trained: Callable[[str], bool] = lambda piece: True,
) -> dict[str, dict[str, Tensor]]:
    """The mean pseudo-gradient of ``replies`` as gradients of the pieces that their models came from.

    ``change(reply, K)`` reads the (clients, K) changes out of replies. The forward pass is done anew. Pieces that are
    not ``trained`` are constants.
    """
    asked = {client: places[client] for client in replies}
    used = {TRUNK, *(p.head for p in asked.values() if p.head), *(p.vectors for p in asked.values())}
    leaves = {
        piece: {name: value.detach().requires_grad_(trained(piece)) for name, value in pieces[piece].items()}
        for piece in pieces
        if piece in used
    }
    woven, pseudo_grads = [], []
    for group, _ in replies.groups:
        # replies of one shape can come from models of several heads
        for members in alike({client: asked[client] for client in group}):
            size = asked[members[0]].size
            woven.append(loom(leaves, [asked[m] for m in members]))
            pseudo_grads.append(-change(replies.pick(members), size) / len(replies))
    wanted = [(piece, name) for piece in leaves if trained(piece) for name in leaves[piece]]
    found = torch.autograd.grad(
        woven, [leaves[piece][name] for piece, name in wanted], pseudo_grads, materialize_grads=True, allow_unused=True
    )
    grads: dict[str, dict[str, Tensor]] = {}
    for (piece, name), grad in zip(wanted, found):
        grads.setdefault(piece, {})[name] = grad
    return grads


def adam_states(pieces: Pieces) -> dict[str, Tree]:
    """Adam's state for each piece, before its first step."""
    return {piece: Optimiser("adam").init(params) for piece, params in pieces.items()}


def adam_step(
    pieces: Pieces, states: Mapping[str, Tree], grads: Pieces, lr: float, clip: float
) -> tuple[dict[str, Params], dict[str, Tree]]:
    """One step of Adam on the pieces that have gradients, clipped together; the others rest."""
    norm = squared_norm(grads).sqrt()
    scale = (clip / (norm + 1e-6)).clamp(max=1.0) if clip else torch.ones_like(norm)
    stepped, moved = dict(pieces), dict(states)
    for piece, grad in grads.items():
        before = states[piece]
        scaled = {name: value * scale for name, value in grad.items()}
        after = Optimiser("adam", lr).update(pieces[piece], scaled, before)
        # a change of nothing is no step
        stepped[piece], moved[piece] = _either(norm > 0, after, (pieces[piece], before))
    return stepped, moved


def _either(which: Tensor, one: Any, other: Any) -> Any:
    """One of two trees alike."""
    return pytree.tree_map(lambda a, b: torch.where(which, a, b), one, other)
