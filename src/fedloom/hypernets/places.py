# SPDX-License-Identifier: Apache-2.0
"""Where models come from: the vectors and the head of a multi-head loom that are a client's, or the global model's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, cast

import torch

from fedloom.core.contract import Setup
from fedloom.core.random import stream
from fedloom.core.trees import ClientId, Params
from fedloom.hypernets.layers import check_named, check_told, sizes_told
from fedloom.hypernets.multi_head import Place
from fedloom.models.model import Model
from fedloom.models.spec import ModelSpec, parse

GLOBAL = "global"


def places_of(setup: Setup[Any], clients: Sequence[ClientId]) -> dict[ClientId, Place]:
    """Where each client's model comes from; a client that is not in the roster is a newcomer."""
    sizes = sizes_told(setup, clients)
    return {
        client: setup.config.place(
            f"vectors.{setup.rows([client])[0]}" if client in setup else f"newcomer.{client}",
            setup.models[client],
            sizes[client],
        )
        for client in clients
    }


def first_pieces(setup: Setup[Any], places: Iterable[Place]) -> dict[str, Params]:
    """A loom with a piece for whatever ``places`` need, if clients can keep and freeze what the options say."""
    models = list({model.spec: model for model in setup.models.values()}.values())  # of newcomers too
    check_named("keep_local", setup.config.keep_local, models)
    check_named("frozen", setup.config.frozen, models)
    check_told(setup.config.keep_local, models)
    pieces: dict[str, Params] = setup.config.loom().grow({}, places, setup.seed, setup.device, setup.dtype)
    return pieces


def global_place(setup: Setup[Any]) -> Place:
    """The global model has vectors of its own and the head of clients with as many."""
    network = global_network(setup)
    place: Place = setup.config.place(f"vectors.{GLOBAL}", network, network.size)
    return place


def global_network(setup: Setup[Any]) -> Model:
    """The network of the global model: the smallest client's, or the one that the options name."""
    models = [setup.models[client] for client in setup.clients]
    if not setup.config.global_model:
        return cast(Model, min(models, key=lambda model: model.size))
    like = cast(ModelSpec, models[0].spec)
    spec = parse(setup.config.global_model, like.input_shape, like.num_outputs)
    return _network_of(spec, setup.device, setup.dtype)


@cache  # one object for all rounds: it is part of a program, and equal programs share a recorded graph
def _network_of(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Model:
    return Model(spec, device, dtype)


def deploying(setup: Setup[Any]) -> set[ClientId]:
    """The clients that can run a second model, the global one: ``global_share`` of them, one at least; 0: none."""
    order, share = stream(setup.seed, "global model").permutation(len(setup.clients)), setup.config.global_share
    number = max(1, int(share * len(order) + 0.5)) if share else 0
    return {setup.clients[row] for row in order[:number]}
