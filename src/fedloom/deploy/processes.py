# SPDX-License-Identifier: Apache-2.0
"""Flower's processes on this machine: started in groups of their own, and stopped, whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from fedloom.core.errors import NeedsError, RunError

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
         "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
         "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}  # fmt: skip
"""No reports, no look for updates, no installation of packages at run time; tasks begin without delay."""


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
    """Processes by name, each with a log; leaving the ``with`` stops them and all that they started."""

    def __init__(self, logs: Path, home: Path) -> None:
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        home.mkdir(parents=True, exist_ok=True)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self.environment = {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str], extra: Mapping[str, str] | None = None) -> None:
        """Start a process; its output goes to its log."""
        with self.log(name).open("ab") as log:
            self.running[name] = subprocess.Popen(
                [program(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.environment, **(extra or {})},
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
        return self._logs / f"{name}.log"

    def alive(self, name: str) -> bool:
        """Whether it still runs."""
        return self.running[name].poll() is None

    def kill(self, name: str) -> None:
        """End a process and its children at once, as a power cut would."""
        self._signal(self.running[name], signal.SIGKILL)
        self.running.pop(name).wait()

    def stop(self) -> None:
        """End all: politely, then not."""
        for process in self.running.values():
            self._signal(process, signal.SIGTERM)
        end = time.monotonic() + 5
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        for process in self.running.values():
            self._signal(process, signal.SIGKILL)
            process.wait()
        self.running = {}

    def check(self, name: str) -> None:
        """Refuse to go on without a process that should be there."""
        if not self.alive(name):
            raise RunError(f"{name} ended with code {self.running[name].returncode}; its log is {self.log(name)}.")

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def wait_for_port(port: int, processes: Processes, name: str, seconds: float = 60.0) -> None:
    """Until ``name`` listens on ``port``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        processes.check(name)
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise RunError(f"{name} does not listen after {seconds:g} seconds; its log is {processes.log(name)}.")
