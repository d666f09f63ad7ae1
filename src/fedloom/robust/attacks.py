# SPDX-License-Identifier: Apache-2.0
"""Clients that lie, in a simulation: ``--malicious SHARE --attack KIND``.

Liars train as the others do; what they reply is then changed. All of them know of each other. ``label_flip`` changes
their training labels instead (``training.simulation``), so that they lie in good faith.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Program, Setup
from fedloom.core.errors import NeedsError
from fedloom.core.random import stream
from fedloom.core.trees import ClientId, PerClient, Tree, tree_map

TIMES = 10.0
"""How much larger a reply is that is scaled."""
ALIE_Z = 1.0
"""How many deviations from the mean a little is."""


def sign_flip(rows: Tensor) -> Tensor:
    """The opposite of what was learned."""
    return -rows


def scale(rows: Tensor) -> Tensor:
    """Ten times the opposite."""
    return -TIMES * rows


def alie(rows: Tensor) -> Tensor:
    """A little is enough (Baruch, Baruch, Goldberg 2019): the liars' mean, one of their deviations off, from all."""
    off = rows.mean(0) - ALIE_Z * rows.std(0, unbiased=False)
    return off.expand_as(rows)


def free_ride(rows: Tensor) -> Tensor:
    """Nothing at all, as if it had been learned."""
    return rows * 0


ATTACKS: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (sign_flip, scale, alie, free_ride)}
LABEL_FLIP = "label_flip"
KINDS = (*ATTACKS, LABEL_FLIP)


def liars(clients: tuple[ClientId, ...], share: float, seed: int) -> frozenset[ClientId]:
    """Which of the participants lie."""
    drawn = stream(seed, "malicious").permutation(len(clients))[: round(share * len(clients))]
    return frozenset(clients[row] for row in drawn)


def with_liars(algorithm: Algorithm, kind: str, share: float) -> Algorithm:
    """``algorithm``, of whose participants a share lies."""
    return replace(algorithm, round=partial(_round, algorithm, ATTACKS[kind], share))


def _round(
    algorithm: Algorithm,
    lie: Callable[[Tensor], Tensor],
    share: float,
    setup: Setup[Any],
    state: Any,
    cohort: Cohort,
    ask: Ask,
) -> tuple[Any, Diagnostics]:
    lying = liars(setup.clients, share, setup.seed)

    def deceived(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        return PerClient(
            [(clients, _changed(algorithm, clients, tree)) for clients, tree in ask(program, shared, mine).groups]
        )

    def _changed(algorithm: Algorithm, clients: tuple[ClientId, ...], tree: Tree) -> Tree:
        rows = [row for row, client in enumerate(clients) if client in lying]
        if not rows:
            return tree
        if "delta" not in tree:
            raise NeedsError(
                f"--attack changes what clients learned, and those of {algorithm.name} reply with "
                f"{', '.join(sorted(tree))}. Choose another method, or --attack {LABEL_FLIP}."
            )

        def spoilt(leaf: Tensor) -> Tensor:
            leaf = leaf.clone()
            leaf[rows] = lie(leaf[rows])
            return leaf

        return {**tree, "delta": tree_map(spoilt, tree["delta"])}

    return algorithm.round(setup, state, cohort, deceived)
