# SPDX-License-Identifier: Apache-2.0
"""Secure sums: what the server gets equals the plain mean, it sees no change, and nodes refuse what would show one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from flwr.app import RecordDict
from scipy import stats

from conftest import small_federation
from deploy.nearby import MUTE, Nearby, deployed, table_of
from deploy.test_server import served
from fedloom import algorithms
from fedloom.cli.catalogue import _needs
from fedloom.clients.federation import Federation
from fedloom.core.errors import ConfigError, DivergedError, NeedsError, RoundError
from fedloom.core.trees import flatten
from fedloom.core.wire import decode
from fedloom.deploy import masks, pact, waiting
from fedloom.deploy.codec import facts_of, pack, refusal
from fedloom.deploy.deployment import Deployment
from fedloom.deploy.keys import make_keys
from fedloom.deploy.local import app_in, local
from fedloom.deploy.options import read
from fedloom.deploy.pact import SUM
from fedloom.deploy.template import write_app
from fedloom.deploy.trial import Trial, about
from fedloom.programs.local import local_training
from fedloom.progress import Quiet
from fedloom.runs.directory import RunDirectory

CLIENTS = 4
NORM = 10.0


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PAUSE", 0.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # which is most of what these take


def equal() -> Federation:
    """Clients that weigh the same: in a sum each counts once."""
    return small_federation(sizes=(8,) * CLIENTS)


def summed(folder: Path, kind: str = "unsigned", method: str = "fedavg", **more: Any) -> Deployment:
    """Clients whose changes are added up, before round 1."""
    nodes = {}
    if kind == "signed":
        keys = make_keys(folder / "keys", [str(number) for number in range(CLIENTS)], ["localhost"])
        nodes = {
            str(number): {"identity": str(keys / "nodes" / str(number)), "peers": str(keys / "clients")}
            for number in range(CLIENTS)
        }
    return deployed(method, equal(), folder, nodes=nodes, secure_aggregation=kind, repeats=0, **more)


def letters(ours: Deployment, kind: str, part: str = "") -> list[tuple[str, dict[str, Any], RecordDict]]:
    """Who was asked so, what, and what came back."""
    lobby: Any = ours.lobby
    found = [(client, facts_of(asked), reply) for one, client, asked, reply in lobby.letters if one == kind]
    return [(client, asked, reply) for client, asked, reply in found if asked.get("part", "") == part]


def state(ours: Deployment) -> dict[str, torch.Tensor]:
    return flatten(ours.server.state._asdict())


def apart(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    return max(float((one[path] - other[path]).abs().max()) for path in one if one[path].numel())


@pytest.mark.parametrize("kind", ["unsigned", "signed"])
@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_a_sum_is_the_plain_mean_to_the_error_of_rounding(method: str, kind: str, tmp_path: Path) -> None:
    """The mean of numbers that are each off by half a step at most is off by no more."""
    plain, ours = deployed(method, equal(), tmp_path / "plain"), summed(tmp_path, kind, method)
    for number in (1, 2):
        wanted, found = plain.train_round(), ours.train_round()
        step = masks.Scale(NORM, CLIENTS).step
        assert found["dropped"] == [] and found["clients"] == CLIENTS
        numbers = sum(leaf.numel() for leaf in state(ours).values())
        assert found["told"] == {"train": {"masked": 4 * (numbers + 2) * CLIENTS}}
        assert 0 < apart(state(plain), state(ours)) <= (step / 2 if number == 1 else 100 * step)
        loss = found["diagnostics"]["local_loss"] - wanted["diagnostics"]["local_loss"]
        assert abs(loss) < 100 * step
    assert any("under masks" in note for note in ours.notes) and not any("under masks" in note for note in plain.notes)
    assert {client: int(tree["version"]) for client, tree in ours.now.memory.items()}.keys() == set("0123")


STAGES = ["keys", "shares", "train", "agree", "unmask"]


def silent(stage: str) -> Callable[[str, RecordDict, RecordDict], RecordDict | str]:
    """A client that answers nothing from that message on."""
    over: list[bool] = []

    def fault(kind: str, asked: RecordDict, reply: RecordDict) -> RecordDict | str:
        over.extend([True] * (stage in (kind, facts_of(asked).get("part"))))
        return MUTE if over else reply

    return fault


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_goes_between_two_messages_holds_nobody_up(stage: str, tmp_path: Path) -> None:
    """Its change is in the sum if it came, and not if it did not; the masks that it leaves behind are taken off."""
    plain, ours = deployed("fedavg", equal(), tmp_path / "plain"), summed(tmp_path, "signed", timeout=0.2)
    ours.lobby.faults["3"] = silent(stage)
    in_it = stage in ("agree", "unmask")
    if not in_it:
        plain.lobby.faults["3"] = lambda kind, asked, reply: MUTE if kind == "train" else reply
        plain.engine.rules = plain.engine.rules._replace(timeout=0.2)
    plain.train_round()
    record = ours.train_round()
    assert [one["client"] for one in record["dropped"]] == ["3"]
    assert ("3" in ours.now.memory and int(ours.now.memory["3"]["version"]) > 0) == in_it
    assert apart(state(plain), state(ours)) <= masks.Scale(NORM, CLIENTS).step / 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_round_of_too_few_is_refused_and_changes_nothing(stage: str, tmp_path: Path) -> None:
    ours = summed(tmp_path, "signed", timeout=0.2)
    before = state(ours)
    for client in "01":
        ours.lobby.faults[client] = silent(stage)
    with pytest.raises(RoundError, match=r"no secure sum: 2 of 4 clients gave .*, and 3 are needed: client"):
        ours.train_round()
    assert ours.server.round == 0 and apart(before, state(ours)) == 0


def test_the_server_sees_nothing_of_a_change_but_the_sum(tmp_path: Path) -> None:
    """Masked numbers are uniform bytes; a chi-squared test tells the same numbers without masks from that at once."""
    ours = summed(tmp_path)
    for _ in range(4):
        ours.train_round()
    replies = [reply for _, _, reply in letters(ours, "train")]
    trees = [decode(reply["trees"]["reply"].data) for reply in replies]
    assert all(set(tree) == {"masked"} for tree in trees) and len(trees) == 4 * CLIENTS
    assert all(set(facts_of(reply)) == {"run", "client", "stage", "ask", "remembers"} for reply in replies)
    assert {facts_of(reply)["samples"] for _, _, reply in letters(ours, "query.hello")} == {1}
    seen = np.concatenate([tree["masked"].numpy() for tree in trees])
    assert stats.chisquare(np.bincount(seen.view(np.uint8), minlength=256)).pvalue > 1e-6
    plain = masks.Scale(NORM, CLIENTS).whole(np.random.default_rng(0).standard_normal(len(seen)) / 100)
    assert stats.chisquare(np.bincount(plain.view(np.uint8), minlength=256)).pvalue < 1e-6
    # of the same change under the same name, each round is under masks of its own
    assert not (trees[0]["masked"] == trees[CLIENTS]["masked"]).any()


def changed(part: str, change: Callable[[Any], Any]) -> Callable[[str, RecordDict, RecordDict], RecordDict | str]:
    """A client whose words in that message are others; its masked change is one, too."""

    def fault(kind: str, asked: RecordDict, reply: RecordDict) -> RecordDict | str:
        if kind == part:
            return pack(facts_of(reply), reply=change(decode(reply["trees"]["reply"].data)))
        if facts_of(asked).get("part") == part:
            return pack({name: json.dumps(change(json.loads(word))) for name, word in facts_of(reply).items()})
        return reply

    return fault


def other_digits(words: Any) -> Any:
    return {name: f"{int(word[0], 16) ^ 1:x}{word[1:]}" for name, word in words.items()}


def test_one_that_lies_about_shares_is_left_out_and_two_stop_the_round(tmp_path: Path) -> None:
    plain, ours = deployed("fedavg", equal(), tmp_path / "plain"), summed(tmp_path)
    plain.train_round()
    ours.lobby.faults["2"] = changed("unmask", other_digits)
    ours.train_round()
    assert apart(state(plain), state(ours)) <= masks.Scale(NORM, CLIENTS).step / 2
    ours.lobby.faults["3"] = changed("unmask", other_digits)
    with pytest.raises(RoundError, match="do not fit its keys: somebody changed them"):
        ours.train_round()


def test_a_change_beyond_the_bound_is_noticed_but_not_whose_it_is(tmp_path: Path) -> None:
    ours = summed(tmp_path)
    ours.lobby.faults["2"] = changed("train", lambda tree: {"masked": tree["masked"] ^ (1 << 30)})
    with pytest.raises(RoundError, match="a client lied, and which one a sum does not tell"):
        ours.train_round()


def test_clients_shorten_their_own_changes(tmp_path: Path) -> None:
    ours = summed(tmp_path, sum_norm=0.01)
    before = state(ours)
    record = ours.train_round()
    moved = torch.cat([(state(ours)[path] - before[path]).reshape(-1) for path in before])
    assert 0 < float(moved.norm()) <= 0.01
    assert record["notes"] == ["some clients shorten their changes to norm 0.01"]


def test_a_change_that_is_not_finite_is_told_by_nobody_alone(tmp_path: Path) -> None:
    """Whoever chooses the model chooses for which samples it overflows."""
    ours = summed(tmp_path, clip=0.0)
    data = ours.lobby.federation  # type: ignore[attr-defined]
    usual = data.x.clone()
    data.x[data.roster["2"].rows["train"]] *= 1e307
    record = ours.train_round()
    assert record["dropped"] == [] and record["notes"] == ["some clients shorten their changes to norm 10"]
    told = [set(facts_of(reply)) for _, _, reply in letters(ours, "train")]
    assert told == [told[0]] * CLIENTS and "error" not in told[0]
    data.x.copy_(usual * 1e307)
    with pytest.raises(DivergedError, match="the changes of all clients have NaN or Inf"):
        ours.train_round()


BAD: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "three keys": ("keys", lambda words: words[:3]),
    "a key that is none": ("keys", lambda words: ["00" * 32, *words[1:]]),
    "one key for two things": ("keys", lambda words: [words[1], *words[1:]]),
    "a letter too few": ("shares", lambda words: dict(list(words.items())[1:])),
    "fractions": ("train", lambda tree: {"masked": tree["masked"].double()}),
    "short shares": ("unmask", lambda words: {client: word[:-2] for client, word in words.items()}),
}


@pytest.mark.parametrize("bad", BAD)
def test_words_that_cannot_be_used_are_left_out_by_name(bad: str, tmp_path: Path) -> None:
    ours = summed(tmp_path)
    ours.lobby.faults["1"] = changed(*BAD[bad])
    assert [one["client"] for one in ours.train_round()["dropped"]] == ["1"]


def test_noise_for_whole_clients_goes_onto_the_sum(tmp_path: Path) -> None:
    """With noise that is next to nothing both are the mean of changes that are shortened to dp-clip."""
    private = {"dp_clip": 0.05, "dp_noise": 1e-9}
    plain = deployed("fedavg", equal(), tmp_path / "plain", **private)
    ours = summed(tmp_path, **private)
    plain.train_round(), ours.train_round()
    assert apart(state(plain), state(ours)) <= 10 * masks.Scale(0.05, CLIENTS).step


def test_a_round_that_was_summed_is_not_summed_again_and_the_run_goes_on_after_it(tmp_path: Path) -> None:
    ours = summed(tmp_path)
    mark = ours.mark()
    ours.train_round()
    ours.go_back(mark)  # a server that was killed before it wrote anything down
    with pytest.raises(RoundError, match="has unmasked the sum of round 1 before, and does so once"):
        ours.train_round()
    ours.go_back(mark)
    again = Deployment(read({**ours.lobby.table, "repeats": 1}), ours.lobby, ours.greetings)  # type: ignore[attr-defined]
    record = again.train_round()
    assert record["round"] == 2 and again.server.round == 2 and "summed before" in record["repeated"][0]


@pytest.mark.parametrize(("last", "rounds"), [("train", [1, 2, 3]), ("unmask", [1, 3])])
def test_a_server_that_is_killed_goes_on_with_the_round_or_after_it(
    last: str, rounds: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything was unmasked the round is done again, to the bit; afterwards it is lost."""
    options = {"nodes": CLIENTS, "rounds": 3, "secure_aggregation": "unsigned"}
    served("fedavg", equal(), tmp_path / "a", monkeypatch, out=str(tmp_path / "straight"), **options)

    class Killed(BaseException):
        """No time to tidy up."""

    heard: list[str] = []
    real = Nearby._answer

    def dying(self: Nearby, kind: str, client: str, content: Any) -> Any:
        found, facts = real(self, kind, client, content), facts_of(content)
        if facts.get("stage") == 2 and last in (kind, facts.get("part")):
            heard.append(client)
            if len(heard) == CLIENTS:
                raise Killed
        return found

    monkeypatch.setattr(Nearby, "_answer", dying)
    with pytest.raises(Killed):
        served("fedavg", equal(), tmp_path / "b", monkeypatch, out=str(tmp_path / "run"), **options)
    monkeypatch.setattr(Nearby, "_answer", real)
    served("fedavg", equal(), tmp_path / "b", monkeypatch, out=str(tmp_path / "run"), resume=True, **options)
    one, other = (RunDirectory.open(tmp_path / name) for name in ("straight", "run"))
    assert [record["round"] for record in other.records()] == rounds
    a, b = flatten(one.load("last").state), flatten(other.load("last").state)
    assert all(a[path].equal(b[path]) for path in a) == (last == "train")


Change = Callable[[dict[str, Any]], dict[str, Any]]


def of_json(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda facts: {**facts, name: json.dumps(change(json.loads(facts[name])))}


def with_other_key(client: str) -> Callable[[Any], Any]:
    key = masks.public_key(masks.seed()).hex()
    return lambda adverts: {**adverts, client: [adverts[client][0], key, *adverts[client][2:]]}


def only(*clients: str) -> Callable[[Any], Any]:
    return lambda words: {client: words[client] for client in clients}


SAID: dict[str, tuple[str, str, Change, str]] = {
    "few keys": ("unsigned", "shares", of_json("adverts", only("0", "1")), "sums of at least 3 clients here; this one"),
    "another key for its own": ("unsigned", "shares", of_json("adverts", with_other_key("0")), "its own are not"),
    "one key for two": (
        "unsigned", "shares", of_json("adverts", lambda found: {**found, "1": found["2"]}), "a key of a sum twice",
    ),
    "a key of the server's": (
        "signed", "shares", of_json("adverts", with_other_key("1")), "client 1 that its own list of peers does not",
    ),
    "a client of the server's": (
        "signed", "shares", of_json("adverts", lambda found: {**found, "9": [*["ab" * 32] * 2, "cd" * 32, "00"]}),
        "a key of a sum twice",
    ),
    "a letter that was changed": ("unsigned", "train", of_json("letters", other_digits), "letter from client 1 that"),
    "few letters": ("unsigned", "train", of_json("letters", only("1")), "at least 3 clients here; this one has 2"),
    "to tell it by itself": (
        "unsigned", "train", lambda facts: {n: v for n, v in facts.items() if n not in ("letters", "number")},
        "only in a secure sum, and was asked for it by itself",
    ),
    "to unmask few": ("unsigned", "unmask", of_json("clients", lambda names: names[:2]), "at least 3 clients here"),
    "to unmask strangers": ("unsigned", "unmask", of_json("clients", lambda names: [*names, "9"]), "of others"),
    "to unmask it all the same": ("unsigned", "unmask", of_json("clients", lambda names: names[1:]), "of others"),
    "no signatures": ("signed", "unmask", of_json("signatures", only("0", "1")), "too few of its clients"),
    "to unmask others than it signed for": (
        "signed", "agree", of_json("clients", lambda names: names[:3]), "too few of its clients have signed",
    ),
    "a part that there is not": ("unsigned", "keys", lambda facts: {**facts, "part": "both"}, "that there is not"),
    "a part before its time": (
        "unsigned", "shares", lambda facts: {**facts, "part": "unmask", "clients": "[]"}, "has not begun",
    ),
    "another round in the middle": (
        "unsigned", "unmask", lambda facts: {**facts, "stage": 0}, "has not begun",
    ),
    "words that are none": ("unsigned", "shares", lambda facts: {**facts, "adverts": "{"}, "words that cannot be read"),
    "no round": ("unsigned", "keys", lambda facts: {**facts, "stage": "admission"}, "of no round"),
    "no number": ("unsigned", "keys", lambda facts: {**facts, "number": "7"}, "of no round"),
}  # fmt: skip


def tampering(ours: Deployment, part: str, change: Change, again: bool = False) -> None:
    """A server that says something else to client 0; ``again``: and after having said the right thing."""
    real = ours.engine.exchange

    def exchange(kind: str, contents: Mapping[str, RecordDict], timeout: float) -> Mapping[str, RecordDict | str]:
        facts = facts_of(contents["0"]) if "0" in contents else {}
        if part not in (kind, facts.get("part")):
            return real(kind, contents, timeout)
        if again:
            assert refusal(real(kind, {"0": contents["0"]}, timeout)["0"]) is None
        trees = {name: decode(array.data) for name, array in contents["0"]["trees"].items()}
        return real(kind, {**contents, "0": pack(change(facts), **trees)}, timeout)

    ours.engine.exchange = exchange


@pytest.mark.parametrize("said", SAID)
def test_a_node_refuses_what_would_show_its_change(said: str, tmp_path: Path) -> None:
    kind, part, change, reason = SAID[said]
    ours = summed(tmp_path, kind)
    tampering(ours, part, change)
    (dropped,) = ours.train_round()["dropped"]
    assert dropped["client"] == "0" and reason in dropped["reason"]


@pytest.mark.parametrize("part", STAGES)
def test_a_node_tells_each_part_once(part: str, tmp_path: Path) -> None:
    """So it never unmasks both masks of one client: with another list of who is gone, for instance."""
    ours = summed(tmp_path, "signed")
    tampering(ours, part, lambda facts: facts, again=True)
    (dropped,) = ours.train_round()["dropped"]
    assert dropped["client"] == "0" and ("has told before" in dropped["reason"] or "begun before" in dropped["reason"])
    for _, asked, reply in letters(ours, SUM, "unmask"):
        told = facts_of(reply)
        if "own" in told:
            own, gone = (set(json.loads(told[name])) for name in ("own", "mask"))
            assert own == set(json.loads(asked["clients"])) and not own & gone


def test_a_node_goes_by_its_own_config(tmp_path: Path) -> None:
    ours = summed(tmp_path)
    ours.lobby.node_config["0"]["min-summed"] = 6  # type: ignore[attr-defined]
    (dropped,) = ours.train_round()["dropped"]
    assert dropped["client"] == "0" and "sums of at least 6 clients" in dropped["reason"]


def test_a_node_adds_noise_of_its_own_before_the_mask(tmp_path: Path) -> None:
    plain, ours = deployed("fedavg", equal(), tmp_path / "plain"), summed(tmp_path)
    ours.lobby.node_config["0"] |= {"sample-dp-clip": 1.0, "sample-dp-noise": 1.0}  # type: ignore[attr-defined]
    plain.train_round()
    assert ours.train_round()["dropped"] == []
    assert apart(state(plain), state(ours)) > 1e-3
    assert (tmp_path / "0" / "answers").read_text() == "1"  # counted like all noised answers


@pytest.mark.parametrize(
    ("kind", "own", "reason"),
    [
        ("none", {"min-summed": 3}, "only in a secure sum (its own config), and secure-aggregation is none"),
        ("none", {"peers": "x"}, "only in a secure sum (its own config), and secure-aggregation is none"),
        ("unsigned", {"peers": "x"}, "only in sums whose keys are signed"),
        ("signed", {}, "has no identity or no peers"),
    ],
)
def test_a_node_takes_no_part_where_less_is_hidden_than_it_wants(
    kind: str, own: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    table = table_of("fedavg", equal(), secure_aggregation=kind)
    lobby = Nearby(equal(), table, tmp_path)
    lobby.node_config["0"] |= own
    lobby.refresh()
    assert "0" not in lobby.nodes and any(reason in text for text in lobby.refused)


def test_a_newcomer_signs_nothing_and_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small_federation(sizes=(8,) * 5, unseen=1)
    options = {"nodes": 4, "rounds": 1, "out": str(tmp_path / "run"), "secure_aggregation": "unsigned"}
    lobby = served("fedavg", federation, tmp_path, monkeypatch, **options)
    assert (tmp_path / "nodes" / "4" / lobby.run / "model" / "client-4.safetensors").is_file()
    signed = Nearby(federation, table_of("fedavg", federation, secure_aggregation="signed"), tmp_path / "signed")
    signed.refresh()
    assert set(signed.nodes) == {"4"}  # the others have no identity
    told = signed._answer(SUM, "4", pack({"run": "run", "client": "4", "stage": 1, "number": 1, "part": "keys"}))
    assert isinstance(told, RecordDict) and "which its own config has none of" in str(refusal(told))


@pytest.mark.parametrize("kind", ["unsigned", "signed"])
def test_a_server_with_clients_of_its_own_reads_a_change_unless_keys_are_signed(kind: str, tmp_path: Path) -> None:
    """Why ``unsigned`` is for servers that keep to the protocol: this one tells client 0 keys that it made itself."""
    plain, ours = deployed("fedavg", equal(), tmp_path / "plain"), summed(tmp_path, kind)
    plain.train_round()
    honest = letters(plain, "train")[0][2]
    change = flatten(decode(honest["trees"]["reply"].data)["delta"])
    one, accomplices = pact.Sum(ours.engine.run, 1, 7), ("1", "2")

    def ask(part: str, **facts: str) -> Any:
        told = {"run": one.run, "client": "0", "stage": one.round, "ask": 1, "number": one.number, "part": part}
        return ours.engine.exchange(SUM, {"0": pack({**told, **facts})}, 1.0)["0"]

    seeds = {client: {name: masks.seed() for name in ("seal", "mask", "own")} for client in accomplices}
    adverts = {"0": pact.advert_in(json.loads(facts_of(ask("keys"))["keys"]))}
    for client, made in seeds.items():
        keys = masks.public_key(made["seal"]), masks.public_key(made["mask"]), masks.commitment(made["own"])
        adverts[client] = pact.Advert(*(key.hex() for key in keys))
    answer = ask("shares", adverts=json.dumps(adverts))
    if kind == "signed":
        assert "client 1 that its own list of peers does not bear out" in str(refusal(answer))
        return
    agreement, shares = pact.digest(one, adverts), {}

    def seal(client: str, sender: str, receiver: str) -> tuple[bytes, bytes]:
        key = masks.agreed(
            seeds[client]["seal"], bytes.fromhex(adverts["0"].seal), pact.addressed(agreement, *sorted(["0", client]))
        )
        return key, pact.addressed(agreement, sender, receiver)

    for client, letter in pact.words_in(facts_of(answer)["letters"]).items():
        key, about = seal(client, "0", client)
        shares[int(client)] = masks.opened(key, letter, about)[masks.SEED :]
    sent = {}
    for client in accomplices:
        key, about = seal(client, client, "0")
        sent[client] = masks.sealed(key, bytes(2 * masks.SEED), about)
    session = ours.engine.session(1, ours.now.memory)
    session.asks = 1
    program, message = local_training(ours.server.config), ours.server.send(("0",))
    content = ours.engine.content(
        session.job(program, message.shared, message.mine), "0", 1, number=one.number, letters=pact.as_text(sent)
    )
    reply: Any = ours.engine.exchange("train", {"0": content}, 1.0)["0"]
    total = decode(reply["trees"]["reply"].data)["masked"].numpy().view(np.uint32)
    told = facts_of(ask("unmask", clients=json.dumps(["0", "1", "2"])))
    shares[0] = pact.words_in(told["own"])["0"]
    total = total - masks.mask(masks.derived(masks.joined(shares), agreement), len(total))
    for client in accomplices:
        pair = pact.paired(agreement, "0", client)
        total -= masks.mask(masks.agreed(seeds[client]["mask"], bytes.fromhex(adverts["0"].mask), pair), len(total))
    seen = masks.Scale(NORM, 3).numbers(total)[:-2]
    wanted = np.concatenate([change[path].numpy().reshape(-1) for path in sorted(change)])
    assert np.abs(seen - wanted).max() <= masks.Scale(NORM, 3).step / 2


def test_a_node_is_who_its_key_says(tmp_path: Path) -> None:
    ours = summed(tmp_path, "signed")
    ours.lobby.node_config["0"]["identity"] = ours.lobby.node_config["1"]["identity"]  # type: ignore[attr-defined]
    (dropped,) = ours.train_round()["dropped"]
    assert dropped["client"] == "0" and "whose key among its peers' is not its own" in dropped["reason"]
    assert pact.threshold(3) == 3 and pact.threshold(4) == 3 and pact.threshold(9) == 7


@pytest.mark.parametrize(
    ("method", "more", "told"),
    [
        ("pfedhn", {}, 'pFedHN needs individual replies.*"only means"'),
        ("scaffold", {}, "SCAFFOLD needs individual replies"),
        ("fedavg", {"aggregate": "median"}, "aggregate needs individual replies"),
        ("fedavg", {"adapt": "prior"}, "adapt prior needs individual replies"),
        ("fedavg", {"dp_clip": 1.0, "dp_noise": 1.0, "dp_quantile": 0.5}, "dp-quantile needs individual replies"),
        ("fedavg", {"dp_clip": 1.0, "dp_noise": 1.0, "sampling": "poisson"}, "Set sampling to fixed"),
        ("fedavg", {"sample_dp_clip": 1.0, "sample_dp_noise": 1.0}, "by how many samples each client has"),
    ],
)
def test_what_needs_single_replies_is_refused_by_name(method: str, more: dict[str, Any], told: str) -> None:
    with pytest.raises(NeedsError, match=told):
        read(table_of(method, equal(), secure_aggregation="unsigned", **more))


@pytest.mark.parametrize("method", ["fedavg_ft", "fedbabu"])
def test_clients_that_tune_for_themselves_say_no_more_than_that_they_did(method: str, tmp_path: Path) -> None:
    plain, ours = deployed(method, equal(), tmp_path / "plain"), summed(tmp_path, method=method)
    plain.train_round(), ours.train_round()
    wanted, found = plain.evaluation(), ours.evaluation()
    assert found.dropped == [] and found.metrics == pytest.approx(wanted.metrics)
    tuned = [reply for _, asked, reply in letters(ours, "train") if asked["program"] == "tune"]
    trees = [decode(reply["trees"]["reply"].data) for reply in tuned]
    assert len(trees) == CLIENTS
    assert all({name: float(leaf) for name, leaf in tree.items()} == {"num_samples": 1, "loss": 0} for tree in trees)


def test_running_statistics_are_no_part_of_a_sum(tmp_path: Path) -> None:
    ours = summed(tmp_path, batchnorm="averaged")
    with pytest.raises(NeedsError, match=r"reply with buffers here.*set batchnorm to local"):
        ours.train_round()


def test_a_trial_of_signed_sums_needs_keys(tmp_path: Path) -> None:
    given = {**about(Trial()), "secure_aggregation": "signed"}
    write_app(tmp_path / "app", "fedavg", given, {"dataset": "digits"})
    with pytest.raises(ConfigError, match=r"signed, and nodes have no keys without --tls"):
        local(app_in(tmp_path / "app"), 3, 0, Quiet())


def test_every_method_says_whether_it_can_be_summed() -> None:
    for name in algorithms.names():
        method = algorithms.get(name)
        assert ("individual replies" in _needs(method)) == (not method.means)
