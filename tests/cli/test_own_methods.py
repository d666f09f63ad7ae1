# SPDX-License-Identifier: Apache-2.0
"""Methods of the user's own on the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.conftest import Cli, Outcome
from fedloom import algorithms

TINY = ("--clients", 4, "--rounds", 1, "--local-steps", 1, "--model", "mlp:hidden=4", "--quiet", "--out", "a")


@pytest.fixture(autouse=True)
def methods(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the method fedmine, which nobody has been told of."""
    monkeypatch.setenv(algorithms.VARIABLE, "")
    (tmp_path / "methods").mkdir()
    assert cli("new", "fedmine", "--folder", "methods").code == 0
    yield tmp_path / "methods"
    for name in [name for name in sys.modules if name.startswith(algorithms.PACKAGE)]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("flags", "variable"), [(["--methods", "methods"], ""), (["--methods=methods"], ""), ([], "methods")]
)
def test_every_command_knows_a_method_of_ones_own(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, flags: list[str], variable: str
) -> None:
    def call(*words: object) -> Outcome:
        monkeypatch.setenv(algorithms.VARIABLE, variable)  # as if each command were a process of its own
        return cli(*flags, *words)

    assert "Fedmine" in call("methods").out
    assert "fedmine" in call("run", "--help").out
    assert "--batchnorm" in call("run", "fedmine", "--help").out
    assert call("run", "fedmine", *TINY).out == "a\n"
    assert call("evaluate", "a").code == call("export", "a", "--all").code == 0
    assert call("resume", "a", "--rounds", 2, "--quiet").code == 0
    assert call("run", "--config", "a/config.yaml", "--out", "b", "--quiet").out == "b\n"
    assert "--mu is an option of fedprox, moon, not of fedmine" in call("run", "fedmine", "--mu", 1).err


def test_without_its_folder_the_sentence_says_how_to_give_it(
    cli: Cli, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("--methods", "methods", "run", "fedmine", *TINY).code == 0
    monkeypatch.setenv(algorithms.VARIABLE, "")
    for words, begin in (
        (("evaluate", "a"), "Unknown method of a 'fedmine'"),
        (("resume", "a"), "Unknown method of a 'fedmine'"),
        (("run", "--config", "a/config.yaml"), "Unknown method in a/config.yaml 'fedmine'"),
        (("run", "fedmine"), "Unknown method 'fedmine'"),
    ):
        told = refused(*words)
        assert told.startswith(begin) and "give its folder: `fedloom --methods DIR`, FEDLOOM_METHODS=DIR" in told


def test_a_file_never_names_a_folder(cli: Cli, refused: Callable[..., str]) -> None:
    Path("c.yaml").write_text("method: fedmine\nmethods: methods\n")
    assert "Unknown method in c.yaml 'fedmine'" in refused("run", "--config", "c.yaml")
    Path("c.yaml").write_text("method: ../methods/fedmine\n")
    assert "Unknown method in c.yaml '../methods/fedmine'" in refused("run", "--config", "c.yaml")
    Path("c.yaml").write_text("method: [fedmine]\n")
    assert "Unknown method in c.yaml" in refused("run", "--config", "c.yaml")


def test_a_broken_method_is_listed_and_the_others_go_on(cli: Cli, refused: Callable[..., str], methods: Path) -> None:
    (methods / "halfdone.py").write_text('"""Half: done."""\nALGORITHM = (')
    (methods / "empty.py").write_text('"""Empty: nothing yet."""\nALGORITHM = None')
    (methods / "bytes.py").write_bytes(b"ALGORITHM = 1\n\0\xff")
    own = ("--methods", methods)
    listed = cli(*own, "run", "--help").out
    assert "(line 2 of its file is not Python)" in listed and "Empty: nothing yet." in listed
    table = " ".join(cli(*own, "methods").out.split())  # a cell may go over several lines
    assert "halfdone" in table and "SyntaxError in line 2" in table and "Fedmine" in table and "SCAFFOLD" in table
    assert "The method 'halfdone' cannot be imported: SyntaxError in line 2 of" in refused(*own, "run", "halfdone")
    assert "--mu is an option of fedprox, moon, not of fedavg." in refused(*own, "run", "fedavg", "--mu", 1)
    assert cli(*own, "run", "fedmine", *TINY).code == 0


def test_folders_that_cannot_be(cli: Cli, refused: Callable[..., str], methods: Path) -> None:
    assert "nowhere is not a folder; give one with methods in it" in refused("--methods", "nowhere", "datasets")
    outcome = cli("--methods")
    assert outcome.code == 2 and "requires an argument" in outcome.err
    (methods / "fedavg.py").write_text("ALGORITHM = None")
    told = refused("--methods", "methods", "datasets")
    assert "Two methods are called 'fedavg'" in told and str(methods / "fedavg.py") in told


def test_new_says_how_to_run_what_it_wrote(cli: Cli, refused: Callable[..., str], methods: Path) -> None:
    Path("my methods").mkdir()
    said = "fedloom: run it with `fedloom "
    assert cli("new", "fedone", "--folder", "my methods").err == f"{said}--methods 'my methods' run fedone`.\n"
    assert cli("new", "fedtwo").err == f"{said}--methods . run fedtwo`.\n"
    assert cli("--methods", "methods", "new", "fedthree", "--folder", methods).err == f"{said}run fedthree`.\n"
    assert f"There is a method 'fedmine', {methods / 'fedmine.py'}; choose another name." in refused("new", "fedmine")
    assert "There is a method 'fedavg'," in refused("new", "fedavg")
    assert not Path("fedavg.py").exists()
