# SPDX-License-Identifier: Apache-2.0
"""What the engines share: sessions, refused replies, memory that is kept or not, order."""

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
from fedloom.engines.job import Job, Outcome
from fedloom.engines.memories import Memories
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.programs.local import local_training
from testnets import Explosive

FEDAVG = algorithms.get("fedavg")

RUNS = {**ENGINES, "parallel": ENGINES["sequential"], "parallel_vectorised": ENGINES["vectorised"]}
"""The engine that runs clients in the end, here or in a worker."""

HERE = sorted(set(ENGINES) - {"ray"})
"""Those whose clients a test can change: the others' are in processes that were started without it."""


@pytest.mark.parametrize("engine", HERE)
def test_a_client_that_raises_is_dropped_with_the_reason_and_the_others_count(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = small_federation(("testnets:Explosive",), sizes=(4, 3, 4))
    # only client 1 has a batch of 3, alone; in a stack it is padded to 4, so there the whole group fails first
    original = RUNS[engine].run_group

    def fails_as_a_group(self, job: Job) -> Outcome:
        monkeypatch.setattr(Explosive, "fuses", (3, 4) if len(job.clients) > 1 else (3,))
        return original(self, job)

    monkeypatch.setattr(RUNS[engine], "run_group", fails_as_a_group)
    played = play(FEDAVG, federation, engine, rounds=1, local_epochs=1)
    (dropped,) = played.stats.dropped
    assert dropped.client == "1" and "boom" in dropped.reason and dropped.program == "train"
    monkeypatch.undo()
    without = play(FEDAVG, federation, engine, rounds=1, local_epochs=1, cohorts=[["0", "2"]])
    for name, value in without.state.params.items():
        torch.testing.assert_close(played.state.params[name], value)


def test_the_sequential_engine_says_stage_client_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small_federation(("testnets:Explosive",), sizes=(4, 3))
    monkeypatch.setattr(Explosive, "fuses", (3,))
    played = play(FEDAVG, federation, rounds=1, local_epochs=1)
    (dropped,) = played.stats.dropped
    assert dropped.reason.startswith("raised ValueError in step on x (3, 1, 6, 6), y (3,): boom")


@pytest.mark.parametrize("engine", HERE)
def test_a_reply_of_the_wrong_shape_is_dropped_with_both_shapes(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small_federation()
    original = ENGINES[engine].run_group

    def tampered(self, job: Job) -> Outcome:
        outcome = original(self, job)
        replies = {client: dict(outcome.replies[client]) for client in job.clients}
        replies["3"] = {**replies["3"], "loss": torch.zeros(2)}
        return Outcome(PerClient.of(replies), outcome.memories)

    monkeypatch.setattr(ENGINES[engine], "run_group", tampered)
    played = play(FEDAVG, federation, engine, rounds=1)
    (dropped,) = played.stats.dropped
    assert dropped.client == "3" and dropped.reason == "replied with shape (2,) for loss; expected ()"


def test_a_dropped_client_keeps_the_memory_it_had() -> None:
    scaffold, federation = algorithms.get("scaffold"), small_federation()
    played = play(scaffold, federation, rounds=1)
    federation.x[federation.roster["1"].rows["train"]] = float("nan")
    session = played.session(2)
    scaffold.round(played.setup, played.state, Cohort(2, federation.participants), session.ask)
    assert [dropped.client for dropped in session.stats.dropped] == ["1"]
    before = flatten(played.memory["1"])
    assert all(torch.equal(value, before[path]) for path, value in flatten(session.memory["1"]).items())


def test_what_is_done_before_an_ask_is_the_sessions_not_the_engines() -> None:
    federation = small_federation()
    setup = play(FEDAVG, federation, rounds=0).setup
    engine = ENGINES["sequential"](federation, FEDAVG, setup.config, 0)
    sent, told = FEDAVG.send(setup, FEDAVG.init(setup), ("0",)), []
    for stage, before_ask in ((1, told.append), (2, None)):
        engine.session(stage, Memories(), before_ask=before_ask).ask(local_training(setup.config), *sent)
    assert [(job.moment.stage, job.clients) for job in told] == [(1, ("0",))]


def test_something_that_is_not_a_tensor_is_refused_before_it_is_sent() -> None:
    federation = small_federation()
    config = FEDAVG.config()
    session = ENGINES["sequential"](federation, FEDAVG, config, 0).session(1, Memories())
    with pytest.raises(TypeError, match="shared/mu is a float, not a tensor"):
        session.ask(local_training(config), {"mu": 0.1}, PerClient.empty(["0"]))
    assert session.stats.asked == 0


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
    assert ("optimiser" in runs[0].memory["0"]) == keep


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
    assert [d.client for d in played.stats.dropped if "keep NaN or Inf" in d.reason or "NaN" in d.reason]
    assert all(leaf.isfinite().all() for tree in played.memory.values() for leaf in flatten(tree).values())


def test_a_cohort_without_samples_changes_nothing() -> None:
    federation = small_federation(sizes=(0, 5, 9, 0, 3))
    played = play(FEDAVG, federation, rounds=1, cohorts=[["0", "3"]])
    start = FEDAVG.init(played.setup).params
    assert all(torch.equal(played.state.params[name], value) for name, value in start.items())


@pytest.mark.parametrize("engine", HERE)
@pytest.mark.parametrize(
    "full",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
    ids=["gpu", "cpu", "numpy"],
)
def test_a_cohort_that_memory_has_no_room_for_runs_in_parts_and_gives_the_same(
    engine: str, full: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = small_federation(sizes=(4, 3, 4, 5, 4, 4, 4))
    whole = play(FEDAVG, federation, engine, rounds=2)
    original, tried = ENGINES[engine].run_group, []

    def with_room_for_two(self, job: Job) -> Outcome:
        tried.append(len(job.clients))
        if len(job.clients) > 2:
            raise full
        return original(self, job)

    monkeypatch.setattr(ENGINES[engine], "run_group", with_room_for_two)
    parts = play(FEDAVG, federation, engine, rounds=2)
    assert tried == [7, 4, 2, 2, 3, 2, 1, 2, 2, 2, 1]  # the second round knows
    assert parts.engine.notes[-1] == "train runs at most 2 clients at a time: memory has no room for 3"
    for name, value in whole.state.params.items():
        torch.testing.assert_close(parts.state.params[name], value)


def test_memory_that_was_kept_for_speed_is_given_back_once_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that is made before memory is full, whenever a group is tried, must not keep it from being halved."""
    original, tried, freed = ENGINES["vectorised"].run_group, [], []

    def with_room_for_two(self, job: Job) -> Outcome:
        tried.append(len(job.clients))
        if len(job.clients) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return original(self, job)

    monkeypatch.setattr(ENGINES["vectorised"], "run_group", with_room_for_two)
    monkeypatch.setattr(ENGINES["vectorised"], "free_memory", lambda self: freed.append(tried[-1]) or True)
    play(FEDAVG, small_federation(sizes=(4, 4, 4, 4)), "vectorised", rounds=2)
    assert tried == [4, 4, 2, 2, 2, 2] and freed == [4]


def test_a_client_that_memory_has_no_room_for_is_dropped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(self, job: Job) -> Outcome:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(ENGINES["vectorised"], "run_group", no_room)
    with pytest.raises(RoundError, match="does not fit into memory: CUDA out of memory"):
        play(FEDAVG, small_federation(), "vectorised", rounds=1)


def _huge(home: Home, shared: Tree, carry: Tree, memory: Tree) -> tuple[Tree, Tree]:
    return {"x": torch.full((9,), 1e308, dtype=torch.float64)}, memory


def test_a_reply_with_a_huge_sum_is_used() -> None:
    federation = small_federation()
    played = play(FEDAVG, federation, "sequential", rounds=1)
    nothing = Program("huge", lambda *_: {}, lambda *_: {}, _huge, None, lambda *_: {"x": torch.zeros(9)})
    asked = PerClient.empty(federation.participants)
    assert list(played.session(2).ask(nothing, {}, asked)) == [*federation.participants]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_keeps_nothing_of_a_session(engine: str) -> None:
    """Two sessions that begin with the same memory end with the same, and leave what they were given as it was."""
    scaffold = algorithms.get("scaffold")
    played = play(scaffold, small_federation(), engine, rounds=1)
    before = flatten(dict(played.memory))
    ends = []
    for _ in range(2):
        session = played.session(2)
        state, _ = scaffold.round(played.setup, played.state, Cohort(2, played.setup.clients), session.ask)
        ends.append({**flatten(state._asdict()), **flatten(dict(session.memory))})
        assert session.stats.asked == len(played.setup.clients)
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(value, ends[1][path]) for path, value in ends[0].items())
    after = flatten(dict(played.memory))
    assert all(torch.equal(value, after[path]) for path, value in before.items())
    assert any(not torch.equal(value, ends[0][path]) for path, value in before.items())


def test_a_trusting_session_uses_every_reply_and_leaves_the_check_to_its_caller() -> None:
    federation = small_federation()
    played = play(FEDAVG, federation, rounds=0)
    cohort = Cohort(1, federation.participants)
    sound, spoilt = (played.engine.session(1, played.memory, trusting=True) for _ in range(2))
    FEDAVG.round(played.setup, played.state, cohort, sound.ask)
    federation.x[federation.roster["1"].rows["train"]] = float("nan")
    state, _ = FEDAVG.round(played.setup, played.state, cohort, spoilt.ask)
    assert all(bool(check) for check in sound.checks) and not all(bool(check) for check in spoilt.checks)
    assert not spoilt.stats.dropped and not all(value.isfinite().all() for value in state.params.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_session_may_have_other_data_than_the_engine(engine: str) -> None:
    """As an admission has, with labels hidden: neither workers nor recordings may read the engine's own."""
    federation = small_federation()
    played = play(FEDAVG, federation, engine, rounds=1)
    other = dataclasses.replace(federation, x=federation.x * 2)
    cohort = Cohort(2, federation.participants)
    session = played.engine.session(2, played.memory, federation=other)
    state, _ = FEDAVG.round(played.setup, played.state, cohort, session.ask)
    alone = ENGINES[engine](other, FEDAVG, played.setup.config, 0).session(2, played.memory)
    expected, _ = FEDAVG.round(played.setup, played.state, cohort, alone.ask)
    assert all(torch.equal(value, state.params[name]) for name, value in expected.params.items())
    again = played.session(2)
    usual, _ = FEDAVG.round(played.setup, played.state, cohort, again.ask)
    assert any(not torch.equal(value, state.params[name]) for name, value in usual.params.items())
