# SPDX-License-Identifier: Apache-2.0
"""The sequential engine with a wire in the middle: everything sent is turned into bytes and back.

It proves that nothing but trees of tensors travels, and that a client needs nothing else. Results equal the
sequential engine's bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedloom.core.contract import Program
from fedloom.core.trees import ClientId, PerClient, Tree
from fedloom.core.wire import decode, encode
from fedloom.engines.engine import AbstractEngine, Outcome
from fedloom.engines.sequential import run_client


class Loopback(AbstractEngine):
    """One client after another, each behind the codec."""

    name = "loopback"

    def run_group(self, program: Program, clients: Sequence[ClientId], shared: Tree, mine: PerClient) -> Outcome:
        """As ``AbstractEngine.run_group``."""
        device = self.federation.device
        replies, memories = {}, {}
        for client in clients:
            arrived = decode(encode(shared), device), decode(encode(mine[client]), device)
            reply, memories[client] = run_client(self, program, client, *arrived)
            replies[client] = decode(encode(reply), device)
        return Outcome(PerClient.of(replies), PerClient.of(memories))
