# SPDX-License-Identifier: Apache-2.0
"""Keys: added without touching those that are there, for their owner alone, and nowhere but in their folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from fedloom.core.errors import ConfigError, RunError
from fedloom.deploy.keys import clients_by_key, make_keys

HOSTS = ["link.example.org", "127.0.0.1"]


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_node_is_added_and_all_other_keys_stay(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys", ["a", "b"], HOSTS)
    before = content(folder)
    (folder / "nodes" / "a").unlink()  # carried to its node
    (folder / "ca.key").unlink()  # kept elsewhere
    make_keys(folder, ["a", "c"], ["127.0.0.1"])
    after = content(folder)
    assert set(after) - set(before) == {"nodes/c", "clients/c.pub"}
    assert set(before) - set(after) == {"nodes/a", "ca.key"}
    assert all(after[name] == before[name] for name in set(before) & set(after))
    assert sorted(clients_by_key(folder / "clients").values()) == ["a", "b", "c"]
    (folder / "clients" / "c.pub").unlink()  # as if killed between the two halves
    make_keys(folder, ["c"], HOSTS)
    assert content(folder) == after


def test_a_folder_that_holds_other_things_or_another_link_is_left_alone(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys", ["a"], HOSTS)
    with pytest.raises(RunError, match=r"is not for other\.example\.org"):
        make_keys(folder, ["b"], ["other.example.org"])
    (folder / "ca.pem").unlink()
    with pytest.raises(RunError, match="no keys of a whole federation"):
        make_keys(folder, ["b"], HOSTS)
    assert not (folder / "nodes" / "b").exists()


@pytest.mark.parametrize("name", ["../../evil", "a b", "", "..", ".hidden", "a/b", "x" * 65])
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="A client cannot be called"):
        make_keys(tmp_path / "deep" / "keys", ["fine", name], HOSTS)
    assert list(tmp_path.rglob("*")) == []


def test_private_keys_are_so_from_the_first_byte(tmp_path: Path, monkeypatch: Any) -> None:
    made: dict[str, int] = {}
    real = os.link

    def seen(source: str, path: Path) -> None:
        made[path.name] = Path(source).stat().st_mode & 0o777
        real(source, path)

    monkeypatch.setattr("os.link", seen)
    before = os.umask(0)
    try:
        folder = make_keys(tmp_path / "keys", ["a"], HOSTS)
    finally:
        os.umask(before)
    assert made == {"ca.key": 0o600, "server.key": 0o600, "a": 0o600}
    for file in ("ca.key", "server.key", "nodes/a"):
        assert (folder / file).stat().st_mode & 0o777 == 0o600
