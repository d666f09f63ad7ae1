# SPDX-License-Identifier: Apache-2.0
"""Samples of tokens, for every method: the same on all engines, or refused in a sentence before round 1."""

from __future__ import annotations

import warnings
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import models_for, needed, play, token_federation
from fedloom import algorithms
from fedloom.core.errors import NeedsError
from fedloom.core.trees import flatten
from fedloom.data import from_arrays
from fedloom.engines.auto import ENGINES as KNOWN
from fedloom.engines.parallel import ParallelVectorised
from fedloom.programs.evaluation import evaluate
from fedloom.training.config import parse_options
from fedloom.training.simulation import Simulation

METHODS = algorithms.names()
SMALL = ("gru:embedding=3:hidden=4", "transformer:width=4:depth=1:heads=2")
ENGINES = ["vectorised", *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(
    set(KNOWN) - {"sequential", "vectorised"}))]  # fmt: skip
COHORTS = [["0", "1", "2"], ["1", "3", "4"]]
WITHOUT_TOKENS = {"it_pfl_hn", "hyperfedzero", "pefll"}
"""They compute with samples themselves."""


def gap(one, other) -> float:
    a, b = flatten(one), flatten(other)
    assert a.keys() == b.keys()
    return max([float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel()], default=0.0)


def everything(played) -> dict:
    return {"state": played.state._asdict(), "memory": played.memory}


@cache
def sequential(method: str, per_token: bool) -> dict:
    """What two rounds on the plain engine leave: all others are compared with it."""
    algorithm = algorithms.get(method)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federation = token_federation(models_for(algorithm, *SMALL), per_token)
        return everything(play(algorithm, federation, cohorts=COHORTS))


def takes(method: str, per_token: bool) -> bool:
    """Others are refused: see below."""
    return method not in WITHOUT_TOKENS and not (per_token and algorithms.get(method).needs.class_labels)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("method", "per_token"),
    [(method, labels) for method in METHODS for labels in (False, True) if takes(method, labels)],
)
def test_engines_agree_on_tokens(method: str, per_token: bool, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelVectorised, "part_size", lambda *_: 2)
    algorithm = algorithms.get(method)
    federation = token_federation(models_for(algorithm, *SMALL), per_token)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = play(algorithm, federation, engine, cohorts=COHORTS)
    assert gap(sequential(method, per_token), everything(other)) <= (
        0.0 if engine in ("loopback", "parallel") else 1e-9
    )
    scores = evaluate(
        algorithm,
        lambda clients: algorithm.send(other.setup, other.state, clients),
        federation.participants,
        "train",
        other.session("evaluation").ask,
    )
    labels = federation.y[federation.roster["0"].rows["train"]]
    assert scores["0"].samples == int((labels != -1).sum())
    assert all(0 <= score.metric <= 1 and score.loss < 10 for score in scores.values())


@pytest.mark.parametrize("per_token", [False, True], ids=["label", "labels"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_tokens_or_says_before_round_1_that_it_does_not(method: str, per_token: bool) -> None:
    algorithm, federation = algorithms.get(method), token_federation(SMALL[:1], per_token)
    arrays = from_arrays(federation.x.numpy(), federation.y.numpy(), vocabulary=300)
    options = {"rounds": 1, "clients": 3, "partition": "iid", "engine": "sequential", **needed(algorithm)}
    shared, config = parse_options(method, options)
    if takes(method, per_token):
        Simulation(method, shared, config, arrays)
        return
    with pytest.raises(NeedsError, match=r"tokens|class labels"):
        Simulation(method, shared, config, arrays)


IDS = st.lists(st.lists(st.integers(0, 299), min_size=5, max_size=5), min_size=3, max_size=6)


@given(
    IDS,
    st.sampled_from(sorted(set(KNOWN) - {"parallel", "parallel_vectorised", "ray"})),
    st.sampled_from(["exact", "bf16"]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_token_is_the_same_token_everywhere(ids: list[list[int]], engine: str, precision: str) -> None:
    # what a client learns of changes the rows of exactly its tokens in the embedding: 257 must not become 256
    narrow = torch.bfloat16 if precision == "bf16" else None
    federation = token_federation(SMALL[:1], True, [len(ids), 3], dtype=torch.float32, training_dtype=narrow)
    federation.x[: len(ids)] = torch.tensor(ids)
    federation.y[: len(ids)] = 1
    fedavg = algorithms.get("fedavg")
    before = fedavg.init(play(fedavg, federation, engine, rounds=0).setup).params["embedding.weight"]
    played = play(fedavg, federation, engine, rounds=1, cohorts=[["0"]], weight_decay=0.0, local_lr=1.0)
    changed = (played.state.params["embedding.weight"] != before).any(1).nonzero()[:, 0].tolist()
    assert changed == sorted({token for row in ids for token in row})
