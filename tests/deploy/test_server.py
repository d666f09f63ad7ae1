# SPDX-License-Identifier: Apache-2.0
"""The server's side: who joins, who is admitted, what a checkpoint brings back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from flwr.app import RecordDict

from conftest import few, models_for, server_data_like, small_federation
from deploy.nearby import Nearby, deployed, table_of
from fedloom import algorithms, api
from fedloom.core.errors import ConfigError, NeedsError, RoundError, RunError
from fedloom.core.tensors import read_with_metadata
from fedloom.core.trees import PerClient, flatten
from fedloom.core.wire import decode
from fedloom.deploy import deployment, server, waiting
from fedloom.deploy.codec import facts_of, pack
from fedloom.deploy.deployment import Deployment
from fedloom.deploy.engine import Rules
from fedloom.deploy.options import read
from fedloom.deploy.roster import grown, in_order
from fedloom.engines.memories import Memories
from fedloom.models.load import load_model
from fedloom.models.size_only import SizeOnly
from fedloom.privacy.ledger import releases_of
from fedloom.programs.labels import label_shares
from fedloom.progress import Quiet, display
from fedloom.runs.directory import PRIVACY, RunDirectory
from fedloom.training.account import Account
from fedloom.training.config import flat_config
from fedloom.training.server import Server

SMALL = ("mlp:hidden=5", "lenet:kernels=2")


def test_an_error_of_the_server_is_one_line_and_reaches_flower(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise RunError("The run is in use.")

    monkeypatch.setattr(server, "read", lambda table: table)
    monkeypatch.setattr(server, "serve", fails)
    with pytest.raises(RunError):  # an exception: after sys.exit, Flower drops the line below
        server.server_app()(grid=None, context=SimpleNamespace(run_config={}))  # type: ignore[arg-type]
    assert "fedloom: The run is in use.\n" in capsys.readouterr().err


def test_clients_are_ordered_by_name_and_numbers_by_value() -> None:
    assert in_order(["10", "2", "b", "a10", "a9", "1"]) == ["1", "2", "10", "a9", "a10", "b"]
    assert in_order(["1", "01"]) == in_order(["01", "1"]) == ["01", "1"]


def test_a_state_grows_by_rows_and_by_pieces() -> None:
    old = {"table": torch.ones(2, 3), "loom": torch.ones(4)}
    fresh = {"table": torch.zeros(3, 3), "loom": torch.zeros(4), "head": {"new": torch.zeros(1)}}
    found = grown(old, fresh, 2, 3)
    assert found is not None
    assert found["table"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert found["loom"].tolist() == [1] * 4 and found["head"]["new"].tolist() == [0]
    assert grown(old, {**fresh, "table": torch.zeros(3, 4)}, 2, 3) is None
    assert grown({**old, "gone": torch.ones(1)}, fresh, 2, 3) is None


def late(method: str, folder: Path, **changes: Any) -> Any:
    """Four clients after a round, and a fifth that comes then."""
    federation = small_federation(models_for(algorithms.get(method), *SMALL))
    gd = {"global_model": "mlp:hidden=5"} if method == "mh_pfedhn_gd" else {}
    own = server_data_like(federation)
    np.savez(folder / "server.npz", x=own.x.float().numpy(), y=own.y.numpy())
    needed = {} if algorithms.get(method).needs.server_data == "none" else {"server_data": str(folder / "server.npz")}
    table = table_of(method, federation, **few(algorithms.get(method)), **gd, **needed, **changes)
    lobby = Nearby(federation, table, folder)
    lobby.disconnect("4")
    lobby.refresh()
    ours = Deployment(read(table), lobby, [lobby.greetings[client] for client in ("0", "1", "2", "3")])
    ours.train_round()
    lobby.connect("4")
    return ours


@pytest.mark.parametrize("method", algorithms.names())
def test_a_client_that_joins_takes_part_in_the_next_round(method: str, tmp_path: Path) -> None:
    ours = late(method, tmp_path, **({"embed_dim": 4} if hasattr(algorithms.get(method).config, "embed_dim") else {}))
    before = flatten(ours.server.state._asdict())
    ours.look()
    if "4" not in ours.server.setup.clients:  # a state that is not one row for each client has no room
        joined = replace(
            ours.server.setup, clients=tuple("01234"), models=dict.fromkeys("01234", ours.server.setup.models["0"])
        )
        fresh = algorithms.get(method).init(joined)
        assert grown(ours.server.state._asdict(), fresh._asdict(), 4, 5) is None
        return
    assert ours.server.setup.clients == ("0", "1", "2", "3", "4")
    after = flatten(ours.server.state._asdict())
    for path, leaf in before.items():  # what was learned is as it was
        assert after[path][: len(leaf)].equal(leaf) if leaf.ndim else after[path].equal(leaf)
    record = ours.train_round()
    assert record["clients"] == 5 and record["dropped"] == []
    assert ours.evaluate("test").keys() == {"0", "1", "2", "3", "4"}


def test_a_round_that_fails_takes_the_clients_that_joined_back_out(tmp_path: Path, monkeypatch: Any) -> None:
    """A checkpoint of the round before must name the clients of that round."""
    monkeypatch.setattr(waiting, "PAUSE", 0.0)
    ours = late("pfedhn", tmp_path, embed_dim=2, repeats=0)
    mark = ours.mark()
    ours.lobby.faults = {client: lambda *_: "did not answer" for client in "0123"}
    real = ours.lobby.exchange
    ours.lobby.exchange = ours.engine.exchange = lambda kind, contents, timeout: dict.fromkeys(contents, "is gone")
    with pytest.raises(RoundError):
        ours.train_round()
    assert len(ours.server.state.embeddings) == 5
    ours.go_back(mark)
    assert (
        len(ours.server.state.embeddings)
        == len(ours.server.setup.clients)
        == len(ours.meta()["deployment"]["roster"])
        == 4
    )
    ours.lobby.exchange = ours.engine.exchange = real
    ours.lobby.faults = {}
    assert ours.train_round()["clients"] == 5


def test_a_client_for_whom_the_method_has_no_room_is_a_newcomer(tmp_path: Path) -> None:
    """Embeddings of size 1 + clients // 4 are of size 1 for three clients and 2 for four."""
    federation = small_federation(["mlp:hidden=5"])
    table = table_of("pfedhn", federation)
    lobby = Nearby(federation, table, tmp_path)
    for client in ("3", "4"):
        lobby.disconnect(client)
    lobby.refresh()
    ours = Deployment(read(table), lobby, [lobby.greetings[client] for client in ("0", "1", "2")])
    lobby.connect("3")
    ours.look()
    assert ours.server.setup.clients == ("0", "1", "2") and ours.newcomers == ("3",)


def served(method: str, federation: Any, folder: Path, monkeypatch: Any, faults: Any = None, **changes: Any) -> Nearby:
    """A whole run through ``serve``; gives the network with all that crossed it."""
    table = table_of(method, federation, **changes)
    lobby = Nearby(federation, table, folder / "nodes")
    lobby.faults = faults or {}

    def nearby(grid: Any, options: Any, run: str) -> Nearby:
        lobby.run = run
        return lobby

    monkeypatch.setattr(server, "lobby_of", nearby)
    monkeypatch.setattr(waiting, "PAUSE", 0.0)
    server.serve(SimpleNamespace(), read(table), display("quiet"))
    return lobby


def test_a_run_over_the_network_leaves_what_a_simulated_run_leaves(tmp_path: Path, monkeypatch: Any) -> None:
    federation = small_federation(["mlp:hidden=5"], unseen=1)
    out = tmp_path / "run"
    lobby = served("it_pfl_hn", federation, tmp_path, monkeypatch, out=str(out), nodes=4, rounds=3, finetune_after=2)
    directory = RunDirectory.open(out)
    summary = directory.summary()
    assert summary is not None and summary["finished"] and summary["rounds"] == 3 and summary["engine"] == "flower"
    assert set(summary["clients"]) == {"0", "1", "2", "3"}
    assert "deployed/unseen/test/accuracy" in summary["unseen"]
    assert [record["round"] for record in directory.records()] == [1, 2, 3]
    assert directory.checkpoints() == [2, 3]
    assert directory.config["method"] == "it_pfl_hn"
    for client in federation.roster:  # everybody has its model, the newcomer too
        assert (tmp_path / "nodes" / client / lobby.run / "model" / f"client-{client}.safetensors").is_file()
    from fedloom.reports.compare import compare

    assert [len(row.seeds) for row in compare([out]).rows] == [1]


def test_a_run_whose_server_knows_sizes_only_becomes_a_bundle(tmp_path: Path, monkeypatch: Any) -> None:
    """A participant gets what was sent to it, and a newcomer says which network it has."""
    from fedloom.serving.bundle import Bundle, make_bundle
    from fedloom.serving.card import as_markdown
    from fedloom.serving.weaver import Weaver
    from fedloom.training.admission import admitted

    federation = small_federation(SMALL)
    served("mh_pfedhn", federation, tmp_path, monkeypatch, out=str(tmp_path / "run"), rounds=1, admit_rounds=2)
    run = api.load(tmp_path / "run")
    bundle = Bundle(make_bundle(run))
    bundle.check()
    sent = flatten(run.server.algorithm.send(run.server.setup, run.server.state, ["1"]).mine["1"])
    given = bundle.given("1")
    found = flatten(given.sent["mine"])
    assert given.missing == ("network",) and found.keys() == sent.keys()
    assert all(torch.equal(found[name], sent[name]) for name in sent)
    tensors, metadata = read_with_metadata(Weaver(bundle).participant("1"))
    assert metadata["form"] == "sent" and metadata["missing"] == "network" and tensors
    assert "networks that only their clients know" in as_markdown(bundle.card, bundle.digest)
    with pytest.raises(NeedsError, match="name the newcomer's network: --model"):
        admitted(bundle.newcomers, federation.x[:9], federation.y[:9])
    newcomer = admitted(bundle.newcomers, federation.x[:9], federation.y[:9], "mlp:hidden=5")
    assert newcomer.home.model.size == federation.roster["0"].model.size


def test_a_private_run_has_secret_noise_and_accounts_for_every_round(tmp_path: Path, monkeypatch: Any) -> None:
    federation = small_federation(["mlp:hidden=5"])
    private = {"dp_noise": 1.0, "dp_clip": 0.5, "sampling": "poisson", "cohort": 3, "nodes": 5, "rounds": 3}
    outs = [tmp_path / name for name in ("one", "other")]
    for out in outs:
        served("fedavg", federation, out, monkeypatch, out=str(out / "run"), **private)
    directories = [RunDirectory.open(out / "run") for out in outs]
    lines = [directory.lines(PRIVACY) for directory in directories]
    assert [line["round"] for line in lines[0]] == [1, 2, 3]
    assert len({line["draw"] for line in [*lines[0], *lines[1]]}) == 6 and lines[0][0]["clients"] == 5
    one, other = (flatten(directory.load("last").state) for directory in directories)
    assert not any(torch.equal(one[name], other[name]) for name in one if name.startswith("params"))


def test_a_rule_for_liars_works_over_the_network(tmp_path: Path, monkeypatch: Any) -> None:
    federation = small_federation(["mlp:hidden=5"])
    out = tmp_path / "run"
    served("fedavg", federation, tmp_path, monkeypatch, out=str(out), nodes=5, rounds=2, cohort=5, aggregate="krum:1")
    kept = RunDirectory.open(out).records()[-1]["tables"]["kept"]
    assert sum(row[0] for row in kept["values"]) == 1 and len(kept["client"]) == 5


def test_a_newcomer_sends_its_descriptor_and_nothing_else(tmp_path: Path, monkeypatch: Any) -> None:
    federation = small_federation(["mlp:hidden=5"], unseen=1)
    private = {"descriptor_epsilon": 1.0, "finetune_after": 1}
    lobby = served(
        "it_pfl_hn", federation, tmp_path, monkeypatch, out=str(tmp_path / "run"), nodes=4, rounds=2, **private
    )
    own = [(kind, asked, reply) for kind, client, asked, reply in lobby.letters if client == "4"]
    programs = {facts_of(asked).get("program", "")[:40] for kind, asked, _ in own if kind == "train"}
    assert any("describe_privately" in name for name in programs)
    sent = {path for kind, _, reply in own if kind == "train" for path in flatten(decode(reply["trees"]["reply"].data))}
    # the scores are of the newcomer's own test data, which only a trial has
    assert sent == {"descriptor", "loss", "metric", "samples"}
    got = {
        path.split("/")[0] for kind, asked, _ in own for a in dict(asked["trees"]).values() for path in decode(a.data)
    }
    assert got == {"encoder", "params"}


def test_a_newcomer_of_an_adapted_model_only_downloads(tmp_path: Path, monkeypatch: Any) -> None:
    federation = small_federation(["mlp:hidden=5"], unseen=1)
    for split in ("val", "test"):
        federation.roster["4"].rows[split] = federation.roster["4"].rows[split][:0]
    lobby = served(
        "fedavg", federation, tmp_path, monkeypatch, out=str(tmp_path / "run"), nodes=4, rounds=1, adapt="prior"
    )
    own = [reply for kind, client, _, reply in lobby.letters if client == "4" and kind == "train"]
    assert own and all(flatten(decode(reply["trees"]["reply"].data)) == {} for reply in own)
    assert (tmp_path / "nodes" / "4" / lobby.run / "model" / "client-4.safetensors").is_file()


def test_newcomers_that_come_after_the_run_are_admitted_with_its_best_checkpoint(
    tmp_path: Path, monkeypatch: Any
) -> None:
    federation = small_federation(["mlp:hidden=5"], unseen=1)
    out = tmp_path / "run"
    real = Nearby.connect
    monkeypatch.setattr(Nearby, "connect", lambda self, client, **k: None if client == "4" else real(self, client, **k))
    private = {"out": str(out), "finetune_after": 1, "descriptor_epsilon": 1.0}
    served("it_pfl_hn", federation, tmp_path, monkeypatch, nodes=4, rounds=2, **private)
    before = (out / "summary.json").read_bytes()
    assert RunDirectory.open(out).lines(PRIVACY) == []
    monkeypatch.setattr(Nearby, "connect", real)
    lobby = served("it_pfl_hn", federation, tmp_path, monkeypatch, admit=True, **private)
    assert [one.who for one in releases_of(RunDirectory.open(out).lines(PRIVACY))] == [("4",)]
    assert (tmp_path / "nodes" / "4" / lobby.run / "model" / "client-4.safetensors").is_file()
    assert (out / "summary.json").read_bytes() == before
    assert {client for kind, client, _, _ in lobby.letters if kind != "query.hello"} == {"4"}


@pytest.mark.parametrize("method", ["pfedhn", "scaffold"])
def test_a_server_that_is_killed_goes_on_with_the_bits_of_never_stopping(
    method: str, tmp_path: Path, monkeypatch: Any
) -> None:
    federation = small_federation(["mlp:hidden=5"])
    options = {"nodes": 5, "rounds": 4, "cohort": 3}
    served(method, federation, tmp_path / "a", monkeypatch, out=str(tmp_path / "straight"), **options)

    class Killed(BaseException):
        """No time to tidy up."""

    asked: list[int] = []
    real = Nearby._answer

    def dying(self: Nearby, kind: str, client: str, content: Any) -> Any:
        found = real(self, kind, client, content)
        asked.append(1) if kind == "train" and facts_of(content)["stage"] == 3 else None
        if len(asked) == 2:  # in mid-round: two clients have trained and remembered
            raise Killed
        return found

    monkeypatch.setattr(Nearby, "_answer", dying)
    with pytest.raises(Killed):
        served(method, federation, tmp_path / "b", monkeypatch, out=str(tmp_path / "run"), **options)
    monkeypatch.setattr(Nearby, "_answer", real)
    assert RunDirectory.open(tmp_path / "run").checkpoints()[-1] == 2
    served(method, federation, tmp_path / "b", monkeypatch, out=str(tmp_path / "run"), resume=True, **options)
    one, other = (RunDirectory.open(tmp_path / name).load("last") for name in ("straight", "run"))
    a, b = flatten(one.state), flatten(other.state)
    assert all(a[path].equal(b[path]) for path in a) and one.round == other.round == 4


def test_a_state_from_which_no_round_begins_is_not_kept_and_the_run_goes_on_before_it(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """SCAFFOLD: clients must still have the memories of the checkpoint before the last one."""
    federation, options = small_federation(["mlp:hidden=5"]), {"nodes": 5, "rounds": 4, "repeats": 0}
    served("scaffold", federation, tmp_path / "a", monkeypatch, out=str(tmp_path / "straight"), **options)

    def unsound(kind: str, asked: RecordDict, reply: RecordDict) -> RecordDict | str:
        in_round_3 = kind == "train" and facts_of(asked)["stage"] == 3
        return "would keep NaN or Inf in its memory" if in_round_3 else reply

    told = "No client of 5 gave .* from the checkpoint of round 2, so it was removed; that of round 1 is intact"
    with pytest.raises(RoundError, match=told):
        faults = dict.fromkeys("01234", unsound)
        served("scaffold", federation, tmp_path / "b", monkeypatch, faults, out=str(tmp_path / "run"), **options)
    directory = RunDirectory.open(tmp_path / "run")
    assert directory.checkpoints()[-1] == 1 and [record["round"] for record in directory.records()] == [1]
    served("scaffold", federation, tmp_path / "b", monkeypatch, out=str(tmp_path / "run"), resume=True, **options)
    one, other = (RunDirectory.open(tmp_path / name).load("last") for name in ("straight", "run"))
    a, b = flatten(one.state), flatten(other.state)
    assert all(a[path].equal(b[path]) for path in a) and one.round == other.round == 4


def away(kind: str, asked: RecordDict, reply: RecordDict) -> RecordDict | str:
    return "did not answer" if kind == "train" and facts_of(asked)["stage"] == 3 else reply


@pytest.mark.parametrize("absent", ["01234", "0123"])
def test_a_round_that_too_few_answer_removes_no_checkpoint(absent: str, tmp_path: Path, monkeypatch: Any) -> None:
    federation, options = small_federation(["mlp:hidden=5"]), {"nodes": 5, "rounds": 4, "repeats": 0, "quorum": 0.5}
    with pytest.raises(RoundError, match="The last checkpoint is intact"):
        faults = dict.fromkeys(absent, away)
        served("scaffold", federation, tmp_path / "a", monkeypatch, faults, out=str(tmp_path / "run"), **options)
    directory = RunDirectory.open(tmp_path / "run")
    assert directory.checkpoints()[-1] == 2 and [record["round"] for record in directory.records()] == [1, 2]


def test_a_run_that_came_to_no_checkpoint_cannot_go_on_and_says_what_to_do(tmp_path: Path, monkeypatch: Any) -> None:
    federation, out = small_federation(["mlp:hidden=5"]), tmp_path / "run"
    with pytest.raises(RunError, match=r"There is no run in .* leave resume out to begin one"):
        served("fedavg", federation, tmp_path, monkeypatch, out=str(out), nodes=5, resume=True)
    RunDirectory.create(out, {"method": "fedavg"})
    with pytest.raises(RunError, match="stopped before its first checkpoint; remove it, and leave resume out"):
        served("fedavg", federation, tmp_path, monkeypatch, out=str(out), nodes=5, resume=True)


class Watch(Quiet):
    """A display that keeps what is waited for."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def wait(self, text: str) -> None:
        self.waited.append(text)


def test_what_the_server_waits_for_is_shown_with_how_many_are_there(tmp_path: Path, monkeypatch: Any) -> None:
    federation = small_federation(["mlp:hidden=5"])
    table = table_of("fedavg", federation, out=str(tmp_path / "run"), nodes=5, rounds=2, wait=60.0, quorum=0.5)
    lobby, watch, looks = Nearby(federation, table, tmp_path / "nodes"), Watch(), []
    for client in "01234":
        lobby.disconnect(client)
    mute: list[int] = []

    def pause(seconds: float) -> None:
        """While the server waits, one more comes, until all are there; those of round 2 are lost, and come again."""
        looks.append(seconds)
        absent = [client for client in "01234" if client not in lobby.clients.values()]
        if absent:
            lobby.connect(absent[0], node=1000 + len(looks))

    class Losing(Watch):
        def update(self, record: Any) -> None:
            if record["round"] == 1:
                for client in "0123":
                    lobby.disconnect(client)
                lobby.faults = dict.fromkeys("124", once)

    def once(kind: str, asked: RecordDict, reply: RecordDict) -> RecordDict | str:
        mute.append(1) if kind == "train" else None
        return "did not answer" if kind == "train" and len(mute) < 3 else reply

    watch = Losing()
    monkeypatch.setattr(server, "lobby_of", lambda *_: lobby)
    for module in (waiting, deployment):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=pause))
    server.serve(SimpleNamespace(), read(table), watch)
    *before, one, two, again = watch.waited
    assert before == [
        "for 5 clients; none is connected",
        "for 5 clients; 1 is connected",
        *(f"for 5 clients; {number} are connected" for number in (2, 3, 4)),
    ]
    assert one == "for 3 clients in round 2; 1 is connected" and two == "for 3 clients in round 2; 2 are connected"
    assert again.startswith("2 seconds, then does round 2 again: 1 of 3 clients gave a usable reply to")
    (_, record) = RunDirectory.open(tmp_path / "run").records()
    assert len(record["repeated"]) == 1


def test_too_few_clients_stop_a_run_before_it_begins(tmp_path: Path, monkeypatch: Any) -> None:
    federation = small_federation(["mlp:hidden=5"])
    with pytest.raises(RoundError, match="5 clients are connected, and 6 are needed"):
        served("fedavg", federation, tmp_path, monkeypatch, out=str(tmp_path / "run"), nodes=6)


def test_a_server_of_mh_pfedhn_knows_sizes_only(tmp_path: Path) -> None:
    ours = deployed("mh_pfedhn", small_federation(SMALL), tmp_path)
    assert all(isinstance(model, SizeOnly) for model in ours.server.setup.models.values())
    with pytest.raises(NeedsError, match="only how many parameters"):
        ours.server.setup.models["0"].shapes  # noqa: B018
    with pytest.raises(NeedsError, match="--global-model"):
        deployed("mh_pfedhn_gd", small_federation(SMALL), tmp_path / "gd").train_round()


@pytest.mark.parametrize(
    ("model", "networks", "reason"),
    [
        ("testnets:Normed", "", "the network testnets:Normed, which the app does not list"),
        ("mlp:hidden=5", "", None),
    ],
)
def test_a_network_that_the_app_does_not_list_is_not_imported(
    model: str, networks: str, reason: str | None, tmp_path: Path
) -> None:
    federation = small_federation([model])
    lobby = Nearby(federation, table_of("fedavg", federation, networks=networks), tmp_path)
    lobby.refresh()
    assert all(reason in text for text in lobby.refused) if reason else not lobby.refused
    assert len(lobby.nodes) == (0 if reason else 5)


def greets(**facts: Any) -> Any:
    """A client whose greeting says this instead; None: nothing."""

    def changed(kind: str, asked: RecordDict, reply: RecordDict) -> RecordDict:
        told = {**dict(reply["facts"]), **facts}
        return pack({n: v for n, v in told.items() if v is not None}) if kind == "query.hello" else reply

    return changed


LIES = {
    "deep": ("pfedhn", {"model": "[" * 200_000}, "node 114 sent a greeting that cannot be read"),
    "deep, not long": ("pfedhn", {"model": "[" * 9_999}, "node 114 sent a greeting that cannot be read"),
    "none": ("pfedhn", {"model": None}, "the method needs to be told its network"),
    "wide": ("pfedhn", {"model": '["mlp", [["hidden", 100000000000]]]'}, "it has more than 20,000,000 parameters"),
    "deep network": (
        "pfedhn",
        {"model": '["vit", [["depth", 1000000000], ["patch", 2]]]'},
        "vit takes a depth of at most",
    ),
    "thin network": ("pfedhn", {"model": f'["mlp", [["hidden", {[1] * 3000}]]]'}, "it has more than 5,000 tensors"),
    "own network": ("fedavg", {"model": '["testnets:Endless", [["layers", 1000000000]]]'}, "more than 5,000 tensors"),
    "large": ("mh_pfedhn", {"size": 10**10}, "it has 10,000,000,000 parameters; expected 1 to 20,000,000"),
    "empty": ("mh_pfedhn", {"size": 0}, "it has 0 parameters"),
    "another": ("fedavg", {"model": '["mlp", [["hidden", 7]]]'}, "client 2 has another network than the others"),
    "terminal": ("fedavg", {"error": "\x1b[2J\nfine"}, "node 114  [2J fine"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_client_that_cannot_be_served_is_refused_by_name_and_the_run_goes_on(
    lie: str, tmp_path: Path, monkeypatch: Any
) -> None:
    method, facts, reason = LIES[lie]
    federation, out = small_federation(["mlp:hidden=5"]), tmp_path / "run"
    served(method, federation, tmp_path, monkeypatch, {"2": greets(**facts)}, out=str(out), nodes=4, rounds=1)
    (record,) = RunDirectory.open(out).records()
    assert record["clients"] == 4 and len(record["refused"]) == 1 and reason in record["refused"][0]
    with pytest.raises(RoundError, match=r"4 clients .*are connected, and 5 are needed"):
        served(
            method, federation, tmp_path / "b", monkeypatch, {"2": greets(**facts)}, out=str(tmp_path / "c"), nodes=5
        )


@pytest.mark.parametrize("method", ["fedavg", "pfedhn"])
def test_a_late_client_that_cannot_be_served_is_refused_and_the_round_goes_on(
    method: str, tmp_path: Path, monkeypatch: Any
) -> None:
    federation = small_federation(["mlp:hidden=5"])
    table = table_of(method, federation, **({"embed_dim": 4} if method == "pfedhn" else {}))
    lobby = Nearby(federation, table, tmp_path)
    lobby.disconnect("4")
    lobby.refresh()
    ours = Deployment(read(table), lobby, [lobby.greetings[client] for client in ("0", "1", "2", "3")])
    lobby.connect("4")
    if method == "fedavg":
        lobby.faults["4"] = greets(model='["mlp", [["hidden", 7]]]')
    else:
        monkeypatch.setattr(ours, "_grown", lambda greetings: torch.empty(1 << 60))
    record = ours.train_round()
    reason = waiting.OTHER_NETWORK if method == "fedavg" else "cannot be taken in (RuntimeError)"
    assert record["refused"] == [f"client 4 {reason}"] and record["clients"] == 4 and len(ours.greetings) == 4


def test_seven_of_25_are_28_percent(tmp_path: Path) -> None:
    assert 7 < 0.28 * 25  # as numbers of the machine go
    engine = deployed("fedavg", small_federation(["mlp:hidden=5"]), tmp_path).engine
    engine.rules = Rules(1.0, 0.28)
    for number, counts in ((7, True), (6, False)):
        replies = PerClient.empty([str(i) for i in range(number)])
        with nullcontext() if counts else pytest.raises(RoundError, match="fewer than the quorum"):
            engine.check_enough(engine.session(1, Memories()), label_shares(), 25, replies)


def sums(**changes: float) -> Any:
    """A client that lies about its evaluation."""

    def changed(kind: str, asked: RecordDict, reply: RecordDict) -> RecordDict:
        if kind != "train" or not facts_of(asked)["program"].startswith("evaluate."):
            return reply
        tree = decode(reply["trees"]["reply"].data)
        told = {name: torch.full_like(tree[name], value) for name, value in changes.items()}
        return pack(dict(reply["facts"]), reply={**tree, **told})

    return changed


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"samples": 0.0}, "says that it tried 0 samples"),
        ({"samples": 2.5}, "says that it tried 2.5 samples"),
        ({"metric": 1e9}, "says that 1e+09 of"),
        ({"metric": -1.0}, "says that -1 of"),
        ({"loss": float("nan")}, "NaN or Inf"),
    ],
)
def test_a_client_that_lies_about_its_score_has_the_worst_and_is_recorded(
    lie: dict[str, float], reason: str, tmp_path: Path, monkeypatch: Any
) -> None:
    federation, out = small_federation(["mlp:hidden=5"]), tmp_path / "run"
    served("fedavg", federation, tmp_path, monkeypatch, {"2": sums(**lie)}, out=str(out), nodes=5, rounds=1)
    directory = RunDirectory.open(out)
    summary, (record,) = directory.summary(), directory.records()
    assert summary is not None and summary["clients"]["2"]["metric"] == 0.0
    assert summary["clients"]["2"]["samples"] == 1 and summary["clients"]["0"]["samples"] > 1
    assert {d["client"] for d in record["dropped"]} == {"2"} and reason in record["dropped"][0]["reason"]
    assert {d["program"] for d in record["dropped"]} == {"evaluate.val", "evaluate.test"}


@pytest.mark.parametrize(
    ("stage", "programs", "options"),
    [
        ("evaluation", {"evaluate.val", "evaluate.test"}, {}),
        ("settling", {"label_shares"}, {"adapt": "prior"}),
    ],
)
def test_an_evaluation_that_nobody_answers_is_recorded_and_the_run_goes_on(
    stage: str, programs: set[str], options: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    federation, out = small_federation(["mlp:hidden=5"]), tmp_path / "run"

    def mute(kind: str, asked: RecordDict, reply: RecordDict) -> RecordDict | str:
        facts = facts_of(asked) if kind == "train" else {"stage": ""}
        return "did not answer" if facts["stage"] == f"{stage} after round 1" else reply

    faults = dict.fromkeys("01234", mute)
    options |= {"out": str(out), "nodes": 5, "rounds": 2, "eval_every": 1}
    served("fedavg", federation, tmp_path, monkeypatch, faults, **options)
    directory = RunDirectory.open(out)
    one, two = directory.records()
    assert {(d["client"], d["program"]) for d in one["dropped"]} == {(c, p) for c in "01234" for p in programs}
    name = "deployed/participants/test/accuracy"
    assert (one["metrics"][name] == 0.0) == (stage == "evaluation")
    assert two["dropped"] == [] and two["metrics"][name] > 0
    summary = directory.summary()
    assert summary is not None and summary["finished"] and summary["best"]["round"] >= 1


def delivery(out: Path) -> Any:
    return json.loads((out / "delivery.json").read_text())


def test_a_newcomer_that_does_not_fit_keeps_no_model_from_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    federation, out = small_federation(["mlp:hidden=5"], unseen=2), tmp_path / "run"
    other = {"4": greets(model='["mlp", [["hidden", 7]]]')}
    served("fedavg", federation, tmp_path, monkeypatch, other, out=str(out), nodes=3, rounds=1, adapt="prior")
    assert delivery(out) == {"delivered": ["0", "1", "2", "3"], "failed": {}}
    (record,) = RunDirectory.open(out).records()
    assert record["refused"] == [f"client 4 {waiting.OTHER_NETWORK}"]


def silent(*kinds: str) -> Any:
    return lambda kind, asked, reply: "did not answer" if kind in kinds else reply


@pytest.mark.parametrize("number", [1, 2])
def test_a_newcomer_that_is_silent_keeps_no_model_from_the_others(
    number: int, tmp_path: Path, monkeypatch: Any
) -> None:
    federation, out = small_federation(["mlp:hidden=5"], unseen=number), tmp_path / "run"
    quiet, there = {"4": silent("train")}, [str(i) for i in range(4)]
    options = {"out": str(out), "finetune_after": 1}
    served("it_pfl_hn", federation, tmp_path, monkeypatch, quiet, nodes=5 - number, rounds=2, **options)
    found = delivery(out)
    assert sorted(found["delivered"]) == there and set(found["failed"]) == {"4"}
    assert "did not answer" in found["failed"]["4"]
    summary = RunDirectory.open(out).summary()
    assert summary is not None and summary["finished"]
    with nullcontext() if number == 2 else pytest.raises(RoundError, match="No newcomer got a model: 4 could not be"):
        served("it_pfl_hn", federation, tmp_path, monkeypatch, quiet, admit=True, **options)
    assert delivery(out)["delivered"] == there[5 - number :] and set(delivery(out)["failed"]) == {"4"}


def test_an_admission_that_fails_for_all_at_once_is_tried_one_by_one(tmp_path: Path, monkeypatch: Any) -> None:
    real = Server.admit

    def fails(self: Any, session: Any, newcomers: Any) -> Any:
        if "4" in newcomers:
            raise ZeroDivisionError("4 is odd")
        return real(self, session, newcomers)

    monkeypatch.setattr(Server, "admit", fails)
    federation, out = small_federation(["mlp:hidden=5"], unseen=2), tmp_path / "run"
    served("it_pfl_hn", federation, tmp_path, monkeypatch, out=str(out), nodes=3, rounds=2, finetune_after=1)
    found = delivery(out)
    assert sorted(found["delivered"]) == ["0", "1", "2", "3"]
    assert found["failed"] == {"4": "could not be admitted: (ZeroDivisionError)"}


def test_a_client_that_does_not_take_its_model_is_noted(tmp_path: Path, monkeypatch: Any) -> None:
    federation, out = small_federation(["mlp:hidden=5"]), tmp_path / "run"
    served("fedavg", federation, tmp_path, monkeypatch, {"2": silent("query.deploy")}, out=str(out), nodes=5, rounds=1)
    assert delivery(out) == {"delivered": ["0", "1", "3", "4"], "failed": {"2": "did not answer"}}


def test_a_model_of_a_users_own_network_loads_where_the_app_is_not(tmp_path: Path, monkeypatch: Any) -> None:
    federation, out = small_federation(["testnets:Normed"]), tmp_path / "run"
    lobby = served("fedavg", federation, tmp_path, monkeypatch, out=str(out), nodes=5, rounds=1)
    moved = shutil.move(tmp_path / "nodes" / "2" / lobby.run / "model", tmp_path / "elsewhere")
    code = f"import runpy; print(runpy.run_path({str(moved / 'client-2.py')!r})['model'])"
    source = str(Path(server.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": source}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("Normed("), done.stderr
    assert [file.name for file in (moved / "code").iterdir() if file.is_file()] == ["testnets.py"]


def test_a_client_that_was_refused_is_greeted_again_later(tmp_path: Path, monkeypatch: Any) -> None:
    federation = small_federation(["mlp:hidden=5"])
    lobby = Nearby(federation, table_of("fedavg", federation), tmp_path)
    lobby.faults["3"] = lambda *_: "did not answer"
    lobby.refresh()
    assert sorted(lobby.nodes) == ["0", "1", "2", "4"] and "did not answer" in lobby.refused[0]
    lobby.faults = {}
    lobby.refresh()
    assert "3" not in lobby.nodes
    monkeypatch.setattr("fedloom.deploy.lobby.time.monotonic", lambda: 1e12)
    lobby.refresh()
    assert "3" in lobby.nodes


def test_a_loaded_run_has_its_models_and_says_where_its_data_are(tmp_path: Path, monkeypatch: Any) -> None:
    federation = small_federation(["mlp:hidden=5"])
    served("fedavg", federation, tmp_path, monkeypatch, out=str(tmp_path / "run"), nodes=5, rounds=1)
    run = api.load(tmp_path / "run")
    assert run.summary["rounds"] == 1
    with pytest.raises(RunError, match=r"was run over a network: its clients have the data.*fedloom deploy resume"):
        run.evaluate()
    x = torch.ones(2, 1, 6, 6, dtype=torch.float64)
    (delivered,) = (tmp_path / "nodes" / "2").glob("*/model/client-2.safetensors")
    assert run.model("2")(x).equal(load_model(delivered, "mlp:hidden=5", (1, 6, 6), 3)(x))


@pytest.mark.parametrize("method", ["pfedhn", "scaffold"])
def test_a_run_that_is_moved_away_from_its_clients_stands_alone(method: str, tmp_path: Path, monkeypatch: Any) -> None:
    federation = small_federation(["mlp:hidden=5"])
    short = {"admit_rounds": 1} if method == "pfedhn" else {}
    served(method, federation, tmp_path, monkeypatch, out=str(tmp_path / "run"), nodes=5, rounds=1, **short)
    x = torch.ones(4, 1, 6, 6, dtype=torch.float64)
    wanted = api.load(tmp_path / "run").predict("2", x)
    moved = shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "nodes")
    run = api.load(moved)
    assert run.predict("2", x).equal(wanted) and run.model("2")(x).equal(wanted)
    assert load_model(run.export("2", tmp_path / "out"), "mlp:hidden=5", (1, 6, 6), 3)(x).equal(wanted)
    assert run.admit(x, torch.tensor([0, 1, 2, 0])).predict(x).shape == (4, 3)


def test_a_server_that_knows_sizes_alone_says_where_the_models_are(tmp_path: Path, monkeypatch: Any) -> None:
    short = {"rounds": 1, "admit_rounds": 1, "out": str(tmp_path / "run")}
    served("mh_pfedhn", small_federation(["mlp:hidden=5"]), tmp_path, monkeypatch, nodes=5, **short)
    run, x, y = api.load(tmp_path / "run"), torch.ones(3, 1, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 2])
    with pytest.raises(NeedsError, match=r"told the size of client 2's network and nothing else; the whole model"):
        run.predict("2", x)
    with pytest.raises(NeedsError, match=r"name the newcomer's network: --model \(in Python, model=\)"):
        run.admit(x, y)
    assert run.admit(x, y, model="mlp:hidden=5").predict(x).shape == (3, 3)


def test_a_server_has_data_of_its_own_but_no_share_of_the_clients(tmp_path: Path, monkeypatch: Any) -> None:
    federation = small_federation(["mlp:hidden=5"])
    given = {"nodes": 5, "rounds": 1, "server_steps": 2, "out": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=r"server-data is 0\.1, a share of the training data, which the server of a"):
        served("feddf", federation, tmp_path, monkeypatch, server_data=0.1, **given)
    with pytest.raises(NeedsError, match="FedDF needs unlabelled data on the server; there are none"):
        served("feddf", federation, tmp_path, monkeypatch, **given)
    np.savez(tmp_path / "public.npz", x=np.ones((7, 1, 6, 6), np.float32))
    served("feddf", federation, tmp_path, monkeypatch, server_data=str(tmp_path / "public.npz"), **given)
    summary = RunDirectory.open(tmp_path / "run").summary()
    assert summary is not None and summary["server_samples"] == 7
    assert summary["notes"] == [f"the server has 7 unlabelled samples of its own ({tmp_path / 'public.npz'})"]


def test_a_deployments_run_is_looked_at_like_any_other(tmp_path: Path, monkeypatch: Any) -> None:
    """Who answered, how long it took, who was dropped and why; and nothing of labels, which clients do not tell."""
    from fedloom.reports import live
    from fedloom.reports.follow import Follower
    from fedloom.reports.single import charts_of

    def mute(kind: str, content: Any, reply: Any) -> Any:
        return reply if kind.startswith("query") else "did not answer within 600 seconds"

    own = {"out": str(tmp_path / "run"), "nodes": 4, "rounds": 2, "admit_rounds": 1}
    served("pfedhn", small_federation(unseen=1), tmp_path, monkeypatch, {"1": mute}, **own)
    follower = Follower(tmp_path / "run")
    follower.look()
    records = follower.facts.records
    assert all(set(r["seconds"]["clients"]) - {None} for r in records)
    assert {one["client"] for one in follower.facts.dropped()} == {"1"}
    page = live.page_of([follower])
    (who,) = [block for block in page.sections[0].blocks if block["id"] == "who"]
    assert who["rows"][0][0:2] == ["1", "late"] and "did not answer" in who["rows"][0][-1]
    assert {"curves", "clients", "embeddings", "traffic"} <= set(charts_of(follower.facts))
    assert not any(member.labels for member in follower.facts.members.values())


def test_a_server_writes_down_what_nodes_tell_of_their_samples_and_stops_in_time(tmp_path: Path) -> None:
    """Numbers of samples are those that clients told when they joined; each ask of theirs is a secret draw."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    hidden = {"sample-dp-noise": 2.0, "sample-dp-clip": 0.5, "max-epsilon": 30.0, "rounds": 500, "batch-size": 4}
    ours = deployed("fedavg", small_federation(), tmp_path, **hidden)
    config = flat_config(ours.server.method, ours.server.options, ours.server.config)
    directory = RunDirectory.create(tmp_path / "run", config)
    account = Account(ours, directory)
    assert 0 < account.last_round() < 500
    for _ in range(2):
        ours.train_round()
    found = releases_of(directory.lines(PRIVACY))
    assert [(one.round, one.who, one.clients) for one in found][:2] == [(1, ("0",), 9), (1, ("1",), 4)]
    assert len({one.draw for one in found}) == 2 and not any(one.from_seed for one in found)


def test_passes_over_an_unknown_number_of_samples_are_not_accounted_for(tmp_path: Path) -> None:
    """A newcomer does not tell how many it has: of so many steps its samples may be in any."""
    hidden = {"sample-dp-noise": 2.0, "sample-dp-clip": 0.5, "rounds": 1, "admit-rounds": 1, "cohort": 2}
    for name, steps, refused in (
        ("steps", {"local-epochs": 0, "local-steps": 3}, nullcontext()),
        ("epochs", {"local-epochs": 2}, pytest.raises(RoundError, match="does not tell how many samples")),
    ):
        ours = deployed("pfedhn", small_federation(unseen=1), tmp_path / name, **hidden, **steps)
        config = flat_config(ours.server.method, ours.server.options, ours.server.config)
        directory = RunDirectory.create(tmp_path / name / "run", config)
        with closing(Account(ours, directory)):
            ours.train_round()
            with refused:
                ours.admission(["4"], ours.now.memory)
        found = [one for one in releases_of(directory.lines(PRIVACY)) if one.who == ("4",)]
        assert [(one.clients, one.size, one.times) for one in found] == [(1, 1, 3)] * (name == "steps")
