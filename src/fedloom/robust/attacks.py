# SPDX-License-Identifier: Apache-2.0
"""Clients that lie, in a simulation: ``--malicious SHARE --attack KIND``.

Liars train as the others do; what they reply is then changed. All of them know of each other. ``label_flip`` and
``backdoor`` change their training data instead (``robust.poison``), so that they lie in good faith.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Program, Setup, Table
from fedloom.core.errors import NeedsError
from fedloom.core.random import stream
from fedloom.core.trees import ClientId, PerClient, Tree, tree_map

TIMES = 10.0
"""How much larger a reply is that is scaled."""
ALIE_Z = 1.0
"""How many deviations from the mean a little is."""
CLAIMED = 1000.0
"""How many times its samples a liar claims to have."""


def sign_flip(rows: Tensor) -> Tensor:
    """The opposite of what was learned."""
    return -rows


def scale(rows: Tensor) -> Tensor:
    """Ten times the opposite."""
    return -TIMES * rows


def overclaim(rows: Tensor) -> Tensor:
    """The opposite, from a thousand times as many samples as there are."""
    return -rows


def alie(rows: Tensor) -> Tensor:
    """A little is enough (Baruch, Baruch, Goldberg 2019): the liars' mean, one of their deviations off, from all."""
    off = rows.mean(0) - ALIE_Z * rows.std(0, unbiased=False)
    return off.expand_as(rows)


def free_ride(rows: Tensor) -> Tensor:
    """Nothing at all, as if it had been learned."""
    return rows * 0


Lie = Callable[[Tensor], Tensor]

ATTACKS: dict[str, Lie] = {f.__name__: f for f in (sign_flip, scale, overclaim, alie, free_ride)}


def liars(clients: tuple[ClientId, ...], share: float, seed: int) -> frozenset[ClientId]:
    """Which of the participants lie."""
    drawn = stream(seed, "malicious").permutation(len(clients))[: round(share * len(clients))]
    return frozenset(clients[row] for row in drawn)


def with_liars(algorithm: Algorithm, kind: str, share: float) -> Algorithm:
    """``algorithm``, of whose participants a share lies; the record says how much of whom a rule left out."""
    return replace(algorithm, round=partial(_round, algorithm, ATTACKS.get(kind), share))


def _round(
    algorithm: Algorithm, lie: Lie | None, share: float, setup: Setup[Any], state: Any, cohort: Cohort, ask: Ask
) -> tuple[Any, Diagnostics]:
    lying = liars(setup.clients, share, setup.seed)

    def deceived(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        replies = ask(program, shared, mine)
        if lie is None:
            return replies
        return PerClient(
            [(clients, _changed(algorithm, lie, lying, clients, tree)) for clients, tree in replies.groups]
        )

    after, diagnostics = algorithm.round(setup, state, cohort, deceived)
    kept = diagnostics.get("kept")
    return after, {**diagnostics, **_by_honesty(kept, lying)} if isinstance(kept, Table) else diagnostics


def _changed(
    algorithm: Algorithm, lie: Lie, lying: frozenset[ClientId], clients: tuple[ClientId, ...], tree: Tree
) -> Tree:
    """The replies of some clients, with what liars among them say."""
    rows = [row for row, client in enumerate(clients) if client in lying]
    if not rows:
        return tree
    if "delta" not in tree:
        raise NeedsError(
            f"--attack changes what clients learned, and those of {algorithm.name} reply with "
            f"{', '.join(sorted(tree))}. Choose another method, or --attack label_flip."
        )

    def spoilt(leaf: Tensor) -> Tensor:
        leaf = leaf.clone()
        leaf[rows] = lie(leaf[rows])
        return leaf

    told = {**tree, "delta": tree_map(spoilt, tree["delta"])}
    if lie is overclaim:
        told["num_samples"] = tree["num_samples"].clone()
        told["num_samples"][rows] *= CLAIMED
    return told


def _by_honesty(kept: Table, lying: frozenset[ClientId]) -> dict[str, Tensor | Table]:
    """How much a rule left out of honest clients and of liars, and who they are."""
    counted = kept.values[:, 0]
    lies = counted.new_tensor([client in lying for client in kept.clients])
    found: dict[str, Tensor | Table] = {"kept": Table(kept.clients, ("kept", "lies"), torch.stack([counted, lies], 1))}
    for name, lie in (("honest_left_out", False), ("liars_left_out", True)):
        rows = [row for row, client in enumerate(kept.clients) if (client in lying) == lie]
        if rows:
            found[name] = 1 - counted[rows].mean()
    return found
