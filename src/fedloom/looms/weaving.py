# SPDX-License-Identifier: Apache-2.0
"""Between a loom and a roster: weaving models for clients, and pulling their replies back through the loom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fedloom.core.contract import Cohort, Setup
from fedloom.core.errors import NeedsError, RoundError
from fedloom.core.random import stream
from fedloom.core.trees import ClientId, Params, PerClient

MAX_RECORDED = 10
"""Models woven at once by a recorded graph."""


class Loom(Protocol):
    """From embeddings to parameters, per architecture."""

    @property
    def targets(self) -> Mapping[str, Any]: ...
    def __call__(self, params: Params, embeddings: Tensor, target: str) -> Tensor: ...
    def flatten(self, params: Params, target: str) -> Tensor: ...
    def unflatten(self, vectors: Tensor, target: str) -> dict[str, Tensor]: ...


def weave(setup: Setup[Any], loom: Loom, phi: Params, embeddings: Tensor, clients: Sequence[ClientId]) -> PerClient:
    """theta_i = h(v_i; phi) for every client; row i of ``embeddings`` is the i-th client's."""
    row = {client: i for i, client in enumerate(clients)}
    groups = []
    with torch.no_grad():
        for spec, members in setup.by_model(clients).items():
            if str(spec) not in loom.targets:
                raise NeedsError(
                    f"The loom weaves {', '.join(loom.targets)}; client {members[0]} has {spec}. "
                    "Admit it with an architecture that took part in training."
                )
            rows, target = _pick(embeddings, [row[m] for m in members]), str(spec)

            def woven(phi: Params, rows: Tensor, target: str = target) -> dict[str, Tensor]:
                return loom.unflatten(loom(phi, rows, target), target)

            # for few clients launching the kernels takes longer than running them; for many a recording takes memory
            few = len(members) <= MAX_RECORDED
            params = setup.replay(("weave", target), woven, phi, rows) if few else woven(phi, rows)
            groups.append((members, {"params": params}))
    return PerClient(groups)


def pull_back(
    setup: Setup[Any],
    loom: Loom,
    phi: Params,
    embeddings: Tensor,
    clients: Sequence[ClientId],
    replies: PerClient,
    *,
    through_loom: bool = True,
) -> tuple[dict[str, Tensor], Tensor]:
    """The mean pseudo-gradient of ``replies`` as gradients of phi and of the embeddings, in one product.

    The forward pass is done anew from the parameters given. Without ``through_loom`` the loom is frozen.
    """
    row = {client: i for i, client in enumerate(clients)}
    table = embeddings.detach().requires_grad_()
    weights = {name: value.detach().requires_grad_(through_loom) for name, value in phi.items()}
    woven, pseudo_grads = [], []
    for group, _ in replies.groups:
        # architectures of equal shapes share a group of replies, but not a head
        for spec, members in setup.by_model(group).items():
            woven.append(loom(weights, _pick(table, [row[m] for m in members]), str(spec)))
            pseudo_grads.append(-loom.flatten(replies.pick(members)["delta"], str(spec)) / len(replies))
    wanted = [table, *(weights.values() if through_loom else ())]
    # a head that no reply went through has a gradient of zero: decay and momentum still act on it
    grads = torch.autograd.grad(woven, wanted, pseudo_grads, allow_unused=True, materialize_grads=True)
    return dict(zip(weights, grads[1:])), grads[0]


def _pick(table: Tensor, rows: list[int]) -> Tensor:
    """Rows of a table; a view of it where they follow each other, which a recorded graph can hold."""
    return table[rows[0] : rows[-1] + 1] if rows == list(range(rows[0], rows[-1] + 1)) else table[rows]


def one_by_one(setup: Setup[Any], replies: PerClient) -> list[PerClient]:
    """Each reply, in the roster's order: for one step of the server after another."""
    return [PerClient([([c], replies.pick([c]))]) for c in sorted(replies, key=lambda c: setup.rows([c]))]


def turns(setup: Setup[Any], cohort: Cohort, answers: Callable[[Sequence[ClientId]], PerClient]) -> Iterator[PerClient]:
    """``answers`` of the whole cohort; with ``server_step=in_turn`` of one client after another, in an order drawn.

    Each is asked when its turn has come, not before. One that fails costs its turn and nothing else, unless all do.
    """
    clients = sorted(cohort.clients, key=lambda c: setup.rows([c]))
    groups = [clients]
    if setup.config.server_step == "in_turn":
        groups = [[clients[i]] for i in stream(setup.seed, cohort.round, "turns").permutation(len(clients))]
    silence: RoundError | None = None
    heard = False
    for group in groups:
        try:
            replies = answers(group)
        except RoundError as error:
            silence = error
            continue
        heard = True
        yield replies
    if silence and not heard:
        raise silence
