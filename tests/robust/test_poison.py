# SPDX-License-Identifier: Apache-2.0
"""A back door: who is taught it, what it is tried on, and that it opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from conftest import small_federation, token_federation
from fedloom.core.errors import ConfigError
from fedloom.robust import TRIGGERED
from fedloom.robust.poison import SHARE, TARGET, pattern, poisoned

SUCCESS = f"deployed/participants/{TRIGGERED}/accuracy"
OPTIONS = {"dataset": "digits", "partition": "iid", "clients": 10, "cohort": 10, "rounds": 20, "local_steps": 10,
           "local_lr": 0.05, "model": "mlp:hidden=32", "eval_every": 20, "progress": "quiet",
           "attack": "backdoor"}  # fmt: skip


def test_the_trigger_is_a_corner_of_images_and_every_tenth_of_other_features() -> None:
    assert pattern((3, 28, 28)).nonzero().min(0).values.tolist() == [0, 24, 24]
    assert int(pattern((1, 8, 8)).sum()) == 1
    assert pattern((25,)).nonzero().flatten().tolist() == [0, 10, 20]


@pytest.mark.parametrize("kind", ["label_flip", "backdoor"])
def test_honest_clients_have_what_they_had(kind: str) -> None:
    federation = small_federation()
    spoilt = poisoned(federation, kind, {"0"}, 0)
    for client, one in federation.roster.items():
        for split, rows in one.rows.items():
            same = torch.equal(spoilt.x[rows], federation.x[rows]) and torch.equal(spoilt.y[rows], federation.y[rows])
            assert same == (client != "0" or split != "train")


def test_liars_learn_the_trigger_and_the_others_are_tried_with_it() -> None:
    federation = small_federation()
    spoilt = poisoned(federation, "backdoor", {"0"}, 0)
    rows = federation.roster["0"].rows["train"]
    touched = (spoilt.x[rows] != federation.x[rows]).flatten(1).any(1)
    assert int(touched.sum()) == round(SHARE * len(rows))
    assert (spoilt.y[rows][touched] == TARGET).all() and torch.equal(
        spoilt.y[rows][~touched], federation.y[rows][~touched]
    )
    assert not len(spoilt.roster["0"].rows[TRIGGERED])
    for client, one in spoilt.roster.items():
        if client != "0":
            own = one.rows["test"][federation.y[one.rows["test"]].numpy() != TARGET]
            tried = one.rows[TRIGGERED]
            changed = spoilt.x[tried] != federation.x[own]
            assert len(tried) == len(own) and changed.flatten(1).any(1).all()
            assert not changed[:, ~pattern(tuple(federation.x.shape[1:]))].any()
            assert (spoilt.y[tried] == TARGET).all()


def test_it_opens_where_liars_teach_it_and_not_without_them(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", out=tmp_path / "run", **{**OPTIONS, "malicious": 0.3})
    control = fedloom.run("fedavg", out=tmp_path / "control", **OPTIONS)
    last, without = run.summary["last"], control.summary["last"]
    assert last[SUCCESS] > 0.5 and without[SUCCESS] < 0.2
    main = "deployed/participants/test/accuracy"
    assert last[main] > without[main] - 0.1, "which is why nobody notices"
    scores = run.evaluate(TRIGGERED)
    assert np.mean([score.metric for score in scores.values()]) == pytest.approx(last[SUCCESS])
    assert len(scores) == 7, "the honest clients"


def test_what_has_no_trigger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        poisoned(token_federation(), "backdoor", {"0"}, 0)
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    more: dict[str, Any] = {"clients": 2, "rounds": 1, "model": "mlp:hidden=4", "partition": "iid", "progress": "quiet"}
    with pytest.raises(ConfigError, match="one class label for each sample"):
        fedloom.run("fedavg", dataset=(x, x[:, :1]), attack="backdoor", out=tmp_path / "run", **more)
    with pytest.raises(ConfigError, match="Choose another engine"):
        fedloom.run("fedavg", engine="flower-sim", malicious=0.5, out=tmp_path / "ray", **more)
    honest = fedloom.run("fedavg", dataset=(x, (x[:, 0] > 0).astype(int)), out=tmp_path / "honest", **more)
    with pytest.raises(ConfigError, match="triggered"):
        honest.evaluate(TRIGGERED)
