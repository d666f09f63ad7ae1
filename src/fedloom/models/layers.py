# SPDX-License-Identifier: Apache-2.0
"""Layers of a model named in an option: which a client keeps, which it cannot train.

``conv1+head`` names the layer ``conv1`` and the output layer, ``body`` all but the output layer, ``*bn*`` all
parameters with bn in their names, ``none`` nothing. An option gives several such choices, of which each client has one;
``resnet*/*bn*`` is a choice for clients of these networks only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from fedloom.core.config import flag
from fedloom.core.contract import Batch, Home, Model, Seeds, Setup
from fedloom.core.errors import ConfigError
from fedloom.core.training import Training, train_step
from fedloom.core.trees import ClientId, Params, Tree
from fedloom.core.vectors import from_vector

Shapes = Mapping[str, tuple[int, ...]]


def selected(model: Model, *choices: str) -> set[str]:
    """The parameters that any of ``choices`` names."""
    layers = [layer for choice in choices for layer in choice.split("+")]
    parts = {"head": set(model.head), "body": set(model.shapes) - model.head}
    return {name for part, names in parts.items() if part in layers for name in names} | {
        name for name in model.shapes for layer in layers if name.startswith(f"{layer}.") or fnmatchcase(name, layer)
    }


def choices_of(model: Model, choices: Sequence[str]) -> list[str]:
    """The choices that are for this model, ``none`` if there are only others."""
    own = [layers for network, _, layers in (choice.rpartition("/") for choice in choices) if _is_for(network, model)]
    return own or ["none"] * bool(choices)


def _is_for(network: str, model: Model) -> bool:
    return not network or any(fnmatchcase(str(model.spec), pattern) for pattern in (network, f"{network}:*"))


def rest(model: Model, choices: Sequence[str]) -> list[Shapes]:
    """The model without what each of its choices names; the whole model where there are none."""
    kept = [selected(model, choice) for choice in choices_of(model, choices)] or [set()]
    return [{name: shape for name, shape in model.shapes.items() if name not in names} for names in kept]


def size_of(shapes: Shapes) -> int:
    """The number of parameters."""
    return sum(math.prod(shape) for shape in shapes.values())


def check_named(option: str, choices: Sequence[str], models: Iterable[Model]) -> None:
    """Refuse layers that no model has, and networks that no client has."""
    models = list(models) if choices else []
    for network, _, layers in (choice.rpartition("/") for choice in choices):
        meant = [model for model in models if _is_for(network, model)]
        if not meant:
            known = sorted({str(model.spec) for model in models})
            raise ConfigError(f"{flag(option)} names the network {network!r}; the clients have {', '.join(known)}.")
        for layer in layers.split("+"):
            if layer != "none" and not any(selected(model, layer) for model in meant):
                known = sorted({name.rpartition(".")[0] or name for model in meant for name in model.shapes})
                raise ConfigError(
                    f"{flag(option)} names {layer!r}, which no model has. Choose from head, body, none, "
                    f"{', '.join(known)}."
                )


def check_told(choices: Sequence[str], models: Iterable[Model]) -> None:
    """Refuse choices to keep layers that clients could not tell by the size of what is left.

    Something must be left of every model, and no two choices may leave different layers of one size.
    """
    for model in models if choices else ():
        left = rest(model, choices)
        if not all(left):
            raise ConfigError(f"--keep-local leaves nothing of {model.spec}. Name fewer layers, or another network.")
        for (one, a), (other, b) in combinations(zip(choices_of(model, choices), left), 2):
            if size_of(a) == size_of(b) and a != b:
                raise ConfigError(
                    f"--keep-local {one} and {other} leave as many parameters of {model.spec}, {size_of(a)}, by which "
                    "a client tells what is its own. Name other layers, or another network."
                )


def sizes_told(setup: Setup[Any], clients: Sequence[ClientId]) -> dict[ClientId, int]:
    """K_i, all that a client tells of its model. It does not count what it keeps."""
    choices, models = setup.config.keep_local, setup.models
    if not choices:
        return {client: models[client].size for client in clients}
    turn = {client: i for alike in setup.by_model(list(models)).values() for i, client in enumerate(alike)}
    left = {client: rest(models[client], choices) for client in clients}
    return {client: size_of(own[turn[client] % len(own)]) for client, own in left.items()}


def first_layers(model: Model, config: Any, seeds: Seeds) -> dict[str, Any]:
    """What a client remembers of its layers: ``own``, those that it keeps, and which of them it ``moves``."""
    memory: dict[str, Any] = {}
    keep_local, frozen = choices_of(model, config.keep_local), choices_of(model, config.frozen)
    if keep_local:
        kept = selected(model, *keep_local)
        memory["own"] = {name: value for name, value in model.init(seeds.own).items() if name in kept}
    if frozen:
        some, drawn = selected(model, *frozen), selected(model, frozen[seeds.own % len(frozen)])
        own = model.init(seeds.own)
        memory["moves"] = {name: torch.full_like(own[name].sum(), float(name not in drawn)) for name in sorted(some)}
    return memory


def not_woven(layers: Params, woven: Params) -> dict[str, Tensor]:
    """The client's own among ``layers``: those that it keeps; the server weaves the rest."""
    return {name: value for name, value in layers.items() if name not in woven}


def keep_layers(memory: Tree, own: Params) -> dict[str, Any]:
    """``memory`` with the client's own layers as they are now, if it keeps any."""
    return {**memory, "own": {**memory["own"], **own}} if "own" in memory else dict(memory)


def shaped(model: Model, keep_local: Sequence[str], vector: Tensor) -> dict[str, Tensor]:
    """The woven parameters; which layers they are follows from their number."""
    return from_vector(vector, next(s for s in rest(model, keep_local) if size_of(s) == len(vector)))


def train_unfrozen(home: Home, carry: Training, batch: Batch, moves: Params) -> Training:
    """One step of the layers that move, ``moves`` being 1 or missing; the others stay, whatever momentum would do."""
    after = train_step(home, carry, batch, correction=partial(_without_frozen, moves=moves))
    before, trained = carry.params, after.params
    return after._replace(
        params={n: torch.where(moves[n] > 0, p, before[n]) if n in moves else p for n, p in trained.items()}
    )


def _without_frozen(grads: Params, moves: Params) -> dict[str, Tensor]:
    """Gradients of zero for layers that do not move."""
    return {name: grad * moves[name] if name in moves else grad for name, grad in grads.items()}
