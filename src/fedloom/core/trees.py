# SPDX-License-Identifier: Apache-2.0
"""Trees: nested dicts with string keys and tensors at the leaves. Nothing else is sent, remembered or checkpointed.

A number travels as a 0-d tensor. Keys hold no "/", so that a path such as ``params/conv1.weight`` names a leaf
in files and messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedloom.core.device import to_device

Tree = Mapping[str, Any]
Params = Mapping[str, Tensor]
ClientId = str


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply ``function`` to the leaves of trees of one structure."""
    if isinstance(tree, Mapping):
        return {name: tree_map(function, branch, *(o[name] for o in others)) for name, branch in tree.items()}
    return function(tree, *others)


def leaves(tree: Tree) -> Iterator[tuple[str, Tensor]]:
    """Every leaf with its path, in the tree's order."""
    for name, branch in tree.items():
        if isinstance(branch, Mapping):
            yield from ((f"{name}/{path}", leaf) for path, leaf in leaves(branch))
        else:
            yield name, branch


def flatten(tree: Tree) -> dict[str, Tensor]:
    """``{path: leaf}``, whose inverse is ``unflatten``. An empty branch is kept as the path ``name/``."""
    flat: dict[str, Tensor] = {}
    for name, branch in tree.items():
        if not isinstance(branch, Mapping):
            flat[name] = branch
        elif branch:
            flat |= {f"{name}/{path}": leaf for path, leaf in flatten(branch).items()}
        else:
            flat[f"{name}/"] = torch.empty(0)
    return flat


def unflatten(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """The tree whose ``flatten`` this is."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *branches, name = path.split("/")
        at = tree
        for branch in branches:
            at = at.setdefault(branch, {})
        if name:
            at[name] = leaf
    return tree


def faults(tree: Any, where: str = "tree") -> list[str]:
    """What keeps ``tree`` from being one: empty if it is a tree of tensors with proper keys."""
    if isinstance(tree, Tensor):
        return []
    if not isinstance(tree, Mapping):
        return [f"{where} is a {type(tree).__name__}, not a tensor or a dict of tensors"]
    found = [f"{where} has the key {name!r}" for name in tree if not isinstance(name, str) or "/" in name or not name]
    for name, branch in tree.items():
        found += faults(branch, f"{where}/{name}")
    return found


def signature(tree: Tree) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Paths and shapes, empty branches included: equal for trees that can be stacked."""
    return tuple((path, tuple(leaf.shape)) for path, leaf in flatten(tree).items())


def num_bytes(tree: Tree) -> int:
    """Bytes of all leaves as they travel."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(tree))


def stack(trees: Sequence[Tree]) -> Any:
    """One tree with a leading dimension of clients."""
    return tree_map(lambda *rows: torch.stack(rows), trees[0], *trees[1:])


def only(params: Params, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of the parameters that have these names."""
    return {name: params[name] for name in names if name in params}


def squared_norm(tree: Tree) -> Tensor:
    """The squared Euclidean norm over all leaves together."""
    return torch.stack([leaf.square().sum() for _, leaf in leaves(tree)]).sum()


def chosen(flag: Tensor, one: Tree, other: Tree) -> Any:
    """``one`` if the flag () is set, else ``other``: to the bit, where both are finite."""

    def either(one: Tensor, other: Tensor) -> Tensor:
        if not one.is_floating_point():
            return torch.where(flag, one, other)
        # on a CPU torch.where takes four times as long, as it goes number by number
        return torch.lerp(other, one, flag.to(one.dtype))

    return tree_map(either, one, other)


class PerClient(Mapping[ClientId, Tree]):
    """``{client: tree}``, kept as stacks of trees of one shape, so that a cohort is handled as a whole.

    It is an ordinary mapping; ``groups`` gives the stacks. A method with one architecture has one group.
    """

    def __init__(self, groups: Iterable[tuple[Sequence[ClientId], Tree]]) -> None:
        self.groups: tuple[tuple[tuple[ClientId, ...], Tree], ...] = tuple((tuple(c), t) for c, t in groups if len(c))
        self._at = {
            client: (g, row) for g, (clients, _) in enumerate(self.groups) for row, client in enumerate(clients)
        }

    @classmethod
    def of(cls, trees: Mapping[ClientId, Tree]) -> PerClient:
        """Stack the trees of equal shape. A ``PerClient`` is given back as it is."""
        if isinstance(trees, PerClient):
            return trees
        alike: dict[Any, list[ClientId]] = {}
        for client, tree in trees.items():
            alike.setdefault(signature(tree), []).append(client)
        return cls((clients, stack([trees[c] for c in clients])) for clients in alike.values())

    @classmethod
    def empty(cls, clients: Iterable[ClientId]) -> PerClient:
        """Nothing for each of ``clients``: who is asked, when there is nothing of their own to send."""
        return cls([(tuple(clients), {})])

    def __getitem__(self, client: ClientId) -> Tree:
        group, row = self._at[client]
        # a copy: it keeps no stack alive, and its place in memory, on which last bits can depend, is always the same
        picked: Tree = tree_map(lambda leaf: leaf[row].clone(), self.groups[group][1])
        return picked

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def pick(self, clients: Sequence[ClientId]) -> Tree:
        """The stack of ``clients``, which must be of one group; no copy when they are that group."""
        group = self._at[clients[0]][0]
        members, tree = self.groups[group]
        if tuple(clients) == members:
            return tree
        if any(self._at[c][0] != group for c in clients):
            raise ValueError("the clients picked have trees of different shapes; pick them group by group")
        rows = [self._at[c][1] for c in clients]
        at: Any = slice(rows[0], rows[-1] + 1)
        if rows != list(range(rows[0], rows[-1] + 1)):
            at = to_device(rows, next((leaf.device for _, leaf in leaves(tree)), torch.device("cpu")))
        picked: Tree = tree_map(lambda leaf: leaf[at], tree)
        return picked
