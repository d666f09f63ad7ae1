# SPDX-License-Identifier: Apache-2.0
"""Any method that asks once a round for a change, with answers that come when they are done: ``--async K``.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated learning with buffered asynchronous aggregation. AISTATS
2022 (arXiv:2106.06639).

A client trains on what it was sent when it began. The server steps with K changes at a time, from the state that it has
by then; a change that is tau rounds old is multiplied by (1 + tau)^-0.5. For a method of means this is FedBuff, with
the method's own weights. A loom's change is pulled back through the loom as it is by then.

A client that has begun keeps what it was sent (``Session.deliver``), and trains when its turn comes: a round of the
engine is the K clients that answer in it, side by side, whatever each of them began from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Home, Program, Setup, call
from fedloom.core.errors import NeedsError
from fedloom.core.trees import ClientId, PerClient, Tree, tree_map
from fedloom.engines.engine import Session
from fedloom.training.clock import Turn

CHANGE = "delta"
"""The branch of a reply that counts for less the older it is."""

TOLD = {"num_samples", "loss"}
"""What replies may say besides."""


class _Asked(Exception):
    """A round came to its first ask."""

    def __init__(self, shared: Tree, mine: PerClient) -> None:
        super().__init__()
        self.shared, self.mine = shared, mine


class Rehearsed(NamedTuple):
    """An ask of a round."""

    program: Program
    told: frozenset[str]
    """The branches of a reply."""
    clients: frozenset[ClientId]


def rehearsed(algorithm: Algorithm, setup: Setup[Any], state: Any, number: int = 1) -> list[Rehearsed]:
    """What a round of that number asks two clients, played without them: all reply that nothing changes."""
    found: list[Rehearsed] = []

    def silent(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        like = {client: program.expects(shared, tree) for client, tree in mine.items()}
        found.append(Rehearsed(program, frozenset(name for tree in like.values() for name in tree), frozenset(mine)))
        return PerClient.of({client: _nothing(setup, tree) for client, tree in like.items()})

    algorithm.round(replace(setup, replay=call), state, Cohort(number, setup.clients[:2]), silent)
    return found


def check(algorithm: Algorithm, setup: Setup[Any], state: Any) -> None:
    """Refuse a method whose rounds are not one ask for a change, the same in the first round and in the last."""
    first, *more = rehearsed(algorithm, setup, state)
    more += [ask for ask in rehearsed(algorithm, setup, state, setup.rounds) if ask.program != first.program]
    if more or first.clients != set(setup.clients[:2]):
        besides = more[0].program.name if more else "others than its cohort"
        raise NeedsError(
            f"{algorithm.name} asks for {first.program.name} and for {besides} here, and --async is for methods that "
            "ask a cohort for one thing in every round. Choose another method, such as fedavg or pfedhn."
        )
    if first.told - TOLD != {CHANGE}:
        said = ", ".join(sorted(first.told - TOLD)) or "no change"
        raise NeedsError(
            f"Clients of {algorithm.name} reply with {said} here, and --async is for methods that get the change of "
            "what was sent and no more. Choose another method, such as fedavg or pfedhn."
        )


def play(
    algorithm: Algorithm, turn: Turn, session: Session, setup: Setup[Any], state: Any, cohort: Cohort, ask: Ask
) -> tuple[Any, Diagnostics]:
    """A round of the method, whose cohort are those who came: each replies to what it was sent when it began.

    Those who begin are given what the method would send them in a round now; that round is played up to its first ask
    and dropped. Then the method plays its round with those who came: in the place of its ask, clients run the same
    program on what they have kept.
    """
    if turn.begun:
        sent = _sent(algorithm, setup, state, Cohort(cohort.round, turn.begun, cohort.size))
        for client in turn.begun:
            session.deliver(client, {"shared": sent.shared, "mine": sent.mine[client]})

    def late(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        messages = {}
        for client in mine:
            message = session.collect(client)
            if message is None:
                raise NeedsError(
                    f"{algorithm.name} asks for {program.name} besides in round {cohort.round}, and --async is for "
                    "methods that ask a cohort for one thing in every round. Choose another method, such as fedavg."
                )
            messages[client] = message
        replies = ask(of_messages(program), {}, PerClient.of(messages))
        return PerClient((clients, _discounted(tree, clients, turn)) for clients, tree in replies.groups)

    state, diagnostics = algorithm.round(setup, state, cohort, late)
    rounds = turn.staleness.values()
    return state, {**diagnostics, "staleness": sum(rounds) / len(rounds), "staleness_most": float(max(rounds))}


def of_messages(program: Program) -> Program:
    """``program`` for clients of which each has a ``shared`` of its own, as part of ``mine``."""
    return replace(
        program,
        init=partial(_init, program.init),
        step=partial(_step, program.step),
        final=partial(_final, program.final),
        expects=partial(_expects, program.expects),
    )


def _init(init: Callable[..., Any], home: Home, shared: Tree, mine: Tree, memory: Tree) -> dict[str, Any]:
    return {"carry": init(home, mine["shared"], mine["mine"], memory), "shared": mine["shared"]}


def _step(step: Callable[..., Any], home: Home, shared: Tree, carry: Any, batch: Any) -> dict[str, Any]:
    return {"carry": step(home, carry["shared"], carry["carry"], batch), "shared": carry["shared"]}


def _final(final: Callable[..., Any], home: Home, shared: Tree, carry: Any, memory: Tree) -> tuple[Tree, Tree]:
    reply, kept = final(home, carry["shared"], carry["carry"], memory)
    return reply, kept


def _expects(expects: Callable[[Tree, Tree], Tree], shared: Tree, mine: Tree) -> Tree:
    return expects(mine["shared"], mine["mine"])


def _sent(algorithm: Algorithm, setup: Setup[Any], state: Any, cohort: Cohort) -> _Asked:
    """What the method sends a cohort in a round after ``state``; the round is left at its first ask."""

    def heard(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        raise _Asked(shared, PerClient.of(mine))

    try:
        algorithm.round(setup, state, cohort, heard)
    except _Asked as asked:
        return asked
    raise NeedsError(f"{algorithm.name} asks nobody in round {cohort.round}; --async needs a method that does.")


def _discounted(tree: Tree, clients: Sequence[ClientId], turn: Turn) -> Tree:
    """The replies of some clients, whose changes count for less the older they are."""

    def one(leaf: torch.Tensor) -> torch.Tensor:
        factors = torch.tensor([(1 + turn.staleness[client]) ** -0.5 for client in clients], dtype=leaf.dtype)
        return leaf * factors.to(leaf.device).reshape(-1, *[1] * (leaf.dim() - 1))

    return {**tree, CHANGE: tree_map(one, tree[CHANGE])}


def _nothing(setup: Setup[Any], like: Tree) -> Any:
    """A reply of this form that changes nothing, of one sample."""
    zeros = tree_map(lambda leaf: torch.zeros(leaf.shape, dtype=setup.dtype, device=setup.device), like)
    return {**zeros, **({"num_samples": torch.ones_like(zeros["num_samples"])} if "num_samples" in zeros else {})}
