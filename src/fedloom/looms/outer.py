# SPDX-License-Identifier: Apache-2.0
"""The server's steps on a loom and a table of embeddings, one row per client, at a cost that no roster size enters.

The paper's optimiser is dense: momentum and weight decay move every row in every step. Here a row that no reply
touches waits, and takes all the steps it missed at once (``Optimiser.coast``) when it is next read: the same values,
up to rounding. ``seen`` says up to which step each row has come.

A state is a value, so a table that is stepped on is copied. A large one on a CPU is not copied in every round: rows
that were stepped on are kept beside it (``recent``), and go into a copy of it when there is no room for more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.core.contract import Setup
from fedloom.core.device import copy_all, to_device
from fedloom.core.optim import Optimiser
from fedloom.core.sharded import is_sharded
from fedloom.core.trees import ClientId, Params, PerClient, Tree, tree_map
from fedloom.looms.weaving import Loom, pull_back

LARGE = 1 << 22
"""Numbers in a table from which a copy of it is felt in the time of a round."""

ROOM = 4096
"""Rows that lie beside a large table: more of them cost time in every round, fewer make for more copies."""

IN_PLACE = ("cuda",)
"""Devices where a step's many small kernels cost more than copies of the loom for all steps to overwrite."""


def begin_outer(outer: Optimiser, phi: Params, table: Tensor, *, learned: bool = True) -> Tree:
    """The state of the outer optimiser before the first step."""
    counts = {"steps": table.new_zeros((), dtype=torch.int64), "seen": table.new_zeros(len(table), dtype=torch.int64)}
    memory = {**outer.init({**phi, "embeddings": table}), **counts}
    if learned and table.device.type == "cpu" and table.numel() >= LARGE:
        memory["recent"] = _none_beside(table, memory)
    return memory


def rows_as_in(here: Tree, state: Tree) -> Tree:
    """A checkpoint's state with rows beside its table, or none, as a state ``here`` has them; its values stay."""
    ours, memory = (tree.get("optimiser", {}) for tree in (here, state))
    if ours.keys() ^ memory.keys() != {"recent"}:
        return state
    table, rest = state["embeddings"], {name: branch for name, branch in memory.items() if name != "recent"}
    if "recent" in ours:
        return {**state, "optimiser": {**rest, "recent": _none_beside(table, rest)}}
    recent = memory["recent"]
    filled = recent["at"] < len(table)
    rows = {name: recent[name][filled] for name in _tables(table, rest)}
    table, whole = _write(table, rest, recent["at"][filled], rows)
    return {**state, "embeddings": table, "optimiser": whole}


def rows_now(setup: Setup[Any], table: Tensor, memory: Tree, clients: Sequence[ClientId]) -> Tensor:
    """The clients' embeddings with the steps they waited for; without a memory they wait for none."""
    if not memory:
        return table[setup.rows(clients)]
    rows = _read(table, memory, to_device(setup.rows(clients), table.device))
    waited = memory["steps"] - rows["seen"]
    now: Tensor = setup.replay("coast", setup.config.outer().coast, rows["values"], rows["speeds"], waited)[0]
    return now


def _tables(table: Tensor, memory: Tree) -> dict[str, Tensor]:
    """All that has a row for each client."""
    speeds = memory.get("momentum", {"embeddings": table})["embeddings"]
    return {"values": table, "speeds": speeds, "seen": memory["seen"]}


def _read(table: Tensor, memory: Tree, at: Tensor) -> dict[str, Tensor]:
    """These rows of all tables."""
    rows = {name: whole[at] for name, whole in _tables(table, memory).items()}
    recent = memory.get("recent")
    if recent:
        place = torch.searchsorted(recent["at"], at).clamp(max=len(recent["at"]) - 1)
        found = recent["at"][place] == at
        for name, row in rows.items():
            row[found] = recent[name][place[found]]
    return rows


def _none_beside(table: Tensor, memory: Tree) -> dict[str, Tensor]:
    """Room beside the table, empty."""
    none = torch.empty(0, dtype=torch.int64)
    return _recent(none, _read(table, memory, none), ROOM, len(table))


def _write(table: Tensor, memory: Tree, at: Tensor, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tree]:
    """The table and the memory with new rows in the tables that ``rows`` names."""
    recent = memory.get("recent")
    if recent:
        room, everybody = len(recent["at"]), len(table)
        others = (recent["at"] < everybody) & ~torch.isin(recent["at"], at)
        at = torch.cat([recent["at"][others], at])
        rows = {name: torch.cat([recent[name][others], new]) for name, new in rows.items()}
        if len(at) <= room:
            return table, {**memory, "recent": _recent(at, rows, room, everybody)}
        none = {name: new[:0] for name, new in rows.items()}
        memory = {**memory, "recent": _recent(at[:0], none, room, everybody)}
    tables = _tables(table, memory)
    tables |= {name: tables[name].index_copy(0, at, new) for name, new in rows.items()}
    if "momentum" in memory:
        memory = {**memory, "momentum": {**memory["momentum"], "embeddings": tables["speeds"]}}
    return tables["values"], {**memory, "seen": tables["seen"]}


def _recent(at: Tensor, rows: Mapping[str, Tensor], room: int, nobody: int) -> dict[str, Tensor]:
    """Rows in their order, in tensors of ``room`` rows, so that a state's shapes are always the same."""
    order, empty = at.argsort(), room - len(at)
    filled = {name: torch.cat([new[order], new.new_zeros(empty, *new.shape[1:])]) for name, new in rows.items()}
    return {"at": torch.cat([at[order], at.new_full((empty,), nobody)]), **filled}


def outer_steps(
    setup: Setup[Any], loom: Loom, phi: Params, table: Tensor, memory: Tree, replies: PerClient, *, learned: bool
) -> tuple[Params, Tensor, Tree]:
    """Step on phi and the rows: once per reply in the roster's order, or once on the mean of all.

    Not ``learned``: the rows are fixed, and have no part in the norm that is clipped.
    """
    if setup.combine:
        return _combined_step(setup, loom, phi, table, memory, replies, learned=learned)
    outer, groups = setup.config.outer(), [members for members, _ in replies.groups]
    places = [(g, row) for g, members in enumerate(groups) for row in range(len(members))]
    clients = [groups[g][row] for g, row in places]
    turns = [list(range(len(places)))]  # who steps together
    if setup.config.server_step == "per_client":
        turns = [[i] for i in sorted(range(len(places)), key=lambda i: setup.rows([clients[i]]))]
    turn_of = {i: number for number, turn in enumerate(turns) for i in turn}
    momentum: Mapping[str, Tensor] = memory.get("momentum", {})
    in_place = table.device.type in IN_PLACE and not is_sharded(phi)
    step = partial(_step_in_place, outer) if in_place else outer.update

    def all_steps(phi: Params, moving: Params, rows: Tree, deltas: Sequence[Tree]) -> Any:
        if in_place:
            phi, moving = _copies(phi), _copies(moving)
        parts = rows["values"], rows["speeds"]
        if learned:
            parts = outer.coast(*parts, rows["waited"])
        values, speeds = (list(part.split(1)) for part in parts)
        for turn in turns:
            v, speed = (torch.cat([part[i] for i in turn]) for part in (values, speeds))
            changes: list[tuple[Sequence[ClientId], Tree]]
            changes = [([clients[i]], {"delta": _row(deltas[places[i][0]], places[i][1])}) for i in turn]
            if len(turns) == 1:
                changes = [(members, {"delta": delta}) for members, delta in zip(groups, deltas)]
            grads, v_grad = pull_back(setup, loom, phi, v, [clients[i] for i in turn], PerClient(changes))
            moved = {**grads, "embeddings": v_grad if learned else torch.zeros_like(v_grad)}
            before = {"momentum": {**moving, "embeddings": speed}} if outer.momentum else {}
            after, state = step({**phi, "embeddings": v}, moved, before)
            now = state.get("momentum", {"embeddings": speed})
            phi, moving = {n: after[n] for n in phi}, {n: now[n] for n in moving}
            for i, own, own_speed in zip(turn, after["embeddings"].split(1), now["embeddings"].split(1)):
                values[i], speeds[i] = own, own_speed
        return phi, moving, torch.cat(values), torch.cat(speeds)

    at = to_device(setup.rows(clients), table.device)
    before = _read(table, memory, at)
    steps = memory["steps"] + to_device([turn_of[i] for i in range(len(places))], table.device)
    rows = {"values": before["values"], "speeds": before["speeds"], "waited": steps - before["seen"]}
    moving = {name: value for name, value in momentum.items() if name != "embeddings"}
    name = ("outer steps", learned, tuple(map(tuple, turns)), tuple(str(setup.models[c].spec) for c in clients))
    deltas = [tree["delta"] for _, tree in replies.groups]
    phi, moving, values, speeds = setup.replay(name, all_steps, phi, moving, rows, deltas)
    memory = {**memory, "steps": memory["steps"] + len(turns)}
    if outer.momentum:
        memory["momentum"] = {**moving, "embeddings": momentum["embeddings"]}
    after = {**({"values": values} if learned else {}), "speeds": speeds, "seen": steps + 1}
    return phi, *_write(table, memory, at, after)


def _combined_step(
    setup: Setup[Any], loom: Loom, phi: Params, table: Tensor, memory: Tree, replies: PerClient, *, learned: bool
) -> tuple[Params, Tensor, Tree]:
    """One step on phi along what ``setup.combine`` makes of single replies, and on each row along its own reply.

    Rows are clipped each by itself: a lie must not shorten the steps of others.
    """
    assert setup.combine
    outer, clients = setup.config.outer(), sorted(replies, key=lambda client: setup.rows([client]))
    at = to_device(setup.rows(clients), table.device)
    before = _read(table, memory, at)
    values, speeds = before["values"], before["speeds"]
    if learned:
        values, speeds = outer.coast(values, speeds, memory["steps"] - before["seen"])
    gradients, rows = [], []
    for row, client in enumerate(clients):
        grads, v_grad = pull_back(
            setup, loom, phi, values[row : row + 1], [client], PerClient([([client], replies.pick([client]))])
        )
        gradients.append(torch.cat([grads[name].flatten() for name in phi]))
        own = {"embeddings": v_grad / len(clients) if learned else torch.zeros_like(v_grad)}
        speed = {"momentum": {"embeddings": speeds[row : row + 1]}} if outer.momentum else {}
        after, state = outer.update({"embeddings": values[row : row + 1]}, own, speed)
        rows.append((after["embeddings"], state.get("momentum", {"embeddings": speeds[row : row + 1]})["embeddings"]))
    whole = torch.split(setup.combine(clients, torch.stack(gradients)), [phi[name].numel() for name in phi])
    moved = {name: part.reshape(phi[name].shape) for name, part in zip(phi, whole)}
    moving = {"momentum": {name: memory["momentum"][name] for name in phi}} if outer.momentum else {}
    phi, state = outer.update(phi, moved, moving)
    if outer.momentum:
        memory = {**memory, "momentum": {**state["momentum"], "embeddings": memory["momentum"]["embeddings"]}}
    memory = {**memory, "steps": memory["steps"] + 1}
    now = {"speeds": torch.cat([speed for _, speed in rows]), "seen": memory["steps"].expand(len(clients))}
    if learned:
        now["values"] = torch.cat([value for value, _ in rows])
    return phi, *_write(table, memory, at, now)


def _step_in_place(outer: Optimiser, params: Params, grads: Params, state: Tree) -> tuple[Params, Tree]:
    """``outer.update``, by few kernels: ``params`` and ``state`` are overwritten, and returned."""
    changes = [grads[name].contiguous() for name in params]
    if outer.clip:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(changes)))
        changes = list(torch._foreach_mul(changes, (outer.clip / (norm + 1e-6)).clamp(max=1.0)))
    torch._fused_sgd_(
        list(params.values()), changes, [state["momentum"][name] for name in params] if outer.momentum else [],
        lr=outer.lr, momentum=outer.momentum, weight_decay=outer.weight_decay, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=False,
    )  # fmt: skip
    return params, state


def _copies(params: Params) -> dict[str, Tensor]:
    copies = {name: torch.empty_like(value, memory_format=torch.contiguous_format) for name, value in params.items()}
    copy_all(list(copies.values()), list(params.values()))
    return copies


def _row(tree: Tree, row: int) -> Any:
    return tree_map(lambda leaf: leaf[row : row + 1], tree)
