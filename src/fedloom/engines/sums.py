# SPDX-License-Identifier: Apache-2.0
"""Replies that are added up where clients run, for a server that uses their mean and nothing else.

The order of additions is fixed: clients of a block one after another, then blocks one after another. What a block is
depends on the cohort alone, so no bit depends on where a block was added up. A block in which some reply cannot be used
comes reply by reply, and so does a single client: whoever gets it refuses what is to be refused, and adds up the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.aggregate import weighted_sum
from fedloom.core.training import like_report
from fedloom.core.trees import ClientId, PerClient, Tree, tree_map
from fedloom.engines.acceptance import finite, refusals
from fedloom.engines.job import Job, Means, Outcome


class Block(NamedTuple):
    """Clients, what they told besides, stacked, and the sum of the rest."""

    clients: Sequence[ClientId]
    told: Tree
    total: Tree

    @classmethod
    def of(cls, means: Means, clients: Sequence[ClientId], replies: Tree) -> Block:
        """The replies of some clients, stacked, added up."""
        told = {name: branch for name, branch in replies.items() if name not in means.branches}
        summed = {name: replies[name] for name in means.branches}
        return cls(clients, told, weighted_sum(summed, _weights(means, told)))


def can_be_added(means: Means, expected: Tree) -> bool:
    """Whether such a reply has what is averaged, its weight and its loss, and nothing else."""
    return set(expected) == {*means.branches, *like_report()}


def added_up(job: Job, outcome: Outcome) -> Outcome:
    """The outcome with a sum in the place of replies; as it is where a reply, or the sum, could not be used."""
    if job.means is None or len(outcome.replies) < 2 or len(outcome.replies.groups) > 1:
        return outcome
    ((clients, replies),) = outcome.replies.groups
    federation, number = job.federation, len(clients)
    expected = job.program.expects(job.shared, job.mine[clients[0]])
    if any(refusals(expected, replies, number, federation.dtype)):
        return outcome
    if not bool(finite(number, federation.device, replies, outcome.memories.pick(clients)).all()):
        return outcome
    block = Block.of(job.means, clients, replies)
    if not bool(finite(1, federation.device, block.total).all()):
        return outcome
    return replace(outcome, replies=PerClient([(clients, block.told)]), total=block.total)


def mean_of(means: Means, blocks: Sequence[Block]) -> PerClient:
    """The mean over all clients of these blocks, as the reply of the first: to a server that uses nothing else."""
    if not blocks:
        return PerClient(())
    told = tree_map(lambda *parts: torch.cat(parts), *(block.told for block in blocks))
    weight = _weights(means, told).sum()
    weight = torch.where(weight > 0, weight, torch.ones_like(weight))
    mean = tree_map(lambda *totals: (reduce(torch.add, totals) / weight)[None], *(block.total for block in blocks))
    one = torch.ones_like(told["num_samples"][:1])
    return PerClient([(blocks[0].clients[:1], {**mean, "num_samples": one, "loss": told["loss"].mean()[None]})])


def _weights(means: Means, told: Tree) -> Tensor:
    weights: Tensor = told[means.weight] if means.weight else torch.ones_like(told["num_samples"])
    return weights
