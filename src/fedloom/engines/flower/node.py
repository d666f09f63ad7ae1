# SPDX-License-Identifier: Apache-2.0
"""A client's side of an ask: the sequential engine for the one client that lives here, with noise of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm, Home, Model, Program
from fedloom.core.random import Fresh
from fedloom.core.trees import ClientId, Tree, leaves
from fedloom.engines.engine import SPOILT, ClientFault
from fedloom.engines.sequential import Sequential, run_client


class Node(Sequential):
    """The batches and the draws in training are those of a simulation with the same seed; noise for privacy is not.

    ``home.key`` is what client programs draw that noise from. The server knows the seed, and noise that it could
    compute, or that came twice, could be subtracted: here it comes from the operating system.
    """

    def __init__(self, federation: Federation, algorithm: Algorithm, config: Any, seed: int, client: ClientId) -> None:
        super().__init__(federation, algorithm, config, seed)
        self.client = client

    def home(self, client: ClientId, num_samples: Tensor, key: Tensor, guest: Model | None = None) -> Home:
        """As ``AbstractEngine.home``, without a key that somebody else could have."""
        return replace(super().home(client, num_samples, key, guest), key=Fresh(self.federation.device))

    def answer(
        self, program: Program, stage: int | str, ask: int, shared: Tree, mine: Tree, memory: Tree | None
    ) -> tuple[Tree, Tree | None]:
        """The reply to an ask, and the new memory, None if it did not change. Nothing that is not finite is kept."""
        self.begin(stage, ask)
        if memory is not None:
            self.memory[self.client] = memory
        before = self.recall(self.client)
        reply, after = run_client(self, program, self.client, shared, mine)
        if not _finite(after):
            raise ClientFault(SPOILT)
        return reply, None if after is before else after


def _finite(tree: Tree) -> bool:
    return all(bool(torch.isfinite(leaf).all()) for _, leaf in leaves(tree))
