# SPDX-License-Identifier: Apache-2.0
"""One process at a time, whatever became of the one before."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.core.errors import RunError
from fedloom.runs import lock
from fedloom.runs.lock import locked

HOLD = """
import sys, time
from pathlib import Path
from fedloom.runs.lock import locked
with locked(Path(sys.argv[1])):
    sys.stdout.write("held\\n")
    sys.stdout.flush()
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(RunError) as caught, locked(tmp_path):
            pass
        os.kill(holder.pid, signal.SIGKILL)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path} is in use by process {holder.pid} on ")
    assert message.endswith("; wait for it or stop it, then try again.")
    with locked(tmp_path):  # the system took it back
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    assert (tmp_path / "lock").read_text() == ""


def test_it_is_given_back_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), locked(tmp_path):
            raise KeyError


def test_a_holder_that_has_not_said_who_it_is(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / "lock").write_text("")
        with pytest.raises(RunError, match="is in use by another process; wait"), locked(tmp_path):
            pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock, "_seize", refuse)
    with pytest.raises(RunError) as caught, locked(tmp_path):
        pass
    assert str(caught.value) == (
        f"{tmp_path} cannot be locked: No locks available; "
        "give an --out on a file system that has locks, such as a local disk."
    )


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"Cannot write .*lock: No such file"), locked(tmp_path / "missing"):
        pass
