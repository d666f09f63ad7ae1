# SPDX-License-Identifier: Apache-2.0
"""``fedloom tune``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Cli
from fedloom.runs.directory import RunDirectory
from fedloom.training import trainer

FLAGS = "--clients 3 --rounds 4 --local-steps 2 --model mlp:hidden=4 --budget 4 --try local-lr=1e-9,0.1"
TINY = FLAGS.split()


def test_a_choice_as_a_table_and_as_json_with_commands_that_run(cli: Cli, tmp_path: Path) -> None:
    found = cli("tune", "fedavg", *TINY)
    folder = "runs/tune-fedavg-digits-seed0"
    assert found.code == 0 and "rung 1 of 1: local lr 0.1" in found.err
    assert "chosen: local lr 0.1\n" in found.out and f"fedloom resume {folder}/2-local_lr=0.1\n" in found.out
    told = json.loads(cli("tune", "fedavg", *TINY, "--json").out)
    assert told["chosen"] == {"local_lr": 0.1} and [one["rounds"] for one in told["trials"]] == [2, 2]
    assert cli(*told["resume"].split()[1:], "--quiet").code == 0
    assert cli(*told["command"].split()[1:], "--out", "again", "--quiet").code == 0
    runs = [RunDirectory.open(path) for path in (told["trials"][0]["path"], "again")]
    assert runs[0].config == runs[1].config and [len(run.records()) for run in runs] == [4, 4]
    assert cli("report", folder).code == 0


def test_options_come_from_a_file_too(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("method: fedavg\nclients: 3\nrounds: 2\nlocal_steps: 1\nlocal_lr: 0.5\n")
    told = json.loads(cli("tune", "--config", "base.yaml", "--model", "mlp:hidden=4", "--json", "--out", "x").out)
    assert sorted(one["chosen"]["local_lr"] for one in told["trials"]) == [0.05, 0.15, 0.5, 1.5, 5.0]


def test_ctrl_c_says_how_to_go_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = trainer.run_round, []

    def stopping(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(trainer, "run_round", stopping)
    stopped = cli("tune", "fedavg", *TINY, "--out", "t")
    assert stopped.code == 130 and "the trials are in t. The same command goes on." in stopped.err
    assert cli("tune", "fedavg", *TINY, "--out", "t").code == 0


def test_what_cannot_be_is_one_sentence(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "--try is 'local_lr'; expected OPTION=VALUE,VALUE" in refused("tune", "fedavg", "--try", "local_lr")
    assert "--server-clip is an option of" in refused("tune", "fedavg", "--server-clip", "1")
    assert "`fedloom tune fedavg --help`" in refused("tune", "fedavg", "--server-clip", "1")
    assert "Unknown method 'fedavgg'" in refused("tune", "fedavgg")
