# SPDX-License-Identifier: Apache-2.0
"""Tokens between machines: they stay whole numbers, and clients that have others say so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from conftest import play, token_federation
from deploy.nearby import deployed, table_of
from fedloom import algorithms
from fedloom.core.errors import ConfigError
from fedloom.core.tokens import Tokens
from fedloom.deploy.client import answer
from fedloom.deploy.codec import facts_of, pack
from fedloom.deploy.options import read
from fedloom.deploy.trial import Trial, about, network

SETTINGS = {"task": "seq", "vocabulary": 300}
MODEL = "gru:embedding=3:hidden=4"


def test_a_federation_of_machines_gives_the_bits_of_the_simulation(tmp_path: Path) -> None:
    federation = token_federation((MODEL,), per_token=True)
    ours = deployed("fedavg", federation, tmp_path, **SETTINGS)
    assert ours.server.roster.tokens == Tokens(300, True) and ours.server.roster.target_shape == (5,)
    ours.train_round()
    played = play(algorithms.get("fedavg"), federation, rounds=1)
    for name, value in played.state.params.items():
        assert torch.equal(ours.server.state.params[name], value)
    found = ours.evaluation()
    assert found.metrics["deployed/participants/test/perplexity"] > 1
    labelled = (federation.y[federation.roster["0"].rows["test"]] != -1).sum()
    (test,) = [scores for group, scores in found.scores.items() if group.split == "test"]
    assert test["0"].samples == int(labelled)


X, Y = np.zeros((4, 5), dtype=np.int64), np.zeros((4, 5), dtype=np.int64)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ((X + 300, Y), "has train samples with tokens from 300 to 300; expected 0 to 299."),
        ((X + 0.5, Y), "has train samples of type torch.float64; this federation's are tokens, whole numbers."),
        ((X, Y + 3), "has train labels outside of 0 to 2."),
        ((X, Y[:, 0]), "has train labels of shape (); expected one for each token, (5,)."),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(data: Any, reason: str, tmp_path: Path) -> None:
    table = table_of("fedavg", token_federation((MODEL,), per_token=True), **SETTINGS)
    node = {"folder": str(tmp_path / "node"), "min-batch": 1}
    context: Any = SimpleNamespace(run_config=table, node_config=node)
    told = facts_of(answer("query.hello", pack({"run": "r"}), context, lambda node: data, lambda node: MODEL))
    assert told == {"error": reason}


def test_labels_of_each_token_need_a_vocabulary() -> None:
    table = table_of("fedavg", token_federation((MODEL,), per_token=True), task="seq")
    with pytest.raises(ConfigError, match="say how many tokens there are"):
        read(table)


def test_a_trials_settings_follow_from_its_data(tmp_path: Path) -> None:
    np.savez(tmp_path / "text.npz", x=X + np.arange(5), y=Y, vocabulary=9)
    settings = {"input_shape": "5", "num_outputs": 1, "classes": "", "task": "seq", "vocabulary": 9}
    assert about(Trial(dataset=str(tmp_path / "text.npz"))) == settings
    assert network(Trial(), 0, (5,), Tokens(9, True)) == "gru"
