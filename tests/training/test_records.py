# SPDX-License-Identifier: Apache-2.0
"""What training writes down of each client, and that it says what is so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom import algorithms
from fedloom.core.trees import num_bytes
from fedloom.runs.directory import EMBEDDINGS, ESTIMATES, SCORES, RunDirectory

TINY: dict[str, Any] = {
    "clients": 6, "unseen": 2, "cohort": 3, "rounds": 4, "eval_every": 2, "local_steps": 2, "model": "mlp:hidden=8",
    "partition": "dirichlet:0.5", "device": "cpu", "progress": "quiet", "batch_size": 16,
}  # fmt: skip
LOOMS = [name for name in algorithms.built_in() if algorithms.get(name).embeddings is not None]


def run(path: Path, method: str, **options: Any) -> fedloom.Run:
    return fedloom.run(method, out=path / "run", **{**TINY, **options})


def rounds(found: fedloom.Run, name: str, **like: Any) -> list[int]:
    """The rounds of the lines of a file that are like that."""
    lines = found.directory.lines(name)
    return [line["round"] for line in lines if all(line[key] == value for key, value in like.items())]


def test_every_evaluation_has_every_clients_score(tmp_path: Path) -> None:
    found = run(tmp_path, "fedavg")
    assert rounds(found, SCORES, group="participants", split="test") == [2, 4]
    assert rounds(found, SCORES, group="unseen") == [2, 4]  # newcomers to FedAvg cost nothing
    for record in found.records:
        if "metrics" not in record:
            continue
        for line in found.directory.lines(SCORES):
            if line["round"] == record["round"]:
                name = f"{line['model']}/{line['group']}/{line['split']}/{line['name']}"
                assert np.mean(line["metric"]) == pytest.approx(record["metrics"][name])


def test_newcomers_that_must_train_are_tried_at_the_best_and_the_last_round(tmp_path: Path) -> None:
    found = run(tmp_path, "pfedhn", admit_rounds=2, rounds=6, cohort=1, server_lr=0.0)
    best = found.summary["best"]
    assert best["round"] == 2  # nothing is learned: later rounds are equals
    assert sorted(rounds(found, SCORES, group="unseen")) == [2, 6]
    assert "deployed/unseen/test/accuracy" in best and "deployed/unseen/test/accuracy" in found.summary["unseen"]


def test_newcomers_are_not_tried_at_a_checkpoint_that_they_are_not_served_from(tmp_path, caplog) -> None:
    """IT-PFL-HN's best round comes before its loom is tuned for newcomers, who are served from the last."""
    found = run(tmp_path, "it_pfl_hn", finetune_after=2)
    assert found.summary["best"]["round"] == 2 and caplog.messages == []
    assert rounds(found, SCORES, group="unseen") == [4] and "deployed/unseen/test/accuracy" in found.summary["unseen"]
    assert not any("/unseen/" in name for name in found.summary["best"])


def test_the_best_rounds_newcomers_are_those_of_its_checkpoint(tmp_path: Path) -> None:
    found = run(tmp_path, "pfedhn", admit_rounds=2)
    best = found.summary["best"]["deployed/unseen/test/accuracy"]
    assert best == pytest.approx(fedloom.load(found.path).evaluate_unseen()["deployed/unseen/test/accuracy"])


def test_a_run_that_goes_on_has_the_records_of_one_that_never_stopped(tmp_path: Path) -> None:
    straight = run(tmp_path / "a", "pfedhn", admit_rounds=2, rounds=6)
    first = run(tmp_path / "b", "pfedhn", admit_rounds=2, rounds=4)
    resumed = fedloom.resume(first.path, rounds=6, progress="quiet")
    for name in (SCORES, EMBEDDINGS):
        assert resumed.directory.lines(name) == straight.directory.lines(name)


def test_who_was_asked_and_what_it_cost(tmp_path: Path) -> None:
    found = run(tmp_path, "fedavg", engine="sequential")
    params = num_bytes({"p": found.server.state.params})
    for record in found.records:
        told = record["cohort"]
        assert told["client"] == sorted(told["client"]) and len(told["client"]) == record["clients"] == 3
        assert told["down"] == [params] * 3 and sum(told["down"]) == record["bytes"]["down"]
        assert sum(told["up"]) == record["bytes"]["up"] == sum(sum(b.values()) for b in record["told"].values())
        assert record["told"]["train"]["delta"] == 3 * params
        assert all(0 < s <= record["seconds"]["round"] for s in record["seconds"]["clients"])


@pytest.mark.parametrize("engine", ["loopback", "vectorised"])
def test_bytes_by_client_do_not_depend_on_the_engine(tmp_path: Path, engine: str) -> None:
    one, other = run(tmp_path / "a", "pfedhn", engine="sequential"), run(tmp_path / "b", "pfedhn", engine=engine)
    assert [r["cohort"] for r in one.records] == [r["cohort"] for r in other.records]
    assert "clients" not in other.records[0]["seconds"]


def test_a_parallel_engine_knows_each_clients_time(tmp_path: Path) -> None:
    found = run(tmp_path, "fedavg", engine="parallel", workers=2)
    assert all(s > 0 for record in found.records for s in record["seconds"]["clients"])


@pytest.mark.parametrize("method", LOOMS)
def test_embeddings_are_as_they_are_now(tmp_path: Path, method: str) -> None:
    """A checkpoint's rows wait for their steps; the records' do not."""
    found = run(tmp_path, method, admit_rounds=2) if "admit_rounds" in config(method) else run(tmp_path, method)
    line = found.directory.lines(EMBEDDINGS)
    last = next(one for one in reversed(line) if one["group"] == "participants")
    loaded = fedloom.load(found.path, which="last").server
    algorithm = algorithms.get(method)
    assert algorithm.embeddings is not None
    now = algorithm.embeddings(loaded.setup, loaded.state, loaded.setup.clients)
    np.testing.assert_allclose(last["embedding"], now.numpy(), rtol=1e-4, atol=1e-7)
    assert last["client"] == list(found.clients) and last["round"] == 4
    assert "participants" in {one["group"] for one in line}


def config(method: str) -> set[str]:
    return set(algorithms.get(method).config.__dataclass_fields__)


@pytest.mark.parametrize("method", ["pfedhn", "mh_pfedhn", "it_pfl_hn"])
def test_newcomers_embeddings_are_where_they_were_admitted(tmp_path: Path, method: str) -> None:
    own = {"admit_rounds": 2} if "admit_rounds" in config(method) else {"finetune_after": 2}
    found = run(tmp_path, method, **own)
    (line, *_) = [one for one in found.directory.lines(EMBEDDINGS) if one["group"] == "unseen"]
    assert len(line["client"]) == 2 and np.isfinite(line["embedding"]).all()
    assert line["embedding"][0] != line["embedding"][1]


def test_class_counts_of_the_split_are_in_the_roster(tmp_path: Path) -> None:
    found = run(tmp_path, "local")
    federation = found.simulation.federation
    for member in found.directory.roster().members:
        rows = federation.roster[member.id].of("all")
        assert member.labels == tuple(np.bincount(federation.y.numpy()[rows], minlength=10))
        assert sum(member.labels) == sum(member.samples.values())


def test_what_newcomers_found_out_is_written_down(tmp_path: Path) -> None:
    found = run(tmp_path, "fedavg", adapt="prior")
    times = [record["seconds"] for record in found.directory.records() if "metrics" in record]
    assert times and all(0 < one["settling"] < one["evaluation"] for one in times)
    (first, *_) = found.directory.lines(ESTIMATES)
    assert first["client"] == list(found.server.unseen)
    assert [sum(shares) for shares in first["share"]] == pytest.approx([1, 1], abs=1e-3)
    assert all(
        low <= share <= high
        for row in zip(first["low"], first["share"], first["high"])
        for low, share, high in zip(*row)
    )
    assert set(first["decision"]) <= {"corrected", "shrunk", "plain"} and first["labelled"] == [0, 0]


def test_aggregation_weights_are_a_table(tmp_path: Path) -> None:
    found = run(tmp_path, "hypergenfl", start="alive", embed_init="random", local_epochs=1)
    for record in found.records:
        told = record["tables"]["weights"]
        np.testing.assert_allclose(np.sum(told["values"], axis=0), 1, atol=1e-5)
        assert told["client"] == record["cohort"]["client"]
        assert not [name for name in record["diagnostics"] if name.startswith("weight")]


def test_a_line_that_was_cut_off_is_left_out_and_cut(tmp_path: Path) -> None:
    found = run(tmp_path, "pfedhn", admit_rounds=2)
    before = found.directory.lines(EMBEDDINGS)
    with (found.path / EMBEDDINGS).open("ab") as file:
        file.write(b'{"round": 9, "emb')
    assert found.directory.lines(EMBEDDINGS) == before
    with RunDirectory.open(found.path).lock():
        pass
    assert (found.path / EMBEDDINGS).read_bytes().endswith(b"}\n")
