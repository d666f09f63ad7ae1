# SPDX-License-Identifier: Apache-2.0
"""Rules that combine replies: numbers worked out by hand, and what lies can move."""

from __future__ import annotations

import pytest
import torch

from fedloom.core.errors import ConfigError
from fedloom.core.random import Fresh, key, uniform
from fedloom.robust.rules import RULES, SKETCH, check_cohort, parse

DRAW = key(1)
HONEST = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 3.0], [2.0, 2.0]])


def combined(text: str, changes: torch.Tensor) -> tuple[list[float], list[float]]:
    rule, liars = parse(text)
    found = rule(changes, liars, DRAW)
    return found.change.tolist(), found.kept.tolist()


def test_the_median_of_each_number() -> None:
    """Of 1, 2, 3, 2 and 9 it is 2; of 2, 1, 3, 2 and 9 too. Of four numbers it is the mean of the two in the middle.

    Of two numbers by three clients, client 1 is in the middle of the first and client 2 in that of the second."""
    with_liar = torch.cat([HONEST, torch.tensor([[9.0, 9.0]])])
    assert combined("median", with_liar)[0] == [2.0, 2.0]
    assert combined("median", torch.tensor([[1.0], [2.0], [4.0], [9.0]])) == ([3.0], [0.0, 1.0, 1.0, 0.0])
    assert combined("median", torch.tensor([[1.0, 9.0], [2.0, 1.0], [3.0, 5.0]]))[1] == [0.0, 0.5, 0.5]


def test_the_trimmed_mean_of_each_number() -> None:
    """Without the least and the greatest: (2 + 2 + 3) / 3 of 1, 2, 3, 2, 9, and of 2, 1, 3, 2, 9 the same."""
    with_liar = torch.cat([HONEST, torch.tensor([[9.0, 9.0]])])
    change, kept = combined("trimmed:1", with_liar)
    assert change == pytest.approx([7 / 3, 7 / 3])
    assert kept == [0.5, 0.5, 1.0, 1.0, 0.0]


def test_krum_takes_the_one_in_the_thick_of_it() -> None:
    """Six clients, one liar: of each the 3 nearest count. Squared distances of 0, 1, 2, 3, 4 and 100 on a line: the
    sums are 1+4+9, 1+1+4, 1+1+4, 1+1+4, 1+4+9: the first of the least, that of 1."""
    line = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [100.0]])
    assert combined("krum:1", line) == ([1.0], [0, 1, 0, 0, 0, 0])


def test_the_geometric_median_of_three_corners() -> None:
    """Of the corners of an equilateral triangle it is the centre; of three points on a line the middle one."""
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 3**0.5 / 2]])
    assert combined("geomedian", corners)[0] == pytest.approx([0.5, 3**0.5 / 6], abs=1e-3)
    change, kept = combined("geomedian", torch.tensor([[0.0], [1.0], [50.0]]))
    assert change == pytest.approx([1.0], abs=1e-2)
    assert kept[1] == 1 and kept[0] < 0.1 and kept[2] < kept[0]


def test_dnc_leaves_out_those_that_stick_out_together() -> None:
    """Two of eight lie alike; three are left out, the two among them."""
    changes = torch.randn(8, 200, generator=torch.Generator().manual_seed(0))
    changes[[2, 5]] += 3.0
    _, kept = combined("dnc:2", changes)
    assert not kept[2] and not kept[5] and sum(kept) == 5


def test_liars_that_know_where_dnc_looks_lie_elsewhere() -> None:
    """So a server draws the numbers that it looks at from its operating system (``training.config``)."""
    changes = torch.randn(8, 40_000, generator=torch.Generator().manual_seed(0))
    hidden = torch.ones(40_000, dtype=torch.bool)
    hidden[uniform(DRAW, (40_000,)).argsort()[:SKETCH]] = False
    changes[[2, 5]] += 100.0 * hidden
    rule, liars = parse("dnc:2")
    assert rule(changes, liars, DRAW).kept[[2, 5]].any()
    assert not rule(changes, liars, Fresh(torch.device("cpu"))).kept[[2, 5]].any()


@pytest.mark.parametrize("name", [name for name in RULES if name != "mean"])
@pytest.mark.parametrize("size", [1e3, 1e8])
def test_lies_move_a_rule_no_further_than_honest_clients_are_apart(name: str, size: float) -> None:
    """The mean goes wherever two liars of ten want it; no rule does."""
    changes = torch.randn(10, 300, generator=torch.Generator().manual_seed(1))
    lied = changes.clone()
    lied[[0, 7]] = size
    text = f"{name}:2" if name in ("trimmed", "krum", "dnc") else name
    apart = (changes[1:7] - changes[1:7].mean(0)).norm(dim=1).max()
    rule, liars = parse(text)
    moved = rule(lied, liars, DRAW).change - changes[1:7].mean(0)
    assert moved.norm() < 1.5 * apart
    assert (RULES["mean"](lied, 0, DRAW).change - changes[1:7].mean(0)).norm() > 0.1 * size


@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("number", [1, 2, 3])
def test_few_replies_are_no_reason_to_fail(name: str, number: int) -> None:
    text = f"{name}:2" if name in ("trimmed", "krum", "dnc") else name
    rule, liars = parse(text)
    found = rule(torch.ones(number, 4), liars, DRAW)
    assert torch.allclose(found.change, torch.ones(4)) and found.kept.any()


@pytest.mark.parametrize("text", ["krum", "median:2", "krum:0", "krum:x", "mode", "trimmed:-1", "krum:²"])
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)


def test_a_rule_for_half_of_the_clients_is_refused() -> None:
    check_cohort("krum:2", 5)
    check_cohort("median", 1)
    with pytest.raises(ConfigError, match="made for 2 that lie of the 4 clients"):
        check_cohort("trimmed:2", 4)
