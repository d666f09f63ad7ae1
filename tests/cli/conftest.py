# SPDX-License-Identifier: Apache-2.0
"""The command line in this process, and tiny runs to use it on."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """``cli("run", "fedavg", ...)`` in an empty folder, without the user's data root."""
    from fedloom.cli.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*words: object) -> Outcome:
        capsys.readouterr()
        before = signal.getsignal(signal.SIGINT)
        try:
            with pytest.raises(SystemExit) as end:
                main([str(word) for word in words])
        finally:
            signal.signal(signal.SIGINT, before)  # a process that ends does not care
        return Outcome(int(end.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def refused(cli: Cli) -> Callable[..., str]:
    """The sentence that a command ends with: one line on stderr, exit code 2, nothing on stdout."""

    def call(*words: object) -> str:
        outcome = cli(*words)
        assert outcome.code == 2
        assert outcome.out == ""
        assert "Traceback" not in outcome.err
        assert outcome.err.startswith("fedloom: ")
        assert outcome.err.count("\n") == 1
        return outcome.err.removeprefix("fedloom: ").rstrip("\n")

    return call


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a method that cannot serve newcomers, with two of them held out. Not to be changed."""
    import fedloom

    options = {"clients": 4, "unseen": 2, "rounds": 2, "local_steps": 2, "model": "mlp"}
    out = tmp_path_factory.mktemp("cli") / "local"
    return fedloom.run("local", out=out, progress="quiet", **options).path


@pytest.fixture
def own_copy(trained: Path, tmp_path: Path) -> Path:
    """The finished run, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "run"))
