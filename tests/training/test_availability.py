# SPDX-License-Identifier: Apache-2.0
"""Who is there when: files that are read, files that are refused, and a span that repeats."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fedloom.core.errors import DataError
from fedloom.training.availability import ALWAYS, Availability


def read(folder: Path, text: str, clients: tuple[str, ...] = ("a", "b")) -> Availability:
    path = folder / "there.csv"
    path.write_text(text)
    return Availability.of(str(path), clients, ("unseen",), seed=0)


def test_a_file_says_who_is_there_and_begins_again(tmp_path: Path) -> None:
    """a: 0-4 and, from two rows that touch, 6-10; b: 5-8. After 10 seconds all of it comes again."""
    found = read(tmp_path, "client,start,end,speed\na,0,4,2.5\na,8,10,2.5\na,6,8,\nb,5,8,\nunseen,1,2,\n")
    assert found.speeds[0] == 2.5
    assert [found.there(1000 * t).tolist() for t in (0, 4, 5, 7, 8, 10, 17)] == [[0], [], [1], [0, 1], [0], [0], [0, 1]]
    assert found.is_there(0, 3999) and not found.is_there(0, 4000) and not found.is_there(1, 8000)
    # from 6 on a stays over the end, and goes 4 seconds after it
    assert (found.until(0, 1000), found.until(0, 7000), found.until(1, 15000)) == (4000, 14000, 18000)
    assert [found.opens(t) for t in (0, 5000, 6000, 10000)] == [5000, 6000, 10000, 15000]
    assert found.longest().tolist() == [8000, 3000]


def test_who_is_there_all_the_time_never_goes(tmp_path: Path) -> None:
    found = read(tmp_path, "client,start,end\na,0,5\na,5,10\nb,0,1\n")
    assert found.until(0, 123456) == math.inf and found.longest().tolist() == [math.inf, 1000]


def test_speeds_are_drawn_ten_times_apart() -> None:
    clients = tuple(map(str, range(20_000)))
    speeds = Availability.of(ALWAYS, clients, (), seed=0).speeds
    assert np.median(speeds) == pytest.approx(1, rel=0.05)
    assert np.quantile(speeds, 0.95) / np.quantile(speeds, 0.05) == pytest.approx(10, rel=0.1)
    assert not np.array_equal(speeds, Availability.of(ALWAYS, clients, (), seed=1).speeds)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has the columns of an empty file; expected client, start, end"),
        ("client,start\na,0\n", "has the columns client, start; expected client, start, end"),
        ("client,start,end,model\n", "has the columns client, start, end, model; expected"),
        ("client,start,end\na,0\n", "line 2 has 2 values, expected 3"),
        ("client,start,end\na,zero,4\n", "line 2: start is 'zero'; expected a number from 0 to 1e\\+09"),
        ("client,start,end\na,0,inf\n", "line 2: end is 'inf'; expected a number"),
        ("client,start,end\na,4,4\n", "line 2: it ends at 4 and starts at 4; give an end after the start"),
        ("client,start,end\nc,0,4\n", "line 2: there is no client 'c' in this federation"),
        ("client,start,end\na,0,4\n", "does not say when clients b are there. Give a row for each client"),
        ("client,start,end\na,0,4\na,3,5\nb,0,1\n", "client a is there from 0 to 4 and again from 3"),
        ("client,start,end,speed\na,0,4,1\na,5,6,2\nb,0,1,\n", "client a has the speeds 1 and 2. Give one"),
        ("client,start,end,speed\na,0,4,0\nb,0,1,\n", "speed is '0'; expected a number from 1e-06"),
        ('client,start,end\n"a,0,4\n', "Cannot read .* Give --availability a text file with the columns client"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(tmp_path, text)


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there.csv").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "there.csv", tmp_path / "nothing.csv", tmp_path, Path("/dev/zero")):
        with pytest.raises(DataError, match=r"Cannot read .* or always\."):
            Availability.of(str(path), ("a",), (), seed=0)
