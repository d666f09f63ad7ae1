# SPDX-License-Identifier: Apache-2.0
"""Data dealt over nodes lie in the nodes' folders, whatever the clients in a dataset are called."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedloom.core.errors import ConfigError
from fedloom.deploy.trial import Trial, deal


def dataset(path: Path, *clients: str) -> str:
    """A file with 20 samples of each client."""
    number = 20 * len(clients)
    x = np.arange(number * 3, dtype=np.float32).reshape(number, 3)
    np.savez(path, x=x, y=np.arange(number) % 2, client=np.repeat(clients, 20))
    return str(path)


def test_every_node_gets_a_file_in_a_folder_of_its_own(tmp_path: Path) -> None:
    found = deal(Trial(dataset=dataset(tmp_path / "data.npz", "ward-3", "Zoë")), 2, 0, 0, tmp_path / "nodes")
    assert found == {name: tmp_path / "nodes" / name / "data.npz" for name in ("ward-3", "Zoë")}
    with np.load(found["Zoë"]) as file:
        assert sum(len(file[f"y_{split}"]) for split in ("train", "val", "test")) == 20


@pytest.mark.parametrize("name", ["../../evil", "/abs/x", "..", "a b"])
def test_a_client_that_no_node_can_be_called_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "app" / "local" / "nodes"
    given = Trial(dataset=dataset(tmp_path / "data.npz", "fine", name.replace("/abs", f"{tmp_path}/abs")))
    with pytest.raises(ConfigError, match="A client cannot be called"):
        deal(given, 2, 0, 0, folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["data.npz"]
