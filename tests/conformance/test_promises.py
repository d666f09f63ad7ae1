# SPDX-License-Identifier: Apache-2.0
"""What methods declare of themselves is so, whether they say it or ``replace(fedavg.ALGORITHM, ...)`` said it for them.

Others are tried elsewhere, on all methods too: ``means`` in the tests of sums, ``averaged`` in those of ``--average``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import Played, play, small_federation
from fedloom import algorithms
from fedloom.clients.federation import Federation
from fedloom.core.contract import Algorithm
from fedloom.core.trees import Tree, flatten

METHODS = [algorithms.get(name) for name in algorithms.names()]
ADMITTING = [method for method in METHODS if method.admit]
NEWCOMER = "4"


def used(algorithm: Algorithm, federation: Federation, rounds: int = 2) -> Played:
    """The method when it is used: settled, with newcomers admitted."""
    few: dict[str, Any] = {"admit_rounds": 2} if hasattr(algorithm.config, "admit_rounds") else {}
    played = play(algorithm, federation, rounds=rounds, **few)
    if algorithm.settle:
        played.settle()
    return played.admit() if federation.unseen and algorithm.admit else played


def same(one: Tree, other: Tree) -> bool:
    a, b = flatten(one), flatten(other)
    return a.keys() == b.keys() and all(torch.equal(a[path], b[path]) for path in a)


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda one: one.name)
def test_participants_use_models_of_their_own_where_these_carry_the_prior(algorithm: Algorithm) -> None:
    """With layers of normalisation where the method has them: FedBN's clients have nothing else of their own."""
    network = "mlp:hidden=5" if algorithm.needs.no_batchnorm else "testnets:Normed"
    played = used(algorithm, small_federation([network]))
    first, second = (
        {name: tree for name, tree in played.deployed(client).items() if name != "buffers"} for client in ("0", "1")
    )
    assert same(first, second) != algorithm.carries_prior


@pytest.mark.parametrize("algorithm", ADMITTING, ids=lambda one: one.name)
def test_newcomers_get_something_of_the_training(algorithm: Algorithm) -> None:
    """A method with models of its clients' own must not hand on what clients begin with."""
    before, after = (used(algorithm, small_federation(unseen=1), rounds).deployed(NEWCOMER) for rounds in (0, 2))
    assert not same(before, after)


@pytest.mark.parametrize("algorithm", ADMITTING, ids=lambda one: one.name)
def test_newcomers_need_labels_where_their_models_depend_on_them(algorithm: Algorithm) -> None:
    plain, other = small_federation(unseen=1), small_federation(unseen=1)
    rows = other.roster[NEWCOMER].rows["train"]
    other.y[rows] = (other.y[rows] + 1) % 3
    played = used(algorithm, plain)
    needs = algorithm.needs_labels(played.setup.config)
    assert same(played.deployed(NEWCOMER), used(algorithm, other).deployed(NEWCOMER)) != needs
