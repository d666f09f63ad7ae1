# SPDX-License-Identifier: Apache-2.0
"""The sequential engine with a wire in the middle: everything sent is turned into bytes and back.

It proves that nothing but trees of tensors travels, and that a client needs nothing else. Results equal the
sequential engine's bit for bit.
"""

from __future__ import annotations

from fedloom.core.trees import PerClient
from fedloom.core.wire import decode, encode
from fedloom.engines.engine import AbstractLocalEngine
from fedloom.engines.job import Job, Outcome
from fedloom.engines.sequential import run_client


class Loopback(AbstractLocalEngine):
    """One client after another, each behind the codec."""

    name = "loopback"

    def run_group(self, job: Job) -> Outcome:
        """As ``AbstractLocalEngine.run_group``."""
        device = job.federation.device
        replies, memories = {}, {}
        for client in job.clients:
            arrived = decode(encode(job.shared), device), decode(encode(job.mine[client]), device)
            reply, memories[client] = run_client(job, client, *arrived)
            replies[client] = decode(encode(reply), device)
        return Outcome(PerClient.of(replies), PerClient.of(memories))
