# SPDX-License-Identifier: Apache-2.0
"""Who is there, and how long others wait for those who are there and mute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from conftest import small_federation
from deploy.nearby import MUTE, Nearby, table_of
from fedloom.deploy import lobby as module
from fedloom.deploy.codec import pack
from fedloom.deploy.lobby import GRACE, PATIENCE, Lobby


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


def nearby(folder: Path) -> Nearby:
    federation = small_federation(["mlp:hidden=5"])
    return Nearby(federation, table_of("fedavg", federation), folder)


def test_a_mute_client_costs_the_timeout_and_nobody_elses_reply(clock: Clock, tmp_path: Path) -> None:
    lobby = nearby(tmp_path)
    lobby.refresh()
    begun = clock.now
    lobby.faults["2"] = lambda *_: MUTE
    answers = lobby.exchange("query.hello", dict.fromkeys("01234", pack({"run": "r"})), 25.0)
    assert 25 <= clock.now - begun < 26
    assert answers.pop("2") == "did not answer within 25 seconds"
    assert sorted(answers) == ["0", "1", "3", "4"] and not any(isinstance(one, str) for one in answers.values())


def test_a_node_that_is_mute_when_it_comes_holds_others_up_once_and_not_for_long(clock: Clock, tmp_path: Path) -> None:
    lobby = nearby(tmp_path)
    lobby.faults["2"] = lambda *_: MUTE
    lobby.disconnect("4")
    begun = clock.now
    lobby.refresh()
    assert sorted(lobby.nodes) == ["0", "1", "3"] and GRACE <= clock.now - begun < GRACE + 1
    lobby.connect("4", node=999)
    before = clock.now
    lobby.refresh()
    assert sorted(lobby.nodes) == ["0", "1", "3", "4"] and clock.now == before
    for _ in range(100):  # rounds of five seconds, while it is given up and greeted again
        clock.sleep(5)
        before = clock.now
        lobby.refresh()
        assert clock.now == before
    assert lobby.refused == [f"node 114 did not answer within {PATIENCE:g} seconds"] * 2
    assert [kind for kind, client, _, _ in lobby.letters if client == "2"] == ["query.hello"] * 3
    lobby.faults = {}
    for _ in range(2):
        clock.sleep(PATIENCE + 1)
        lobby.refresh()
    assert "2" in lobby.nodes


def test_a_greeting_that_comes_late_counts_and_one_of_a_node_that_is_gone_does_not(
    clock: Clock, tmp_path: Path
) -> None:
    lobby = nearby(tmp_path)
    lobby.faults = {client: lambda *_: MUTE for client in "23"}
    lobby.refresh()
    honest = {client: lobby._answer("query.hello", client, pack({"run": "r"})) for client in "01"}
    assert set(lobby.nodes) == {"0", "1", "4"} and all(honest.values())
    lobby.faults = {}
    for message, (node, _) in lobby._hailed.items():
        lobby.answers[message] = lobby._answer("query.hello", lobby.clients[node], pack({"run": "r"}))
    lobby.disconnect("3")
    lobby.refresh()
    assert set(lobby.nodes) == {"0", "1", "2", "4"} and not lobby._hailed and not lobby.refused


def test_an_answer_to_another_message_is_nobodys() -> None:
    replies = [
        SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=name), has_error=lambda: False, content=name)
        for name in ("a", "old")
    ]
    grid = SimpleNamespace(pull_messages=lambda messages: replies)
    assert Lobby(grid, "run", None, print).pull(["a", "b"]) == {"a": "a"}
