# SPDX-License-Identifier: Apache-2.0
"""Where models come from: the vectors and the head of a multi-head loom that are a client's, or the global model's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fedloom.core.contract import Model, Setup
from fedloom.core.errors import NeedsError
from fedloom.core.random import stream
from fedloom.core.trees import ClientId, Params
from fedloom.looms.multi_head import Pieces, Place
from fedloom.models.layers import check_named, check_told, sizes_told
from fedloom.models.model import network
from fedloom.models.size_only import SizeOnly
from fedloom.models.spec import parse

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
    return grown(setup, {}, places)


def grown(setup: Setup[Any], pieces: Pieces, places: Iterable[Place]) -> dict[str, Params]:
    """``pieces``, and what ``places`` need besides."""
    found: dict[str, Params] = setup.config.loom().grow(
        pieces, places, setup.seed, setup.device, setup.dtype, setup.shards
    )
    return found


def global_place(setup: Setup[Any]) -> Place:
    """The global model has vectors of its own and the head of clients with as many."""
    network = global_network(setup)
    place: Place = setup.config.place(f"vectors.{GLOBAL}", network, network.size)
    return place


def global_network(setup: Setup[Any]) -> Model:
    """The network of the global model: the one that the options name, or the smallest client's."""
    models = [setup.models[client] for client in setup.clients]
    network = named_network(setup.config, models[0]) or min(models, key=lambda model: model.size)
    if isinstance(network, SizeOnly):
        raise NeedsError("The server knows only the sizes of clients' networks. Name the global one: --global-model.")
    return network


def named_network(config: Any, like: Model) -> Model | None:
    """The network that ``--global-model`` names, for samples and outputs as those of ``like``; None if it is empty."""
    if not config.global_model:
        return None
    spec = parse(config.global_model, like.input_shape, like.num_outputs, like.tokens)
    return network(spec, like.device, like.dtype)


def deploying(setup: Setup[Any]) -> set[ClientId]:
    """The clients that can run a second model, the global one: ``global_share`` of them, one at least; 0: none."""
    order, share = stream(setup.seed, "global model").permutation(len(setup.clients)), setup.config.global_share
    number = max(1, int(share * len(order) + 0.5)) if share else 0
    return {setup.clients[row] for row in order[:number]}
