# SPDX-License-Identifier: Apache-2.0
"""``fedloom table`` and ``fedloom board``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cli.conftest import Cli

RECIPE = """
title: A small table
setting: digits
source: nobody
note: A note.
seeds: [0]
columns: [best]
options: {dataset: digits, model: "mlp:hidden=4", clients: 4, cohort: 2, rounds: 2, local_steps: 2}
rows:
  - {name: Local, method: local, paper: 10.5}
  - {name: FedAvg, method: fedavg}
"""


def test_a_recipe_is_run_and_put_on_the_board(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    first = cli("table", "small.yaml", "--device", "cpu")
    assert first.code == 0 and "A small table" in first.out and "| 10.5 | 1 |" in first.out
    assert first.out.rstrip().endswith("runs/small/results.json")
    assert first.err.count("seed 0") == 2
    again = cli("table", "small.yaml", "--device", "cpu", "--only", "Local")
    assert "seed 0" not in again.err and "FedAvg" not in again.out
    board = cli("board", "runs/small/results.json")
    assert board.out.splitlines()[0] == "|  | digits |" and "| best of the papers | 10.5 |" in board.out


def test_a_row_that_failed_is_told_every_time(cli: Cli, tmp_path: Path) -> None:
    rows = "  - {name: two, method: fedavg, options: {model: 'mlp,mlp:hidden=3'}}\n"
    (tmp_path / "small.yaml").write_text(RECIPE + rows)
    for _ in range(2):
        found = cli("table", "small.yaml", "--device", "cpu")
        assert found.code == 1 and "| Local |" in found.out
        assert "two has no number: fedavg needs one architecture" in found.err.lower()


def test_what_cannot_be_is_one_sentence(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    assert "Unknown row 'Locla'; did you mean 'Local'?" in refused("table", "small.yaml", "--only", "Locla")
    assert "Cannot read the recipe none.yaml" in refused("table", "none.yaml")
    assert "--device gpu is not available" in refused("table", "small.yaml", "--device", "gpu")
    assert not (tmp_path / "runs").exists()
    assert "is no file of results" in refused("board", "small.yaml")
    assert "Cannot read none.json: No such file or directory" in refused("board", "none.json")
    assert "run it with `fedloom table small.yaml`" in refused("run", "--config", "small.yaml")
