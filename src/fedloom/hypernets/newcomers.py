# SPDX-License-Identifier: Apache-2.0
"""Newcomers to a trained loom: what is theirs alone is found by rounds like those of training, and the loom is frozen.

To a loom with a table of embeddings (``embed``) a newcomer brings a row; to one in pieces (``find_pieces``) its vectors
and, where no client had as many, a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedloom.core.contract import Ask, Program, Sent, Setup
from fedloom.core.optim import Optimiser
from fedloom.core.shares import ask_class_shares
from fedloom.core.trees import ClientId, Params, PerClient, Tree
from fedloom.hypernets import multi_head
from fedloom.hypernets.layers import check_told
from fedloom.hypernets.multi_head import Pieces, Place, adam_states, adam_step
from fedloom.hypernets.sparse import change_in
from fedloom.hypernets.weaving import Loom, pull_back, weave


def embed(
    setup: Setup[Any],
    loom: Loom,
    phi: Params,
    first: Tensor,
    clients: Sequence[ClientId],
    train: Program,
    ask: Ask,
    *,
    keeps: bool,
) -> Sent:
    """Freeze the loom and step on embeddings that start at ``first``; or take the newcomers' class shares.

    ``keeps``: newcomers keep something of these rounds (a head, running statistics), so that they also take place
    where the embedding is given.
    """
    table = first.repeat(len(clients), 1)
    row = {client: i for i, client in enumerate(clients)}
    given = setup.config.descriptor == "class_shares"
    if given:
        for members, reply in ask_class_shares(setup, tuple(clients), ask).groups:
            table[[row[m] for m in members]] = reply["shares"]
    outer = Optimiser("sgd", setup.config.admit_lr, setup.config.server_momentum)
    memory = outer.init({"v": table})
    for _ in range(setup.config.admit_rounds if keeps or not given else 0):
        replies = ask(train, {}, weave(setup, loom, phi, table, clients))
        if not given:
            _, grad = pull_back(setup, loom, phi, table, clients, replies, through_loom=False)
            # every newcomer steps on its own change, not on a mean
            after, memory = outer.update({"v": table}, {"v": grad * len(replies)}, memory)
            table = after["v"]
    return Sent({}, weave(setup, loom, phi, table, clients))


def find_pieces(setup: Setup[Any], pieces: Pieces, places: Mapping[ClientId, Place], train: Program, ask: Ask) -> Sent:
    """Freeze the pieces that are there; step on those that newcomers need besides: vectors, and heads of new sizes."""
    loom, config = setup.config.loom(), setup.config
    check_told(config.keep_local, [setup.models[client] for client in places])  # a newcomer's network can be new
    grown: Pieces = loom.grow(pieces, places.values(), setup.seed, setup.device, setup.dtype)
    fresh = {piece: params for piece, params in grown.items() if piece not in pieces}
    memory: Mapping[str, Tree] = adam_states(fresh)
    # newcomers whose head is known have nothing in common that moves
    sharing: dict[str, list[ClientId]] = {}
    for client, own in places.items():
        sharing.setdefault(own.head if own.head in fresh else own.vectors, []).append(client)
    for _ in range(config.admit_rounds):
        replies = ask(train, {}, multi_head.weave(loom, grown, places))
        for members in sharing.values():
            answers = PerClient.of({client: replies[client] for client in members if client in replies})
            if answers:
                grads = multi_head.pull_back(loom, grown, places, answers, change_in, fresh.__contains__)
                grown, memory = adam_step(grown, memory, grads, config.admit_lr, config.server_clip)
    return Sent({}, multi_head.weave(loom, grown, places))
