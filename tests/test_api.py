# SPDX-License-Identifier: Apache-2.0
"""What users call from Python, on their own data and networks too, and what they are told when something is wrong."""

from __future__ import annotations

import itertools
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import fedloom
from fedloom import api
from fedloom.core.errors import ConfigError, DataError, DivergedError, FedloomError, NeedsError, RoundError, RunError
from fedloom.core.trees import Tree, flatten, leaves
from fedloom.data.arrays import Arrays
from fedloom.data.own import from_arrays
from fedloom.data.registry import load as load_data
from fedloom.runs.directory import RunDirectory
from testnets import Normed

TINY = {"clients": 4, "rounds": 2, "local_steps": 2, "model": "mlp:hidden=8", "progress": "quiet"}
VAL = "deployed/participants/val/accuracy"


def features(samples: int = 120, classes: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Feature vectors whose classes differ in their mean."""
    rng = np.random.default_rng(seed)
    y = np.arange(samples) % classes
    return (rng.standard_normal((samples, 5)) + y[:, None]).astype(np.float32), y


def bits(path: Path, which: Any = "last") -> dict[str, bytes]:
    """Every tensor of a checkpoint."""
    saved = RunDirectory.open(path).load(which)
    tree: Tree = {"state": saved.state, "memory": saved.memory}
    return {name: leaf.numpy().tobytes() for name, leaf in leaves(tree)}


def numbers(run: fedloom.Run) -> list[dict[str, Any]]:
    """The records without their times."""
    return [{name: value for name, value in record.items() if name != "seconds"} for record in run.records]


def refused(kind: type[FedloomError], action: Callable[[], Any]) -> str:
    """The sentence of an error of exactly that kind."""
    with pytest.raises(FedloomError) as caught:
        action()
    assert type(caught.value) is kind
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")
    return sentence


class Digits(NamedTuple):
    """A run, and samples as its own are."""

    run: fedloom.Run
    x: Tensor
    y: Tensor


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Digits]:
    """Finished runs on digits with two unseen clients, one per method. Not to be changed."""
    made: dict[str, Digits] = {}

    def of(method: str) -> Digits:
        if method not in made:
            out = tmp_path_factory.mktemp("api") / method
            own = {"admit_rounds": 2} if "hn" in method else {}
            run = fedloom.run(method, dataset="digits", out=out, unseen=2, **TINY, **own)
            federation = fedloom.load(out).simulation.federation
            rows = torch.as_tensor(federation.roster["4"].of("train"))
            made[method] = Digits(run, federation.x[rows], federation.y[rows])
        return made[method]

    return of


# Runs by name, and what they know


def test_a_run_by_names_knows_its_numbers(digits: Callable[[str], Digits]) -> None:
    run = digits("fedavg").run
    assert [record["round"] for record in run.records] == [1, 2]
    assert run.clients == ("0", "1", "2", "3")
    summary = run.summary
    assert (summary["finished"], summary["rounds"], summary["metric"]) == (True, 2, "accuracy")
    assert summary["last"]["round"] == 2
    assert summary["best"]["round"] in (1, 2)
    assert list(summary["clients"]) == list(run.clients)
    assert summary["bytes"] == {way: sum(r["bytes"][way] for r in run.records) for way in ("down", "up")}
    assert repr(run) == f"Run({str(run.path)!r})"
    assert run.config["method"] == "fedavg"


def test_a_model_predicts_as_the_run_does(digits: Callable[[str], Digits]) -> None:
    run, x, _ = digits("pfedhn")
    model = run.model(1)
    assert isinstance(model, nn.Module)
    assert not model.training
    outputs = run.predict("1", x)
    assert outputs.shape == (len(x), 10)
    torch.testing.assert_close(model(x).detach(), outputs)
    assert not torch.allclose(run.predict("0", x), outputs)
    assert torch.equal(run.predict("1", x.numpy()), outputs)


def test_parameters_are_those_of_the_model(digits: Callable[[str], Digits]) -> None:
    run = digits("fedper").run
    tree = run.parameters("2")
    assert set(tree) == {"params", "buffers"}
    own = dict(run.model("2").named_parameters())
    assert own.keys() == tree["params"].keys()
    assert all(torch.equal(own[name].detach(), value.detach()) for name, value in tree["params"].items())


def test_scores_of_the_best_checkpoint_are_those_of_the_summary(digits: Callable[[str], Digits]) -> None:
    run = digits("fedper").run
    best = fedloom.load(run.path, which="best")
    assert best.server.round == run.summary["best"]["round"]
    assert {client: score._asdict() for client, score in best.evaluate().items()} == run.summary["clients"]
    splits = {
        split: sum(score.samples for score in best.evaluate(split).values()) for split in ("train", "val", "test")
    }
    assert sum(splits.values()) == sum(score.samples for score in best.evaluate("all").values())
    assert min(splits.values()) > 0


def test_the_score_is_what_the_model_gets_right(digits: Callable[[str], Digits]) -> None:
    run = fedloom.load(digits("pfedhn").run.path, which="last")
    federation = run.simulation.federation
    rows = torch.as_tensor(federation.roster["3"].of("test"))
    hits = run.model("3")(federation.x[rows]).argmax(-1) == federation.y[rows]
    assert run.evaluate("test")["3"].metric == pytest.approx(float(hits.double().mean()), abs=1e-6)


@pytest.mark.parametrize(("before", "engine"), [("cuda", "parallel"), ("cuda:1", "parallel"), ("cpu", "vectorised")])
def test_a_run_of_another_kind_of_device_has_an_engine_for_this_one(
    before: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.engines.auto.cores", lambda: 2)
    monkeypatch.setattr("fedloom.training.simulation.cores", lambda: 2)
    monkeypatch.setattr("fedloom.training.machine.torch.cuda.is_available", lambda: False)
    options = {"model": "lenet:kernels=2", "clients": 3, "cohort": 3, "rounds": 1, "local_steps": 1}
    run = fedloom.run("fedavg", dataset="digits", engine="vectorised", out=tmp_path, progress="quiet", **options)
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    (run.path / "config.yaml").write_text(yaml.safe_dump({**config, "device": before}))
    assert fedloom.load(run.path, force=True).simulation.server.options.engine == engine


def test_load_takes_best_last_or_a_round(tmp_path: Path) -> None:
    options = {**TINY, "rounds": 4, "local_lr": 0.05, "local_steps": 10}
    run = fedloom.run("fedavg", out=tmp_path / "run", eval_every=1, keep=9, **options)
    values = [record["metrics"][VAL] for record in run.records]
    best = 1 + int(np.argmax(values))
    assert run.summary["best"]["round"] == best
    assert run.server.round == best
    assert fedloom.load(run.path).server.round == best
    assert fedloom.load(run.path, which="last").server.round == 4
    for round in (1, 2, 3, 4):
        loaded = fedloom.load(str(run.path), which=round)
        assert loaded.server.round == loaded.simulation.server.round == round
        assert loaded.simulation.evaluation().metrics == run.records[round - 1]["metrics"]
    assert "has no checkpoint of round 7; choose from: 1, 2, 3, 4." in refused(
        RunError, lambda: fedloom.load(run.path, which=7).clients
    )


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", out=tmp_path / "run", eval_every=1, keep=1, **{**TINY, "rounds": 5, "local_lr": 0.0})
    assert run.summary["best"]["round"] == 1  # nothing is learned, and the later of two equals is kept out
    assert run.directory.checkpoints() == [1, 5]


def test_a_run_without_validation_data_has_no_best(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", out=tmp_path / "run", val_share=0, **TINY)
    assert run.summary["best"] is None
    assert run.server.round == 2
    assert not [name for name in run.records[-1]["metrics"] if "/val/" in name]


def test_no_rounds_at_all(tmp_path: Path) -> None:
    run = fedloom.run("pfedhn", out=tmp_path / "run", **{**TINY, "rounds": 0})
    assert run.records == []
    assert (run.summary["finished"], run.summary["rounds"], run.summary["best"]) == (True, 0, None)
    assert run.summary["last"]["round"] == 0
    assert run.server.round == 0
    assert isinstance(run.model("0"), nn.Module)
    straight = fedloom.run("pfedhn", out=tmp_path / "straight", **{**TINY, "rounds": 1})
    fedloom.resume(run.path, rounds=1, progress="quiet")
    assert bits(run.path) == bits(straight.path)


def test_evaluation_of_some_clients(tmp_path: Path) -> None:
    run = fedloom.run("local", out=tmp_path / "some", eval_clients=2, **TINY)
    everybody = fedloom.run("local", out=tmp_path / "all", eval_clients=9, **TINY)
    assert (len(run.summary["clients"]), len(everybody.summary["clients"])) == (2, 4)
    name = "deployed/participants/test/accuracy"
    last = fedloom.load(everybody.path, which="last").evaluate()
    assert everybody.summary["last"][name] == pytest.approx(np.mean([score.metric for score in last.values()]))
    chosen = [last[client].metric for client in run.summary["clients"]]
    assert run.summary["last"][name] == pytest.approx(np.mean(chosen))


def test_a_run_goes_into_a_new_folder_under_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = [fedloom.run("fedavg", **{**TINY, "rounds": 0}).path for _ in range(2)]
    assert paths == [Path("runs/fedavg-digits-seed0"), Path("runs/fedavg-digits-seed0-2")]


# Same bits


def test_the_seed_is_all_that_makes_a_difference(tmp_path: Path) -> None:
    one, same, other = (
        fedloom.run("pfedhn_pc", out=tmp_path / str(i), seed=seed, unseen=1, admit_rounds=2, **TINY)
        for i, seed in enumerate((3, 3, 4))
    )
    assert bits(one.path) == bits(same.path)
    assert numbers(one) == numbers(same)
    assert one.summary["unseen"] == same.summary["unseen"]
    assert bits(one.path) != bits(other.path)


def test_the_config_file_repeats_the_run(tmp_path: Path) -> None:
    options = {"partition": "dirichlet:0.5", "unseen": 0.25, "seed": 5, "dtype": "float64", "weight_decay": 1e-5}
    run = fedloom.run("scaffold", out=tmp_path / "run", **TINY, **options)
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    assert config == run.config
    again = fedloom.run(**config, out=tmp_path / "again", progress="quiet")
    assert (again.path / "config.yaml").read_bytes() == (run.path / "config.yaml").read_bytes()
    assert bits(again.path) == bits(run.path)
    assert numbers(again) == numbers(run)


def test_another_type_of_numbers(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", out=tmp_path / "run", dtype="float64", **TINY)
    floats = {leaf.dtype for _, leaf in leaves(run.directory.load().state)}
    assert floats == {torch.float64}
    model = run.model("0")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert run.predict("0", np.zeros((2, 1, 8, 8), dtype=np.float32)).dtype == torch.float64


# Data and networks of the user's own


class Pairs(Dataset):
    """A map-style Dataset."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.as_tensor(self.x[index]), int(self.y[index])


KINDS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "arrays": lambda x, y: (x, y),
    "lists": lambda x, y: (x.tolist(), y.tolist()),
    "tensors": lambda x, y: (torch.as_tensor(x).requires_grad_(), torch.as_tensor(y)),
    "checked arrays": lambda x, y: from_arrays(x, y),
    "a Dataset": Pairs,
    "a TensorDataset": lambda x, y: TensorDataset(torch.as_tensor(x), torch.as_tensor(y)),
}


@pytest.fixture(scope="module")
def of_arrays(tmp_path_factory: pytest.TempPathFactory) -> fedloom.Run:
    return fedloom.run("fedavg", dataset=features(), out=tmp_path_factory.mktemp("own") / "run", **TINY)


@pytest.mark.parametrize("kind", KINDS)
def test_data_of_the_user_s_own(of_arrays: fedloom.Run, tmp_path: Path, kind: str) -> None:
    run = fedloom.run("fedavg", dataset=KINDS[kind](*features()), out=tmp_path / "run", **TINY)
    assert bits(run.path) == bits(of_arrays.path)
    assert run.model("0")(torch.zeros(2, 5)).shape == (2, 3)  # without giving the data again
    assert run.evaluate("val")


def test_data_of_the_user_s_own_are_given_again_for_what_is_loaded(of_arrays: fedloom.Run) -> None:
    path = of_arrays.path
    why = f"{path} was run on data given from Python; give them again there: load(run, dataset=(x, y))."
    assert fedloom.load(path).clients == of_arrays.clients  # which takes no data
    assert refused(RunError, fedloom.load(path).evaluate) == why
    assert refused(RunError, lambda: fedloom.resume(path, progress="quiet")) == why
    loaded = fedloom.load(path, dataset=features())
    assert loaded.evaluate() == of_arrays.evaluate()


def test_a_resumed_run_on_data_from_python(of_arrays: fedloom.Run, tmp_path: Path) -> None:
    path = Path(shutil.copytree(of_arrays.path, tmp_path / "run"))
    further = fedloom.resume(path, dataset=features(), rounds=3, progress="quiet")
    assert [record["round"] for record in further.records] == [1, 2, 3]
    assert further.evaluate()


def test_a_file_as_a_path(of_arrays: fedloom.Run, tmp_path: Path) -> None:
    x, y = features()
    np.savez(tmp_path / "own.npz", x=x, y=y)
    run = fedloom.run("fedavg", dataset=tmp_path / "own.npz", out=tmp_path / "run", **TINY)
    assert bits(run.path) == bits(of_arrays.path)
    assert fedloom.load(run.path).clients == of_arrays.clients


def test_time_windows(tmp_path: Path) -> None:
    x, y = features()
    windows = np.stack([x, -x], axis=1)  # (samples, channels, length)
    run = fedloom.run("fedavg", dataset=(windows, y), out=tmp_path / "run", **{**TINY, "model": "auto"})
    assert run.predict("0", windows[:4]).shape == (4, 3)


def test_a_network_given_as_a_class(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", out=tmp_path / "run", **{**TINY, "model": Normed})
    assert run.config["model"] == "testnets:Normed"
    assert isinstance(run.model("0"), Normed)
    assert isinstance(fedloom.load(run.path, trust=True).model("0"), Normed)
    assert int(run.model("0").norm.num_batches_tracked) == 4


@pytest.mark.parametrize("model", ["lambda", "instance", "local class", "none"])
def test_other_things_than_a_class_are_refused(tmp_path: Path, model: str) -> None:
    class Local(nn.Module):
        pass

    given = {"lambda": lambda: nn.Linear(2, 2), "instance": nn.Linear(2, 2), "local class": Local, "none": None}
    told = refused(ConfigError, lambda: fedloom.run("fedavg", out=tmp_path / "run", **{**TINY, "model": given[model]}))
    assert "expected a network's name, an import path, or an nn.Module class" in told
    assert not (tmp_path / "run").exists()


def regression(targets: int = 1) -> tuple[np.ndarray, np.ndarray]:
    x, _ = features()
    y = x[:, :targets] * 2 + 1
    return x, y[:, 0] if targets == 1 else y


@pytest.mark.parametrize("targets", [1, 2])
def test_regression(tmp_path: Path, targets: int) -> None:
    options = {**TINY, "rounds": 6, "local_lr": 0.05, "local_steps": 10, "partition": "iid"}
    run = fedloom.run("fedavg", dataset=regression(targets), out=tmp_path / "run", eval_every=1, keep=9, **options)
    name = "deployed/participants/val/absolute_error"
    values = [record["metrics"][name] for record in run.records]
    assert values[-1] < values[0]
    assert run.summary["metric"] == "absolute_error"
    assert run.summary["best"]["round"] == 1 + int(np.argmin(values))
    assert run.server.setup.task.name == "regression"
    last = run.records[-1]["metrics"]
    assert last[f"{name}_worst10"] >= last[name] >= last[f"{name}_best10"]
    assert run.predict("0", regression()[0][:7]).shape == (7, targets)


def test_the_best_of_a_regression_is_the_least_error(tmp_path: Path) -> None:
    # steps so long that the error grows
    options = {**TINY, "rounds": 4, "local_lr": 0.3, "momentum": 0.99, "partition": "iid"}
    run = fedloom.run("fedavg", dataset=regression(), out=tmp_path / "run", eval_every=1, **options)
    values = [record["metrics"]["deployed/participants/val/absolute_error"] for record in run.records]
    assert np.argmin(values) != np.argmax(values)
    assert run.summary["best"]["round"] == 1 + int(np.argmin(values))


# Newcomers


@pytest.mark.parametrize(("method", "labelled"), [("fedavg", False), ("scaffold", False), ("pfedhn", True)])
def test_a_newcomer_is_admitted(digits: Callable[[str], Digits], method: str, labelled: bool) -> None:
    run, x, y = digits(method)
    before = {name: leaf.clone() for name, leaf in flatten(run.server.state._asdict()).items()}
    admission = run.admit(x, y) if labelled else run.admit(x)
    assert isinstance(admission.model, nn.Module)
    assert not admission.model.training
    torch.testing.assert_close(admission.predict(x), admission.model(x).detach())
    assert admission.predict(x[:3]).shape == (3, 10)
    after = flatten(run.server.state._asdict())
    assert all(torch.equal(before[name], leaf) for name, leaf in after.items())
    assert admission.client not in {member.id for member in run.server.roster.members}
    assert admission.client not in run.server.now.memory
    assert bits(run.path, run.server.round)  # and what is on disk is whole


def test_admitting_gives_the_same_again(digits: Callable[[str], Digits]) -> None:
    run, x, y = digits("pfedhn")
    one, other = run.admit(x, y), run.admit(x.numpy(), y.numpy())
    assert torch.equal(one.predict(x), other.predict(x))
    assert not torch.equal(one.predict(x), run.predict("0", x))


def test_fedavg_s_newcomer_gets_the_global_model(digits: Callable[[str], Digits]) -> None:
    run, x, _ = digits("fedavg")
    assert torch.equal(run.admit(x).predict(x), run.predict("0", x))


def test_a_newcomer_settles_its_running_statistics(tmp_path: Path) -> None:
    run = fedloom.run("fedavg", out=tmp_path / "run", **{**TINY, "model": Normed})
    x = run.simulation.federation.x[:50]
    before = {client: dict(memory["buffers"]) for client, memory in run.server.now.memory.items()}
    near, far = run.admit(x).model, run.admit(x + 5).model
    assert not torch.allclose(near.norm.running_mean, far.norm.running_mean)
    after = run.server.now.memory
    assert before and before.keys() == after.keys()
    assert all(torch.equal(before[c][n], after[c]["buffers"][n]) for c in before for n in before[c])


@pytest.mark.parametrize(
    ("method", "name"), [("fedper", "FedPer"), ("local", "Local")], ids=["no head", "no model at all"]
)
def test_methods_that_cannot_admit_say_so(digits: Callable[[str], Digits], method: str, name: str) -> None:
    run, x, y = digits(method)
    told = refused(NeedsError, lambda: run.admit(x, y))
    assert told.startswith(f"{name} cannot serve clients that took no part in training")
    assert run.summary["unseen"] == {"reason": told}


def test_a_method_that_trains_on_labels_asks_for_them(digits: Callable[[str], Digits]) -> None:
    run, x, y = digits("pfedhn")
    for labels in (None, torch.full_like(y, -1)):
        assert refused(NeedsError, lambda labels=labels: run.admit(x, labels)) == (
            "pFedHN admits a newcomer by training on its labelled samples; got none. "
            "Give them (admit(x, y), or an array y in the file), or choose a method that needs no labels."
        )


def test_a_method_that_trains_on_labels_takes_the_samples_that_have_some(
    digits: Callable[[str], Digits], caplog: pytest.LogCaptureFixture
) -> None:
    run, x, y = digits("pfedhn")
    some = torch.where(torch.arange(len(y)) % 3 == 0, y, -1)
    found, alone = run.admit(x, some), run.admit(x[::3], y[::3])
    assert torch.equal(found.predict(x), alone.predict(x)) and found.newcomer.samples == len(y[::3])
    left = len(y) - len(y[::3])
    assert caplog.messages == [f"pFedHN trains on labels; {left} of {len(y)} samples have none and are left out."]


WRONG: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Any, Any]], str]] = {
    "another shape": (lambda x, y: (x[:, :, :4], y), "expected (samples, 1, 8, 8), as in this federation."),
    "one sample without its axis": (lambda x, y: (x[0], y[:1]), "Got samples of shape (1, 8, 8)"),
    "a number": (lambda x, y: (1.0, y), "Got samples of shape ()"),
    "no samples": (lambda x, y: (x[:0], y[:0]), "admit got no samples; give the newcomer at least one."),
    "text": (lambda x, y: (["a", "b"], y), "The samples cannot be made a tensor: got a list; expected an array"),
    "complex numbers": (lambda x, y: (x.to(torch.complex64), y), "The samples cannot be made a tensor"),
    "rows of several lengths": (lambda x, y: ([[1.0], [1.0, 2.0]], y), "The samples cannot be made a tensor"),
    "NaN": (lambda x, y: (x / 0 * 0, y), "Got samples with NaN or infinite values; remove or replace them."),
    "fewer labels": (lambda x, y: (x, y[:-1]), "Got labels of shape"),
    "labels with another axis": (lambda x, y: (x, y[:, None]), "Got labels of shape"),
    "a class too many": (lambda x, y: (x, y * 0 + 10), "expected whole numbers from 0 to 9, as in this federation"),
    "a negative class": (lambda x, y: (x, y * 0 - 2), "Got labels from -2 to -2; expected whole numbers from 0 to 9"),
    "half a class": (lambda x, y: (x, y * 0 + 0.5), "Got labels from 0.5 to 0.5; expected whole numbers"),
    "NaN for a class": (lambda x, y: (x, y / 0), "Got labels with NaN or infinite values"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_newcomer_with_data_that_do_not_fit(digits: Callable[[str], Digits], wrong: str) -> None:
    run, x, y = digits("pfedhn")
    spoil, sentence = WRONG[wrong]
    assert sentence in refused(DataError, lambda: run.admit(*spoil(x, y)))


def test_predictions_for_data_that_do_not_fit(digits: Callable[[str], Digits]) -> None:
    run, x, _ = digits("fedavg")
    for predict in (lambda data: run.predict("0", data), run.admit(x).predict):
        assert "Got samples of shape (2, 64); expected (samples, 1, 8, 8)" in refused(
            DataError, lambda predict=predict: predict(np.zeros((2, 64)))
        )


def test_a_client_may_be_called_newcomer(tmp_path: Path) -> None:
    x, y = features(40)
    data = from_arrays(x, y, client=np.where(np.arange(40) % 2, "newcomer", "b"))
    run = fedloom.run("fedavg", dataset=data, out=tmp_path / "run", partition="group:client", **{**TINY, "clients": 2})
    assert run.clients == ("b", "newcomer")
    assert run.admit(x).client not in run.clients


# Unseen clients


def test_unseen_clients_are_in_the_summary(digits: Callable[[str], Digits]) -> None:
    run = digits("pfedhn").run
    found = run.summary["unseen"]
    assert 0 <= found["deployed/unseen/test/accuracy"] <= 1
    assert fedloom.load(run.path, which="last").evaluate_unseen() == found
    assert set(run.summary["clients"]) == {"0", "1", "2", "3"}


def test_newcomers_to_it_pfl_hn_get_the_fine_tuned_loom_and_participants_the_best(tmp_path: Path) -> None:
    """Fine-tuning leaves participants as they are, so that no round of it is ever better by their validation data."""
    options = {**TINY, "rounds": 3, "finetune_after": 1, "local_lr": 0.1}
    run = fedloom.run("it_pfl_hn", dataset="digits", out=tmp_path / "run", unseen=2, **options)
    assert run.summary["best"]["round"] == run.server.round == 1
    assert run.for_newcomers.server.round == 3
    assert run.evaluate_unseen() == run.summary["unseen"]
    first, last = (fedloom.load(run.path, which=which) for which in (1, "last"))
    assert first.evaluate_unseen() != run.summary["unseen"]
    x = run.simulation.federation.x[:20]
    assert torch.equal(run.admit(x).predict(x), last.admit(x).predict(x))
    assert not torch.equal(run.admit(x).predict(x), first.admit(x).predict(x))


def test_a_run_is_tried_with_other_options_than_it_was_trained_with(digits: Callable[[str], Digits]) -> None:
    run = digits("fedavg").run
    plain, blurred = (fedloom.load(run.path, which="last", **o) for o in ({}, {"unseen_shift": "blur"}))
    for of_both in (lambda r: r.evaluate(), lambda r: {n: p.tolist() for n, p in r.parameters("0")["params"].items()}):
        assert of_both(plain) == of_both(blurred)
    rows = [r.simulation.federation.roster[r.simulation.federation.unseen[0]].of("all") for r in (plain, blurred)]
    shown = [r.simulation.federation.x[torch.as_tensor(own)] for r, own in zip((plain, blurred), rows)]
    assert rows[0].tolist() == rows[1].tolist() and not torch.equal(*shown)
    assert "Unknown option of fedavg 'unseen_shfit'" in refused(
        ConfigError, lambda: fedloom.load(run.path, unseen_shfit="blur").evaluate()
    )


def test_a_run_without_unseen_clients_says_nothing_of_them(of_arrays: fedloom.Run) -> None:
    assert "unseen" not in of_arrays.summary
    assert of_arrays.evaluate_unseen() == {}


@pytest.mark.parametrize("method", ["fedavg", "pfedhn", "local"])
def test_an_unseen_client_has_no_model_in_the_run(digits: Callable[[str], Digits], method: str, tmp_path: Path) -> None:
    run, x, _ = digits(method)
    actions: list[Callable[[], Any]] = [
        lambda: run.model("4"),
        lambda: run.parameters(5),
        lambda: run.predict("4", x),
        lambda: run.export("4", tmp_path),
    ]
    for action in actions:
        assert "took no part in training" in refused(NeedsError, action)


def test_training_is_not_lost_when_no_unseen_client_can_be_admitted(tmp_path: Path) -> None:
    run = fedloom.run("pfedhn", out=tmp_path / "run", unseen=2, admit_rounds=9, admit_lr=1e30, **TINY)
    assert run.summary["finished"]
    assert run.summary["unseen"]["reason"].startswith("No client of 2 gave a usable reply to ")


def of_participants(run: fedloom.api.Run) -> list[Any]:
    """The records without times, and without how unseen clients fare."""
    return [
        {name: value for name, value in record["metrics"].items() if "/unseen/" not in name} | record["diagnostics"]
        for record in run.records
    ]


def test_a_shift_changes_the_data_of_unseen_clients_only(tmp_path: Path) -> None:
    plain, shifted = (
        fedloom.run("fedavg", out=tmp_path / str(shift), unseen=2, unseen_shift=shift, **TINY)
        for shift in (None, "rotation")
    )
    assert bits(plain.path) == bits(shifted.path)
    assert of_participants(plain) == of_participants(shifted)
    one, other = plain.simulation.federation, shifted.simulation.federation
    for client, rows in ((c.id, torch.as_tensor(c.of("all"))) for c in one.roster.values()):
        same = torch.equal(one.x[rows], other.x[rows])
        assert same == (client in plain.clients)
    assert torch.equal(one.y, other.y)
    assert plain.summary["unseen"] != shifted.summary["unseen"]


# Refusals


def nan_data() -> tuple[np.ndarray, np.ndarray]:
    x, y = features()
    x[3, 1] = np.nan
    return x, y


REFUSALS: dict[str, tuple[dict[str, Any], type[FedloomError], str]] = {
    "method": ({"method": "fedavgg"}, ConfigError, "Unknown method 'fedavgg'; did you mean 'fedavg'"),
    "method of another type": ({"method": 5}, ConfigError, "Unknown method"),
    "option": ({"clints": 4}, ConfigError, "Unknown option of fedavg 'clints'; did you mean 'clients'"),
    "option of another method": ({"embed_dim": 4}, ConfigError, "Unknown option of fedavg 'embed_dim'"),
    "dataset": ({"dataset": "digit"}, ConfigError, "Unknown dataset 'digit'; did you mean 'digits'"),
    "dataset python": ({"dataset": "python"}, ConfigError, "Unknown dataset 'python'"),
    "no dataset": ({"dataset": None}, DataError, "NoneType has no length"),
    "no pair": ({"dataset": (1, 2, 3)}, DataError, "has items that are not pairs; expected (x, y)"),
    "numbers": ({"dataset": (1, 2)}, DataError, "has labels of type int64 and shape ()"),
    "missing file": ({"dataset": Path("none.npz")}, DataError, "There is no file none.npz"),
    "unequal lengths": ({"dataset": (features()[0], np.zeros(3, int))}, DataError, "120 samples in x but y has shape"),
    "NaN": ({"dataset": nan_data()}, DataError, "has NaN or infinite values in x"),
    "NaN targets": ({"dataset": (features()[0], np.full(120, np.nan))}, DataError, "has NaN or infinite values in y"),
    "clients": ({"clients": "many"}, ConfigError, "--clients is 'many'; expected a whole number"),
    "no clients": ({"clients": 0}, ConfigError, "--clients is 0; it must be at least 1"),
    "half a client": ({"clients": 2.5}, ConfigError, "--clients is 2.5; expected a whole number"),
    "true clients": ({"clients": True}, ConfigError, "--clients is True; expected a whole number"),
    "no value": ({"rounds": None}, ConfigError, "--rounds is none; it needs a value"),
    "more clients than samples": ({"dataset": features(), "clients": 121}, ConfigError, "more clients (121) than"),
    "cohort": ({"cohort": 5}, ConfigError, "--cohort is 5, but there are 4 clients"),
    "rounds": ({"rounds": -1}, ConfigError, "--rounds is -1; it must be at least 0"),
    "unseen": ({"unseen": 1.5}, ConfigError, "Got unseen=1.5; give a whole number of clients"),
    "partition": ({"partition": "clases:2"}, ConfigError, "Unknown partition scheme 'clases:2'"),
    "group": ({"partition": "group:writer"}, ConfigError, "this dataset has no natural groups"),
    "classes of a regression": (
        {"dataset": regression(), "partition": "classes:2"},
        ConfigError,
        "splits by class, but samples have no single class",
    ),
    "shift": ({"unseen": 1, "unseen_shift": "blurr"}, ConfigError, "Unknown shift 'blurr'; did you mean 'blur'"),
    "shift of features": ({"dataset": features(), "unseen": 1, "unseen_shift": "blur"}, DataError, "needs images"),
    "shares": ({"val_share": 0.6, "test_share": 0.6}, ConfigError, "together they must stay below 1"),
    "model": ({"model": "lennet"}, ConfigError, "Unknown model 'lennet'; did you mean 'lenet'"),
    "model of images": ({"dataset": features(), "model": "lenet"}, ConfigError, "lenet"),
    "models": ({"model": "mlp,lenet"}, NeedsError, "FedAvg needs one architecture for all clients; got 2"),
    "engine": ({"engine": "vectorized"}, ConfigError, "Unknown engine 'vectorized'; did you mean 'vectorised'"),
    "device": ({"device": "cuda:77"}, ConfigError, "--device cuda:77 is not available; this machine has"),
    "device that is none": ({"device": "gpu"}, ConfigError, "--device gpu is not available; this machine has"),
    "device without memory": ({"device": "meta"}, ConfigError, "--device meta is not available; this machine has"),
    "dtype": ({"dtype": "float16"}, ConfigError, "Unknown value for --dtype 'float16'"),
    "torch's dtype": ({"dtype": torch.float64}, ConfigError, "did you mean 'float64'"),
    "seed": ({"seed": -1}, ConfigError, "--seed is -1; it must be at least 0"),
    "learning rate": ({"local_lr": float("nan")}, ConfigError, "--local-lr is nan"),
    "task": ({"task": "clasification"}, ConfigError, "Unknown task 'clasification'; did you mean 'classification'"),
    "task by path": ({"task": "testnets:Nothing"}, ConfigError, "--task testnets:Nothing: 'testnets' has no 'Nothing'"),
    "regression of classes": ({"task": "regression"}, ConfigError, "digits has class labels"),
    "classes of targets": (
        {"dataset": regression(), "task": "classification", "partition": "iid"},
        ConfigError,
        "has real-valued targets. Use regression.",
    ),
    "progress": ({"progress": "loud"}, ConfigError, "Unknown progress display 'loud'"),
    "tracker": ({"tracker": "tensorbord"}, ConfigError, "Unknown tracker 'tensorbord'; did you mean 'tensorboard'"),
}


@pytest.mark.parametrize("wrong", REFUSALS)
def test_what_users_get_wrong_is_told_before_anything_is_written(tmp_path: Path, wrong: str) -> None:
    given, kind, sentence = REFUSALS[wrong]
    options = {"method": "fedavg", **TINY, **given}
    assert sentence in refused(kind, lambda: fedloom.run(**options, out=tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


def test_what_is_asked_of_a_run_by_a_wrong_name(digits: Callable[[str], Digits], tmp_path: Path) -> None:
    run = digits("fedavg").run
    assert "Unknown client '9'" in refused(ConfigError, lambda: run.model(9))
    assert "Unknown split 'tst'; did you mean 'test'" in refused(ConfigError, lambda: run.evaluate("tst"))
    assert "is not a run directory" in refused(RunError, lambda: fedloom.load(tmp_path))
    assert "has no checkpoint of round first" in refused(
        RunError,
        lambda: fedloom.load(run.path, which="first").clients,  # type: ignore[arg-type]
    )
    with pytest.raises(AttributeError, match="module 'fedloom' has no attribute 'train'"):
        _ = fedloom.train


def test_a_config_file_without_its_method(digits: Callable[[str], Digits], tmp_path: Path) -> None:
    path = Path(shutil.copytree(digits("fedavg").run.path, tmp_path / "run"))
    (path / "config.yaml").write_text("clients: 4\n")
    assert "names no method; it is not the config of a run." in refused(RunError, lambda: fedloom.load(path).clients)


def test_a_checkpoint_of_other_options_is_refused(digits: Callable[[str], Digits], tmp_path: Path) -> None:
    path = Path(shutil.copytree(digits("local").run.path, tmp_path / "run"))
    config = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(config.replace("mlp:hidden=8", "mlp:hidden=9"))
    assert "config.yaml was changed since round" in refused(RunError, lambda: fedloom.load(path).clients)
    assert "The checkpoint does not fit local on this federation: own/" in refused(
        RunError, fedloom.load(path, force=True).evaluate
    )


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Not a directory; make it writable or give another --out" in refused(
        RunError, lambda: fedloom.run("fedavg", out=tmp_path / "file" / "run", **TINY)
    )


def test_a_place_that_is_taken(digits: Callable[[str], Digits]) -> None:
    path = digits("fedavg").run.path
    assert f"already holds a run; give another --out, or go on with it: `fedloom resume {path}`." in refused(
        RunError, lambda: fedloom.run("fedavg", out=path, **TINY)
    )


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_full_disk_is_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def trained(self: api.Simulation) -> None:
        raise AssertionError("it has begun to train")

    monkeypatch.setattr(api.Simulation, "train_round", trained)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    assert "has 0 MB left, and the run needs about 0 MB; free some space or give another --out." in refused(
        RunError, lambda: fedloom.run(method, out=tmp_path / "run", **TINY)
    )
    assert list(tmp_path.iterdir()) == []


# Rounds that fail


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "pfedhn_pc", "local"])
def test_a_run_in_which_everybody_fails(tmp_path: Path, method: str, engine: str) -> None:
    path = tmp_path / "run"
    options = {**TINY, "rounds": 9, "local_lr": 1e30, "clip": 0.0, "engine": engine, "local_steps": 4}
    told = refused(DivergedError, lambda: fedloom.run(method, out=path, **options))
    assert told.startswith("No client of ")
    assert "replied with NaN or Inf. The last checkpoint is intact: mend the cause, then resume; other rates" in told
    directory = RunDirectory.open(path)
    done = directory.checkpoints()[-1]
    assert [record["round"] for record in directory.records()] == list(range(1, done + 1))
    summary = directory.summary()
    assert summary is not None
    assert (summary["finished"], summary["rounds"]) == (False, done)
    loaded = fedloom.load(path, which="last")
    assert loaded.server.round == done
    assert all(leaf.isfinite().all() for _, leaf in leaves(loaded.server.state._asdict()))
    before = bits(path)
    assert refused(DivergedError, lambda: fedloom.resume(path, progress="quiet")) == told
    assert bits(path) == before


def test_an_evaluation_that_fails_takes_its_round_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = api.Simulation.evaluation

    def fails(self: api.Simulation) -> Any:
        if self.server.round == 3:
            raise RoundError("No client of 4 gave a usable reply to evaluate.val.")
        return evaluation(self)

    options = {**TINY, "rounds": 4}
    straight = fedloom.run("scaffold", out=tmp_path / "straight", eval_every=1, **options)
    with monkeypatch.context() as patch:
        patch.setattr(api.Simulation, "evaluation", fails)
        refused(RoundError, lambda: fedloom.run("scaffold", out=tmp_path / "run", eval_every=1, **options))
    assert RunDirectory.open(tmp_path / "run").checkpoints()[-1] == 2
    again = fedloom.resume(tmp_path / "run", progress="quiet")
    assert bits(again.path) == bits(straight.path)
    assert numbers(again) == numbers(straight)


def test_clients_that_fail_alone_are_written_down(tmp_path: Path) -> None:
    x, y = features()
    x[y == 2] *= 1e30  # finite, but not their gradients
    data: Arrays = from_arrays(x, y, client=y.astype(str))
    options = {**TINY, "clients": 3, "partition": "group:client", "clip": 0.0}
    run = fedloom.run("fedavg", dataset=data, out=tmp_path / "run", **options)
    dropped = [(one["client"], one["program"]) for record in run.records for one in record["dropped"]]
    assert dropped.count(("2", "train")) == 2
    assert run.summary["dropped"] >= 2
    assert run.summary["finished"]


@pytest.mark.parametrize("other", [{"unseen": 3}, {"seed": 1}, {"test_share": 0.5}, {"partition": "iid"}])
def test_a_run_is_not_loaded_with_data_dealt_anew(other: dict[str, Any], tmp_path: Path) -> None:
    fedloom.run("fedavg", out=tmp_path / "run", unseen=2, **{"partition": "classes:2", **TINY})
    with pytest.raises(ConfigError, match=f"With {next(iter(other))} as given participants would have other data"):
        fedloom.load(tmp_path / "run", **other).evaluate_unseen()
    assert fedloom.load(tmp_path / "run", unseen_shift="blur").evaluate_unseen()


def test_every_newcomer_has_noise_of_its_own(tmp_path: Path) -> None:
    run = fedloom.run("it_pfl_hn", out=tmp_path / "run", descriptor_epsilon=1.0, finetune_after=1, **TINY)
    x = load_data("digits").x[:20]
    woven = [flatten(loaded.admit(x).parameters) for loaded in (run, run, fedloom.load(run.path))]
    for a, b in itertools.combinations(woven, 2):
        assert not all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("trained", "other"), [(1e6, 0.0), (0.0, 1e6)])
def test_a_run_is_not_loaded_with_an_encoder_of_the_other_form(trained: float, other: float, tmp_path: Path) -> None:
    fedloom.run("it_pfl_hn", out=tmp_path / "run", unseen=2, descriptor_epsilon=trained, finetune_after=1, **TINY)
    with pytest.raises(ConfigError, match=f"trained {'with' if trained else 'without'} private descriptors"):
        fedloom.load(tmp_path / "run", descriptor_epsilon=other).evaluate_unseen()
    assert not trained or fedloom.load(tmp_path / "run", descriptor_epsilon=3.0).evaluate_unseen()


@pytest.mark.slow
def test_a_global_model_is_not_given_away_without_its_statistics_or_its_training(tmp_path: Path) -> None:
    given = {**TINY, "unseen": 2, "hidden": 8, "local_epochs": 1}
    normed = fedloom.run("mh_pfedhn_gd", out=tmp_path / "normed", **{**given, "model": "testnets:Normed"})
    assert normed.evaluate_global("test")
    for use in (lambda: normed.evaluate_global("test", unseen=True), lambda: normed.export_global(tmp_path)):
        with pytest.raises(NeedsError, match="which stay with the participants; without them"):
            use()
    untrained = fedloom.run("mh_pfedhn_gd", out=tmp_path / "untrained", global_share=0.0, **given)
    with pytest.raises(NeedsError, match="No client trains the global model"):
        untrained.evaluate_global("test")


# To look at a run


def test_a_run_is_looked_at_from_python(tmp_path: Path) -> None:
    run = fedloom.run("pfedhn", out=tmp_path / "run", unseen=1, admit_rounds=2, **TINY)
    assert run.report() == run.path / "report.html"
    assert run.report(tmp_path / "page.html").read_bytes() == (run.path / "report.html").read_bytes()
    (axes, *_) = run.plot("curves", "seconds").axes
    assert axes.get_xlabel() == "seconds of training"
    assert run.plot("mix").axes and run.plot("admission").axes
    shown = run._repr_html_()
    assert shown.count("<div") == shown.count("</div>") and "<script" not in shown
    assert f"{run.summary['best']['deployed/participants/test/accuracy']:.1%}" in shown


def test_names_in_a_notebook_are_text(tmp_path: Path) -> None:
    from made import made_run

    made = made_run(tmp_path / "run", dataset="<img src=x onerror=alert(1)>", clients=["<b>"])
    assert "<img" not in fedloom.load(made.path)._repr_html_()


def test_labels_of_any_kind_are_remembered_by_name(tmp_path: Path) -> None:
    x, codes = features(200)
    animals = np.array(["cow", "ant", "bee"])
    run = fedloom.run("fedavg", dataset=(x, animals[codes]), partition="iid", out=tmp_path / "run", **TINY)
    assert run.server.roster.class_names == ("ant", "bee", "cow")
    outputs, again = run.predict("0", x), api.load(run.path)
    expected = [("ant", "bee", "cow")[number] for number in outputs.argmax(1)]
    assert again.classify("0", x) == expected
    newcomer = again.admit(x[:9], animals[codes[:9]])
    assert set(newcomer.classify(x)) <= set(animals)
    told = refused(DataError, lambda: again.admit(x[:3], ["ant", "gnu", "bee"]))
    assert told == "The data has the label 'gnu'; the classes are ant, bee, cow. Give labels of these."
    with safetensors.safe_open(again.export("0", tmp_path / "out"), "pt") as file:
        assert file.metadata()["classes"] == '["ant", "bee", "cow"]'
    assert runpy.run_path(str(tmp_path / "out" / "client-0.py"))["classes"] == ["ant", "bee", "cow"]


def test_a_run_goes_by_the_names_of_its_classes_in_other_data(tmp_path: Path) -> None:
    x, codes = features(150)
    run = fedloom.run(
        "local", dataset=(x, np.array([10, 20, 40])[codes]), partition="iid", out=tmp_path / "run", **TINY
    )
    fewer = from_arrays(x[codes > 0], np.array([10, 20, 40])[codes[codes > 0]])
    loaded = api.load(run.path, dataset=fewer, force=True)
    assert loaded.simulation.arrays.y.tolist() == codes[codes > 0].tolist()
    assert run.classify("0", x[:1])[0] in {"10", "20", "40"}


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "loopback"])
def test_several_labels_may_hold(engine: str, tmp_path: Path) -> None:
    """Whether each of two features is above 0 is learned, and read back from the run without being told the task."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, 4)).astype(np.float32)
    data = from_arrays(x, x[:, :2] > 0, classes=["left", "right"])
    more = {"rounds": 3, "local_steps": 20, "engine": engine, "local_lr": 0.5}
    run = fedloom.run("fedavg", dataset=data, partition="iid", out=tmp_path / "run", **{**TINY, **more})
    assert run.summary["best"]["deployed/participants/test/f1"] > 0.8
    again = api.load(run.path)
    told = again.classify("0", np.array([[3, -3, 0, 0], [3, 3, 0, 0]], np.float32))
    assert told == [["left"], ["left", "right"]]
    assert again.admit(x[:20]).predict(x).shape == (400, 2)


def test_labels_of_which_several_may_hold_are_checked(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((80, 4)).astype(np.float32)
    data = from_arrays(x, x[:, :2] > 0)
    run = fedloom.run("pfedhn", dataset=data, out=tmp_path / "run", **TINY)
    assert "other than 0 and 1" in refused(DataError, lambda: run.admit(x[:2], [[0, 1], [0, 2]]))
    told = refused(NeedsError, lambda: fedloom.run("fedproto", dataset=data, **TINY))
    assert "needs class labels; the task is multilabel" in told
    told = refused(ConfigError, lambda: fedloom.run("fedavg", dataset=(x, x[:, :2]), task="multilabel", **TINY))
    assert "needs zeros and ones of shape (samples, labels)" in told


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "parallel", "parallel_vectorised", "loopback", "ray"])
def test_windows_are_convolved_over_time_on_every_engine(engine: str, tmp_path: Path) -> None:
    """Waves of two frequencies in any phase, given with their channels last."""
    rng = np.random.default_rng(0)
    y = np.arange(160) % 2
    phase, time = rng.uniform(0, 6, (160, 1)), np.arange(32)
    x = np.stack([np.sin((0.4 + 0.5 * y[:, None]) * time + phase + shift) for shift in (0, 1)], axis=2)
    given = {**TINY, "model": "auto", "local_steps": 20, "local_lr": 0.1, "clients": 2, "engine": engine, "workers": 2}
    run = fedloom.run("fedavg", dataset=(x, y), partition="iid", out=tmp_path / "run", **given)
    assert run.server.roster.members[0].model == "conv1d"
    assert run.server.roster.input_shape == (2, 32)
    assert any("taken for windows of 32 steps of 2 channels" in note for note in run.summary["notes"])
    assert run.summary["best"]["deployed/participants/test/accuracy"] > 0.9
    assert torch.equal(run.predict("0", x[:3]), run.predict("0", np.moveaxis(x[:3], -1, 1)))


def test_where_a_method_comes_to_another_the_run_says_so(tmp_path: Path) -> None:
    run = fedloom.run("lg_fedavg", dataset=features(60), out=tmp_path / "run", **{**TINY, "rounds": 1})
    assert [note for note in run.summary["notes"] if "this is FedAvg: bodies go apart after round 50" in note]


def test_networks_that_stay_at_chance_are_told_of(tmp_path: Path) -> None:
    x, y = features(200)
    given = {**TINY, "rounds": 10, "partition": "iid", "local_lr": 0.1, "local_steps": 20}
    lost = fedloom.run("fedavg", dataset=(np.zeros_like(x), y), out=tmp_path / "lost", **given)
    (note,) = [one for one in lost.summary["notes"] if "chance" in one]
    assert "validation samples are right at best" in note and "values run from 0 to 0" in note
    learned = fedloom.run("fedavg", dataset=(x, y), out=tmp_path / "learned", **given)
    assert not [one for one in learned.summary["notes"] if "chance" in one]


def test_several_targets_are_learned_together(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((300, 4)).astype(np.float32)
    more = {"rounds": 3, "local_steps": 20, "partition": "iid", "local_lr": 0.1}
    run = fedloom.run("fedavg", dataset=(x, x[:, :3] * 2.0), out=tmp_path / "run", **{**TINY, **more})
    assert api.load(run.path).predict("0", x).shape == (300, 3)
    assert run.summary["best"]["deployed/participants/test/absolute_error"] < 0.5
    assert "predictions have no names" in refused(NeedsError, lambda: run.classify("0", x))


# Clients on Ray


def test_clients_on_ray_are_an_engine_from_python_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fedloom.run("fedavg", **TINY, out=tmp_path / "plain")
    asked = []

    def run_on_ray(method: str, options: Any, config: Any, out: Path, shown: Any) -> RunDirectory:
        asked.append((method, options.engine, options.rounds, config.local_steps, out))
        return plain.directory

    monkeypatch.setitem(sys.modules, "fedloom.deploy.ray", SimpleNamespace(run_on_ray=run_on_ray))
    run = fedloom.run("fedavg", engine="flower-sim", **TINY, out=tmp_path / "ray")
    assert asked == [("fedavg", "flower-sim", 2, 2, tmp_path / "ray")] and run.summary == plain.summary
    told = refused(ConfigError, lambda: fedloom.run("fedavg", dataset=features(), engine="flower-sim", **TINY))
    assert "Save them as an .npz file and give its path" in told
