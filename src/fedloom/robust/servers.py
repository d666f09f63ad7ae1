# SPDX-License-Identifier: Apache-2.0
"""Any method whose server needs only a mean of replies, with a rule that lies can move less: ``--aggregate``.

The method gets what the rule made of the replies as if one client had given it. Numbers of samples do not count, as
they would be the easiest lie.

A method that steps a loom once a round on the mean of what it pulls back through it (``Algorithm.one_step``) has the
rule over the clients' gradients of the loom. An embedding is one client's alone, and takes that client's own gradient.

Without a rule, ``--max-weight`` bounds what a claimed number of samples can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Program, Setup, Table
from fedloom.core.errors import NeedsError
from fedloom.core.random import Fresh, Key, key
from fedloom.core.trees import ClientId, PerClient, Tree, leaves, tree_map
from fedloom.robust.rules import Rule, parse


def with_rule(algorithm: Algorithm, text: str, *, secret: bool = False) -> Algorithm:
    """``algorithm``, whose replies are combined by the rule that ``text`` names.

    ``secret``: what the rule draws comes from the operating system, so that no client knows it beforehand.
    """
    rule, liars = parse(text)
    named = f"{algorithm.name}, {text}"
    if algorithm.one_step:
        own = partial(_round_of_loom, algorithm, rule, liars, secret)
        return replace(algorithm, name=named, init=partial(_init_of_loom, algorithm), round=own)
    if not algorithm.means:
        raise NeedsError(
            f"{algorithm.name} uses what single clients reply, and --aggregate is for methods that need only a mean "
            'over clients. `fedloom methods "only means"` lists them.'
        )
    settle = partial(_settle, algorithm, rule, liars, secret) if algorithm.settle else None
    return replace(algorithm, name=named, round=partial(_round, algorithm, rule, liars, secret), settle=settle)


def _drawn(round: int, secret: bool) -> Key:
    return Fresh(torch.device("cpu")) if secret else key(round, "dnc")


def _round(
    algorithm: Algorithm, rule: Rule, liars: int, secret: bool, setup: Setup[Any], state: Any, cohort: Cohort, ask: Ask
) -> tuple[Any, Diagnostics]:
    """The method's round, with one combined reply in the place of all."""
    told: dict[str, Table | Tensor] = {}

    def robust(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        if told:
            raise NeedsError(
                f"{algorithm.name} asks {program.name} besides one mean a round here, and --aggregate combines one. "
                "Leave out what asks others than the cohort, such as --everybody-trains."
            )
        replies = ask(program, shared, mine)
        ((clients, tree),) = replies.groups  # methods of means have one architecture
        branches = _beside(tree)
        found = rule(_rows(branches, len(clients)), liars, _drawn(cohort.round, secret))
        told.update(_told(clients, found.kept))
        loss = (tree["loss"] * found.kept).sum() / found.kept.sum()
        one = {"num_samples": torch.ones_like(tree["num_samples"][:1]), "loss": loss[None]}
        return PerClient([(clients[:1], {**_like(found.change, branches), **one})])

    after, diagnostics = algorithm.round(setup, state, cohort, robust)
    return after, {**diagnostics, **told}


def _settle(algorithm: Algorithm, rule: Rule, liars: int, secret: bool, setup: Setup[Any], state: Any, ask: Ask) -> Any:
    """As the method settles, with the rule over what clients tell for it."""
    assert algorithm.settle is not None

    def robust(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        replies = ask(program, shared, mine)
        ((clients, tree),) = replies.groups
        branches = _beside(tree)
        if not branches:
            return replies
        found = rule(_rows(branches, len(clients)), liars, _drawn(0, secret))
        rest = {name: leaf[:1] for name, leaf in tree.items() if name not in branches}
        return PerClient([(clients[:1], {**_like(found.change, branches), **rest})])

    return algorithm.settle(setup, state, robust)


def _beside(tree: Tree) -> Tree:
    """What replies say beside numbers of samples and losses."""
    return {name: branch for name, branch in tree.items() if name not in ("num_samples", "loss")}


def _init_of_loom(algorithm: Algorithm, setup: Setup[Any]) -> Any:
    assert algorithm.one_step is not None
    if not algorithm.one_step(setup.config):
        raise NeedsError(
            f"{algorithm.name} makes a step of its own for each reply here, so that there is nothing to combine; "
            "--aggregate needs one step a round. Give --server-step cohort_mean."
        )
    if len(setup.architectures) > 1:
        raise NeedsError(
            f"The loom of {algorithm.name} has a head for each of {len(setup.architectures)} architectures here, and "
            "--aggregate combines gradients of clients that have one. Give one --model."
        )
    return algorithm.init(setup)


def _round_of_loom(
    algorithm: Algorithm, rule: Rule, liars: int, secret: bool, setup: Setup[Any], state: Any, cohort: Cohort, ask: Ask
) -> tuple[Any, Diagnostics]:
    """The method's round, in which clients' gradients of the loom are combined by the rule."""
    told: dict[str, Table | Tensor] = {}

    def combine(clients: Sequence[ClientId], gradients: Tensor) -> Tensor:
        found = rule(gradients, liars, _drawn(cohort.round, secret))
        told.update(_told(clients, found.kept))
        return found.change

    after, diagnostics = algorithm.round(replace(setup, combine=combine), state, cohort, ask)
    return after, {**diagnostics, **told}


def _told(clients: Sequence[ClientId], kept: Tensor) -> dict[str, Table | Tensor]:
    """For the round's record: how much of each client counted, and how much of all did not."""
    return {"kept": Table(tuple(clients), ("kept",), kept.to(torch.float32)[:, None]), "left_out": 1 - kept.mean()}


def with_bounded_weights(algorithm: Algorithm, most: float) -> Algorithm:
    """``algorithm``, of whose clients none counts for more than ``most`` times the median number of samples.

    The median is that of the replies that came together, and the lower one of an even number of them: one of two must
    not make its own bound.
    """
    return replace(algorithm, round=partial(_bounded_round, algorithm, most))


def _bounded_round(
    algorithm: Algorithm, most: float, setup: Setup[Any], state: Any, cohort: Cohort, ask: Ask
) -> tuple[Any, Diagnostics]:
    def bounded(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        replies = ask(program, shared, mine)
        claims = [n for _, tree in replies.groups if "num_samples" in tree for n in tree["num_samples"].tolist()]
        limit = max(1.0, most * median_low(claims)) if claims else 1.0
        return PerClient(
            (clients, {name: leaf.clamp(max=limit) if name == "num_samples" else leaf for name, leaf in tree.items()})
            for clients, tree in replies.groups
        )

    return algorithm.round(setup, state, cohort, bounded)


def _rows(tree: Tree, number: int) -> Tensor:
    """The clients' replies as rows: (clients, numbers)."""
    return torch.cat([leaf.reshape(number, -1) for _, leaf in leaves(tree)], 1)


def _like(row: Tensor, tree: Tree) -> Any:
    """A row as a tree of one client, as those in ``tree`` are."""
    sizes = [leaf[0].numel() for _, leaf in leaves(tree)]
    parts = iter(torch.split(row, sizes))
    return tree_map(lambda leaf: next(parts).reshape(1, *leaf.shape[1:]).to(leaf.dtype), tree)
