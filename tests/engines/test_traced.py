# SPDX-License-Identifier: Apache-2.0
"""Traced steps give the bits of the steps they were traced from; what cannot be traced runs as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import play, small_federation
from fedloom import algorithms
from fedloom.core.trees import flatten
from fedloom.engines import parallel, traced
from fedloom.engines.traced import Traces


@pytest.mark.parametrize("method", algorithms.names())
@pytest.mark.parametrize("model", ["mlp:hidden=5", "testnets:Normed", "testnets:Dropping"])
def test_traced_steps_give_the_same_bits(method: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 1)
    algorithm = algorithms.get(method)
    # two full batches and one that is not: few kinds, as tracing takes its time
    federation = small_federation((model,), sizes=(10, 10, 10), dtype=torch.float32)
    found = []
    for after in (10**9, 0):
        monkeypatch.setattr(traced, "TRACE_AFTER", after)
        played = play(algorithm, federation, "parallel_vectorised")
        found.append(flatten({"state": played.state._asdict(), "memory": played.engine.memory}))
        kinds = played.engine._traces._traced
        assert bool(kinds) == (after == 0) and all(one is not None for one in kinds.values())
    assert all(torch.equal(value, found[1][path]) for path, value in found[0].items())


def test_a_kind_is_traced_when_it_has_been_called_often_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", 2)
    calls = []

    def twice(tree: Any, y: torch.Tensor) -> Any:
        calls.append(1)
        return {"sum": tree["x"].expand(3) + y, "x": tree["x"]}

    traces, x = Traces(), torch.arange(3.0)
    for number in range(6):
        found = traces.call("twice", twice, {"x": x + number}, x)
        assert torch.equal(found["sum"], 2 * x + number) and torch.equal(found["x"], x + number)
    assert len(calls) == 3  # twice as it is, once to trace it
    other = torch.arange(6.0).reshape(3, 2)[:, 0]
    assert torch.equal(traces.call("twice", twice, {"x": other}, x)["sum"], other + x)
    assert len(calls) == 4  # other strides are another kind


def test_an_argument_given_twice_is_two_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", 0)
    traces, one, two = Traces(), torch.ones(3), torch.full((3,), 2.0)
    for a, b in ((one, one), (one, two), (two, one)):
        first, second = traces.call("f", lambda a, b: (a + 1, b * 10), a, b)
        assert torch.equal(first, a + 1) and torch.equal(second, b * 10)


def test_what_cannot_be_traced_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", 0)

    def reads_a_value(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.sum()) > 0 else x

    traces = Traces()
    assert [float(traces.call("f", reads_a_value, torch.tensor([v]))) for v in (1.0, -1.0)] == [2.0, -1.0]
