# SPDX-License-Identifier: Apache-2.0
"""Trials that are stopped, killed and gone on with, with other processes in the place of Flower's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.errors import RunError
from fedloom.deploy import local as trial
from fedloom.deploy.local import App, LocalFederation, alone, app_in, follow
from fedloom.deploy.processes import Processes
from fedloom.deploy.template import write_app
from fedloom.deploy.trial import Trial, about
from fedloom.progress import Quiet, display
from fedloom.runs.directory import RunDirectory

STUBBORN = "trap '' TERM; setsid sleep 300 & sleep 300 & wait; wait; wait"
"""A shell that does not end when asked to, with a child in another session, as Flower's link has."""

PARENT = """
import signal, sys, time
from pathlib import Path
from fedloom.deploy.processes import Processes

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
with Processes(Path(sys.argv[1]) / "logs", Path(sys.argv[1]) / "flower") as processes:
    processes.start("shell", ["sh", "-c", sys.argv[2]])
    time.sleep(60)
"""


def wait_until(what: Callable[[], bool], seconds: float, why: str, federation: LocalFederation | None = None) -> None:
    """Look often; with a federation, until its run has ended."""
    end = time.monotonic() + seconds
    while not what():
        if federation and not federation.processes.alive("run"):
            pytest.fail(f"{why}: {federation.processes.said('run')[-2000:]}")
        assert time.monotonic() < end, why
        time.sleep(0.2)


def running_below(folder: Path) -> list[str]:
    """Command lines of processes with Flower's home in ``folder``."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if f"FLWR_HOME={folder}".encode() in (proc / "environ").read_bytes() and int(proc.name) != os.getpid():
                found.append((proc / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # gone, or somebody else's
            continue
    return found


def new_app(folder: Path) -> App:
    write_app(folder, "fedavg", about(Trial()), {"dataset": "digits"})
    return app_in(folder)


def test_processes_are_stopped_with_their_children_in_other_sessions_too(tmp_path: Path) -> None:
    with Processes(tmp_path / "logs", tmp_path / "flower") as processes:
        processes.start("shell", ["sh", "-c", "sleep 300 & setsid sleep 300 & wait"])
        wait_until(lambda: len(running_below(tmp_path)) == 3, 10, "the shell started nothing")
    assert running_below(tmp_path) == []


def test_killing_one_ends_what_it_started_and_nothing_else(tmp_path: Path) -> None:
    with Processes(tmp_path / "logs", tmp_path / "flower") as processes:
        processes.start("link", ["sh", "-c", "setsid sleep 301 & sleep 302; true"])
        processes.start("node", ["sleep", "303"])
        wait_until(lambda: len(running_below(tmp_path)) == 4, 10, "too few were started")
        processes.kill("link")
        assert [line.split()[-1] for line in running_below(tmp_path)] == ["303"]


def test_a_process_that_dies_slowly_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a process that dies is gone before its files are closed: it holds locks and is not seen."""
    processes = Processes(tmp_path / "logs", tmp_path / "flower")
    with subprocess.Popen(["sleep", "300"]) as dying:
        seen = iter([[dying.pid]])
        monkeypatch.setattr(Processes, "_left", lambda self, name=None: next(seen, []))
        monkeypatch.setattr("fedloom.deploy.processes._signal", lambda *_: None)
        threading.Timer(1.0, dying.kill).start()
        processes.stop()
        assert Path(f"/proc/{dying.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_shell_with_the_same_home_is_not_ours(tmp_path: Path) -> None:
    processes = Processes(tmp_path / "logs", tmp_path / "flower")
    with subprocess.Popen(["sleep", "300"], env={**os.environ, "FLWR_HOME": str(tmp_path / "flower")}) as other:
        try:
            processes.stop()
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.slow
@pytest.mark.parametrize("signals", [["SIGTERM"], ["SIGHUP"], ["SIGINT"], ["SIGINT", "SIGINT"], ["SIGTERM", "SIGINT"]])
def test_nothing_is_left_after_a_signal_and_a_second_one_hurries(signals: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path), STUBBORN]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as parent:
        try:
            wait_until(lambda: len(running_below(tmp_path)) == 3, 20, "nothing began")
            begun = time.monotonic()
            for name in signals:
                parent.send_signal(getattr(signal, name))
                time.sleep(0.7)
            parent.wait(20)
            took = time.monotonic() - begun
        finally:
            parent.kill()
        assert parent.stderr is not None and parent.stderr.read().endswith(b"KeyboardInterrupt\n")
    assert running_below(tmp_path) == []
    assert (took < 4) == (len(signals) == 2)


def test_what_a_killed_trial_left_is_ended_before_the_next_and_only_one_runs(tmp_path: Path) -> None:
    app = new_app(tmp_path / "app")
    with subprocess.Popen([sys.executable, "-c", PARENT, str(app.local), STUBBORN]) as parent:
        wait_until(lambda: len(running_below(app.local)) == 3, 20, "nothing began")
        parent.kill()
    assert len(running_below(app.local)) == 3
    with alone(app):
        assert running_below(app.local) == []
        with pytest.raises(RunError, match="is in use by process"), alone(app):
            pass


def test_the_reason_of_this_run_is_told_and_not_that_of_an_earlier_one(tmp_path: Path) -> None:
    federation = LocalFederation(new_app(tmp_path / "app"))
    federation.processes.log("run").write_text("fedloom: An earlier reason.\n")
    with federation.processes as processes:
        processes.start("link", ["sleep", "300"])
        processes.start("run", ["sh", "-c", "echo INFO: begun; echo fedloom: Too few clients.; echo ERROR: it failed"])
        with pytest.raises(RunError, match=r"^Too few clients\. The whole log: "):
            follow(federation, display("quiet"))
        processes.start("run", ["true"])
        with pytest.raises(RunError, match="The run did not finish; its log is"):
            follow(federation, display("quiet"))


def test_a_new_link_is_told_the_keys_and_one_that_is_started_again_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, keys, calls = new_app(tmp_path / "app"), tmp_path / "keys", []
    (keys / "clients").mkdir(parents=True)
    for client in "01":
        (keys / "clients" / f"{client}.pub").touch()
    monkeypatch.setattr(Processes, "start", lambda self, name, command: calls.append(command))
    monkeypatch.setattr(Processes, "call", lambda self, command: calls.append(command))
    monkeypatch.setattr(trial, "wait_for_port", lambda *_: None)
    database = app.local / "flower" / "link.db"
    for _ in range(2):  # as `deploy local` does, then `deploy resume`: nodes of the first are gone
        federation = LocalFederation(app, keys)
        database.write_text("of an earlier trial")
        calls.clear()
        federation.start_link()
        assert database.read_text() == "" and [command[0] for command in calls] == ["flower-superlink", "flwr", "flwr"]
        assert oct(database.stat().st_mode) == "0o100600"
        assert {oct(folder.stat().st_mode) for folder in (database.parent, app.local / "logs")} == {"0o40700"}
        database.write_text("of this trial")
        calls.clear()
        federation.start_link()
        assert [command[0] for command in calls] == ["flower-superlink"] and str(database) in calls[0]
        assert database.read_text() == "of this trial"


def test_what_the_server_waits_for_is_shown_once_as_soon_as_it_says_so(tmp_path: Path) -> None:
    shown: list[str] = []

    class Watch(Quiet):
        def wait(self, text: str) -> None:
            shown.append(text)

    federation = LocalFederation(new_app(tmp_path / "app"))
    with federation.processes as processes:
        processes.start("link", ["sleep", "300"])
        first = "fedloom waits for 4 clients; 2 are connected"
        processes.start("run", ["sh", "-c", f"echo '{first}'; sleep 2; echo 'INFO: fedloom waits for 4 clients; 3'"])
        with pytest.raises(RunError, match="The run did not finish"):
            follow(federation, Watch())
    assert shown == ["for 4 clients; 2 are connected", "for 4 clients; 3"]


def test_a_trial_goes_on_with_the_nodes_and_the_data_that_it_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, nodes, runs = new_app(tmp_path / "app"), [], []

    def start_node(self: LocalFederation, client: str, config: Any) -> None:
        nodes.append((client, config.get("role", "participant")))

    monkeypatch.setattr(LocalFederation, "start_link", lambda self: None)
    monkeypatch.setattr(LocalFederation, "start_node", start_node)
    monkeypatch.setattr(LocalFederation, "start_run", lambda self, changes: runs.append(changes))
    monkeypatch.setattr(
        trial,
        "follow",
        lambda federation, shown: app.out.exists() or RunDirectory.create(app.out, {"method": "fedavg"}),
    )
    trial.local(app, 3, 1, display("quiet"))
    RunDirectory.open(app.out).save(0, {}, {}, {}, best=False)
    begun, data = list(nodes), app.local / "nodes" / "1" / "data.npz"
    data.write_bytes(b"my own")
    nodes.clear()
    trial.resume(app, display("quiet"))
    assert nodes == begun == [("0", "participant"), ("1", "participant"), ("2", "participant"), ("3", "newcomer")]
    assert [(run["nodes"], run.get("resume", False)) for run in runs] == [(3, False), (3, True)]
    assert data.read_bytes() == b"my own"
    with RunDirectory.open(app.out).lock(), pytest.raises(RunError, match="is in use by"):
        trial.resume(app, display("quiet"))
    # stopped before the first checkpoint, or before there was a run at all: it begins again
    for left in ("config.yaml", None):
        shutil.rmtree(app.out)
        if left:
            RunDirectory.create(app.out, {"method": "fedavg", "old": True})
        runs.clear()
        trial.resume(app, display("quiet"))
        assert [run["resume"] for run in runs] == [False] and "old" not in RunDirectory.open(app.out).config
    trial.TrialRoster.file(app).unlink()
    with pytest.raises(RunError, match="begin again with `fedloom deploy local`"):
        trial.resume(app, display("quiet"))
