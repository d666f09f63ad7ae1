# SPDX-License-Identifier: Apache-2.0
"""Traced steps give the bits of the steps they were traced from; what cannot be traced runs as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import by_programs, play, small_federation
from fedloom import algorithms
from fedloom.core.trees import chosen, flatten
from fedloom.engines import parallel, traced
from fedloom.engines.traced import Traces


@pytest.mark.parametrize("method", by_programs())
@pytest.mark.parametrize(
    "model",
    [
        "mlp:hidden=5",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("testnets:Normed", "testnets:Dropping")),
    ],
)
def test_traced_steps_give_the_same_bits(method: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 1)
    _same_bits(method, model, "parallel_vectorised", 3, monkeypatch)


@pytest.mark.parametrize(("method", "model"), [("fedavg", "lenet:kernels=2"), ("scaffold", "testnets:Dropping")])
def test_traced_steps_of_other_networks_give_the_same_bits(
    method: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _same_bits(method, model, "sequential", 2, monkeypatch)


@pytest.mark.parametrize("method", by_programs())
def test_traced_steps_of_single_clients_give_the_same_bits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _same_bits(method, "testnets:Normed", "sequential", 2, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "parallel_vectorised"])
def test_traced_steps_that_hide_samples_give_the_same_bits(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 1)
    hidden = {"sample_dp_noise": 1.0, "sample_dp_clip": 0.5, "local_epochs": 0, "local_steps": 1}
    _same_bits("fedavg", "mlp:hidden=5", engine, 2, monkeypatch, **hidden)


def test_steps_of_a_convolutional_network_are_tidied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_SINGLE_AFTER", 0)
    federation = small_federation(("lenet:kernels=2",), sizes=(12,), dtype=torch.float32)
    runs = play(algorithms.get("fedavg"), federation, "sequential").engine._single_steps._forms.kept.values()
    code = next(iter(runs)).__self__.code
    assert "detach" not in code
    assert code.count("alpha = -0.05, out = ") == 10  # each parameter is stepped on in place


def test_steps_of_dense_networks_call_operators_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "cores", lambda: 1)
    monkeypatch.setattr(traced, "TRACE_AFTER", 0)
    engine = play(algorithms.get("fedavg"), small_federation(("mlp:hidden=5",)), "parallel_vectorised").engine
    code = next(iter(engine.inner._traces._forms.kept.values())).__self__.code
    # of the loss and of a rectifier's gradient: all others, several dozen, are cheaper by their public names
    assert code.count("torch.ops.") <= 5 < 40 < code.count("torch.")


@pytest.mark.parametrize(
    "step",
    [
        lambda fixed, carry, batch: carry + torch.unsafe_chunk(2 * batch[0], 1, 0)[0].relu() + 2 * batch[0],
        lambda fixed, carry, batch: carry + torch.unsafe_split(carry, 3)[0].relu() + batch[0],
        lambda fixed, carry, batch: carry + (z := batch[0] * 2).relu() + z,
        lambda fixed, carry, batch: carry + (batch[0] * 2).view(3).relu(),
    ],
)
def test_views_that_do_not_say_so_are_known(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for after in (10**9, 0):
        monkeypatch.setattr(traced, "TRACE_AFTER", after)
        batches = [(torch.tensor([-1.0, 2.0, 3.0]),), (torch.tensor([-1.0, -2.0, 4.0]),)]
        found.append(Traces([]).steps("k", "k", step, (), torch.tensor([-1.0, 0.0, 1.0]), batches))
    assert torch.equal(*found)


def test_what_a_network_holds_besides_its_parameters_does_not_stop_a_traced_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for after in (10**9, 0):
        monkeypatch.setattr(traced, "TRACE_SINGLE_AFTER", after)
        torch.manual_seed(0)
        played = play(
            algorithms.get("fedavg"), small_federation(("testnets:Hidden",), dtype=torch.float32), "sequential"
        )
        found.append(flatten(played.state._asdict()))
    assert all(torch.equal(value, found[1][path]) for path, value in found[0].items())


def test_a_step_with_autocast_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", 0)

    def step(fixed: Any, carry: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return carry + (batch[0] @ batch[0]).float()

    notes: list[str] = []
    traces = Traces(notes)
    traces.steps("k", "train", step, (), torch.zeros(2, 2), [(torch.ones(2, 2),)] * 2)
    assert list(traces._forms.kept.values()) == [None]
    assert notes == ["train cannot be traced: a step uses autocast"]


def test_a_fault_in_tracing_is_told_of_and_steps_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_SINGLE_AFTER", 0)
    federation = small_federation(dtype=torch.float32)
    right = play(algorithms.get("fedavg"), federation, "sequential")

    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("a slip")

    monkeypatch.setattr(traced, "_tidy", broken)
    played = play(algorithms.get("fedavg"), federation, "sequential")
    assert played.engine.notes == ["train cannot be traced: a slip"] and right.engine.notes == []
    found, expected = (flatten(one.state._asdict()) for one in (played, right))
    assert all(torch.equal(value, found[path]) for path, value in expected.items())


def test_only_the_latest_traces_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", 0)
    monkeypatch.setattr(traced, "KEPT", 2)
    traces = Traces([])
    for size in (1, 2, 3):
        steps_of(traces, lambda _, carry, batch: carry + batch[0], torch.zeros(size), torch.ones(size))
    assert len(traces._forms.kept) == 2


def _same_bits(
    method: str, model: str, engine: str, clients: int, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """Traced from the first step on, and never."""
    # two full batches and one that is not: few kinds, as tracing takes its time
    federation = small_federation((model,), sizes=(10,) * clients, dtype=torch.float32)
    found = []
    for after in (10**9, 0):
        monkeypatch.setattr(traced, "TRACE_AFTER", after)
        monkeypatch.setattr(traced, "TRACE_SINGLE_AFTER", after)
        played = play(algorithms.get(method), federation, engine, **options)
        found.append(flatten({"state": played.state._asdict(), "memory": dict(played.memory)}))
        traces = played.engine._single_steps if engine == "sequential" else played.engine.inner._traces
        kinds = traces._forms.kept
        assert bool(kinds) == (after == 0) and all(one is not None for one in kinds.values())
    assert all(torch.equal(value, found[1][path]) for path, value in found[0].items())


def test_a_client_that_fails_is_told_of_in_the_same_words_when_its_steps_are_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    federation = small_federation(sizes=(8, 8, 8), dtype=torch.float32)
    federation.y[federation.roster["2"].rows["train"][-1]] = 99
    told = []
    for after in (10**9, 0):
        monkeypatch.setattr(traced, "TRACE_SINGLE_AFTER", after)
        told.append(play(algorithms.get("fedavg"), federation, "sequential", rounds=1).stats.dropped)
    assert told[0] == told[1]
    (dropped,) = told[0]
    assert dropped.client == "2"
    assert "in step on x (4, 1, 6, 6), y (4,): " in dropped.reason


@pytest.mark.parametrize("after", [10**9, 0])
def test_a_network_that_writes_into_its_input_does_so_once_a_step(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", after)
    found = steps_of(Traces([]), lambda _, carry, batch: carry + batch[0].add_(1), torch.zeros(2), *torch.zeros(3, 2))
    assert torch.equal(found, torch.full((2,), 3.0))


@pytest.mark.parametrize("after", [10**9, 0])
def test_a_carry_may_come_back_in_another_order(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", after)

    def step(_: Any, carry: Any, batch: Any) -> Any:
        return {"b": carry["b"] * 2, "a": carry["a"] + 1}

    start = {"a": torch.zeros(1), "b": torch.ones(1)}
    assert steps_of(Traces([]), step, start, *torch.zeros(3, 1)) == {"a": torch.tensor([3.0]), "b": torch.tensor([8.0])}


def steps_of(traces: Traces, step: Any, carry: Any, *batches: torch.Tensor, fixed: Any = ()) -> Any:
    return traces.steps("kind", "train", step, fixed, carry, [(batch,) for batch in batches])


def operations(traces: Traces) -> list[str]:
    """What the traced steps consist of."""
    (run,) = traces._forms.kept.values()
    return [node.target.__name__.partition(".")[0] for node in run.__self__.graph.nodes if node.op == "call_function"]


def test_a_kind_is_traced_when_it_has_been_called_often_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", 2)
    calls = []

    def sums(fixed: torch.Tensor, carry: Any, batch: tuple[torch.Tensor]) -> Any:
        calls.append(1)
        return {"sum": carry["sum"] + batch[0].expand(3) * fixed, "x": carry["x"]}

    traces, x = Traces([]), torch.arange(3.0)
    start = {"sum": torch.zeros(3), "x": x}
    found = steps_of(traces, sums, start, *(x + number for number in range(6)), fixed=torch.tensor(2.0))
    assert torch.equal(found["sum"], 12 * x + 30) and torch.equal(found["x"], x)
    assert len(calls) == 3  # twice as it is, once to trace it
    other = torch.arange(6.0).reshape(3, 2)[:, 0]
    assert torch.equal(steps_of(traces, sums, start, other, fixed=torch.tensor(1.0))["sum"], other)
    assert len(calls) == 4  # other strides are another kind


def test_what_a_step_need_not_do_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", 0)

    def step(_: Any, carry: torch.Tensor, batch: tuple[torch.Tensor]) -> torch.Tensor:
        (x,) = batch
        ones = torch.ones_like(x) * 3
        return carry + (x.t().t().exp() * ones + x.exp().t().t() * ones).mul(1)

    traces, x = Traces([]), torch.rand(2, 3)
    found = steps_of(traces, step, torch.zeros(2, 3), x, 2 * x)
    assert torch.equal(found, torch.zeros(2, 3) + 2 * (x.exp() * 3) + 2 * ((2 * x).exp() * 3))
    assert operations(traces) == ["exp", "mul", "add", "add"]


def test_arguments_stay_as_they_are_though_the_carry_is_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", 0)
    one = torch.ones(3)
    carry = {"now": one, "start": one}  # the same tensor twice, as training begins

    def step(_: Any, carry: Any, batch: tuple[torch.Tensor]) -> Any:
        return {"now": carry["now"] + batch[0], "start": carry["start"]}

    traces = Traces([])
    found = steps_of(traces, step, carry, one, one)
    assert operations(traces) == ["add"]
    assert torch.equal(found["now"], 3 * one) and torch.equal(found["start"], one) and torch.equal(one, torch.ones(3))


def test_what_is_chosen_is_written_in_place_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", 0)

    def step(_: Any, carry: Any, batch: tuple[torch.Tensor]) -> Any:
        return chosen(batch[0] > 0, carry * 2, carry)

    traces, one = Traces([]), torch.ones(3)
    found = steps_of(traces, step, one, torch.tensor(1.0), torch.tensor(-1.0), torch.tensor(1.0))
    assert found.tolist() == [4.0] * 3 and one.tolist() == [1.0] * 3
    (run,) = traces._forms.kept.values()
    (last,) = (node for node in run.__self__.graph.nodes if node.target is torch.lerp)
    assert "out" in last.kwargs


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(lambda c, x: (c[0] + x, c[0]), id="the value before is kept"),
        pytest.param(lambda c, x: (c[1], c[0] + x), id="places are swapped"),
        pytest.param(lambda c, x: (c[0] + x, c[0] + x), id="two are one"),
        pytest.param(lambda c, x: ((after := c[0] + x), after.flip(0)[:].view(3)), id="one shows the other"),
        pytest.param(lambda c, x: (c[0] + x, (c[0] + x) * c[0]), id="it is read after its sum"),
        pytest.param(lambda c, x: (c[0] + c[0].flip(0), c[1] + c[1].view(3)), id="a sum with itself"),
        pytest.param(lambda c, x: (torch.lerp(c[0], x, x), torch.lerp(x, x, c[1])), id="a mean"),
        pytest.param(lambda c, x: (torch.zeros(3), c[1] + torch.ones(3)), id="a constant"),
    ],
)
def test_in_place_or_not_steps_give_the_same(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start, batches = (torch.arange(3.0), torch.ones(3)), [torch.rand(3) for _ in range(4)]
    found = []
    for after in (10**9, 0):
        monkeypatch.setattr(traced, "TRACE_AFTER", after)
        traces = Traces([])
        found.append(steps_of(traces, lambda _, carry, batch: step(carry, batch[0]), start, *batches))
        assert after or None not in traces._forms.kept.values()
    assert all(torch.equal(one, other) for one, other in zip(*found))


@pytest.mark.parametrize(
    "factor",
    [
        pytest.param(lambda x: 2 if float(x.sum()) > 0 else 0, id="a branch"),
        pytest.param(lambda x: sum(x.tolist()), id="a list"),
        pytest.param(lambda x: float(x.numpy().sum()), id="an array"),
        pytest.param(lambda x: len(x[x > 0]), id="what is positive"),
        pytest.param(lambda x: x.nonzero().shape[0] + x.sum(), id="what is not zero"),
        pytest.param(lambda x: len(x.masked_select(x > 0)), id="a selection"),
        pytest.param(lambda x: len(x.unique()), id="what differs"),
        pytest.param(lambda x: len(torch.bincount(x.long().abs())), id="counts"),
    ],
)
def test_what_cannot_be_traced_runs_as_it_is(factor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", 0)

    def reads_values(_: Any, carry: torch.Tensor, batch: tuple[torch.Tensor]) -> torch.Tensor:
        return carry + batch[0] * factor(batch[0])

    traces, batches = Traces([]), [torch.tensor(x) for x in ([1.0, 2.0], [-1.0, 0.0], [3.0, 3.0])]
    expected = sum(batch * factor(batch) for batch in batches)
    assert torch.equal(steps_of(traces, reads_values, torch.zeros(2), *batches), expected)
    assert list(traces._forms.kept.values()) == [None]


def test_rows_that_are_chosen_by_number_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "TRACE_AFTER", 0)
    traces, x = Traces([]), torch.arange(3.0)
    found = steps_of(
        traces, lambda _, carry, batch: carry + x[batch[0]], torch.zeros(2), *torch.tensor([[0, 1], [2, 2]])
    )
    assert found.tolist() == [2.0, 3.0]
    assert None not in traces._forms.kept.values()
