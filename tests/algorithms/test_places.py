# SPDX-License-Identifier: Apache-2.0
"""Where methods are looked for: fedloom's folder, the user's, and installed packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fedloom
from fedloom import algorithms
from fedloom.core.errors import ConfigError

MINE = """
from dataclasses import replace
from fedloom.algorithms import fedavg

ALGORITHM = replace(fedavg.ALGORITHM, name="Mine")
"""
TINY = {"clients": 4, "rounds": 1, "local_steps": 1, "model": "mlp:hidden=4", "progress": "quiet"}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """``write("mine.py", text, folder)`` in a folder that methods are looked for in; all is forgotten afterwards."""
    monkeypatch.setenv(algorithms.VARIABLE, "")
    before = set(sys.modules)
    algorithms._in_packages.cache_clear()

    def make(name: str, text: str = MINE, folder: str = "own") -> Path:
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        if path.parent not in algorithms.folders():
            algorithms.add_folder(path.parent)
        return path

    yield make
    algorithms._in_packages.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith(algorithms.PACKAGE) or str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_file_in_a_folder_that_was_given_is_a_method(write: Write, tmp_path: Path) -> None:
    file = write("mine.py")
    assert algorithms.names() == sorted([*algorithms.built_in(), "mine"])
    assert algorithms.place("mine") == ("fedloom_methods.mine", file)
    assert algorithms.get("mine").name == "Mine" and algorithms.get("mine") is algorithms.get("mine")
    run = fedloom.run("mine", out=tmp_path / "run", **TINY)
    assert fedloom.load(run.path).evaluate()
    assert str(tmp_path / "own") not in (run.path / "config.yaml").read_text()  # the name, not the place


def test_a_run_says_which_method_is_missing_and_how_to_give_it(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("mine.py")
    run = fedloom.run("mine", out=tmp_path / "run", **TINY)
    monkeypatch.setenv(algorithms.VARIABLE, "")
    with pytest.raises(ConfigError) as caught:
        fedloom.load(run.path).evaluate()
    assert str(caught.value).startswith(f"Unknown method of {run.path} 'mine'")
    assert "give its folder: `fedloom --methods DIR`, FEDLOOM_METHODS=DIR or, in Python" in str(caught.value)


def test_files_beside_methods_are_theirs_to_import_and_are_no_methods(write: Write) -> None:
    write("rates.py", "RATE = 0.125\n")
    write("_hidden.py", "ALGORITHM = None\n")
    write("not-a-name.py", "ALGORITHM = None\n")
    write("other.py", MINE + "from fedloom_methods.rates import RATE\n")
    write("mine.py", MINE + "from .other import RATE\nfrom . import rates\nassert rates.RATE == RATE\n")
    assert set(algorithms.names()) - set(algorithms.built_in()) == {"mine", "other"}
    assert algorithms.get("mine")
    assert "rates" not in sys.modules and "mine" not in sys.modules  # under one name only, which nothing else has


def test_a_built_in_method_is_not_replaced(write: Write) -> None:
    file = write("fedavg.py")
    known = Path(algorithms.__file__).parent / "fedavg.py"
    with pytest.raises(ConfigError, match=f"Two methods are called 'fedavg', {known} and {file}; rename one."):
        algorithms.names()
    file.write_text("no method")
    assert algorithms.get("fedavg").name == "FedAvg"


@pytest.mark.parametrize("text", [MINE, "RATE = 1"], ids=["methods", "others"])
def test_two_files_of_one_name_are_refused(write: Write, text: str) -> None:
    one, other = write("mine.py", text, "a"), write("mine.py", text, "b")
    with pytest.raises(ConfigError, match=f"have one name, {one} and {other}; rename one."):
        algorithms.names()


def test_a_folder_counts_once(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write("mine.py").parent
    monkeypatch.chdir(folder.parent)
    home = Path(algorithms.__file__).parent
    monkeypatch.setenv(algorithms.VARIABLE, os.pathsep.join(["own", str(folder), "", str(home)]))
    assert algorithms.folders() == [folder] and "mine" in algorithms.names()


def test_a_folder_that_is_not_there(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a folder; give one with methods in it"):
        algorithms.add_folder(tmp_path / "nowhere")
    assert algorithms.names() == algorithms.built_in()
    monkeypatch.setenv(algorithms.VARIABLE, "nowhere")
    with pytest.raises(ConfigError, match=r"nowhere is not a folder; .* \(--methods, FEDLOOM_METHODS\)"):
        algorithms.names()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\nALGORITHM = (", r"cannot be imported: SyntaxError in line 2 of .*mine\.py \('\(' was never closed\)"),
        ("\nALGORITHM = nothing", r"cannot be imported: NameError in line 2 of .*mine\.py \(name 'nothing' is not"),
        ("import nowhere\nALGORITHM = 1", r"ModuleNotFoundError in line 1 of .*mine\.py \(No module named 'nowhere'"),
        ("ALGORITHM = 3", r"The method 'mine' has no ALGORITHM of type Algorithm; define one in .*mine\.py\."),
    ],
)
def test_a_broken_file_is_told_in_one_sentence_and_stops_nothing_else(write: Write, text: str, sentence: str) -> None:
    write("mine.py", text)
    assert "mine" in algorithms.names() and algorithms.get("fedavg")
    with pytest.raises(ConfigError, match=sentence) as caught:
        algorithms.get("mine")
    assert "\n" not in str(caught.value)


def installed(site: Path, name: str, points: str) -> None:
    """A package as pip would have put it there."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{algorithms.GROUP}]\n{points}\n")


@pytest.fixture
def site(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, with the module labmethods.mine in it."""
    (tmp_path / "site" / "labmethods").mkdir(parents=True)
    (tmp_path / "site" / "labmethods" / "__init__.py").touch()
    (tmp_path / "site" / "labmethods" / "mine.py").write_text(f'"""Mine: of a package."""\n{MINE}')
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def test_a_package_declares_methods(site: Path) -> None:
    installed(site, "labmethods", "labs = labmethods.mine\nlost = labmethods.gone")
    assert {"labs", "lost"} <= set(algorithms.names()) and "labmethods" not in sys.modules
    assert algorithms.place("labs") == ("labmethods.mine", "the package labmethods")
    assert algorithms.get("labs").name == "Mine"
    with pytest.raises(ConfigError, match="'lost' cannot be imported: ModuleNotFoundError"):
        algorithms.get("lost")


def test_a_package_and_a_folder_of_one_name(site: Path, write: Write) -> None:
    installed(site, "labmethods", "mine = labmethods.mine")
    file = write("mine.py")
    with pytest.raises(ConfigError, match=f"Two methods are called 'mine', {file} and the package labmethods; rename"):
        algorithms.names()


def test_nothing_is_installed_in_the_folder_that_the_user_is_in(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be somebody else's, and its methods would be imported by their names in a config."""
    installed(site, "labmethods", "labs = labmethods.mine")
    monkeypatch.chdir(site)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert algorithms.names() == algorithms.built_in()
