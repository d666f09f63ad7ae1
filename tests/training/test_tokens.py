# SPDX-License-Identifier: Apache-2.0
"""A run on tokens from end to end: records, models, files, bundles, newcomers, resuming, a trial's settings."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.errors import ConfigError, DataError
from fedloom.core.tokens import Tokens
from fedloom.data import from_arrays
from fedloom.serving.bundle import Bundle, make_bundle

LENGTH, VOCABULARY = 6, 5
OPTIONS = {"clients": 3, "unseen": 1, "rounds": 2, "local_steps": 4, "progress": "quiet",
           "partition": "group:client", "model": "gru:embedding=4:hidden=8", "engine": "vectorised"}  # fmt: skip


def counting(samples: int = 40, per_token: bool = True) -> fedloom.data.Arrays:
    """Clients count upwards by a step of their own; the label of a token is the next one."""
    rng = np.random.default_rng(0)
    step = np.repeat([1, 2, 1, 2], samples)
    start = rng.integers(0, VOCABULARY, 4 * samples)
    whole = (start[:, None] + step[:, None] * np.arange(LENGTH + 1)) % VOCABULARY
    x, y = whole[:, :-1], whole[:, 1:].copy()
    if per_token:
        y[::4, 4:] = -1
    return from_arrays(x, y if per_token else y[:, -1], np.repeat(list("abcd"), samples), vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fedloom.Run:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fedloom.run(
            "pfedhn", admit_rounds=2, dataset=counting(), out=tmp_path_factory.mktemp("runs") / "run", **OPTIONS
        )


def test_records_have_accuracy_and_perplexity_per_token(run: fedloom.Run) -> None:
    best = run.summary["best"]
    loss = best["deployed/participants/test/loss"]
    assert best["deployed/participants/test/perplexity"] == pytest.approx(np.exp(loss))
    scores = run.evaluate("test")
    arrays, rows = counting(), run.simulation.federation.roster["a"].rows["test"]
    assert scores["a"].samples == (arrays.y[rows] != -1).sum()
    assert any("taken for sequences of 5 different tokens" in note for note in run.simulation.notes)


def test_models_and_files_take_tokens(run: fedloom.Run, tmp_path: Path) -> None:
    x = counting().x[:3]
    outputs = run.predict("a", x)
    assert outputs.shape == (3, LENGTH, VOCABULARY)
    loader = run.export("a", tmp_path).with_suffix(".py")
    torch.testing.assert_close(runpy.run_path(str(loader))["model"](torch.tensor(x)), outputs)
    with pytest.raises(DataError, match="tokens from 1 to 5; expected 0 to 4"):
        run.predict("a", x + 1)


def test_a_run_directory_and_a_bundle_know_what_samples_are_like(run: fedloom.Run, tmp_path: Path) -> None:
    again = fedloom.load(run.path)
    assert again.server.roster.tokens == Tokens(VOCABULARY, True)
    assert torch.equal(again.predict("a", counting().x), run.predict("a", counting().x))
    bundle = Bundle(make_bundle(run, tmp_path / "b.fedloom"))
    assert bundle.frame.roster.tokens == Tokens(VOCABULARY, True)
    assert bundle.card["samples"]["tokens"] == VOCABULARY


def test_a_newcomer_is_admitted_by_its_tokens(run: fedloom.Run) -> None:
    arrays = counting()
    admitted = run.admit(arrays.x[-30:], arrays.y[-30:])
    assert admitted.predict(arrays.x[:2]).shape == (2, LENGTH, VOCABULARY)


def test_auto_takes_a_network_for_tokens_and_others_are_refused() -> None:
    given = {**OPTIONS, "model": "auto", "rounds": 0}
    found = fedloom.run("fedavg", dataset=counting(per_token=False), **given)
    assert str(found.server.setup.models["a"].spec) == "gru"
    assert found.server.setup.task.name == "classification"
    with pytest.raises(ConfigError, match="mlp takes numbers"):
        fedloom.run("fedavg", dataset=counting(), **{**given, "model": "mlp"})
    with pytest.raises(ConfigError, match="one label for each sample; arrays has one label for each token"):
        fedloom.run("fedavg", dataset=counting(), task="classification", **given)
