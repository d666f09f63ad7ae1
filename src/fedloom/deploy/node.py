# SPDX-License-Identifier: Apache-2.0
"""A client's side of an ask: one client, one program, with noise of its own.

The batches and the draws in training are those of a simulation with the same seed; noise for privacy is not. The server
knows the seed, and noise that it could compute, or that came twice, could be subtracted: here it comes from the
operating system.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from fedloom.core.contract import Program
from fedloom.core.trees import ClientId, PerClient, Tree, leaves
from fedloom.engines.acceptance import SPOILT
from fedloom.engines.job import ClientFault
from fedloom.engines.memories import Memories
from fedloom.engines.sequential import Sequential, run_client

log = logging.getLogger(__name__)


def answer(
    engine: Sequential, client: ClientId, program: Program, stage: int | str, ask: int, shared: Tree, mine: Tree,
    memory: Tree | None, *, silent: bool = False,
) -> tuple[Tree, Tree | None, bool]:  # fmt: skip
    """The reply to an ask, the new memory, None if it did not change, and whether there is noise on the reply.

    Nothing that is not finite is kept. Whoever sent the model can have that depend on a single sample; so an ask to
    which nothing is replied, or nothing that anybody sees (``silent``), does not tell of it either.
    """
    known = Memories({} if memory is None else {client: memory})
    session = engine.session(stage, known, secret_noise=True, asks=ask)
    drawn: list[int] = []
    job = replace(session.job(program, shared, PerClient.of({client: mine})), drawn=drawn)
    if job.hides_samples:
        engine.check_hidden(job)
    reply, after = run_client(job, client, shared, mine)
    if not all(bool(torch.isfinite(leaf).all()) for _, leaf in leaves(after)):
        if any(leaves(reply)) and not silent:
            raise ClientFault(SPOILT)
        log.warning("%s %s", program.name, SPOILT)
        after = dict(job.memories[client])
    return reply, None if after is job.memories[client] else after, bool(drawn)
