# SPDX-License-Identifier: Apache-2.0
"""A federation built from options: who is asked, what is written down, and which checkpoints it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import needed
from fedloom import algorithms
from fedloom.clients.federation import Federation
from fedloom.core.contract import Cohort
from fedloom.core.errors import ConfigError, NeedsError, RoundError
from fedloom.core.task import CLASSIFICATION, REGRESSION, Task
from fedloom.core.trees import flatten, num_bytes
from fedloom.data.arrays import Arrays
from fedloom.data.own import from_arrays
from fedloom.engines.auto import heavy
from fedloom.engines.job import Job
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.runs.checkpoint import Checkpoint
from fedloom.runs.options import RunOptions
from fedloom.training.config import flat_config, parse_options
from fedloom.training.simulation import Simulation, resolve, split, task_of

TOP2 = Task("top two", CLASSIFICATION.loss, lambda outputs, y: (outputs.topk(2).indices == y[:, None]).any(-1), "top2")
NO_TASK = 7

SMALL = {"clients": 5, "rounds": 3, "local_steps": 2, "model": "mlp:hidden=4", "batch_size": 8}


def data(samples: int = 150, **fields: Any) -> Arrays:
    rng = np.random.default_rng(0)
    y = np.arange(samples) % 3
    return from_arrays((rng.standard_normal((samples, 6)) + y[:, None]).astype(np.float32), y, **fields)


TARGETS = from_arrays(np.ones((20, 2), dtype=np.float32), np.arange(20.0))


def simulation(method: str = "fedavg", arrays: Arrays | None = None, **options: Any) -> Simulation:
    return Simulation(method, *parse_options(method, {**SMALL, **options}), arrays or data())


def test_operator_threads_are_few_and_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    monkeypatch.setattr("fedloom.training.simulation.cores", lambda: 16)
    try:
        assert simulation(engine="sequential").server.options.threads == torch.get_num_threads() == 1  # a small model
        monkeypatch.setattr("fedloom.engines.auto.HEAVY", 0)
        assert simulation(engine="sequential").server.options.threads == torch.get_num_threads() == 4
        monkeypatch.setattr("fedloom.training.simulation.MOST_THREADS", 3)
        assert simulation(engine="sequential").server.options.threads == torch.get_num_threads() == 3
        assert simulation(engine="parallel").server.options.threads == torch.get_num_threads() == 1
        monkeypatch.setattr("fedloom.training.simulation.HEAVY_SERVER", 0)
        assert simulation(engine="parallel").server.options.threads == 3
        assert simulation(engine="parallel", threads=2).server.options.threads == torch.get_num_threads() == 2
        assert simulation(engine="parallel").server.options.threads == 3  # not the run's before it
        torch.set_num_threads(2)
        assert simulation(engine="parallel").server.options.threads == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("model", "shape", "pays"),
    [("mlp:hidden=100", (1, 28, 28), False), ("lenet", (1, 8, 8), False), ("lenet", (1, 28, 28), True)],
)
def test_threads_pay_for_heavy_models_only(model: str, shape: tuple[int, ...], pays: bool) -> None:
    assert heavy(Model(parse(model, shape, 10))) is pays


def test_our_own_kernels_can_be_left_out() -> None:
    assert simulation(engine="vectorised").engine.machine.own_kernels
    assert not simulation(engine="vectorised", convolutions="library").engine.machine.own_kernels


def test_workers_are_as_many_as_asked() -> None:
    assert simulation(engine="parallel", workers=3).engine.machine.workers == 3
    assert simulation(engine="parallel").server.options.workers == 0  # the machine's, wherever it is resumed


def cohorts(built: Simulation, rounds: int = 4) -> list[Cohort]:
    """The cohorts of some rounds, without training."""
    seen = []

    def noted(setup: Any, state: Any, cohort: Cohort, ask: Any) -> tuple[Any, dict[str, float]]:
        seen.append(cohort)
        return state, {}

    built.server.algorithm = replace(built.server.algorithm, round=noted)
    for _ in range(rounds):
        built.train_round()
    return seen


# Cohorts


def test_cohorts_are_the_same_for_all_methods_with_one_seed() -> None:
    drawn = {
        method: cohorts(simulation(method, cohort=2, **needed(algorithms.get(method)))) for method in algorithms.names()
    }
    first = drawn.pop("fedavg")
    assert [cohort.round for cohort in first] == [1, 2, 3, 4]
    assert len({cohort.clients for cohort in first}) > 1
    assert drawn
    assert all(other == first for other in drawn.values())


def test_cohorts_depend_on_the_seed() -> None:
    assert cohorts(simulation(cohort=2, seed=0), 8) != cohorts(simulation(cohort=2, seed=1), 8)


def test_a_cohort_has_different_clients_in_the_order_of_the_roster() -> None:
    for cohort in cohorts(simulation(cohort=3), 20):
        assert list(cohort.clients) == sorted(set(cohort.clients))
        assert len(cohort.clients) == 3


def test_unseen_clients_are_never_in_a_cohort() -> None:
    built = simulation(unseen=3, cohort=5)
    assert built.federation.unseen == ("5", "6", "7")
    assert cohorts(built, 1)[0].clients == ("0", "1", "2", "3", "4")


@pytest.mark.parametrize(("method", "clients", "cohort"), [("fedavg", 9, 5), ("fedavg", 3, 3), ("pfedhn", 9, 1)])
def test_without_a_cohort_it_is_the_paper_s_or_everybody(method: str, clients: int, cohort: int) -> None:
    assert simulation(method, clients=clients).server.options.cohort == cohort


# Options


@pytest.mark.parametrize(("rounds", "given", "wanted"), [(100, 0, 5), (400, 0, 20), (19, 0, 1), (0, 0, 1), (100, 7, 7)])
def test_twenty_evaluations_in_a_run_or_as_asked(rounds: int, given: int, wanted: int) -> None:
    assert simulation(rounds=rounds, eval_every=given).eval_every == wanted


def test_what_was_left_to_choose_is_in_the_config() -> None:
    built = simulation()
    config = flat_config("fedavg", built.server.options, built.server.config)
    assert (config["method"], config["cohort"], config["engine"]) == ("fedavg", 5, "parallel_vectorised")
    assert config["device"] in ("cpu", "cuda", "cuda:0")
    again = Simulation("fedavg", *parse_options("fedavg", {k: v for k, v in config.items() if k != "method"}), data())
    assert flat_config("fedavg", again.server.options, again.server.config) == config


@pytest.mark.parametrize(
    ("shape", "network"),
    [((1, 8, 8), "lenet"), ((3, 9), "conv1d"), ((3, 7), "mlp"), ((4,), "mlp")],
    ids=["images", "windows", "short", "features"],
)
def test_the_network_follows_the_data(shape: tuple[int, ...], network: str) -> None:
    arrays = from_arrays(np.zeros((30, *shape), dtype=np.float32), np.arange(30) % 2)
    built = simulation(arrays=arrays, model="auto", clients=2)
    assert {str(model.spec) for model in built.server.setup.models.values()} == {network}


def test_several_networks_go_round() -> None:
    built = simulation("local", model="mlp:hidden=4,mlp:hidden=5")
    widths = [built.server.setup.models[client].shapes for client in built.server.setup.clients]
    assert widths[0] == widths[2] != widths[1] == widths[3]


def test_the_split_follows_the_options() -> None:
    options, _ = parse_options("fedavg", {**SMALL, "unseen": 2, "val_share": 0.2, "test_share": 0.3})
    parts = split(options, data())
    assert len(parts.clients) == 7
    held = [sum(len(getattr(client, name)) for client in parts.clients) for name in ("train", "val", "test")]
    assert held == [75, 30, 45]


def test_a_published_split_and_natural_groups_are_used() -> None:
    client = np.repeat(["a", "b", "c"], 50)
    part = np.tile(["train", "train", "train", "val", "test"], 30)
    built = simulation(arrays=data(client=client, split=part), clients=3, partition="group:client")
    assert built.server.setup.clients == ("a", "b", "c")
    for one in built.federation.roster.values():
        assert {str(part[row]) for row in one.of("test")} == {"test"}
        assert {str(client[row]) for row in one.of("all")} == {one.id}


def test_declared_needs_are_checked_before_round_one() -> None:
    with pytest.raises(NeedsError, match="FedAvg needs one architecture for all clients; got 2"):
        simulation(model="mlp:hidden=4,mlp:hidden=5")


# Tasks and devices


def test_the_task_follows_the_labels() -> None:
    assert task_of("auto", data()) is CLASSIFICATION
    assert task_of("auto", TARGETS) is REGRESSION
    assert task_of("classification", data()) is CLASSIFICATION
    assert task_of("regression", TARGETS) is REGRESSION


def test_a_task_by_import_path() -> None:
    path = f"{__name__}:TOP2"
    assert task_of(path, data()) is TOP2
    built = simulation(task=path)
    built.train_round()
    assert "deployed/participants/test/top2" in built.evaluation().metrics


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("clasification", "Unknown task 'clasification'; did you mean 'classification'?"),
        (f"{__name__}:NO_TASK", "is a int; expected a fedloom.core.task.Task object."),
        (f"{__name__}:NOTHING", "has no 'NOTHING'. Check the name after the colon."),
        ("nowhere:TASK", "cannot import 'nowhere'"),
        ("regression", "--task regression needs real-valued targets; arrays has class labels."),
    ],
)
def test_what_is_no_task(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        task_of(name, data())
    assert sentence in str(caught.value)


def test_classes_need_class_labels() -> None:
    with pytest.raises(ConfigError, match="needs class labels; arrays has real-valued targets"):
        task_of("classification", TARGETS)


def test_runs_side_by_side_have_a_precision_each() -> None:
    exact, fast = simulation(), simulation(precision="tf32")
    seen = []
    for one in (exact, fast, exact):
        one.server.algorithm = replace(
            one.server.algorithm, round=lambda setup, state, *_: (seen.append(_precision()) or state, {})
        )
        one.train_round()
    assert seen == ["highest", "high", "highest"]
    fast.evaluate("test")
    assert _precision() == "high"
    exact.evaluate("test")
    assert _precision() == "highest"


def _precision() -> str:
    return torch.get_float32_matmul_precision()


# Records


def test_a_record_has_bytes_and_seconds() -> None:
    built = simulation(cohort=4)
    params = num_bytes(built.server.state.params)
    record = built.train_round()
    assert (record["round"], record["clients"], record["dropped"]) == (1, 4, [])
    assert record["bytes"] == {"down": 4 * params, "up": 4 * (params + 8)}  # the number of samples and the loss
    seconds = record["seconds"]
    assert set(seconds) == {"round", "generate", "local_training", "server_step"}
    assert all(value >= 0 for value in seconds.values())
    parts = seconds["generate"] + seconds["local_training"] + seconds["server_step"]
    assert parts == pytest.approx(seconds["round"], abs=0.01)
    assert record["diagnostics"]["local_loss"] > 0


def test_evaluation_changes_neither_state_nor_the_next_round() -> None:
    quiet, curious = simulation("scaffold", cohort=2), simulation("scaffold", cohort=2)
    for _ in range(2):
        quiet.train_round()
        curious.train_round()
        curious.evaluation()
        curious.evaluate("all")
    one, other = (flatten(built.server.state._asdict()) for built in (quiet, curious))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_clients_evaluated_are_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    built = simulation(eval_clients=2, clients=6)
    asked: list[tuple[str, ...]] = []
    evaluate = built.evaluate
    monkeypatch.setattr(
        built, "evaluate", lambda part, clients: asked.append(tuple(clients)) or evaluate(part, clients)
    )
    built.evaluation()
    built.train_round()
    built.evaluation()
    assert len(set(asked)) == 1
    assert len(asked) == 4
    assert len(asked[0]) == 2


def test_clients_without_samples_are_left_out_of_an_evaluation() -> None:
    built = simulation(val_share=0)
    assert built.evaluate("val") == {}
    assert not [name for name in built.evaluation().metrics if "/val/" in name]


def test_the_size_of_a_checkpoint_counts_what_clients_keep() -> None:
    built = simulation("local", clients=5)
    model = built.server.setup.models["0"]
    assert built.server.checkpoint_bytes() == 5 * num_bytes(model.init(0))
    assert simulation("fedavg").server.checkpoint_bytes() == num_bytes(simulation("fedavg").server.state.params)


# Checkpoints


def everything(built: Simulation) -> dict[str, torch.Tensor]:
    return flatten({"state": built.now.state._asdict(), **built.now.memory})


def checkpoint_of(built: Simulation) -> Checkpoint:
    return Checkpoint(1, built.now.state._asdict(), dict(built.now.memory), built.meta())


def test_going_back_undoes_what_came_after() -> None:
    built = simulation("scaffold", cohort=2)
    built.train_round()
    mark = built.mark()
    before = {name: leaf.clone() for name, leaf in everything(built).items()}
    next_record = built.train_round()
    built.evaluation()
    built.go_back(mark)
    after = everything(built)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert built.server.round == 1
    again = built.train_round()
    assert {**again, "seconds": 0} == {**next_record, "seconds": 0}


def test_a_checkpoint_brings_the_simulation_back() -> None:
    one, other = simulation("scaffold"), simulation("scaffold")
    one.train_round()
    other.server.restore(checkpoint_of(one))
    assert other.server.round == 1
    assert other.evaluation() == one.evaluation()
    assert {**one.train_round(), "seconds": 0} == {**other.train_round(), "seconds": 0}


def test_what_training_adds_to_memory_is_no_misfit() -> None:
    built = simulation("fedavg", keep_optimiser=True)
    built.train_round()
    fresh = simulation("fedavg", keep_optimiser=True)
    assert "optimiser" in built.now.memory["0"]
    fresh.server.restore(checkpoint_of(built))
    assert fresh.evaluation() == built.evaluation()


# Newcomers


@pytest.mark.parametrize("method", ["local", "fedper"])
def test_methods_without_a_model_for_newcomers_say_so(method: str) -> None:
    built = simulation(method, unseen=1)
    with pytest.raises(NeedsError, match="cannot serve clients that took no part in training"):
        built.evaluation_of_unseen()


def test_unseen_clients_without_samples_are_passed_over() -> None:
    assert simulation("local", unseen=0).evaluation_of_unseen().metrics == {}
    assert simulation("local", unseen=2, test_share=0).evaluation_of_unseen().metrics == {}


def test_unseen_clients_can_be_tried_on_all_that_they_have() -> None:
    built = simulation("fedavg", unseen=2)
    rows = {client: built.federation.roster[client].of("all") for client in built.federation.unseen}
    params = built.server.state.params
    right = []
    for client, own in rows.items():
        outputs = built.federation.roster[client].model(params, {}, built.federation.x[torch.as_tensor(own)])
        right.append((outputs.argmax(1) == built.federation.y[torch.as_tensor(own)]).double().mean().item())
    found = built.evaluation_of_unseen("all").metrics["deployed/unseen/all/accuracy"]
    assert found == pytest.approx(np.mean(right))


def test_a_model_drawn_at_random_is_worth_the_mean_over_participants() -> None:
    built = simulation("pfedhn", unseen=2)
    models = built.server.algorithm.send(built.server.setup, built.server.state, built.server.setup.clients).mine
    right = []
    for client in built.federation.unseen:
        own = torch.as_tensor(built.federation.roster[client].of("test"))
        x, y = built.federation.x[own], built.federation.y[own]
        model = built.federation.roster[client].model
        right += [(model(models[c]["params"], {}, x).argmax(1) == y).double().mean().item() for c in models]
    found = built.evaluation_of_unseen("test", "sampled").metrics["deployed/unseen/test/accuracy"]
    assert found == pytest.approx(np.mean(right))


def test_the_global_model_is_tried_on_everybodys_data() -> None:
    built = simulation("mh_pfedhn_gd", model="mlp:hidden=4,mlp:hidden=3", chunk=32, unseen=2)
    built.train_round()
    network, params = built.server.global_model()
    assert str(network.spec) == "mlp:hidden=3"  # the smallest client's
    participants, newcomers = built.evaluate_global("test"), built.evaluate_global("test", unseen=True)
    for client, score in {**participants, **newcomers}.items():
        own = torch.as_tensor(built.federation.roster[client].of("test"))
        right = network(params, {}, built.federation.x[own]).argmax(1) == built.federation.y[own]
        assert score.metric == pytest.approx(right.double().mean().item())
    assert set(participants) == set(built.server.setup.clients) and set(newcomers) == set(built.federation.unseen)


def test_a_global_model_with_batch_norm_is_tried_by_those_who_have_trained_it() -> None:
    y = np.arange(150) % 3
    images = from_arrays(np.random.default_rng(0).standard_normal((150, 1, 6, 6)).astype(np.float32), y)
    built = simulation("mh_pfedhn_gd", images, global_model="testnets:Normed", chunk=32, cohort=2)
    built.train_round()
    trained = {client for client, tree in built.now.memory.items() if "global_buffers" in tree}
    assert 0 < len(trained) <= 2 < len(built.server.setup.clients)
    assert set(built.evaluate_global("test")) == trained


@pytest.mark.parametrize("method", ["fedavg", "mh_pfedhn", "pfedhn_pc", "hyperfedzero"])
def test_models_that_cannot_be_handed_on_are_refused(method: str) -> None:
    with pytest.raises(NeedsError, match=r"server of .* has no whole model for each participant"):
        simulation(method, unseen=1).evaluation_of_unseen(mode="ensemble")


def shown_at_admission(built: Simulation, monkeypatch: pytest.MonkeyPatch, **how: Any) -> list[Federation]:
    """The clients as they were to each program of an admission."""
    seen = []
    answer = built.engine.answer

    def noted(job: Job) -> Any:
        if job.moment.stage == "admission":
            seen.append(job.federation)
        return answer(job)

    monkeypatch.setattr(built.engine, "answer", noted)
    built.evaluation_of_unseen(**how)
    assert seen
    return seen


@pytest.mark.parametrize("samples", [3, 5])
def test_newcomers_can_be_admitted_with_few_samples(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    built = simulation("pfedhn", unseen=2, admit_rounds=1)
    for shown in shown_at_admission(built, monkeypatch, samples=samples):
        for client in built.federation.unseen:
            own = shown.roster[client].rows["train"]
            assert len(own) == samples and set(own) <= set(built.federation.roster[client].rows["train"])
        assert torch.equal(shown.y, built.federation.y)


@pytest.mark.parametrize("options", [{"method": "it_pfl_hn"}, {"method": "fedavg", "adapt": "prior"}])
def test_labels_of_newcomers_are_out_of_reach(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    built = simulation(unseen=2, engine="vectorised", **options)
    built.train_round()
    train = [built.federation.roster[client].rows["train"] for client in built.federation.unseen]
    rows = torch.as_tensor(np.concatenate(train))
    others = torch.ones(len(built.federation.y), dtype=torch.bool)
    others[rows] = False
    for shown in shown_at_admission(built, monkeypatch):
        assert (shown.y[rows] == -1).all() and (built.federation.y[rows] >= 0).all()
        assert torch.equal(shown.y[others], built.federation.y[others])


@pytest.mark.parametrize("method", ["pfedhn_pc", "mh_pfedhn", "it_pfl_hn", "fedavg"])
def test_newcomers_come_for_the_first_time_each_time(method: str) -> None:
    """What they kept of an admission, a head or statistics, does not help them in the next evaluation."""
    arrays = from_arrays(np.random.default_rng(0).random((90, 1, 6, 6), dtype=np.float32), np.arange(90) % 3)
    own = {"admit_rounds": 3} if method != "fedavg" and method != "it_pfl_hn" else {}
    model = "testnets:Normed" if method != "pfedhn_pc" else "mlp:hidden=4"
    built = simulation(method, arrays, unseen=2, model=model, local_lr=0.5, **own)
    built.train_round()
    first = built.evaluation_of_unseen()
    built.evaluation_of_unseen(samples=2)
    assert built.evaluation_of_unseen() == first
    assert not set(built.now.memory) & set(built.federation.unseen)


def test_a_shift_leaves_the_given_arrays_alone() -> None:
    x = np.random.default_rng(0).random((30, 1, 6, 6), dtype=np.float32)
    arrays = from_arrays(x, np.arange(30) % 2)
    before = arrays.x.copy()
    built = simulation(arrays=arrays, clients=2, unseen=1, unseen_shift="brightness", unseen_shift_strength=0.5)
    assert np.array_equal(arrays.x, before)
    rows = built.federation.roster["2"].of("all")
    low = before.min()
    np.testing.assert_allclose(built.federation.x[torch.as_tensor(rows)], (before[rows] - low) / 2 + low, rtol=1e-5)


def test_every_client_can_have_a_camera_of_its_own() -> None:
    """All of a client's images are changed alike, and those of other clients in other ways."""
    x = np.random.default_rng(0).uniform(0.1, 0.4, (40, 1, 6, 6)).astype(np.float32)
    x[0], x[1] = 0, 1  # black and white
    arrays = from_arrays(x, np.arange(40) % 2)
    built = simulation(arrays=arrays, clients=2, unseen=1, client_shift="brightness:2")
    factors = {}
    for client, member in built.federation.roster.items():
        rows = [row for row in member.of("all").tolist() if row > 1]
        ratio = built.federation.x[torch.as_tensor(rows)].numpy() / x[rows]
        factors[client] = float(ratio.mean())
        np.testing.assert_allclose(ratio, factors[client], rtol=1e-4)
    assert len({round(factor, 4) for factor in factors.values()}) == 3
    with pytest.raises(ConfigError, match="--client-shift changes images, and these samples are tokens"):
        tokens = from_arrays(np.arange(80).reshape(40, 2), np.arange(40) % 2)
        simulation(arrays=tokens, model="gru", partition="iid", client_shift="blur")


def test_clients_that_the_data_name_stay_as_they_are() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((60, 4)).astype(np.float32), np.arange(60) % 3
    arrays = from_arrays(x, y, client=np.array(list("abcdef") * 10))
    options = resolve(RunOptions(dataset="own"), arrays)
    assert (options.partition, options.clients) == ("group:client", 6)
    assert resolve(RunOptions(dataset="own", unseen=2), arrays).clients == 4
    assert {c.id for c in split(RunOptions(dataset="own", unseen=2), arrays).clients} == set("abcdef")
    plain = from_arrays(x, y)
    assert (resolve(RunOptions(), plain).partition, resolve(RunOptions(), plain).clients) == ("classes:2", 20)
    real = from_arrays(x, y.astype(np.float32) / 7)
    assert resolve(RunOptions(), real).partition == "iid"


def test_unseen_clients_can_have_networks_of_their_own() -> None:
    built = simulation("mh_pfedhn", unseen=2, unseen_model="mlp:hidden=9,mlp:hidden=5", chunk=32, admit_rounds=1)
    assert [str(built.server.setup.models[c].spec) for c in ("0", "4", "5", "6")] == ["mlp:hidden=4"] * 2 + [
        "mlp:hidden=5",
        "mlp:hidden=9",
    ]
    assert 0 <= built.evaluation_of_unseen().metrics["deployed/unseen/test/accuracy"] <= 1
    with pytest.raises(
        NeedsError, match="FedAvg has one model for all clients, mlp:hidden=4; client 5 has mlp:hidden=9"
    ):
        simulation("fedavg", unseen=2, unseen_model="mlp:hidden=9").evaluation_of_unseen()


def test_unseen_clients_by_share_with_a_split_and_a_shift_of_their_own() -> None:
    arrays = from_arrays(np.random.default_rng(0).random((400, 1, 6, 6), dtype=np.float32), np.arange(400) % 4)
    made = {"clients": 8, "unseen": 0.2, "partition": "iid", "arrays": arrays, "test_share": 0.25}
    plain = simulation(**made)
    other = simulation(**made, unseen_partition="classes:1", unseen_shift="blur")
    assert len(plain.federation.unseen) == len(other.federation.unseen) == 2
    for built, classes in ((plain, 4), (other, 1)):
        rows = torch.as_tensor(built.federation.roster[built.federation.unseen[0]].of("all"))
        assert len(built.federation.y[rows].unique()) == classes
        assert torch.equal(built.federation.x[rows], torch.as_tensor(arrays.x)[rows]) == (built is plain)
    for client in plain.server.setup.clients:
        rows = [torch.as_tensor(s.federation.roster[client].of("all")) for s in (plain, other)]
        assert torch.equal(*rows) and torch.equal(plain.federation.x[rows[0]], other.federation.x[rows[1]])
    assert 0 <= other.evaluation_of_unseen("all").metrics["deployed/unseen/all/accuracy"] <= 1


def test_a_round_that_would_leave_the_server_with_infinite_numbers_does_not_count() -> None:
    built = simulation()
    built.train_round()
    before = built.server.state

    def absurd(setup: Any, state: Any, cohort: Cohort, ask: Any) -> Any:
        return state._replace(params={name: value + torch.inf for name, value in state.params.items()}), {}

    built.server.algorithm = replace(built.server.algorithm, round=absurd)
    with pytest.raises(RoundError, match="Round 2 would leave the server with NaN or Inf"):
        built.train_round()
    assert built.server.state is before and built.server.round == 1
