# SPDX-License-Identifier: Apache-2.0
"""Trees with a row for every client of the roster: what a server keeps that has a model of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedloom.core.contract import Setup
from fedloom.core.device import to_device
from fedloom.core.trees import ClientId, Tree, tree_map


def for_everybody(setup: Setup[Any], tree: Tree) -> Any:
    """The same tree in every row."""
    number = len(setup.clients)
    return tree_map(lambda leaf: leaf.expand(number, *leaf.shape).clone(), tree)


def mean_row(table: Tree) -> Any:
    """The mean of all rows as a table of one: what can be handed on of it without being anybody's."""
    return tree_map(lambda leaf: leaf.mean(0, keepdim=True), table)


def rows_of(setup: Setup[Any], table: Tree, clients: Sequence[ClientId]) -> Any:
    """The rows of these clients, as one stack in their order."""
    at = _places(setup, clients)
    return tree_map(lambda leaf: leaf.index_select(0, at), table)


def with_rows(setup: Setup[Any], table: Tree, clients: Sequence[ClientId], rows: Tree) -> Any:
    """The table with other rows for these clients; the one that is given stays as it is."""
    at = _places(setup, clients)
    return tree_map(lambda leaf, new: leaf.index_copy(0, at, new), table, rows)


def _places(setup: Setup[Any], clients: Sequence[ClientId]) -> Tensor:
    return to_device(setup.rows(clients), setup.device)
