# SPDX-License-Identifier: Apache-2.0
"""``audit``: a table, JSON, a file beside the run, and refusals in a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from cli.conftest import Cli


def test_a_table_and_json_say_the_same_and_are_kept(cli: Cli, own_copy: Path) -> None:
    shown = cli("audit", own_copy, "--attack", "membership")
    assert shown.code == 0
    for word in ("chance", "control", "95% interval", "Sees:", "Knows:", "Control:"):
        assert word in shown.out
    told = json.loads(cli("audit", own_copy, "--attack", "membership", "--json").out)
    kept = json.loads((own_copy / "audit.json").read_text())
    assert kept["membership"] == {name: value for name, value in told.items() if name != "run"}
    assert f"{told['measures'][0]['run']['value']:.4f}" in shown.out
    assert told["verdict"] in shown.out


def test_refusals(refused: Callable[..., str], own_copy: Path) -> None:
    assert "labels" in refused("audit", own_copy, "--attack", "lables")
    assert "do not reply with" in refused("audit", own_copy, "--attack", "labels")
    assert not (own_copy / "audit.json").exists()


def test_one_attack_leaves_another_be(cli: Cli, own_copy: Path) -> None:
    (own_copy / "audit.json").write_text('{"labels": {"attack": "labels"}}')
    cli("audit", own_copy, "--attack", "membership")
    assert set(json.loads((own_copy / "audit.json").read_text())) == {"labels", "membership"}
