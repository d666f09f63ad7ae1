# SPDX-License-Identifier: Apache-2.0
"""What clients remember, in a form whose copies cost the same for any number of clients.

Each session works on a copy, so that a round that fails or an evaluation leaves the run's memory as it was. With a
million clients a dict of them must not be copied for that each time: what has settled is shared between copies, and
only what changed of late is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from fedloom.core.trees import ClientId, Tree

RECENT = 4096
"""Changes that lie beside the rest; more of them, some eighty rounds of fifty clients, go into a copy of it."""


class Memories(Mapping[ClientId, Tree]):
    """A tree for each client that was asked. Trees are values; which tree is whose changes here, and in no copy."""

    def __init__(self, settled: Mapping[ClientId, Tree] | None = None) -> None:
        self._settled: Mapping[ClientId, Tree] = settled or {}  # shared with copies, and never changed
        self._recent: dict[ClientId, Tree] = {}

    def __getitem__(self, client: ClientId) -> Tree:
        return self._recent[client] if client in self._recent else self._settled[client]

    def __iter__(self) -> Iterator[ClientId]:
        yield from self._settled
        yield from (client for client in self._recent if client not in self._settled)

    def __len__(self) -> int:
        return len(self._settled) + sum(client not in self._settled for client in self._recent)

    def __contains__(self, client: object) -> bool:
        return client in self._recent or client in self._settled

    def __setitem__(self, client: ClientId, tree: Tree) -> None:
        self._recent[client] = tree

    def update(self, changes: Iterable[tuple[ClientId, Tree]]) -> None:
        """Have these clients remember these trees."""
        self._recent.update(changes)

    def copy(self) -> Memories:
        """The same; what either remembers from now on the other does not."""
        if len(self._recent) > RECENT:
            self._settled, self._recent = {**self._settled, **self._recent}, {}
        other = Memories(self._settled)
        other._recent = dict(self._recent)
        return other
