# SPDX-License-Identifier: Apache-2.0
"""Real processes on loopback: a link, nodes, servers. Slow; nothing is left behind, whatever happens."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

import fedloom
from deploy.test_stopping import running_below, wait_until
from fedloom.core.errors import RunError
from fedloom.core.trees import flatten
from fedloom.deploy.keys import make_keys
from fedloom.deploy.local import App, LocalFederation, app_in, follow, local, resume, started
from fedloom.deploy.processes import free_port
from fedloom.deploy.proxy import write_nginx_config
from fedloom.deploy.ray import run_on_ray
from fedloom.deploy.template import write_app
from fedloom.deploy.trial import Trial, about, deal
from fedloom.progress import Quiet, display
from fedloom.runs.directory import RunDirectory
from fedloom.training.config import parse_options

pytestmark = pytest.mark.slow

NODES, SHARED = 4, {"seed": 0, "threads": 1, "device": "cpu"}
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
MODELS = ("mlp:hidden=16", "mlp:hidden=24")
QUICK = {"local_steps": 3, "batch_size": 16}
PATIENCE = 480
"""Seconds that anything may take: this is about what happens, not about how fast a machine is."""


def app_for(folder: Path, method: str, models: tuple[str, ...] = MODELS, **settings: Any) -> App:
    """An app whose trial is digits, dealt over four nodes and a newcomer."""
    given = {**about(Trial()), **SHARED, "timeout": PATIENCE / 2, "wait": PATIENCE / 2, **settings}
    write_app(folder, method, given, {"dataset": "digits", "model": ",".join(models)})
    return app_in(folder)


def node_config(models: tuple[str, ...], number: int) -> dict[str, str]:
    role = "newcomer" if number >= NODES else "participant"
    # as in a simulation, whose last batch of a pass may have a single sample
    return {"model": models[number % len(models)], "role": role, "min-batch": "1"}


def records_of(app: App) -> list[dict[str, Any]]:
    """The rounds of a trial so far; one of nobody, if there is none."""
    records = RunDirectory.open(app.out).records() if (app.out / "config.yaml").is_file() else []
    return records or [{"clients": 0}]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # gone
        return b""


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """When all is over, passed or failed, no process of any of these federations runs, and so no port is held."""
    yield
    assert running_below(tmp_path_factory.getbasetemp()) == []


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory, nothing_is_left: None) -> Iterator[LocalFederation]:
    """A link and four nodes with two architectures, which all tests that need no others share."""
    app = app_for(tmp_path_factory.mktemp("ward") / "app", "pfedhn")
    deal(app.trial, NODES, 1, 0, app.local / "nodes")
    federation = LocalFederation(app)
    with federation.processes:
        federation.start_link()
        for number in range(NODES):
            federation.start_node(str(number), node_config(MODELS, number))
        yield federation


def run_to_end(federation: LocalFederation, app: App, out: Path, **changes: Any) -> RunDirectory:
    """Submit an app to a federation that runs, and wait for it."""
    federation.start_run({"out": str(out), "nodes": NODES, **changes}, app.folder)
    process, end = federation.processes.running["run"], time.monotonic() + PATIENCE
    shown: set[bytes] = set()
    while process.poll() is None:
        if time.monotonic() > end:
            pytest.fail(f"the run did not end: {federation.processes.log('run').read_text()[-2000:]}")
        # what everybody on this machine can read
        shown |= {command_of(int(proc.name)) for proc in Path("/proc").glob("[0-9]*")}
        time.sleep(0.2)
    apps = [command for command in shown if b"flwr-clientapp" in command or b"flwr-serverapp" in command]
    assert apps and not [command for command in apps if b"--token\0" in command]
    assert federation.app.local.joinpath("flower").stat().st_mode & 0o77 == 0
    assert (out / "summary.json").is_file(), federation.processes.log("run").read_text()[-3000:]
    return RunDirectory.open(out)


CASES: dict[str, dict[str, Any]] = {
    "pfedhn_pc": {"rounds": 2, "cohort": NODES, "local_steps": 200},
    "mh_pfedhn_gd": {"rounds": 1, "server_step": "per_client", "global_model": MODELS[0], "chunk": 512},
    "scaffold": {"rounds": 2},
    "it_pfl_hn": {"rounds": 2, "finetune_after": 1},
}
"""pFedHN has two rounds in the test with keys."""
PAIR = {"cohort": 2, "eval_clients": 1}
"""A process starts for every client and ask: two at a time, and one score, are enough."""


OWN = """
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, num_outputs):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10))

    def forward(self, x):
        return self.layers(x)

def build_model(node):
    return Net

app = client_app(load_data, build_model)
"""


class TestOnOneFederation:
    """A class, as pytest-xdist gives one to a single worker: these share a federation."""

    @pytest.mark.parametrize("method", CASES)
    def test_a_method_over_the_network_equals_the_sequential_engine(
        self, method: str, ward: LocalFederation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = {**QUICK, **PAIR, **CASES[method], "eval_every": 99}
        same = method == "scaffold"  # needs one architecture: its user writes one into client.py
        own = {"networks": "federation.client:Net"} if same else {}
        app = app_for(tmp_path / "app", method, **options, **own, deliver=method == "it_pfl_hn")
        if same:
            client = app.folder / "federation" / "client.py"
            client.write_text(client.read_text() + OWN)
            monkeypatch.syspath_prepend(app.folder)
        newcomer = method == "it_pfl_hn"
        if newcomer:
            ward.start_node(str(NODES), node_config(MODELS, NODES))
        try:
            directory = run_to_end(ward, app, tmp_path / "run")
        finally:
            if newcomer:
                ward.processes.kill(f"node-{NODES}")
        expected = fedloom.run(
            method, dataset="digits", clients=NODES, unseen=1, model=own["networks"] if same else ",".join(MODELS),
            engine="sequential", out=tmp_path / "expected", progress="quiet", **options, **SHARED,
            **({"admit_rounds": 1} if method.startswith(("pfedhn", "mh_")) else {}),
        )  # fmt: skip
        one, other = directory.load("last"), expected.directory.load("last")
        a, b = flatten(one.state), flatten(other.state)
        assert list(a) == list(b) and one.round == other.round == options["rounds"]
        assert max(float((a[path].double() - b[path].double()).abs().max()) for path in a if a[path].numel()) < 1e-6
        ours, theirs = directory.summary(), expected.summary
        assert ours and ours["finished"] and ours["dropped"] == 0
        # newcomers are tried when they come, which is not at the same time in both
        mine, wanted = (
            {name: value for name, value in told["last"].items() if "/unseen/" not in name} for told in (ours, theirs)
        )
        assert mine == pytest.approx(wanted)
        if method == "pfedhn_pc":  # the one that trains in earnest: two architectures, to the accuracy of a simulation
            assert ours["last"]["deployed/participants/test/accuracy"] > 0.95
        for client, score in theirs["clients"].items():
            assert ours["clients"][client] == pytest.approx(score)
        if newcomer:
            assert ours["unseen"] == pytest.approx(theirs["unseen"])
            assert list((ward.app.local / "nodes" / str(NODES)).glob(f"*/model/client-{NODES}.safetensors"))


EVIL = """
import torch
from fedloom.deploy import client as _client
_honest = _client.Participant.answer

def _evil(self, asked, content):
    if self.name == "2" and asked["stage"] == 2:
        reply = _honest(self, asked, content)
        from fedloom.core.wire import decode
        from fedloom.core.trees import tree_map
        tree = decode(reply["trees"]["reply"].data)
        spoilt = {**tree, "delta": tree_map(lambda leaf: leaf * float("nan"), tree["delta"])}
        return _client.pack(dict(reply["facts"]), reply=spoilt)
    if self.name == "1" and asked["stage"] == 2 and not (self.store.folder / "slept").exists():
        import time
        (self.store.folder / "slept").touch()
        time.sleep(600)
    return _honest(self, asked, content)

_client.Participant.answer = _evil
"""


def test_a_node_that_is_killed_comes_back_as_itself_a_bad_one_is_named_and_a_new_one_joins(tmp_path: Path) -> None:
    """Client 1 is killed with -9 in round 2, while it trains; client 2 lies in that round; client 3 comes then."""
    options = {**QUICK, "rounds": 99, "cohort": 4, "eval_every": 99, "timeout": 120, "quorum": 0.3}
    app = app_for(tmp_path / "app", "scaffold", MODELS[:1], **options)
    source = app.folder / "federation" / "client.py"
    source.write_text(source.read_text() + EVIL)
    deal(app.trial, 4, 0, 0, app.local / "nodes")
    federation = LocalFederation(app)
    with federation.processes:
        federation.start_link()
        for client in "012":
            federation.start_node(client, {"model": MODELS[0]})
        federation.start_run({"out": str(app.out), "nodes": 3})
        slept = app.local / "nodes" / "1" / "slept"
        wait_until(slept.exists, PATIENCE, "client 1 never came to round 2")
        federation.processes.kill("node-1")
        federation.start_node("1", {"model": MODELS[0]})
        federation.start_node("3", {"model": MODELS[0]})
        wait_until(lambda: records_of(app)[-1]["clients"] == 4, PATIENCE, "the two never came", federation)
    one, two, *_, last = records_of(app)
    assert (one["clients"], two["clients"]) == (3, 3) and one["dropped"] == []
    dropped = {d["client"]: d["reason"] for d in two["dropped"]}
    assert set(dropped) == {"1", "2"} and dropped["2"] == "replied with NaN or Inf"
    # client 1 is back as itself, with its memory of round 1; client 3 has joined, with a memory of its own
    assert last["dropped"] == []
    memories = RunDirectory.open(app.out).load("last").memory
    assert set(memories) == {"0", "1", "2", "3"}


def test_a_server_and_a_link_that_are_killed_are_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    """First the ServerApp alone, under a link and nodes that go on; then the link, and all that it started."""
    options = {**QUICK, "rounds": 3, "cohort": 2, "eval_every": 99}
    app = app_for(tmp_path / "app", "scaffold", MODELS[:1], **options, deliver=False)

    class KillsTheLink(Quiet):
        """A display that pulls the plug after round 2."""

        def update(self, record: Any) -> None:
            if record["round"] == 2:  # round 1 comes again where the server was killed before its checkpoint
                federation.processes.running["link"].send_signal(signal.SIGKILL)

        def end(self, directory: Any) -> None:
            pytest.fail("the run ended")

    with started(app, 2) as federation:
        federation.start_run({"out": str(app.out), "nodes": 2})
        wait_until(lambda: records_of(app)[-1]["clients"] == 2, PATIENCE, "round 1 was never done", federation)
        (server,) = (pid for pid in federation.processes._left("link") if b"flwr-serverapp" in command_of(pid))
        os.kill(server, signal.SIGKILL)
        federation.processes.kill("run")  # which would notice within a minute
        federation.start_run({"out": str(app.out), "nodes": 2, "resume": True})
        with pytest.raises(RunError, match="link ended with code -9"):
            follow(federation, KillsTheLink())
    assert running_below(app.local) == []
    directory = resume(app, display("quiet"))
    expected = fedloom.run(
        "scaffold", dataset="digits", clients=2, model=MODELS[0], engine="sequential", out=tmp_path / "expected",
        progress="quiet", **options, **SHARED,
    )  # fmt: skip
    a, b = flatten(directory.load("last").state), flatten(expected.directory.load("last").state)
    assert all(a[path].equal(b[path]) for path in b)
    assert [record["round"] for record in directory.records()] == [1, 2, 3]


def test_with_keys_clients_are_who_their_keys_say_strangers_stay_out_and_a_new_link_knows_them(tmp_path: Path) -> None:
    """The link is killed after round 1; the one that is started in its place has its database, and the nodes go on."""
    options = {**QUICK, "rounds": 2, "cohort": 2, "eval_every": 99}
    app = app_for(tmp_path / "app", "pfedhn", MODELS, **options, deliver=False)
    keys = make_keys(app.folder / "keys", ["0", "1"], ["127.0.0.1", "localhost"])
    other = make_keys(tmp_path / "other", ["stranger"], ["127.0.0.1"])
    deal(app.trial, 2, 0, 0, app.local / "nodes")
    federation = LocalFederation(app, keys)
    with federation.processes as processes:
        federation.start_link()
        if NGINX:  # nodes reach the link through the proxy of the guide
            federation.entry = free_port()
            config = write_nginx_config(keys, federation.entry, federation.port)
            processes.start("proxy", [NGINX, "-c", str(config), "-p", str(keys), "-g", "daemon off;"])
        address = ["--superlink", f"127.0.0.1:{federation.entry}", "--host", "127.0.0.1"]
        node = ["flower-supernode", *address, "--port"]
        unregistered = ["--auth-supernode-private-key", f"{other}/nodes/stranger"]
        processes.start("stranger", [*node, str(free_port()), "--root-certificates", f"{keys}/ca.pem", *unregistered])
        wrong = ["--root-certificates", f"{other}/ca.pem", "--auth-supernode-private-key", f"{keys}/nodes/1"]
        processes.start("fooled", [*node, str(free_port()), *wrong, "--max-retries", "1"])
        # client 1 says that it is client 0: its key says otherwise
        federation.start_node("0", {"model": MODELS[0]})
        federation.start_node("1", {"model": MODELS[1], "client": "0"})
        federation.start_run({"out": str(app.out), "nodes": 2})
        wait_until(lambda: records_of(app)[-1]["clients"] == 2, PATIENCE, "round 1 was never done", federation)
        processes.kill("link")
        assert processes.running["stranger"].wait(PATIENCE) != 0
        assert processes.running["run"].wait(PATIENCE) != 0
        federation.start_link()
        federation.start_run({"out": str(app.out), "nodes": 2, "resume": True})
        processes.running["run"].wait(PATIENCE)
        assert processes.alive("node-0") and processes.alive("node-1")
        assert not re.search(r"SuperNode ID", processes.log("fooled").read_text())
        assert re.search(r"CERTIFICATE_VERIFY_FAILED|certificate verify failed", processes.log("fooled").read_text())
        log = processes.log("run").read_text()
    summary = RunDirectory.open(app.out).summary()
    assert summary is not None and summary["finished"], log[-2000:]
    assert set(summary["clients"]) == {"0", "1"}
    assert [record["round"] for record in RunDirectory.open(app.out).records()] == [1, 2]
    expected = fedloom.run(
        "pfedhn", dataset="digits", clients=2, model=",".join(MODELS), engine="sequential", out=tmp_path / "expected",
        progress="quiet", **options, **SHARED,
    )  # fmt: skip
    a = flatten(RunDirectory.open(app.out).load("last").state)
    assert all(a[path].equal(leaf) for path, leaf in flatten(expected.directory.load("last").state).items())


def test_clients_on_ray_equal_the_sequential_engine(tmp_path: Path) -> None:
    options = {
        **QUICK,
        **SHARED,
        "dataset": "digits",
        "clients": 3,
        "unseen": 1,
        "model": ",".join(MODELS),
        "rounds": 2,
    }
    options |= {"cohort": 2, "finetune_after": 1}
    given = parse_options("it_pfl_hn", {**options, "engine": "flower-sim"})
    directory = run_on_ray("it_pfl_hn", *given, tmp_path / "run", display("quiet"))
    expected = fedloom.run("it_pfl_hn", engine="sequential", out=tmp_path / "expected", progress="quiet", **options)
    a, b = (flatten(one.load("last").state) for one in (directory, expected.directory))
    assert all(a[path].equal(b[path]) for path in b)
    summary = directory.summary()
    assert summary is not None and summary["last"] == expected.summary["last"]
    assert summary["unseen"] == expected.summary["unseen"]


MAIN = "from fedloom.cli.main import main; main()"


def test_ctrl_c_stops_everything_that_was_started(tmp_path: Path) -> None:
    app = app_for(tmp_path / "app", "fedavg", MODELS[:1], rounds=50, cohort=2, **QUICK)
    command = [sys.executable, "-c", MAIN, "deploy", "local", str(app.folder), "--nodes", "2"]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE) as process:
        try:
            log = app.local / "logs" / "run.log"
            wait_until(
                lambda: log.exists() and "Successfully started run" in log.read_text(), PATIENCE, "nothing began"
            )
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
        assert process.stderr and b"go on with `fedloom deploy resume" in process.stderr.read()
    assert running_below(app.local) == []


def test_changes_are_added_up_under_masks_with_signed_keys(tmp_path: Path) -> None:
    """In a sum each client counts once, as in the rule ``mean``."""
    options = {**QUICK, "rounds": 1, "cohort": 3, "eval_every": 99}
    app = app_for(tmp_path / "app", "fedavg", MODELS[:1], **options, secure_aggregation="signed", deliver=False)
    make_keys(app.folder / "keys", ["0", "1", "2"], ["127.0.0.1", "localhost"])
    directory = local(app, 3, 0, Quiet(), tls=True)
    (record,) = directory.records()
    assert record["dropped"] == [] and set(record["told"]["train"]) == {"masked"}
    expected = fedloom.run(
        "fedavg", dataset="digits", clients=3, model=MODELS[0], engine="sequential", aggregate="mean",
        out=tmp_path / "expected", progress="quiet", **options, **SHARED,
    )  # fmt: skip
    found, wanted = (flatten(one.load("last").state) for one in (directory, expected.directory))
    assert all(found[path].allclose(leaf, rtol=0, atol=1e-6) for path, leaf in wanted.items())
