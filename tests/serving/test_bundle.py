# SPDX-License-Identifier: Apache-2.0
"""A bundle has what is needed and nothing else: models equal the run's to the last bit, no client's data."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from conftest import needed
from fedloom import algorithms
from fedloom.core.contract import Handover
from fedloom.core.errors import DataError, FedloomError, NeedsError, RunError
from fedloom.core.tensors import read_tensors
from fedloom.core.trees import flatten
from fedloom.data.registry import load as load_data
from fedloom.serving.archive import Archive, write_archive
from fedloom.serving.bundle import LOOM, MODEL, PARTICIPANTS, Bundle, make_bundle, newcomers_state
from fedloom.serving.card import as_markdown
from fedloom.training.admission import admitted

METHODS = {
    **{name: needed(algorithms.get(name)) for name in algorithms.built_in()},
    "fedavg+prior": {"adapt": "prior"},
    "fedavg+bn": {"model": "testnets:Normed"},
    "fedavg+average": {"average": 0.9},
    "fedavg+private+average+prior": {"average": 0.9, "adapt": "prior", "dp_noise": 1.0, "dp_clip": 1.0},
    "pfedhn+average": {"average": 0.9, "admit_rounds": 4},
    "hyperfedzero": {"hidden": "16", "chunk_size": 64},
    "pfedhn": {},
    "pfedhn+two": {"model": "mlp:hidden=8,mlp:hidden=12", "admit_rounds": 4},
    "pfedhn+shares": {"descriptor": "class_shares"},
    "pfedhn_pc": {"admit_rounds": 4},
    "it_pfl_hn": {"finetune_after": 1},
    "mh_pfedhn": {"admit_rounds": 4},
    "mh_pfedhn_gd": {"admit_rounds": 4},
}


def equal(one: Any, other: Any) -> bool:
    """Two trees, to the last bit."""
    a, b = flatten(one), flatten(other)
    return list(a) == list(b) and all(torch.equal(a[path], b[path]) for path in a)


@pytest.fixture(params=METHODS)
def case(request: pytest.FixtureRequest, made) -> tuple[str, fedloom.Run, Path]:
    """A method's run and its bundle: every method has one."""
    return (request.param, *made(request.param.partition("+")[0], **METHODS[request.param]))


def test_participants_get_the_models_of_the_run(case) -> None:
    name, run, path = case
    bundle = Bundle(path, trust=True)
    for client in run.clients:
        given = bundle.given(client)
        if given.complete:
            assert equal(given.sent, run.parameters(client)), (name, client)
        else:  # the client has the rest: with what it remembers, the model is that of the run
            home, memory = run.server.home(client), run.server.recall(client)
            deployed = run.server.algorithm.client_deploy(home, given.sent["shared"], given.sent["mine"], memory)
            assert equal(deployed, run.parameters(client)), (name, client)
    assert given.complete == (not given.missing)


def test_newcomers_are_admitted_as_by_the_run(case, newcomer) -> None:
    name, run, path = case
    bundle, (x, y) = Bundle(path, trust=True), newcomer
    if run.server.algorithm.admit is None:
        with pytest.raises(NeedsError, match="no model for clients that took no part"):
            _ = bundle.newcomers
        return
    labels = y if run.server.algorithm.needs_labels(run.server.config) else None
    ours = run.admit(x, labels)
    theirs = admitted(bundle.newcomers, torch.as_tensor(x), None if labels is None else torch.as_tensor(labels))
    assert equal(theirs.deployed, ours.parameters), name


def test_nothing_of_anybody_is_in_it(case) -> None:
    """Samples, labels and memories are looked for byte by byte; and in what newcomers get, embeddings too."""
    _, run, path = case
    content = path.read_bytes()
    archive = Archive(path)
    public = b"".join(bytes(archive.view(name)) for name in (MODEL, LOOM) if name in archive.names)
    simulation = run.simulation
    memories = [
        leaf
        for client in run.clients
        for name, leaf in flatten(run.server.recall(client)).items()
        if leaf.numel() > 3 and len(leaf.unique()) > 3  # not a counter, nor what everybody begins with
    ]
    for sample in [*simulation.federation.x[:300], *memories]:
        assert sample.numpy().tobytes() not in content
    for client in run.clients:
        rows = simulation.federation.roster[client].rows["train"]
        for kind in (torch.int64, torch.uint8):
            assert simulation.federation.y[rows].to(kind).numpy().tobytes() not in content
    private = archive.view(PARTICIPANTS) if PARTICIPANTS in archive.names else b""
    for name, leaf in read_tensors(private).items() if private else ():
        if name == "embeddings":
            assert not any(row.numpy().tobytes() in public for row in leaf)
            assert leaf[0].numpy().tobytes() in content  # so that the search would find one
    for secret in (str(run.path), str(load_data("digits").name) + ".npz", "data_root"):
        assert secret.encode() not in content


def test_the_search_finds_what_is_there(made) -> None:
    run, path = made("fedavg")
    leaf = next(iter(flatten(run.server.state.params).values()))
    assert leaf.numpy().tobytes() in path.read_bytes()


def test_equal_runs_make_equal_bundles(made, tmp_path: Path) -> None:
    run, path = made("pfedhn")
    assert make_bundle(run, tmp_path / "again.fedloom").read_bytes() == path.read_bytes()


def test_what_newcomers_get_does_not_tell_how_many_took_part(made, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = made("pfedhn")
    server = fedloom.load(run.path).server
    server.algorithm = replace(server.algorithm, handover=Handover(loom="loom"))
    with pytest.raises(NeedsError, match=r"keeps something of each participant.*Algorithm\.handover"):
        newcomers_state(server)


def test_the_card_has_intervals_and_limits(made) -> None:
    run, path = made("fedavg")
    card = Bundle(path).card
    took, held = card["metrics"]
    assert took["clients"] == 4 and took["low"] <= took["mean"] <= took["high"] and held["low"] is None
    scores = [score.metric for score in run.evaluate("test").values()]
    assert took["mean"] == pytest.approx(np.mean(scores))
    half = 3.182446 * np.std(scores, ddof=1) / 2  # Student's t with 3 degrees of freedom, four clients
    assert took["high"] == pytest.approx(min(1, np.mean(scores) + half), abs=1e-6)
    text = as_markdown(card, "0" * 64)
    for heading in ("Data", "Networks", "How well it does", "Newcomers", "Limits", "Privacy", "Citation"):
        assert f"## {heading}" in text
    assert "no samples, no labels and no memory" in text and "McMahan" in text


def test_a_card_without_a_score_says_so(made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that was never tested has none, nor has one whose loss was no number."""
    run, _ = made("fedavg")
    lines = [{**line, "metric": [None] * len(line["metric"])} for line in run.directory.scores()]
    monkeypatch.setattr(type(run.directory), "scores", lambda self: lines)
    bundle = Bundle(make_bundle(run, tmp_path / "bundle"))
    assert bundle.card["metrics"] == [] and "It was not evaluated." in as_markdown(bundle.card, bundle.digest)


def test_a_card_that_cannot_be_shown_is_found_before_serving(made, tmp_path: Path) -> None:
    _, path = made("fedavg")
    archive = Archive(path)
    parts = {name: bytes(archive.view(name)) for name in archive.names}
    kept = {name: value for name, value in archive.manifest.items() if name not in ("format", "parts")}
    write_archive(tmp_path / "odd", kept, {**parts, "card.json": b"{}"})
    with pytest.raises(RunError, match="is not a bundle that this fedloom can use"):
        Bundle(tmp_path / "odd").check()


def test_a_private_descriptor_is_named_with_its_epsilon(made) -> None:
    _, path = made("it_pfl_hn", finetune_after=1, descriptor_epsilon=2.0)
    assert any("descriptor: epsilon 2 at delta 0.01" in sentence for sentence in Bundle(path).card["privacy"])


def test_a_network_of_ones_own_needs_trust(made, tmp_path: Path) -> None:
    run = fedloom.run("fedavg", model="tiny:Line", dataset=lines(), clients=2, rounds=1, out=tmp_path / "run",
                      progress="quiet")  # fmt: skip
    path = make_bundle(run)
    with pytest.raises(FedloomError, match="names code outside of fedloom"):
        Bundle(path)
    Bundle(path, trust=True).check()


def lines() -> tuple[np.ndarray, np.ndarray]:
    x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
    return x, 2 * x


def rewritten(path: Path, to: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> Path:
    """The archive with ``change(name, data)`` in the place of each member; None: without it."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w", compression) as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return to


def test_damage_is_found(made, tmp_path: Path) -> None:
    _, path = made("pfedhn")
    content = path.read_bytes()
    with zipfile.ZipFile(path) as whole:
        info = whole.getinfo("manifest.json")
    number = content.index(b'"round": {') + len(b'"round": {\n  "participants": ')
    assert number < info.file_size and content[number : number + 1].isdigit()
    for at in [number, *range(0, len(content), max(1, len(content) // 60))]:
        bad = bytearray(content)
        bad[at] ^= 1 if at == number else 0x55  # another digit leaves it good JSON
        (tmp_path / "bad").write_bytes(bad)
        try:
            found = Bundle(tmp_path / "bad")
        except (DataError, RunError):
            continue
        assert found.digest == Bundle(path).digest  # a byte of padding, or of a date
        with pytest.raises(DataError, match="besides its parts"):
            found.archive.check_rest()
    Archive(path).check_rest()
    (tmp_path / "more").write_bytes(content + b"\0")
    with pytest.raises(DataError):
        Archive(tmp_path / "more").check_rest()
    for end in (0, 10, len(content) // 2, len(content) - 1):
        (tmp_path / "short").write_bytes(content[:end])
        with pytest.raises(DataError, match="not a bundle, or damaged"):
            Bundle(tmp_path / "short")


def test_other_archives_are_refused(made, tmp_path: Path) -> None:
    _, path = made("pfedhn")
    to = tmp_path / "other"
    same = lambda name, data: data  # noqa: E731
    with pytest.raises(DataError, match="damaged"):
        Bundle(rewritten(path, to, same, zipfile.ZIP_DEFLATED))
    with pytest.raises(DataError, match=r"'loom\.safetensors' is not both"):
        Bundle(rewritten(path, to, lambda name, data: None if name == LOOM else data))
    with pytest.raises(DataError, match="damaged"), zipfile.ZipFile(rewritten(path, to, same), "a") as archive:
        archive.writestr("../../evil.json", b"{}")
        archive.close()
        Bundle(to)
    with pytest.raises(DataError, match="format 99 where this fedloom knows 1"):
        Bundle(
            rewritten(
                path, to, lambda n, d: d.replace(b'"format": 1', b'"format": 99', 1) if n == "manifest.json" else d
            )
        )
    with pytest.raises(DataError, match="There is no file"):
        Bundle(tmp_path / "nothing")


def test_a_manifest_that_lies_is_an_error_of_one_sentence(made, tmp_path: Path) -> None:
    _, path = made("pfedhn")
    manifest = json.loads(zipfile.ZipFile(path).read("manifest.json"))
    for name in manifest:
        for value in (None, 7, [], {}, "x"):
            changed = json.dumps({**manifest, name: value}).encode()
            to = rewritten(path, tmp_path / "lie", lambda n, d, new=changed: new if n == "manifest.json" else d)
            try:
                Bundle(to).check()
            except FedloomError as error:
                assert "\n" not in str(error)


def test_nothing_is_left_where_it_cannot_be_written(made, tmp_path: Path) -> None:
    run, _ = made("fedavg")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunError, match="Cannot write"):
        make_bundle(run, tmp_path / "file" / "bundle")
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_members_are_plain_files_of_known_kinds(made) -> None:
    _, path = made("pfedhn")
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        for info in archive.infolist():
            assert info.compress_type == zipfile.ZIP_STORED and info.filename.endswith((".json", ".safetensors"))
        assert archive.testzip() is None
