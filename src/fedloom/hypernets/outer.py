# SPDX-License-Identifier: Apache-2.0
"""The server's steps on a loom and a table of embeddings, one row per client, at a cost that no roster size enters.

The paper's optimiser is dense: momentum and weight decay move every row in every step. Here a row that no reply
touches waits, and takes all the steps it missed at once (``Optimiser.coast``) when it is next read: the same values,
up to rounding. The table is copied once a round; ``seen`` says up to which step each row has come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.core.contract import Setup
from fedloom.core.optim import Optimiser
from fedloom.core.recording import to_device
from fedloom.core.trees import ClientId, Params, PerClient, Tree
from fedloom.hypernets.weaving import Loom, pull_back


def begin_outer(outer: Optimiser, phi: Params, table: Tensor) -> Tree:
    """The state of the outer optimiser before the first step."""
    counts = {"steps": table.new_zeros((), dtype=torch.int64), "seen": table.new_zeros(len(table), dtype=torch.int64)}
    return {**outer.init({**phi, "embeddings": table}), **counts}


def rows_now(setup: Setup[Any], table: Tensor, memory: Tree, clients: Sequence[ClientId]) -> Tensor:
    """The clients' embeddings with the steps they waited for."""
    rows = to_device(setup.rows(clients), table.device)
    moving = memory.get("momentum", {"embeddings": table})["embeddings"]
    now: Tensor = setup.config.outer().coast(table[rows], moving[rows], memory["steps"] - memory["seen"][rows])[0]
    return now


def outer_steps(
    setup: Setup[Any], loom: Loom, phi: Params, table: Tensor, memory: Tree, replies: PerClient, *, learned: bool
) -> tuple[Params, Tensor, Tree]:
    """Step on phi and the rows: once per reply in the roster's order, or once on the mean of all.

    Not ``learned``: the rows are fixed, and have no part in the norm that is clipped.
    """
    outer, parts = setup.config.outer(), [replies]
    if setup.config.server_step == "per_client":
        parts = [PerClient([([c], replies.pick([c]))]) for c in sorted(replies, key=lambda c: setup.rows([c]))]
    rows = to_device(setup.rows([client for part in parts for client in part]), table.device)
    momentum: Mapping[str, Tensor] = memory.get("momentum", {})
    moving = {name: value for name, value in momentum.items() if name != "embeddings"}
    values, speeds, seen = table[rows], momentum.get("embeddings", table)[rows], memory["seen"][rows]
    steps, done = memory["steps"].clone(), 0
    for part in parts:
        groups, here = [group for group, _ in part.groups], slice(done, done + len(part))
        members = [client for group in groups for client in group]

        def step(phi: Params, moving: Params, v: Tensor, speed: Tensor, waited: Tensor, deltas: Sequence[Tree],
                 groups: Any = groups, members: Any = members) -> Any:  # fmt: skip
            v, speed = outer.coast(v, speed, waited) if learned else (v, speed)
            changes = PerClient([(group, {"delta": delta}) for group, delta in zip(groups, deltas)])
            grads, v_grad = pull_back(setup, loom, phi, v, members, changes)
            before = {"momentum": {**moving, "embeddings": speed}} if outer.momentum else {}
            moved = {**grads, "embeddings": v_grad if learned else torch.zeros_like(v_grad)}
            after, state = outer.update({**phi, "embeddings": v}, moved, before)
            state = state.get("momentum", {"embeddings": speed})
            names = [name for name in phi if name in state]
            return {n: after[n] for n in phi}, {n: state[n] for n in names}, after["embeddings"], state["embeddings"]

        name = ("outer step", learned, tuple(str(setup.models[client].spec) for client in members))
        arguments = (values[here], speeds[here], steps - seen[here], [tree["delta"] for _, tree in part.groups])
        phi, moving, values[here], speeds[here] = setup.replay(name, step, phi, moving, *arguments)
        steps += 1
        seen[here] = steps
        done += len(part)
    after_table = table.index_copy(0, rows, values) if learned else table
    if outer.momentum:
        momentum = {**moving, "embeddings": momentum["embeddings"].index_copy(0, rows, speeds)}
        memory = {**memory, "momentum": momentum}
    return phi, after_table, {**memory, "steps": steps, "seen": memory["seen"].index_copy(0, rows, seen)}
