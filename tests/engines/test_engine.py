# SPDX-License-Identifier: Apache-2.0
"""What the engines share: refusals, rollback, order, books."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from conftest import play, setup_of, small_federation
from fedloom import algorithms
from fedloom.core.contract import Cohort, Home, Program
from fedloom.core.errors import ConfigError, RoundError
from fedloom.core.trees import PerClient, Tree, flatten
from fedloom.engines import auto
from fedloom.engines.auto import ENGINES, choose
from fedloom.engines.engine import Outcome, _finite, refusals
from fedloom.models.model import Model
from fedloom.models.spec import parse
from testnets import Explosive

FEDAVG = algorithms.get("fedavg")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_that_raises_is_dropped_with_the_reason_and_the_others_count(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = small_federation(("testnets:Explosive",), sizes=(4, 3, 4))
    # only client 1 has a batch of 3, alone; in a stack it is padded to 4, so there the whole group fails first
    original = ENGINES[engine].run_group

    def fails_as_a_group(self, program, clients, shared, mine):
        monkeypatch.setattr(Explosive, "fuses", (3, 4) if len(clients) > 1 else (3,))
        return original(self, program, clients, shared, mine)

    monkeypatch.setattr(ENGINES[engine], "run_group", fails_as_a_group)
    played = play(FEDAVG, federation, engine, rounds=1, local_epochs=1)
    (dropped,) = played.engine.books.dropped
    assert dropped.client == "1" and "boom" in dropped.reason and dropped.program == "fedavg.train"
    monkeypatch.undo()
    without = play(FEDAVG, federation, engine, rounds=1, local_epochs=1, cohorts=[["0", "2"]])
    for name, value in without.state.params.items():
        torch.testing.assert_close(played.state.params[name], value)


def test_the_sequential_engine_says_stage_client_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small_federation(("testnets:Explosive",), sizes=(4, 3))
    monkeypatch.setattr(Explosive, "fuses", (3,))
    played = play(FEDAVG, federation, rounds=1, local_epochs=1)
    (dropped,) = played.engine.books.dropped
    assert dropped.reason.startswith("raised ValueError in step on x (3, 1, 6, 6), y (3,): boom")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_reply_of_the_wrong_shape_is_dropped_with_both_shapes(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small_federation()
    original = ENGINES[engine].run_group

    def tampered(self, program, clients, shared, mine):
        outcome = original(self, program, clients, shared, mine)
        replies = {c: dict(outcome.replies[c]) for c in clients}
        if "3" in replies:  # side by side, a process has only some of the clients
            replies["3"] = {**replies["3"], "loss": torch.zeros(2)}
        return Outcome(PerClient.of(replies), outcome.memories)

    monkeypatch.setattr(ENGINES[engine], "run_group", tampered)
    played = play(FEDAVG, federation, engine, rounds=1)
    (dropped,) = played.engine.books.dropped
    assert dropped.client == "3" and dropped.reason == "replied with shape (2,) for loss; expected ()"


def test_refusals_name_missing_and_surplus_tensors() -> None:
    expected = {"a": torch.zeros(2), "b": torch.zeros(())}
    stacked = {"a": torch.zeros(3, 2), "c": torch.zeros(3)}
    assert refusals(expected, stacked, 3) == ["replied with shape None for b; expected ()"] * 3
    stacked = {"a": torch.zeros(3, 2), "b": torch.tensor([0.0, float("inf"), 1.0])}
    assert refusals(expected, stacked, 3) == [None] * 3
    kept = {"c": torch.tensor([1.0, 1.0, torch.inf])}
    assert _finite(3, torch.device("cpu"), stacked, kept).tolist() == [[True, False, True], [True, True, False]]


def test_a_dropped_client_keeps_the_memory_it_had() -> None:
    scaffold, federation = algorithms.get("scaffold"), small_federation()
    played = play(scaffold, federation, rounds=1)
    before = flatten(played.engine.memory["1"])
    federation.x[federation.roster["1"].rows["train"]] = float("nan")
    played.engine.begin(2)
    scaffold.round(played.setup, played.state, Cohort(2, federation.participants), played.engine.ask)
    assert all(torch.equal(value, before[path]) for path, value in flatten(played.engine.memory["1"]).items())


def test_something_that_is_not_a_tensor_is_refused_before_it_is_sent() -> None:
    federation = small_federation()
    config = FEDAVG.config()
    engine = ENGINES["sequential"](federation, FEDAVG, config, 0)
    from fedloom.algorithms.fedavg import program

    with pytest.raises(TypeError, match="shared/mu is a float, not a tensor"):
        engine.ask(program(config), {"mu": 0.1}, PerClient.empty(["0"]))


def test_all_failing_is_said_with_the_last_reason() -> None:
    federation = small_federation()
    federation.x[:] = float("nan")
    with pytest.raises(RoundError) as caught:
        play(FEDAVG, federation, rounds=1)
    assert "(round 1); the last one, 4, replied with NaN or Inf." in str(caught.value)


@pytest.mark.parametrize(
    ("names", "cohort", "workers", "engine"),
    [
        (["mlp"], 2, 1, "parallel_vectorised"),
        (["mlp"], 2, 2, "parallel_vectorised"),
        (["mlp"], 1, 8, "sequential"),
        (["lenet"], 1, 8, "sequential"),
        (["lenet"], 2, 1, "sequential"),
        (["lenet"], 2, 2, "parallel"),
        (["mlp", "lenet"], 100, 2, "parallel"),
        (["testnets:Recurrent"], 10, 1, "sequential"),
        (["testnets:Recurrent"], 10, 2, "parallel"),
    ],
)
def test_auto_chooses_by_a_rule_and_says_why(
    names: list[str], cohort: int, workers: int, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "possible", lambda: True)
    models = [Model(parse(name, (1, 16, 16), 3)) for name in names]
    chosen, why = choose("auto", torch.device("cpu"), models, cohort, workers)
    assert chosen == engine and len(why) > 20
    assert ("side by side" in why) == (workers > 1 and cohort > 1)
    monkeypatch.setattr(auto, "possible", lambda: False)
    assert "side by side" not in choose("auto", torch.device("cpu"), models, cohort, workers)[1]


def test_auto_on_a_gpu_and_an_engine_by_name() -> None:
    conv, recurrent = (Model(parse(name, (1, 16, 16), 3)) for name in ("lenet", "testnets:Recurrent"))
    assert choose("auto", torch.device("cuda"), [conv], 1)[0] == "vectorised"
    assert choose("auto", torch.device("cuda"), [conv, recurrent], 10)[0] == "sequential"
    assert choose("loopback", torch.device("cpu"), [conv], 10) == ("loopback", "as asked")
    with pytest.raises(ConfigError, match="--engine parallel is for CPUs, the device is cuda"):
        choose("parallel", torch.device("cuda"), [conv], 10)
    for name in ("vectorised", "parallel_vectorised"):
        assert choose(name, torch.device("cpu"), [conv], 10) == (name, "as asked")
        with pytest.raises(
            ConfigError, match=f"--engine {name} runs many clients at once; testnets:Recurrent has oper"
        ):
            choose(name, torch.device("cpu"), [conv, recurrent], 10)


@pytest.mark.parametrize("optimiser", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("keep", [False, True])
def test_engines_agree_for_every_optimiser_fresh_or_kept(optimiser: str, keep: bool) -> None:
    federation = small_federation()
    runs = [
        play(FEDAVG, federation, engine, rounds=3, optimiser=optimiser, keep_optimiser=keep, local_lr=0.01)
        for engine in ("sequential", "vectorised")
    ]
    for name, value in runs[0].state.params.items():
        torch.testing.assert_close(runs[1].state.params[name], value, rtol=0, atol=1e-10)
    assert ("optimiser" in runs[0].engine.memory["0"]) == (keep)


def test_kept_optimiser_state_changes_the_next_round() -> None:
    federation = small_federation()
    fresh, kept = (play(FEDAVG, federation, rounds=2, keep_optimiser=keep) for keep in (False, True))
    assert any(not torch.equal(fresh.state.params[name], kept.state.params[name]) for name in fresh.state.params)


def test_weights_are_the_numbers_of_samples_for_ragged_clients() -> None:
    """One full-batch step each: the mean of deltas weighted by samples is one step on the pooled data."""
    federation = small_federation(sizes=(6, 2, 3))
    played = play(FEDAVG, federation, "vectorised", rounds=1, local_epochs=1, batch_size=16, momentum=0.0, clip=0.0)
    setup = setup_of(federation, dataclasses.replace(played.setup.config))
    start = FEDAVG.init(setup).params
    rows = torch.cat([torch.as_tensor(c.rows["train"]) for c in federation.roster.values()])
    model = federation.roster["0"].model

    def pooled(params):
        outputs = model(params, {}, federation.x[rows])
        return torch.nn.functional.cross_entropy(outputs, federation.y[rows])

    grads = torch.func.grad(pooled)(start)
    for name in start:
        expected = start[name] - 0.05 * (grads[name] + 5e-5 * start[name])
        torch.testing.assert_close(played.state.params[name], expected, rtol=0, atol=1e-12)


def test_auto_leaves_models_that_cannot_be_batched_to_the_plain_loop() -> None:
    recurrent = Model(parse("testnets:Recurrent", (1, 6, 6), 3))
    name, why = choose("auto", torch.device("cpu"), [recurrent], 10, workers=1)
    assert name == "sequential" and "testnets:Recurrent has operations that cannot run for many clients" in why


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_that_would_be_spoilt_is_not_kept(engine: str) -> None:
    """One step with an endless rate: the reply's loss is from before it, the model after it is not a number."""
    local, federation = algorithms.get("local"), small_federation()
    federation.x[federation.roster["1"].rows["train"]] *= 1e300
    played = play(local, federation, engine, rounds=1, local_epochs=1, batch_size=99, clip=0.0, local_lr=1e300)
    assert [d.client for d in played.engine.books.dropped if "keep NaN or Inf" in d.reason or "NaN" in d.reason]
    assert all(leaf.isfinite().all() for tree in played.engine.memory.values() for leaf in flatten(tree).values())


def test_a_cohort_without_samples_changes_nothing() -> None:
    federation = small_federation(sizes=(0, 5, 9, 0, 3))
    played = play(FEDAVG, federation, rounds=1, cohorts=[["0", "3"]])
    start = FEDAVG.init(played.setup).params
    assert all(torch.equal(played.state.params[name], value) for name, value in start.items())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cohort_that_memory_has_no_room_for_runs_in_parts_and_gives_the_same(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = small_federation(sizes=(4, 3, 4, 5, 4, 4, 4))
    whole = play(FEDAVG, federation, engine, rounds=2)
    original, tried = ENGINES[engine].run_group, []

    def with_room_for_two(self, program, clients, shared, mine):
        tried.append(len(clients))
        if len(clients) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return original(self, program, clients, shared, mine)

    monkeypatch.setattr(ENGINES[engine], "run_group", with_room_for_two)
    parts = play(FEDAVG, federation, engine, rounds=2)
    assert tried == [7, 4, 2, 2, 3, 2, 1, 2, 2, 2, 1]  # the second round knows
    assert parts.engine.notes[-1] == "fedavg.train runs at most 2 clients at a time: memory has no room for 3"
    for name, value in whole.state.params.items():
        torch.testing.assert_close(parts.state.params[name], value)


def test_memory_that_was_kept_for_speed_is_given_back_once_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that is made before memory is full, whenever a group is tried, must not keep it from being halved."""
    original, tried, freed = ENGINES["vectorised"].run_group, [], []

    def with_room_for_two(self, program, clients, shared, mine):
        tried.append(len(clients))
        if len(clients) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return original(self, program, clients, shared, mine)

    monkeypatch.setattr(ENGINES["vectorised"], "run_group", with_room_for_two)
    monkeypatch.setattr(ENGINES["vectorised"], "free_memory", lambda self: freed.append(tried[-1]) or True)
    play(FEDAVG, small_federation(sizes=(4, 4, 4, 4)), "vectorised", rounds=2)
    assert tried == [4, 4, 2, 2, 2, 2] and freed == [4]


def test_a_client_that_memory_has_no_room_for_is_dropped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(self, program, clients, shared, mine):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(ENGINES["vectorised"], "run_group", no_room)
    with pytest.raises(RoundError, match="does not fit into memory: CUDA out of memory"):
        play(FEDAVG, small_federation(), "vectorised", rounds=1)


def test_numbers_are_finite_though_their_sum_is_not() -> None:
    huge, bad = torch.full((2, 3), 3e38), torch.tensor([[1.0, 2.0, 3.0], [1.0, float("inf"), -float("inf")]])
    device = torch.device("cpu")
    assert _finite(2, device, {"a": huge}, {"a": bad}).tolist() == [[False, False], [True, False]]
    assert _finite(2, device, {"a": huge}, {"a": bad}, exactly=True).tolist() == [[True, True], [True, False]]


def _huge(home: Home, shared: Tree, carry: Tree, memory: Tree) -> tuple[Tree, Tree]:
    return {"x": torch.full((9,), 3e38)}, memory


def test_a_reply_with_a_huge_sum_is_used() -> None:
    federation = small_federation()
    played = play(FEDAVG, federation, "sequential", rounds=1)
    nothing = Program("huge", lambda *_: {}, lambda *_: {}, _huge, None, lambda *_: {"x": torch.zeros(9)})
    assert list(played.engine.ask(nothing, {}, PerClient.empty(federation.participants))) == [*federation.participants]
