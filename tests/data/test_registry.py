# SPDX-License-Identifier: Apache-2.0
"""Datasets by name or by path, and the root that their files lie below."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedloom.core.errors import ConfigError, DataError
from fedloom.data import dataset, load, names, readers, registry
from fedloom.data.registry import resolve_root


def test_a_file_among_the_readers_is_enough(monkeypatch, tmp_path):
    before = names()
    (tmp_path / "marbles.py").write_text(
        "from fedloom.data.files import Dataset\n"
        "TOY = Dataset(name='marbles', about='a toy', licence='CC0', files=(), read=lambda root: root)\n"
    )
    monkeypatch.setattr(readers, "__path__", [*readers.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "fedloom.data.readers.marbles", raising=False)
    registry._datasets.cache_clear()
    try:
        assert names() == sorted([*before, "marbles"])
        assert dataset("marbles").about == "a toy"
    finally:
        registry._datasets.cache_clear()


@pytest.mark.parametrize("name", names())
def test_every_dataset_says_what_it_is(name):
    known = dataset(name)
    assert known.name == name
    assert known.about
    assert known.licence
    assert len({file.path for file in known.files}) == len(known.files)
    for file in known.files:
        assert len(file.md5) == 32
        assert file.url.startswith("http")
        assert not Path(file.path).is_absolute()


@pytest.mark.parametrize("name", [name for name in names() if dataset(name).files])
def test_an_absent_dataset_says_how_to_get_it(tmp_path, name):
    with pytest.raises(DataError, match=f"fedloom data fetch {name} --data-root {tmp_path}") as caught:
        load(name, tmp_path)
    assert dataset(name).files[0].path in str(caught.value)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match="Unknown dataset 'cifar11'; did you mean 'cifar1"):
        load("cifar11")
    with pytest.raises(ConfigError, match="Unknown dataset 'x'"):
        dataset("x")


def test_the_root_is_the_given_one_or_the_environments(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "env"))
    assert resolve_root() == tmp_path / "env"
    assert resolve_root(tmp_path) == tmp_path
    monkeypatch.delenv("FEDLOOM_DATA")
    with pytest.raises(DataError, match=r"No data root is given; set --data-root .*FEDLOOM_DATA"):
        load("mnist")


def test_embedded_data_needs_no_root(monkeypatch):
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    assert load("digits").name == "digits"


def test_paths_are_users_own_data(tmp_path):
    np.savez(tmp_path / "anna.npz", x=np.zeros((2, 3)), y=[0, 1])
    assert load(tmp_path / "anna.npz").name == "anna"
    assert load(str(tmp_path)).groups["client"].tolist() == ["anna", "anna"]
    with pytest.raises(DataError, match=r"There is no file .*bert\.npz"):
        load(tmp_path / "bert.npz")
    with pytest.raises(DataError, match=r"There is no folder .*nowhere; give a folder with one .npz per client"):
        load(tmp_path / "nowhere")


def test_importing_is_light():
    heavy = "('torch', 'sklearn', 'scipy', 'matplotlib', 'PIL', 'torchvision')"
    code = f"import sys, fedloom.data; fedloom.data.names(); assert not [m for m in {heavy} if m in sys.modules]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_file_of_another_kind_is_told_how_to_become_an_npz(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("1,2\n")
    with pytest.raises(DataError, match="write your samples with np"):
        load(tmp_path / "mine.txt")
