# SPDX-License-Identifier: Apache-2.0
"""Who the clients of a run are, as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.errors import RunError
from fedloom.runs.directory import RunDirectory
from fedloom.runs.roster import Member, Roster

SAMPLES = {"train": 9, "val": 2, "test": 3}
ROSTER = Roster(
    (1, 6, 6), 3, 3, ("cat", "dog", "eel"), (),
    [
        Member("0", False, "lenet:kernels=2", 120, SAMPLES),
        Member("clinic b", False, "lenet:kernels=2", 120, {**SAMPLES, "test": 0}),
        Member("on a machine of its own", False, None, 120, SAMPLES),
        Member("2", True, "mlp", 99, SAMPLES),
    ],
)  # fmt: skip


def test_a_roster_comes_back_from_a_run_directory(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", {"method": "fedavg"})
    assert not directory.has_roster()
    directory.write_roster(ROSTER)
    assert directory.has_roster() and RunDirectory.open(tmp_path / "run").roster() == ROSTER
    assert ROSTER.participants == ("0", "clinic b", "on a machine of its own")


def test_networks_are_listed_once_and_one_whose_size_alone_is_known_is_another() -> None:
    content = ROSTER.as_json()
    assert content["models"] == [
        {"name": "lenet:kernels=2", "parameters": 120},
        {"name": None, "parameters": 120},
        {"name": "mlp", "parameters": 99},
    ]
    assert [client["model"] for client in content["clients"]] == [0, 0, 1, 2]


def test_a_run_without_a_roster_says_where_it_is_from(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", {"method": "fedavg"})
    with pytest.raises(RunError, match=r"has no roster.json: it was written by an earlier version of fedloom, or"):
        directory.roster()


def test_a_roster_of_a_later_format_is_refused() -> None:
    with pytest.raises(RunError, match=r"roster.json has format 2 where this fedloom knows 1; use the fedloom that"):
        Roster.of_json({**ROSTER.as_json(), "format": 2}, "roster.json")


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("clients"),
        lambda content: content["clients"][0].pop("train"),
        lambda content: content["clients"][0].update(model=9),
        lambda content: content["models"][0].update(parameters="many"),
        lambda content: content["clients"][0].update(train=float("inf")),
        lambda content: content["models"][0].update(name=7),
        lambda content: content.update(clients=3),
    ],
)
def test_a_damaged_roster_is_refused(damage: Any) -> None:
    content = json.loads(json.dumps(ROSTER.as_json()))
    damage(content)
    with pytest.raises(RunError, match=r"roster.json is damaged: it is not the roster of a run; restore it."):
        Roster.of_json(content, "roster.json")
