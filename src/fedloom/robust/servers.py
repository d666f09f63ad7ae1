# SPDX-License-Identifier: Apache-2.0
"""Any method whose server needs only a mean of replies, with a rule that lies can move less: ``--aggregate``.

The method gets what the rule made of the replies as if one client had given it. Numbers of samples do not count, as
they would be the easiest lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.core.contract import Algorithm, Ask, Cohort, Diagnostics, Program, Setup, Table
from fedloom.core.errors import NeedsError
from fedloom.core.trees import ClientId, PerClient, Tree, leaves, tree_map
from fedloom.robust.rules import Rule, parse


def with_rule(algorithm: Algorithm, text: str) -> Algorithm:
    """``algorithm``, whose replies are combined by the rule that ``text`` names."""
    rule, liars = parse(text)
    if not algorithm.means:
        raise NeedsError(
            f"{algorithm.name} uses what single clients reply, and --aggregate is for methods that need only a mean "
            'over clients. `fedloom methods "only means"` lists them.'
        )
    return replace(algorithm, name=f"{algorithm.name}, {text}", round=partial(_round, algorithm, rule, liars))


def _round(
    algorithm: Algorithm, rule: Rule, liars: int, setup: Setup[Any], state: Any, cohort: Cohort, ask: Ask
) -> tuple[Any, Diagnostics]:
    """The method's round, with one combined reply in the place of all."""
    told: dict[str, Table] = {}

    def robust(program: Program, shared: Tree, mine: Mapping[ClientId, Tree]) -> PerClient:
        replies = ask(program, shared, mine)
        ((clients, tree),) = replies.groups  # methods of means have one architecture
        kept = {name: branch for name, branch in tree.items() if name not in ("num_samples", "loss")}
        found = rule(_rows(kept, len(clients)), liars, cohort.round)
        told["kept"] = Table(clients, ("kept",), found.kept.to(torch.float32)[:, None])
        one = {"num_samples": torch.ones_like(tree["num_samples"][:1]), "loss": tree["loss"][found.kept].mean()[None]}
        return PerClient([(clients[:1], {**_like(found.change, kept), **one})])

    after, diagnostics = algorithm.round(setup, state, cohort, robust)
    return after, {**diagnostics, **told}


def _rows(tree: Tree, number: int) -> Tensor:
    """The clients' replies as rows: (clients, numbers)."""
    return torch.cat([leaf.reshape(number, -1) for _, leaf in leaves(tree)], 1)


def _like(row: Tensor, tree: Tree) -> Any:
    """A row as a tree of one client, as those in ``tree`` are."""
    sizes = [leaf[0].numel() for _, leaf in leaves(tree)]
    parts = iter(torch.split(row, sizes))
    return tree_map(lambda leaf: next(parts).reshape(1, *leaf.shape[1:]).to(leaf.dtype), tree)
