# SPDX-License-Identifier: Apache-2.0
"""Rounds on the clock, by hand: who answers when, how old it is, and who goes away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedloom.core.errors import ConfigError
from fedloom.training.availability import Availability
from fedloom.training.clock import AbstractClock, Asynchronous, Synchronous


def shown(clock: AbstractClock, rounds: int) -> list[tuple[float, str, list[int]]]:
    turns = [clock.turn(number) for number in range(1, rounds + 1)]
    return [(turn.time, "".join(turn.came), list(turn.staleness.values())) for turn in turns]


def everybody(clients: int = 3) -> Availability:
    return Availability(np.ones(clients))


def of_file(folder: Path, rows: str, clients: str) -> Availability:
    (folder / "there.csv").write_text("client,start,end,speed\n" + rows.replace(" ", "\n"))
    return Availability.of(str(folder / "there.csv"), tuple(clients), (), seed=0)


def test_the_server_steps_with_every_answer() -> None:
    """a, b and c take 1, 2 and 5 seconds, and all train at all times; of two at one moment the first begun is first.

    a: 0-1, 1-2, 2-3, 3-4, 4-5; b: 0-2, 2-4, 4-6; c: 0-5.
    """
    clock = Asynchronous("abc", everybody(), [1, 2, 5], seed=0, cohort=3, buffer=1)
    assert shown(clock, 7) == [
        (1, "a", [0]), (2, "b", [1]), (2, "a", [1]), (3, "a", [0]), (4, "b", [2]), (4, "a", [1]), (5, "c", [6]),
    ]  # fmt: skip
    assert [clock.turn(number).begun for number in (1, 2, 3)] == [("a", "b", "c"), ("a",), ("b",)]


def test_nobody_answers_twice_in_a_round() -> None:
    """With two answers a round a waits for b: 0-2, 2-4, 4-6; c: 0-5, in the third round, 5-10."""
    clock = Asynchronous("abc", everybody(), [1, 2, 5], seed=0, cohort=3, buffer=2)
    assert shown(clock, 3) == [(2, "ab", [0, 0]), (4, "ab", [0, 0]), (5, "ac", [0, 2])]


def test_answers_of_all_at_one_moment_are_a_synchronous_round() -> None:
    clock = Asynchronous("abc", everybody(), [2, 2, 2], seed=0, cohort=3, buffer=3)
    assert shown(clock, 2) == [(2, "abc", [0, 0, 0]), (4, "abc", [0, 0, 0])]


def test_a_round_of_a_cohort_lasts_as_long_as_its_slowest() -> None:
    clock = Synchronous("abc", everybody(), [1, 2, 5], seed=0, cohort=3)
    assert shown(clock, 2) == [(5, "abc", []), (10, "abc", [])]


def test_a_cohort_is_drawn_from_those_who_are_there(tmp_path: Path) -> None:
    """a is there from 0 to 10, b from 20 to 30; each takes 4 seconds. a is too late at 8, b at 28; then all repeats."""
    clock = Synchronous("ab", of_file(tmp_path, "a,0,10,1 b,20,30,1", "ab"), [4, 4], seed=0, cohort=2)
    assert shown(clock, 5) == [(4, "a", []), (8, "a", []), (24, "b", []), (28, "b", []), (34, "a", [])]
    assert [clock.turn(number).left for number in (2, 3, 4, 5)] == [(), ("a",), (), ("b",)]


def test_who_goes_away_makes_room_for_others(tmp_path: Path) -> None:
    """One at a time: a, who takes 4 seconds and goes at 10, then nobody until b comes at 20 and at 24."""
    clock = Asynchronous("ab", of_file(tmp_path, "a,0,10,1 b,20,30,1", "ab"), [4, 4], seed=0, cohort=1, buffer=1)
    assert [(turn.time, turn.came, turn.left, turn.begun) for turn in map(clock.turn, (2, 3, 4))] == [
        (8, ("a",), (), ("a",)), (24, ("b",), ("a",), ("b",)), (28, ("b",), (), ("b",)),
    ]  # fmt: skip


def test_the_same_seed_gives_the_same_moments() -> None:
    def played(seed: int, rounds: tuple[int, ...]) -> list[object]:
        clock = Asynchronous([*map(str, range(50))], everybody(50), [3] * 50, seed=seed, cohort=10, buffer=4)
        return [clock.turn(number) for number in rounds]

    assert played(0, (1, 2, 20)) == [*played(0, (1, 2)), *played(0, (20,))]
    assert played(0, (5,)) != played(1, (5,))


def test_who_has_never_time_enough_is_counted(tmp_path: Path) -> None:
    there = of_file(tmp_path, "a,0,3,1 b,5,10,1", "ab")
    Asynchronous("ab", there, [4, 4], seed=0, cohort=2, buffer=1)
    with pytest.raises(ConfigError, match="Of 2 clients 1 are ever there long enough to finish their training, and a"):
        Asynchronous("ab", there, [4, 4], seed=0, cohort=2, buffer=2)
    with pytest.raises(ConfigError, match="Of 2 clients 0 are ever there"):
        Synchronous("ab", there, [6, 6], seed=0, cohort=1)
