# SPDX-License-Identifier: Apache-2.0
"""Clients that misbehave, come late, go and come back: named, recorded, and the round goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from conftest import few, play, small_federation
from deploy.nearby import Nearby, deployed, table_of
from fedloom import algorithms
from fedloom.adaptation.calibration import Privacy, protect
from fedloom.core.errors import RoundError
from fedloom.core.trees import PerClient, flatten, tree_map
from fedloom.core.wire import decode, encode
from fedloom.deploy.codec import pack
from fedloom.deploy.deployment import Deployment
from fedloom.deploy.engine import VERSION, Rules
from fedloom.deploy.options import read
from fedloom.engines.memories import Memories
from fedloom.engines.sequential import Sequential
from fedloom.looms.encoder import Described, private_final
from fedloom.privacy.laplace import with_laplace_noise
from fedloom.programs import evaluation, labels


def with_reply(reply: RecordDict, change: Callable[[Any], Any], **facts: Any) -> RecordDict:
    """An honest reply, with another tree and other facts."""
    tree = decode(reply["trees"]["reply"].data)
    return pack({**dict(reply["facts"]), **facts}, reply=change(tree))


def tiny(reply: RecordDict) -> RecordDict:
    """An honest reply, but for a loss in a kind of number that fedloom itself does not send."""
    tree = decode(reply["trees"]["reply"].data)
    flat = flatten({**tree, "loss": tree["loss"].to(torch.float8_e4m3fn)})
    data = safetensors.torch.save(flat, {"order": json.dumps(list(flat))})
    array = Array("uint8", (len(data),), "safetensors", data)
    return RecordDict({"facts": reply["facts"], "trees": ArrayRecord({"reply": array})})


def raw(reply: RecordDict, form: str) -> RecordDict:
    """An honest reply's facts, and a tree that is none."""
    return RecordDict({"facts": reply["facts"], "trees": ArrayRecord({"reply": Array("u", (1,), form, b"x")})})


def deep(reply: RecordDict) -> RecordDict:
    """An honest reply's facts, and a tree that recursion does not get through."""
    name = "/".join("a" * 30_000)
    data = safetensors.torch.save({name: torch.zeros(1, dtype=torch.float64)}, {"order": json.dumps([name])})
    tree = Array("uint8", (len(data),), "safetensors", data)
    return RecordDict({"facts": reply["facts"], "trees": ArrayRecord({"reply": tree})})


def unchanged(tree: Any) -> Any:
    return tree


def with_delta(reply: RecordDict, change: Callable[[torch.Tensor], torch.Tensor]) -> RecordDict:
    """An honest reply, but for the change of the parameters."""
    return with_reply(reply, lambda tree: {**tree, "delta": tree_map(change, tree["delta"])})


def with_samples(reply: RecordDict, *number: float) -> RecordDict:
    """An honest reply, but for the number of samples."""
    shape = number if len(number) != 1 else number[0]
    return with_reply(reply, lambda tree: {**tree, "num_samples": torch.tensor(shape, dtype=torch.float64)})


BAD: dict[str, tuple[Callable[[RecordDict], RecordDict | str], str]] = {
    "shape": (lambda r: with_delta(r, lambda leaf: leaf.new_zeros(3)), "replied with shape"),
    "missing": (lambda r: with_reply(r, lambda t: {"loss": t["loss"]}), "replied with shape None"),
    "nan": (lambda r: with_delta(r, lambda leaf: leaf * float("nan")), "NaN or Inf"),
    "type": (lambda r: with_reply(r, lambda t: tree_map(lambda leaf: leaf.half(), t)), "numbers of type torch.float16"),
    "whole": (lambda r: with_reply(r, lambda t: tree_map(lambda leaf: leaf.long(), t)), "numbers of type torch.int64"),
    "narrow": (lambda r: with_reply(r, lambda t: tree_map(lambda leaf: leaf.float(), t)), "expected torch.float64"),
    "oversized": (lambda r: with_reply(r, lambda t: {**t, "more": torch.zeros(1 << 20)}), "bytes where at most"),
    "tiny": (lambda r: tiny(r), "type torch.float8"),
    "no samples": (lambda r: with_samples(r, 0.0), "says that it has 0 samples"),
    "fewer than none": (lambda r: with_samples(r, -5000.0), "says that it has -5000 samples"),
    "half a sample": (lambda r: with_samples(r, 4.5), "says that it has 4.5 samples"),
    "nan samples": (lambda r: with_samples(r, float("nan")), "says that it has nan samples"),
    "many numbers of samples": (lambda r: with_samples(r, 4.0, 4.0), "not one number of samples"),
    "enormous": (lambda r: with_delta(r, lambda leaf: leaf + 1e30), "replied with numbers of norm"),
    "overflowing": (lambda r: with_delta(r, lambda leaf: leaf + 1e300), "replied with numbers of norm inf"),
    "other client": (lambda r: with_reply(r, unchanged, client="0"), "replied for client '0'; asked was '2'"),
    "other round": (lambda r: with_reply(r, unchanged, stage=0), "replied for stage 0; asked was 1"),
    "other ask": (lambda r: with_reply(r, unchanged, ask=9), "replied for ask 9"),
    "garbage": (lambda r: raw(r, "safetensors"), "cannot be read"),
    "deep": (lambda r: deep(r), "sent a tree of more than 32 levels"),
    "surprise": (lambda r: 7, "sent a reply that cannot be used (AttributeError)"),
    "terminal": (lambda r: pack({"error": "\x1b[2J\nall is well"}), " [2J all is well"),
    "no tree": (lambda r: RecordDict({"facts": r["facts"]}), "no tree named 'reply'"),
    "no facts": (lambda r: RecordDict({"other": ConfigRecord({"a": 1})}), "sent records named ['other']"),
    "pickle": (lambda r: raw(r, "pickle"), "no tree named 'reply'"),
    "silence": (lambda r: "did not answer within 1 seconds", "did not answer within 1 seconds"),
    "error": (lambda r: pack({"error": "has no samples"}), "has no samples"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_client_is_refused_by_name_and_the_round_goes_on_without_it(kind: str, tmp_path: Path) -> None:
    spoil, reason = BAD[kind]
    federation = small_federation(["mlp:hidden=5", "lenet:kernels=2"])
    ours = deployed("pfedhn", federation, tmp_path, **few(algorithms.get("pfedhn")))
    ours.lobby.faults["2"] = lambda kind, asked, reply: spoil(reply) if kind == "train" else reply
    record = ours.train_round()
    assert [d["client"] for d in record["dropped"]] == ["2"] and reason in record["dropped"][0]["reason"]
    without = play(algorithms.get("pfedhn"), federation, rounds=1, cohorts=[["0", "1", "3", "4"]])
    there, expected = flatten(ours.server.state._asdict()), flatten(without.state._asdict())
    assert all(there[path].equal(expected[path]) for path in expected)


def test_a_reply_in_the_shape_of_another_architecture_harms_nobody_else(tmp_path: Path) -> None:
    federation = small_federation(["mlp:hidden=5", "mlp:hidden=6"])
    ours = deployed("pfedhn", federation, tmp_path)
    honest: dict[str, RecordDict] = {}

    def first(kind: str, asked: RecordDict, reply: RecordDict) -> RecordDict:
        shapes = decode(asked["trees"]["mine"].data)["params"]
        wide = {n: torch.zeros([6 if s == 5 else s for s in p.shape], dtype=p.dtype) for n, p in shapes.items()}
        return with_reply(reply, lambda t: {**t, "delta": wide}) if kind == "train" else reply

    ours.lobby.faults["0"] = first
    record = ours.train_round()
    assert [d["client"] for d in record["dropped"]] == ["0"] and not honest


def test_a_client_keeps_the_memory_that_the_server_counts_on(tmp_path: Path) -> None:
    """SCAFFOLD's control variates: a reply that was not used must not have changed what the client goes on from."""
    algorithm, federation = algorithms.get("scaffold"), small_federation(["mlp:hidden=5"])
    ours = deployed("scaffold", federation, tmp_path)
    ours.train_round()
    ours.lobby.faults["1"] = lambda kind, asked, reply: "did not answer within 1 seconds"
    ours.train_round()  # client 1 trains and remembers, but its reply is lost
    del ours.lobby.faults["1"]
    ours.train_round()
    cohorts = [["0", "1", "2", "3", "4"], ["0", "2", "3", "4"], ["0", "1", "2", "3", "4"]]
    expected = play(algorithm, federation, rounds=3, cohorts=cohorts)
    there, wanted = flatten(ours.server.state._asdict()), flatten(expected.state._asdict())
    assert all(there[path].equal(wanted[path]) for path in wanted)


@pytest.mark.parametrize("rounds", [3, 4])
def test_a_client_that_ends_its_work_on_an_earlier_round_late_spoils_no_memory(rounds: int, tmp_path: Path) -> None:
    """Client 1 writes what it remembers of round 2 only after it has taken part in later rounds."""
    federation, late = small_federation(["mlp:hidden=5"]), []
    ours = deployed("scaffold", federation, tmp_path)

    def slow(kind: str, asked: RecordDict, reply: RecordDict) -> str:
        late.append((kind, "1", asked))
        return "did not answer within 1 seconds"

    for number in range(1, 6):
        ours.lobby.faults = {"1": slow} if number == 2 else {}
        ours.train_round()
        ours.saved([number])
        if number == rounds:
            assert isinstance(ours.lobby._answer(*late[0]), RecordDict)
    everybody = ["0", "1", "2", "3", "4"]
    cohorts = [["0", "2", "3", "4"] if number == 2 else everybody for number in range(1, 6)]
    expected = play(algorithms.get("scaffold"), federation, rounds=5, cohorts=cohorts)
    there, wanted = flatten(ours.server.state._asdict()), flatten(expected.state._asdict())
    assert all(there[path].equal(wanted[path]) for path in wanted)
    assert len(list((tmp_path / "1" / "run").iterdir())) == 2  # nothing is left of it either


def test_versions_are_never_given_twice_even_if_the_clock_goes_back(tmp_path: Path, monkeypatch: Any) -> None:
    engine = deployed("scaffold", small_federation(["mlp:hidden=5"]), tmp_path).engine

    def next_version(known: int = 0) -> int:
        memory = Memories({"0": {VERSION: torch.tensor(known)}})
        return engine._new_version(engine.session(1, memory).job(labels.label_shares(), {}, PerClient.empty(["0"])))

    first = next_version()
    monkeypatch.setattr("time.time_ns", lambda: 0)
    assert next_version() == first + 1
    engine._newest = 0  # another server
    assert next_version(first + 7) == first + 8


def test_a_server_that_goes_back_finds_the_memories_of_its_checkpoint(tmp_path: Path) -> None:
    federation = small_federation(["mlp:hidden=5"])
    ours = deployed("scaffold", federation, tmp_path)
    ours.train_round()
    ours.saved([1])
    mark = ours.mark()
    straight = flatten(ours.train_round() and ours.server.state._asdict())
    ours.train_round()
    ours.train_round()  # never saved: the memories of round 1 must still be there
    ours.go_back(mark)
    ours.train_round()
    assert all(leaf.equal(straight[path]) for path, leaf in flatten(ours.server.state._asdict()).items())


def test_a_client_whose_memory_is_lost_is_told_so(tmp_path: Path) -> None:
    ours = deployed("scaffold", small_federation(["mlp:hidden=5"]), tmp_path)
    ours.train_round()
    for file in (tmp_path / "3" / "run").iterdir():
        file.unlink()
    record = ours.train_round()
    assert [d["client"] for d in record["dropped"]] == ["3"]
    assert re.match(r"has no version \d+ of its memory of this run any more", record["dropped"][0]["reason"])


def test_a_round_without_a_quorum_is_done_again_and_then_stops(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fedloom.deploy.waiting.PAUSE", 0.0)
    ours = deployed("fedavg", small_federation(["mlp:hidden=5"]), tmp_path, quorum=0.5, repeats=2)
    silent: list[int] = []

    def twice(kind: str, asked: RecordDict, reply: RecordDict) -> RecordDict | str:
        silent.append(1)
        return "did not answer" if len(silent) <= 2 * 3 else reply

    for client in ("0", "1", "2"):
        ours.lobby.faults[client] = twice
    record = ours.train_round()
    assert len(record["repeated"]) == 2 and "2 of 5 clients gave a usable reply" in record["repeated"][0]
    assert record["dropped"] == [] and ours.server.round == 1
    for client in ("0", "1", "2"):
        ours.lobby.faults[client] = lambda *_: "did not answer"
    before = flatten(ours.server.state._asdict())
    with pytest.raises(RoundError, match="fewer than the quorum of 50%"):
        ours.train_round()
    assert all(leaf.equal(before[path]) for path, leaf in flatten(ours.server.state._asdict()).items())


def test_a_client_that_goes_is_not_asked_and_comes_back_as_the_same(tmp_path: Path) -> None:
    federation = small_federation(["mlp:hidden=5"])
    ours = deployed("scaffold", federation, tmp_path)
    ours.train_round()
    ours.lobby.disconnect("4")
    record = ours.train_round()
    assert record["clients"] == 4 and record["dropped"] == []
    ours.lobby.connect("4", node=999)  # a new Flower node, the same folder
    ours.train_round()
    cohorts = [["0", "1", "2", "3", "4"], ["0", "1", "2", "3"], ["0", "1", "2", "3", "4"]]
    expected = play(algorithms.get("scaffold"), federation, rounds=3, cohorts=cohorts)
    there, wanted = flatten(ours.server.state._asdict()), flatten(expected.state._asdict())
    assert all(there[path].equal(wanted[path]) for path in wanted)


def test_a_name_that_is_taken_cannot_be_claimed(tmp_path: Path) -> None:
    ours = deployed("fedavg", small_federation(["mlp:hidden=5"]), tmp_path)
    ours.lobby.clients[999] = "1"
    ours.lobby.node_config["1"] = {"client": "1", "folder": str(tmp_path / "elsewhere"), "min-batch": 1}
    record = ours.train_round()
    assert record["refused"] == ["node 999 claims the name '1', which another client has"]
    assert 999 not in ours.lobby.nodes.values()
    assert "refused" not in ours.train_round()


def test_noise_for_privacy_cannot_be_drawn_from_the_seed(tmp_path: Path) -> None:
    """The same run twice, with other secrets: replies differ by the noise, and only with noise."""

    def replies(folder: Path, noise: float) -> Any:
        ours = deployed("mh_pfedhn", small_federation(["mlp:hidden=5"]), folder, laplace_noise=noise)
        ours.train_round()
        kept = [reply for kind, client, _, reply in ours.lobby.letters if kind == "train" and client == "0"]
        return decode(kept[0]["trees"]["reply"].data)["delta"]

    assert replies(tmp_path / "a", 0.0).equal(replies(tmp_path / "b", 0.0))
    assert not replies(tmp_path / "c", 0.1).equal(replies(tmp_path / "d", 0.1))


def test_noise_for_privacy_never_comes_twice(tmp_path: Path) -> None:
    """Two runs with one folder and one seed, one of which trains with no step size: its noise must take nothing off."""

    def reply(run: str, noise: float, lr: float) -> Any:
        federation = small_federation(["mlp:hidden=5"])
        table = table_of("mh_pfedhn", federation, laplace_noise=noise, local_lr=lr)
        lobby = Nearby(federation, table, tmp_path)
        lobby.run = run
        lobby.refresh()
        Deployment(read(table), lobby, [lobby.greetings[client] for client in federation.roster]).train_round()
        kept = [reply for kind, client, _, reply in lobby.letters if kind == "train" and client == "0"]
        return decode(kept[0]["trees"]["reply"].data)["delta"]

    clean, noisy, again = reply("a", 0.0, 0.05), reply("b", 0.1, 0.05), reply("b", 0.1, 0.05)
    still = reply("c", 0.1, 1e-30)
    assert float((noisy - still - clean).abs().mean()) > 0.05  # 0.15 where the two are independent
    assert noisy.equal(again)  # who asks the same twice gets the same: fresh noise can be averaged away


def test_noise_on_a_node_is_no_function_of_a_key(monkeypatch: Any) -> None:
    """A key has 63 bits, and its draws are not made to keep it secret: a node draws from the operating system."""
    federation = small_federation(["mlp:hidden=5"])
    settings = read(table_of("it_pfl_hn", federation, descriptor_epsilon=1.0))
    engine = Sequential(federation, algorithms.get("it_pfl_hn"), settings.config, 0)
    job = engine.session(1, Memories(), secret_noise=True).job(labels.label_shares(), {}, PerClient.empty(["0"]))
    value, samples = torch.ones(3, dtype=torch.float64), torch.tensor(9.0)
    home = job.home("0", samples, job.keys(["0"])[0])
    monkeypatch.setattr("fedloom.core.random._mix", lambda z: pytest.fail("drawn from a key"))
    sums = evaluation._Sums({}, *torch.ones(3, dtype=torch.float64) * 100)
    noisy: dict[str, Callable[[], torch.Tensor]] = {
        "laplace": lambda: with_laplace_noise(home, value, 0.1),
        "descriptor": lambda: private_final(home, {}, Described(value, samples), {})[0]["descriptor"],
        "calibration": lambda: protect(Privacy(1.0, 1.0), home, {"value": value})["value"],
        "label shares": lambda: labels._final(1.0, home, {}, value, {})[0]["shares"],
        "evaluation": lambda: evaluation._noised_final(0.1, home, {}, sums, {})[0]["loss"],
    }
    for name, draw in noisy.items():
        one, other = draw(), draw()
        assert float((one - other).abs().min()) > 0, name


def test_codec_keeps_bits_and_order() -> None:
    tree = {"b": torch.tensor([1.5, float("nan")]), "a": {"y": torch.tensor(True), "x": torch.arange(3)}, "empty": {}}
    back = decode(pack({}, it=tree)["trees"]["it"].data)
    assert list(flatten(back)) == list(flatten(tree)) and encode(back) == encode(tree)
    assert Rules().quorum == 0
