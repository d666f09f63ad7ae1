# SPDX-License-Identifier: Apache-2.0
"""Mixed models and admission curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.core.errors import NeedsError

TINY: dict[str, Any] = {
    "clients": 4, "unseen": 2, "cohort": 2, "rounds": 8, "local_steps": 4, "model": "mlp:hidden=8", "device": "cpu",
    "progress": "quiet", "partition": "classes:3",
}  # fmt: skip


def test_on_the_diagonal_both_parts_are_the_clients_own(tmp_path: Path) -> None:
    run = fedloom.run("pfedhn_pc", out=tmp_path / "run", admit_rounds=2, **TINY)
    found, own = run.mix(), run.evaluate()
    assert found["client"] == list(run.clients)
    diagonal = [row[i] for i, row in enumerate(found["metric"])]
    assert diagonal == pytest.approx([own[client].metric for client in run.clients], abs=1e-4)
    assert found["samples"] == [own[client].samples for client in run.clients]
    assert run.directory.extra("mix.json") == found


def test_a_global_model_is_the_same_however_it_is_mixed(tmp_path: Path) -> None:
    found = fedloom.run("fedavg", out=tmp_path / "run", **TINY).mix("val")
    assert all(len(set(row)) == 1 for row in found["metric"])


def test_what_cannot_be_mixed_is_refused(tmp_path: Path) -> None:
    run = fedloom.run("local", out=tmp_path / "run", **{**TINY, "model": "mlp:hidden=8,mlp:hidden=4"})
    with pytest.raises(
        NeedsError, match="Output layers and bodies can be exchanged where all clients have one network"
    ):
        run.mix()


def test_an_admission_round_by_round_ends_where_it_does(tmp_path: Path) -> None:
    """The last point is what an evaluation of unseen clients gives; the first is before any step."""
    run = fedloom.run("pfedhn", out=tmp_path / "run", admit_rounds=12, **TINY)
    found = run.admission_curve()
    assert [point["admission_round"] for point in found["points"]] == [*range(13)]
    last = found["points"][-1]
    mean = sum(last["metric"]) / len(last["metric"])
    assert mean == pytest.approx(run.evaluate_unseen()["deployed/unseen/test/accuracy"], abs=1e-4)
    assert run.directory.extra("admission.json") == found


def test_an_admission_without_rounds_is_one_point(tmp_path: Path) -> None:
    found = fedloom.run("fedavg", out=tmp_path / "run", adapt="prior", **TINY).admission_curve()
    assert [point["admission_round"] for point in found["points"]] == [0]
