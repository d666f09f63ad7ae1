# SPDX-License-Identifier: Apache-2.0
"""Rates by short trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom.core.errors import ConfigError
from fedloom.training.rates import FAILED, Tried, ahead, ranked

GIVEN: dict[str, Any] = {"partition": "iid", "clients": 3, "cohort": 3, "rounds": 4, "local_steps": 2, "seed": 1,
                         "model": "mlp:hidden=8", "progress": "quiet", "val_share": 0.3}  # fmt: skip


def lines(rows: int = 240) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((rows, 4)).astype(np.float32)
    return x, (3 * x[:, :1] + 1).astype(np.float32)


def test_a_rate_that_is_far_too_small_is_left_behind(tmp_path: Path) -> None:
    """A line is learned in a few steps at 0.1; at the 0.005 of pFedHN's experiments it has hardly begun."""
    runs = {rate: fedloom.run("fedavg", dataset=lines(), local_lr=rate, out=tmp_path / str(rate), **GIVEN)
            for rate in ("auto", 0.005)}  # fmt: skip
    found = runs["auto"].config["local_lr"]
    assert found in (0.015, 0.05, 0.15, 0.45)
    (note,) = [one for one in runs["auto"].summary["notes"] if "local rate" in one]
    assert note.startswith(f"local rate {found:g}, by short trials of 0.0005, 0.0015, 0.005, 0.015, 0.05")
    name = "deployed/participants/test/absolute_error"
    assert runs["auto"].summary["best"][name] < runs[0.005].summary["best"][name] / 2
    # a number from then on: the same run again, with the same bits
    again = fedloom.run("fedavg", dataset=lines(), local_lr=found, out=tmp_path / "again", **GIVEN)
    assert again.summary["best"] == runs["auto"].summary["best"]


def test_the_methods_own_rate_stays_where_the_best_is_within_an_error() -> None:
    own = Tried((0.8, 0.0), 0.1, None, (0.7, 0.8, 0.9))
    hardly = Tried((0.81, 0.0), 0.3, None, (0.9, 0.6, 0.93))
    clearly = Tried((0.9, 0.0), 0.3, None, (0.8, 0.9, 1.0))
    assert not ahead(hardly, own) and ahead(clearly, own)
    assert ahead(hardly, own._replace(score=FAILED, metrics=()))
    assert not ahead(own, own)
    assert [one.rate for one in ranked([own, clearly._replace(score=(0.8, 0.0)), hardly])] == [0.3, 0.1, 0.3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_noise": 1.0, "dp_clip": 1.0}, "does not go with --dp-noise"),
        ({"sample_dp_noise": 1.0, "sample_dp_clip": 1.0}, "does not go with --dp-noise or --sample-dp-noise"),
        ({"val_share": 0.0}, "needs validation data"),
        ({"engine": "flower-sim"}, "flower-sim does not"),
    ],
)
def test_what_it_cannot_do_is_said(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataset = "digits" if "engine" in options else lines()
        fedloom.run("fedavg", dataset=dataset, local_lr="auto", out=tmp_path / "run", **{**GIVEN, **options})
    assert not (tmp_path / "run").exists()
