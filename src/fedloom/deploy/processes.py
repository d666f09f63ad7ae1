# SPDX-License-Identifier: Apache-2.0
"""Flower's processes on this machine: started in groups of their own, and stopped, whatever happens.

Flower's processes start others, which do not all end with them. What belongs to a trial is therefore known by its
environment, which children inherit: the folder of Flower's own files (FLWR_HOME) and a name. All of it is asked to end,
then made to; so a later process can also end what one that was killed has left.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from fedloom.core.errors import NeedsError, RunError
from fedloom.deploy import superexec
from fedloom.runs.files import file_name

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
         "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
         "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}  # fmt: skip
"""No reports, no look for updates, no installation of packages at run time; tasks begin without delay."""
NAME = "FEDLOOM_PROCESS"
"""In the environment of a process and of all that it starts: its name. A shell with the same FLWR_HOME has none."""
PATIENCE = 5.0
"""Seconds that processes have to end by themselves."""
DEATH = 30.0
"""Seconds to wait for the end of processes that were killed."""


def program(name: str) -> str:
    """The path of one of Flower's commands, beside this Python or in the PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise NeedsError(f"{name} is not installed; install Flower: pip install 'fedloom[flower]'.")
    return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Processes:
    """Processes by name, each with a log; leaving the ``with`` stops them and all that they started.

    Within it, SIGTERM and SIGHUP interrupt as Ctrl-C does; once something did, more of them only hurry the end.
    """

    def __init__(self, logs: Path, home: Path) -> None:
        self._logs, self._home = logs, home.resolve()
        for folder in (logs, self._home):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)  # who reads the link's database can act as any node
        superexec.install(self._home / "bin")
        path = os.pathsep.join([str(self._home / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self.environment = {**os.environ, **QUIET, "FLWR_HOME": str(self._home), "PATH": path, NAME: "call"}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._begun: dict[str, int] = {}
        self._handlers: dict[signal.Signals, Any] = {}
        self._stopping = self._hurry = False

    def __enter__(self) -> Self:
        self._stopping = self._hurry = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and a shell's & want it
                    self._handlers[number] = signal.signal(number, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        try:
            self.stop()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            self._hurry = True
        else:
            self._stopping = True
            raise KeyboardInterrupt

    def start(self, name: str, command: Sequence[str], extra: Mapping[str, str] | None = None) -> None:
        """Start a process; its output goes to its log."""
        with self.log(name).open("ab") as log:
            self._begun[name] = log.tell()
            self.running[name] = subprocess.Popen(
                [program(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.environment, **(extra or {}), NAME: name},
                start_new_session=True,
            )

    def call(self, command: Sequence[str]) -> None:
        """Run a command to its end."""
        done = subprocess.run(
            [program(command[0]), *command[1:]], env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RunError(f"`{' '.join(command)}` failed: {' '.join((done.stdout + done.stderr).split())[-300:]}")

    def log(self, name: str) -> Path:
        """The file that a process writes to."""
        return self._logs / f"{file_name(name)}.log"

    def said(self, name: str) -> str:
        """What a process wrote to its log since it was started last."""
        return self.log(name).read_bytes()[self._begun.get(name, 0) :].decode(errors="replace")

    def alive(self, name: str) -> bool:
        """Whether it still runs."""
        return self.running[name].poll() is None

    def kill(self, name: str) -> None:
        """End a process and all that it started at once, as a power cut would."""
        seen = set(self._left(name))
        self._signal(self.running[name], signal.SIGKILL)
        self.running.pop(name).wait()
        self._kill_left(seen, name)

    def stop(self) -> None:
        """End all, also what an earlier, killed parent left behind: politely, then not."""
        seen: set[int] = set()
        try:
            seen |= set(self._left())
            for process in self.running.values():
                self._signal(process, signal.SIGTERM)
            for left in seen:
                _signal(left, signal.SIGTERM)
            end = time.monotonic() + PATIENCE
            while self._any() and time.monotonic() < end and not self._hurry:
                time.sleep(0.1)
        finally:
            for process in self.running.values():
                self._signal(process, signal.SIGKILL)
                process.wait()
            self._kill_left(seen)
            self.running = {}

    def check(self, name: str) -> None:
        """Refuse to go on without a process that should be there."""
        if not self.alive(name):
            raise RunError(f"{name} ended with code {self.running[name].returncode}; its log is {self.log(name)}.")

    def _any(self) -> bool:
        return any(process.poll() is None for process in self.running.values()) or bool(self._left())

    def _kill_left(self, seen: set[int], name: str | None = None) -> None:
        """Kill until nothing is left, nor of those ``seen``: what is killed may have started something meanwhile.

        The environment of a process that dies is gone before its files are closed, and with them its locks and ports.
        """
        end, doomed = time.monotonic() + DEATH, seen
        while time.monotonic() < end:
            found = self._left(name)
            for left in found:
                _signal(left, signal.SIGKILL)
            doomed = {process for process in {*doomed, *found} if not _is_over(process)}
            if not doomed:
                return
            time.sleep(0.05)

    def _left(self, name: str | None = None) -> list[int]:
        """Processes that were started here, or by those, in whatever session they are: Flower opens its own."""
        found = []
        for proc in Path("/proc").glob("[0-9]*"):
            try:
                entries = (proc / "environ").read_bytes().split(b"\0")
            except OSError:  # gone, or somebody else's
                continue
            names = [entry.partition(b"=")[2].decode() for entry in entries if entry.startswith(f"{NAME}=".encode())]
            if os.fsencode(f"FLWR_HOME={self._home}") in entries and names and name in (None, *names):
                found.append(int(proc.name))
        return [number for number in found if number != os.getpid()]

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _is_over(process: int) -> bool:
    """Whether a process and all its threads have ended, waited for by its parent or not."""
    folder = Path("/proc") / str(process)
    try:
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        return state in "ZX" and len(list((folder / "task").iterdir())) < 2
    except OSError:
        return True


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def wait_for_port(port: int, processes: Processes, name: str, seconds: float = 60.0) -> None:
    """Until ``name`` listens on ``port``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        processes.check(name)
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise RunError(f"{name} does not listen after {seconds:g} seconds; its log is {processes.log(name)}.")
