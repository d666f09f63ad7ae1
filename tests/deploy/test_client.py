# SPDX-License-Identifier: Apache-2.0
"""The client's side: what it checks, what it tells, what it keeps."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from conftest import small_federation
from deploy.nearby import deployed, table_of
from fedloom.core.contract import Batches, Noise
from fedloom.core.errors import ConfigError, DataError, RoundError, RunError
from fedloom.core.trees import flatten
from fedloom.core.wire import decode
from fedloom.deploy.client import _question, answer
from fedloom.deploy.codec import facts_of, pack
from fedloom.deploy.options import NodeOptions, read
from fedloom.deploy.own_config import own_config
from fedloom.deploy.store import Refusal, Store, write_private
from fedloom.engines import sequential
from fedloom.looms.encoder import describe_program
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.privacy.ledger import epsilon
from fedloom.programs.labels import label_shares

X, Y = np.zeros((4, 1, 6, 6)), np.array([0, 1, 2, 0])


def hello(tmp_path: Path, data: Any, model: Any = "mlp:hidden=5", settings: Any = None, **node: Any) -> dict[str, Any]:
    table = {**table_of("fedavg", small_federation()), **(settings or {})}
    context: Any = SimpleNamespace(
        run_config=table, node_config={"folder": str(tmp_path / "node"), "min-batch": 1, **node}
    )
    load = data if callable(data) else lambda node: data
    return facts_of(answer("query.hello", pack({"run": "r"}), context, load, lambda node: model))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ((X[:, :, :5], Y), "has train samples of shape (1, 5, 6); this federation's have (1, 6, 6)."),
        ((X + np.nan, Y), "has train samples with NaN or infinite values."),
        ((X, Y[:3]), "has another number of train labels than of train samples."),
        ((X, Y + 1), "has train labels outside of 0 to 2."),
        ({"train": (X[:0], Y[:0])}, "has no samples: load_data gave none."),
    ],
)
def test_data_that_do_not_fit_are_refused_in_a_sentence(data: Any, reason: str, tmp_path: Path) -> None:
    assert hello(tmp_path, data) == {"error": reason}


def test_a_nodes_labels_can_be_names_of_classes_and_need_not_be_all_of_them(tmp_path: Path, caplog: Any) -> None:
    named = {"classes": "ant,bee,cow"}
    assert hello(tmp_path, (X, ["bee", "cow", "bee", ""]), settings=named)["samples"] == 4
    told = hello(tmp_path, (X, ["bee", "Mr Smith", "bee", "cow"]), settings=named)
    assert told == {"error": "has train labels that are not among the federation's classes."}
    assert "Mr Smith" in caplog.text  # in its own log
    with pytest.raises(ConfigError, match=r"classes names 2 of the 3 that num-outputs says"):
        read({**table_of("fedavg", small_federation()), "classes": "ant,bee"})


def test_an_error_in_a_users_function_says_nothing_of_the_data(tmp_path: Path, capsys: Any) -> None:
    def load(node: Any) -> Any:
        raise KeyError("patient Smith")

    assert hello(tmp_path, load) == {"error": "failed with KeyError in query.hello; its own log says why"}
    assert "patient Smith" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [ValueError, DataError])
def test_an_error_in_training_says_its_type_and_its_stage_and_nothing_of_the_data(
    kind: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    ours = deployed("fedavg", small_federation(["mlp:hidden=5"]), tmp_path)

    def leak(self: Any, params: Any, buffers: Any, x: torch.Tensor, *_: Any) -> Any:
        raise kind(f"bad sample {x.flatten()[:3].tolist()}")

    monkeypatch.setattr("fedloom.models.model.Model.train", leak)
    monkeypatch.setattr("fedloom.deploy.waiting.PAUSE", 0.0)
    with pytest.raises(RoundError) as error:
        ours.train_round()
    reasons = {facts_of(reply)["error"] for kind, _, _, reply in ours.lobby.letters if kind == "train"}
    assert reasons == {f"raised {kind.__name__} in step; its own log says why"} and "bad sample" not in str(error.value)
    assert "bad sample [" in capsys.readouterr().err


def test_a_readers_error_is_not_told_even_if_it_is_fedlooms(tmp_path: Path, capsys: Any) -> None:
    def load(node: Any) -> Any:
        raise DataError("patient Smith")

    assert hello(tmp_path, load) == {"error": "failed with DataError in query.hello; its own log says why"}
    assert "patient Smith" in capsys.readouterr().err


def test_a_folder_is_one_clients(tmp_path: Path) -> None:
    assert hello(tmp_path, (X, Y), client="a")["client"] == "a"
    refusal = {"error": "has a folder that belongs to another client; give each node a folder of its own."}
    assert hello(tmp_path, (X, Y), client="b") == refusal
    assert hello(tmp_path, (X, Y), client="a")["client"] == "a"


def test_what_is_private_is_so_from_the_first_byte(tmp_path: Path, monkeypatch: Any) -> None:
    modes: list[int] = []
    real = os.fsync

    def seen(descriptor: int) -> None:
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        real(descriptor)

    monkeypatch.setattr("os.fsync", seen)
    assert write_private(tmp_path / "secret", b"one") and not write_private(tmp_path / "secret", b"two")
    assert (tmp_path / "secret").read_bytes() == b"one" and set(modes) == {0o600}
    assert [file.name for file in tmp_path.iterdir()] == ["secret"]


def test_a_client_tells_its_name_its_network_and_its_splits(tmp_path: Path) -> None:
    told = hello(tmp_path, {"train": (X, Y), "test": (X, Y)}, client="clinic")
    assert told["client"] == "clinic" and told["splits"] == "train test" and told["role"] == "participant"
    assert told["model"] == '["mlp", [["hidden", 5]]]'
    unnamed = hello(tmp_path / "other", (X, None), role="newcomer")
    assert unnamed["client"].startswith("client-") and unnamed["role"] == "newcomer"
    assert hello(tmp_path / "other", (X, None))["client"] == unnamed["client"]  # it stays


def test_a_node_can_have_options_of_its_own_but_not_other_privacy() -> None:
    table = table_of("it_pfl_hn", small_federation())
    plain, private = (read({**table, "descriptor-epsilon": e}).config for e in (0.0, 1.0))
    own = {"descriptor-epsilon": 0.5, "descriptor-delta": 1e-5, "client": "a"}
    assert own_config(private, own).descriptor_epsilon == 0.5
    with pytest.raises(Refusal, match="wants descriptor-epsilon of its own with the app's descriptor-delta"):
        own_config(private, {"descriptor-epsilon": 0.5})
    assert own_config(plain, {"local-lr": 0.5}).local_lr == 0.5 and own_config(plain, {}) == plain
    with pytest.raises(Refusal, match="wants a model for private descriptors where the federation's is for none"):
        own_config(plain, own)


def test_a_nodes_options_bring_with_them_what_follows_from_them() -> None:
    config = read(table_of("mh_pfedhn", small_federation())).config
    code, steps = own_config(config, {"preset": "code"}), own_config(config, {"local-steps": 3, "batch-size": 2})
    assert (code.local_epochs, code.local_lr, code.weight_decay) == (1, 5e-3, 5e-4)
    assert steps.batches() == Batches("train", 2, steps=3)
    assert own_config(config, {"preset": "code", "local-lr": 0.5}).local_lr == 0.5


FORGED = [
    ("fedavg", "participant", {}, "label_shares", "all of its label shares, of a method that wants none"),
    ("fedavg", "participant", {}, "evaluate.train", "the loss on training data"),
    ("fedavg", "participant", {}, "evaluate_plain.test", "the program of a run that is adapted"),
    ("fedavg", "newcomer", {}, "train", "training, of one who only wants a model"),
    (
        "it_pfl_hn",
        "newcomer",
        {"descriptor-epsilon": 0.1, "descriptor-delta": 0.01},
        "encoder.describe",
        "its descriptor without noise",
    ),
    ("fedavg", "participant", {"evaluation": "none"}, "evaluate.test", "an evaluation that it gives none of"),
    ("fedavg", "participant", {}, '{"name": "x", "init": ["os", "system"]}', "code"),
    ("fedavg", "participant", {}, "train\x1b[2J", "what clears the screen of whoever reads the log"),
]


@pytest.mark.parametrize(("method", "role", "own", "program", "why"), FORGED, ids=[one[-1] for one in FORGED])
def test_a_node_refuses_what_is_no_program_of_its_own_by_name_and_writes_it_down(
    method: str, role: str, own: Any, program: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = table_of(method, small_federation(), **({"descriptor_epsilon": 1.0} if method == "it_pfl_hn" else {}))
    node = {"client": "a", "folder": str(tmp_path), "min-batch": 1, "role": role, **own}
    context: Any = SimpleNamespace(run_config=table, node_config=node)
    ticket = {"run": "r", "client": "a", "stage": 1, "ask": 1, "from_version": 0, "to_version": 1, "kept_versions": ""}
    asked = pack({**ticket, "program": program}, shared={}, mine={})
    reply = answer("train", asked, context, lambda node: (X, Y), lambda node: "mlp:hidden=5")
    printable = program.replace("\x1b", "")
    refusal = f"was asked for {printable!r}, which its own config does not allow a {role}."
    assert dict(reply.config_records)["facts"] == {"error": refusal} and not dict(reply.array_records).get("trees")
    assert f"Refused to run {printable!r}: it is not what a {role} of " in caplog.text and "\x1b" not in caplog.text


def test_a_node_computes_on_no_small_batches(tmp_path: Path) -> None:
    small = {"error": "computes on batches of at least 8 samples (its own min-batch); train has 4. Set a larger "
             "batch-size, or have it set min-batch."}  # fmt: skip
    many = np.zeros((40, 1, 6, 6)), np.zeros(40, int)
    own = {"min-batch": 8}
    assert hello(tmp_path, many, **own) == small
    assert hello(tmp_path, many, **own, **{"batch-size": 8})["samples"] == 40
    (told,) = evaluations(tmp_path, 1, **{"batch-size": 4})  # a server need not have said hello
    assert told == small["error"]
    few = hello(tmp_path, (X, Y), **own, **{"batch-size": 8})
    assert few == {"error": "has 4 training samples, fewer than its own min-batch."}
    assert NodeOptions().min_batch == 8  # without being asked for


def asked_of(tmp_path: Path, program: str, parts: Any, method: str = "fedavg", **own: Any) -> dict[str, Any]:
    """The facts of a node's reply to a program, sent what such a program is sent."""
    table = table_of(method, small_federation(), **{"batch-size": 8})
    node = {"client": "a", "folder": str(tmp_path), "min-batch": 8, **own}
    context: Any = SimpleNamespace(run_config=table, node_config=node)
    model = Model(parse("mlp:hidden=5", (1, 6, 6), 3), dtype=torch.float64)
    ticket = {"run": "r", "client": "a", "stage": 1, "ask": 1, "from_version": 0, "to_version": 1, "kept_versions": ""}
    content = pack({**ticket, "program": program}, shared={"params": model.init(0)}, mine={})
    return facts_of(answer("train", content, context, lambda node: parts, lambda node: "mlp:hidden=5"))


@pytest.mark.parametrize(
    ("splits", "own", "announced", "refused"),
    [
        ({"train": 40, "val": 1, "test": 8}, {}, "train test", "val"),
        ({"train": 40, "val": 1, "test": 8}, {"evaluation": "noised"}, "train val test", ""),
        ({"train": 40, "val": 1, "test": 8}, {"min-batch": 1}, "train val test", ""),
        ({"train": 1, "test": 7}, {"role": "newcomer"}, "train", "test"),
    ],
)
def test_a_node_tells_nothing_of_few_samples(
    splits: dict[str, int], own: Any, announced: str, refused: str, tmp_path: Path
) -> None:
    """An exact evaluation of one sample is that sample's loss."""
    parts = {split: (np.random.default_rng(0).random((n, 1, 6, 6)), np.zeros(n, int)) for split, n in splits.items()}
    assert hello(tmp_path, parts, **{"min-batch": 8, **own, "batch-size": 8})["splits"] == announced
    for split in set(splits) - {"train"}:
        facts = asked_of(tmp_path, f"evaluate.{split}", parts, **own)
        told = f"has fewer {split} samples than its own min-batch, 8."
        assert facts.get("error") == (told if split == refused else None)


def test_a_newcomer_with_few_samples_settles_its_statistics_which_tells_nothing(tmp_path: Path) -> None:
    parts = {"train": (np.zeros((1, 1, 6, 6)), None)}
    assert "error" not in asked_of(tmp_path, "statistics", parts, role="newcomer")


def test_a_short_last_batch_is_no_batch_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    run_client = sequential.run_client

    def watched(job: Any, client: str, *rest: Any) -> Any:
        sizes.extend(len(rows) for rows in job.schedule(client).rows)
        return run_client(job, client, *rest)

    monkeypatch.setattr("fedloom.deploy.node.run_client", watched)
    parts = {"train": (np.random.default_rng(0).random((17, 1, 6, 6)), np.zeros(17, int))}
    assert "error" not in asked_of(tmp_path, "train", parts)
    assert sizes == [8, 9, 8, 9]  # two passes


def replies_of(ours: Any, client: str, program: str) -> list[Any]:
    """What a client replied to a program."""
    asks = [letter[2:] for letter in ours.lobby.letters if letter[0] == "train" and letter[1] == client]
    found = [reply for asked, reply in asks if facts_of(asked)["program"] == program]
    return [decode(reply["trees"]["reply"].data) for reply in found]


@pytest.mark.slow
def test_a_nodes_own_noise_is_on_what_it_tells_for_adaptation_whatever_the_app_says(tmp_path: Path) -> None:
    """Client 1 has 4 samples; its shares come in quarters, and with noise of its own they do not."""
    protected = {"1": {"adapt-clip": 1.0, "adapt-noise": 0.5}}
    plain, ours = (
        deployed("fedavg", small_federation(), tmp_path / name, nodes=nodes, adapt="prior")
        for name, nodes in (("plain", {}), ("ours", protected))
    )
    for deployment in (plain, ours):
        deployment.train_round()
        deployment.settle()
    for program in ("label_shares", "calibrate", "reference"):
        exact, noised = (flatten(replies_of(deployment, "1", program)[0]) for deployment in (plain, ours))
        assert any(not exact[path].equal(noised[path]) for path in exact), program
    (shares,) = (tree["shares"] for tree in replies_of(plain, "1", "label_shares"))
    assert (shares * 4 % 1 == 0).all()
    (shares,) = (tree["shares"] for tree in replies_of(ours, "1", "label_shares"))
    assert not (shares * 4 % 1 == 0).any()
    other = (flatten(replies_of(deployment, "2", "label_shares")[0]) for deployment in (plain, ours))
    assert all(leaf.equal(again) for leaf, again in zip(*(one.values() for one in other)))


def test_a_node_hides_its_samples_whatever_the_app_says(tmp_path: Path) -> None:
    """Client 1's noise is its own: new in every run, with losses left out; the others' replies are as without it."""
    hidden = {"1": {"sample-dp-clip": 0.1, "sample-dp-noise": 2.0}}
    plain, once, again = (
        deployed("fedavg", small_federation(), tmp_path / name, nodes=nodes)
        for name, nodes in (("plain", {}), ("once", hidden), ("again", hidden))
    )
    for deployment in (plain, once, again):
        deployment.train_round()
    one, two, three = (flatten(replies_of(deployment, "1", "train")[0]) for deployment in (plain, once, again))
    assert not any(a.equal(b) or b.equal(c) for a, b, c in zip(*(
        [tree[path] for path in one if path.startswith("delta")] for tree in (one, two, three))))  # fmt: skip
    assert float(one["loss"]) > 0 and float(two["loss"]) == 0
    same = [flatten(replies_of(deployment, "2", "train")[0]) for deployment in (plain, once)]
    assert all(same[0][path].equal(same[1][path]) for path in same[0])


HIDES = {"sample-dp-clip": 0.1, "sample-dp-noise": 2.0}
PARTS = {"train": (np.random.default_rng(0).random((40, 1, 6, 6)), np.zeros(40, int))}


def test_a_node_stops_at_an_epsilon_of_its_own(tmp_path: Path) -> None:
    """Two passes of 5 steps each at 8 of 40 samples: what is spent is written down first, and counts over all runs."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    assert "error" not in asked_of(tmp_path, "train", PARTS, **HIDES)
    (spent,) = Store(tmp_path).releases()
    assert (spent.clients, spent.size, spent.times, spent.unit) == (40, 8, 10, "sample")
    limit = {"max-epsilon": epsilon([spent, spent], 1e-5) * 1.001, "dp-delta": 1e-5}
    assert "error" not in asked_of(tmp_path, "train", PARTS, **HIDES, **limit)
    assert "would spend more than epsilon" in asked_of(tmp_path, "train", PARTS, **HIDES, **limit)["error"]
    assert len(Store(tmp_path).releases()) == 2
    assert "without noise; give sample-dp-noise" in asked_of(tmp_path / "b", "train", PARTS, **limit)["error"]


def test_its_epsilon_limits_all_that_it_tells_with_noise(tmp_path: Path) -> None:
    """Samples of one split are not those of another: what tells of validation data leaves training data alone."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    own = {**HIDES, "evaluation": "noised", "evaluation-noise": 4.0, "max-epsilon": 5.0}
    told = evaluations(tmp_path, 30, 1e-9, **own)
    given = [one for one in told if isinstance(one, float)]
    assert 0 < len(given) < 30 and "would spend more than epsilon 5 on each" in told[len(given)]
    found = Store(tmp_path).releases()
    assert len(found) == len(given) and {one.split for one in found} == {"test"}
    assert epsilon(found, 1e-5) <= 5 < epsilon([*found, found[0]], 1e-5)
    assert evaluations(tmp_path, 1, **own) == given[:1], "which it has given already"
    assert "error" not in asked_of(tmp_path, "train", PARTS, **own)
    assert [one.split for one in Store(tmp_path).releases()].count("train") == 1


def test_what_it_tells_for_adaptation_counts_too(tmp_path: Path) -> None:
    """All of an answer is bounded, and one sample may turn it round: noise of 3 bounds is one of 3/2 of a sample."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    own = {"adapt-clip": 1.0, "adapt-noise": 3.0}
    ours = deployed("fedavg", small_federation(), tmp_path, nodes={"1": own}, adapt="prior")
    ours.train_round()
    ours.settle()
    found = Store(tmp_path / "1").releases()
    assert {(one.what, one.split) for one in found} == {
        ("label_shares", "train"), ("calibrate", "val"), ("reference", "val"), ("try_correction", "val")
    }  # fmt: skip
    assert {(one.noise, one.unit) for one in found} == {(1.5, "sample")}


def test_a_newcomers_descriptor_counts_too(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    federation = small_federation(unseen=1)
    (newcomer,) = federation.unseen
    private = {"descriptor-epsilon": 1.0, "descriptor-delta": 1e-5}
    for limit, refused in ((1.01, nullcontext()), (0.9, pytest.raises(RoundError, match="its own max-epsilon"))):
        folder = tmp_path / str(limit)
        own = {newcomer: {**private, "max-epsilon": limit}}
        ours = deployed("it_pfl_hn", federation, folder, nodes=own, **private)
        ours.train_round()
        with refused:
            ours.admission([newcomer], ours.now.memory)
        assert len(Store(folder / newcomer).releases()) == (limit > 1)


def test_code_that_its_own_config_does_not_name_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strangers.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "ours.py").write_text("from fedloom.core.task import CLASSIFICATION as TASK\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    wanted = {"task": "strangers:TASK"}
    for more in ({}, {"vocabulary": 5}):
        told = hello(tmp_path, (X, Y), settings={**wanted, **more})["error"]
        assert told.startswith("does not run strangers:TASK (task), which its own config does not name")
    assert "has ours:TASK for task in its own config, and the app has strangers:TASK" in hello(
        tmp_path, (X, Y), settings=wanted, task="ours:TASK")["error"]  # fmt: skip
    assert "error" not in hello(tmp_path, (X, Y), settings={"task": "ours:TASK"}, task="ours:TASK")
    assert "has ours:TASK for task" in hello(tmp_path, (X, Y), task="ours:TASK")["error"]


def test_of_two_asks_at_once_none_gets_what_is_left_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of several runs are answered by processes side by side."""
    monkeypatch.setattr("fedloom.deploy.store.PATIENCE", 0.0)
    with Store(tmp_path).alone():
        assert asked_of(tmp_path, "train", PARTS, **HIDES)["error"].startswith("cannot keep count")
        assert Store(tmp_path).releases() == []
    assert "error" not in asked_of(tmp_path, "train", PARTS, **HIDES) and len(Store(tmp_path).releases()) == 1


def test_a_node_refuses_what_would_not_hide_its_samples(tmp_path: Path) -> None:
    told = asked_of(tmp_path, "class_means", PARTS, "fedproto", **HIDES)["error"]
    assert told.startswith("cannot answer: FedProto asks clients for class_means, which computes more")


def test_privacy_of_its_own_that_cannot_be_had_keeps_a_node_out(tmp_path: Path) -> None:
    table = table_of("fedavg", small_federation(), adapt="prior")
    node = {"client": "a", "folder": str(tmp_path), "min-batch": 1, "adapt-noise": 0.5}
    context: Any = SimpleNamespace(run_config=table, node_config=node)
    reply = answer("query.hello", pack({"run": "r"}), context, lambda node: (X, Y), lambda node: "mlp:hidden=5")
    assert facts_of(reply)["error"].startswith("wants privacy of its own that cannot be had: --adapt-noise needs")


def test_a_node_tells_of_its_evaluations_as_it_wants(tmp_path: Path) -> None:
    kinds = {"0": {}, "1": {"evaluation": "noised", "evaluation-noise": 3.0}, "2": {"evaluation": "none"}}
    ours = deployed("fedavg", small_federation(), tmp_path, nodes=kinds)
    exact = deployed("fedavg", small_federation(), tmp_path / "exact").evaluate("test")
    found = ours.evaluate("test")
    assert found["0"] == exact["0"] and found["0"].samples == 5
    (told,) = replies_of(ours, "1", "evaluate.test")
    assert float(told["loss"]) != exact["1"].loss * 5
    (refused,) = ours._dropped
    assert refused.client == "2" and refused.reason.startswith("was asked for 'evaluate.test', which its own config")
    record = ours.train_round()
    assert record["dropped"] == [] and record["clients"] == 5  # it trains with the others all the same


def test_a_newcomer_that_tells_nothing_does_not_tell_that_a_sample_overflows_either(tmp_path: Path) -> None:
    """Whoever chooses the model chooses for which samples it does: to say so would tell of one, ask by ask."""
    federation = small_federation(["mlp:hidden=5"], unseen=1)
    federation.x[federation.roster["4"].rows["train"]] *= 1e300
    ours = deployed("fedavg", federation, tmp_path, adapt="prior")
    for leaf in ours.server.state.base["params"].values():
        leaf.mul_(1e6)
    ours.admission(["4"], ours.now.memory)
    replies = [facts_of(reply) for kind, client, _, reply in ours.lobby.letters if (kind, client) == ("train", "4")]
    assert replies and all(set(told) == {"run", "client", "stage", "ask", "remembers"} for told in replies)
    assert all(told["remembers"] for told in replies)


def test_a_store_keeps_what_it_is_told_to_keep(tmp_path: Path) -> None:
    store = Store(tmp_path / "node")
    assert store.load("run", 0) is None
    for version in (1, 2, 3, 4):
        store.save("run", version, {"a": torch.tensor(float(version))}, {1, version - 1})
    assert sorted(file.name for file in (tmp_path / "node" / "run").iterdir()) == [
        f"memory-{version}.safetensors" for version in (1, 3, 4)
    ]
    again = Store(tmp_path / "node")
    found = again.load("run", 3)
    assert found is not None and float(found["a"]) == 3
    assert (again.secret, again.name, again.mark("run")) == (store.secret, store.name, store.mark("run"))
    assert again.mark("other") != again.mark("run") and store.secret not in again.mark("run")
    assert (tmp_path / "node" / "secret").stat().st_mode & 0o77 == 0
    with pytest.raises(RunError, match="has no version 2"):
        store.load("run", 2)
    store.once("another", b"question", {}, 9)
    assert all((tmp_path / "node" / run).stat().st_mode & 0o77 == 0 for run in ("run", "another"))
    for name in ("../escape", "a/b", "", "x" * 65, "answers"):
        with pytest.raises(RunError, match="which is no name of a folder"):
            store.of_run(name)


def test_a_write_that_is_cut_short_leaves_the_version_before(tmp_path: Path, monkeypatch: Any) -> None:
    store = Store(tmp_path / "node")
    store.save("run", 1, {"a": torch.ones(1)}, set())

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", cut)
    monkeypatch.setattr(Path, "replace", cut)
    with pytest.raises(KeyboardInterrupt):
        store.save("run", 2, {"a": torch.zeros(1)}, {1})
    monkeypatch.undo()
    found = Store(tmp_path / "node").load("run", 1)
    assert found is not None and float(found["a"]) == 1


def evaluations(tmp_path: Path, number: int, change: float = 0.0, **own: Any) -> list[Any]:
    """What a node with noise on its evaluations answers to a server that asks so often; ``change``: of the model."""
    table = table_of("fedavg", small_federation(), **{"batch-size": 8})
    node = {"client": "a", "folder": str(tmp_path), "min-batch": 8, "evaluation": "noised", **own}
    context: Any = SimpleNamespace(run_config=table, node_config=node)
    model = Model(parse("mlp:hidden=5", (1, 6, 6), 3), dtype=torch.float64)
    parts = {split: (np.random.default_rng(0).random((40, 1, 6, 6)), np.zeros(40, int)) for split in ("train", "test")}
    found = []
    for stage in range(number):
        params = {name: value + stage * change for name, value in model.init(0).items()}
        ticket = {"run": "r", "client": "a", "stage": stage, "ask": 1, "from_version": 0, "to_version": stage + 1}
        asked = pack({**ticket, "kept_versions": "", "program": "evaluate.test"}, shared={"params": params}, mine={})
        reply = answer("train", asked, context, lambda node: parts, lambda node: "mlp:hidden=5")
        error = facts_of(reply).get("error")
        found.append(error or decode(reply["trees"]["reply"].data)["loss"].item())
    return found


def test_who_asks_the_same_again_gets_the_same_noise(tmp_path: Path) -> None:
    """Else the mean of many answers would be the exact one: in other rounds too, and after the node was restarted."""
    answers = evaluations(tmp_path, 5)
    assert len(set(answers)) == 1 and len(set(evaluations(tmp_path, 3, 1e-9))) == 3
    assert evaluations(tmp_path, 1) == answers[:1]
    exact = evaluations(tmp_path / "exact", 3, 1e-3, evaluation="exact")
    assert len(set(exact)) == 3 and not (tmp_path / "exact" / "answers").exists()  # no noise: nothing is counted
    assert Store(tmp_path / "exact").releases() == []


def test_noised_evaluations_are_releases_of_the_samples_that_were_tried(tmp_path: Path) -> None:
    """A sample moves three sums, each by one unit at most: noise of 2 on each is one of 2 / sqrt(3) on all."""
    evaluations(tmp_path, 3, 1e-9, **{"evaluation-noise": 2.0})
    evaluations(tmp_path, 1, **{"evaluation-noise": 2.0})  # which it has given already
    found = Store(tmp_path).releases()
    assert {(one.what, one.unit, one.clients, one.size, one.who) for one in found} == {
        ("evaluate.test", "sample", 40, 40, ("a",))
    }
    assert len(found) == 3 and found[0].noise == pytest.approx(2 / 3**0.5)
    with (tmp_path / "privacy.jsonl").open("a") as file:
        file.write('{"round": 0, "wh')  # as a node that was killed leaves it
    assert Store(tmp_path).releases() == found
    Store(tmp_path).release(found[0]._replace(draw="another"))
    assert len(Store(tmp_path).releases()) == 4


def test_a_node_stops_after_so_many_noised_answers(tmp_path: Path) -> None:
    full = "has given 2 answers with noise on them, as many as its own max-answers allows."
    one, two, three = evaluations(tmp_path, 3, 1e-9, **{"max-answers": 2})
    assert isinstance(one, float) and isinstance(two, float) and three == full
    assert evaluations(tmp_path, 1, **{"max-answers": 2}) == [one]  # which it has given already
    assert (tmp_path / "answers").read_text() == "2"


@pytest.mark.slow
def test_label_shares_are_noised_once_whatever_happens_in_between(tmp_path: Path) -> None:
    protected = {"1": {"adapt-clip": 1.0, "adapt-noise": 0.5}}
    ours = deployed("scaffold", small_federation(), tmp_path, nodes=protected, adapt="prior")
    for _ in range(2):
        ours.train_round()
        ours.settle()
    first, second = (tree["shares"] for tree in replies_of(ours, "1", "label_shares"))
    assert first.equal(second)
    one, *more = (tree["gradient"] for tree in replies_of(ours, "1", "calibrate"))
    assert not any(one.equal(other) for other in more)  # other questions


def test_what_follows_from_the_data_alone_is_one_question_in_every_round() -> None:
    asks = [{"from_version": v, "stage": v, "ask": 0} for v in (1, 2)]
    private = describe_program(8, Noise("gaussian", 1.0, "sample"))
    for program, questions in ((label_shares(0.5), 1), (private, 1), (describe_program(8), 2)):
        assert len({_question(program, asked, {}, {}) for asked in asks}) == questions


def test_a_node_keeps_the_last_answers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.deploy.store.KEPT", 3)
    store = Store(tmp_path)
    for number in range(6):
        given = store.once("run", bytes([number]), {"a": torch.tensor(float(number))}, 100)
        assert float(given["a"]) == number
    assert len(list((tmp_path / "run" / "answers").iterdir())) == 3 and (tmp_path / "answers").read_text() == "6"
    assert float(store.once("run", bytes([5]), {"a": torch.tensor(9.0)}, 100)["a"]) == 5


UNREAD = [
    (
        "fedavg",
        {"descriptor-epsilon": 0.5},
        "has 'descriptor-epsilon' in its own config, which nothing reads, nor has the",
    ),
    (
        "fedavg",
        {"laplace-noise": 0.1},
        "has 'laplace-noise' in its own config, which nothing reads; did you mean 'sample-dp-noise'",
    ),
    (
        "fedavg",
        {"evalution": "none"},
        "has 'evalution' in its own config, which nothing reads; did you mean 'evaluation'?",
    ),
    ("fedavg", {"min_bach": 99}, "has 'min_bach' in its own config, which nothing reads; did you mean 'min-batch'?"),
    (
        "fedavg",
        {"adapt-clip": 1.0, "adapt-noise": 1.0},
        "wants adapt-clip and adapt-noise, which this federation has no",
    ),
    ("fedavg", {"evaluation-noise": 3.0}, "wants evaluation-noise, and its evaluation is exact: set evaluation to"),
    ("fedavg", {"local-lr": -1.0}, "has a config of its own that cannot be: --local-lr is -1.0"),
]


@pytest.mark.parametrize(("method", "own", "reason"), UNREAD, ids=[next(iter(one[1])) for one in UNREAD])
def test_a_node_that_was_given_what_nothing_reads_takes_no_part(
    method: str, own: Any, reason: str, tmp_path: Path
) -> None:
    assert hello(tmp_path, (X, Y), **own)["error"].startswith(reason)


def test_what_a_nodes_two_functions_read_is_no_mistake(tmp_path: Path) -> None:
    own = {"scale": 2, "where": "x", "all": 1, "num-partitions": 4}  # the last is Flower's

    def load(node: Any) -> Any:
        assert node["scale"] == 2 and node.get("nothing") is None and "where" in node
        return X, Y

    assert hello(tmp_path, load, **own)["error"].startswith("has 'all' in its own config")
    for way in (dict, list, lambda node: {**node}, lambda node: list(node.items())):
        assert "error" not in hello(tmp_path, lambda node, way=way: way(node) and (X, Y), **own)
