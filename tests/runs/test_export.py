# SPDX-License-Identifier: Apache-2.0
"""Exported models need no run directory, whatever their clients are called."""

from __future__ import annotations

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import fedloom
from fedloom.core.errors import ConfigError, RunError
from fedloom.data.own import from_arrays
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.runs.export import export

NAMES = ("plain", "a/b", "../up", "ü ñ", "dots.and.dots", "100%", "quote'\"", "back\\slash", ".", "a:b?*")
"""Ids of clients that come from folders and files of users."""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> fedloom.Run:
    """A run whose clients have odd names."""
    rng = np.random.default_rng(0)
    client = np.repeat(NAMES, 12)
    data = from_arrays(rng.standard_normal((len(client), 3)), np.arange(len(client)) % 2, client=client)
    options = {"partition": "group:client", "clients": len(NAMES), "rounds": 1, "local_steps": 2, "dtype": "float64"}
    out = tmp_path_factory.mktemp("odd") / "run"
    return fedloom.run("fedper", dataset=data, out=out, model="mlp:hidden=4", progress="quiet", **options)


@pytest.mark.parametrize("name", NAMES)
def test_every_client_is_exported_and_loaded(odd: fedloom.Run, tmp_path: Path, name: str) -> None:
    path = odd.export(name, tmp_path / "out")
    assert path.parent == tmp_path / "out"
    assert sorted(file.name for file in path.parent.iterdir()) == sorted([path.with_suffix(".py").name, path.name])
    loaded = runpy.run_path(str(path.with_suffix(".py")))["model"]
    assert isinstance(loaded, nn.Module)
    assert not loaded.training
    x = torch.ones(4, 3, dtype=torch.float64)
    assert torch.equal(loaded(x), odd.model(name)(x))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"client": name, "method": "FedPer", "model": "mlp:hidden=4", "format": "pt"}


def test_clients_have_files_of_their_own(odd: fedloom.Run, tmp_path: Path) -> None:
    paths = [odd.export(client, tmp_path) for client in odd.clients]
    assert len({path.name.lower() for path in paths}) == len(NAMES)
    models = [runpy.run_path(str(path.with_suffix(".py")))["model"] for path in paths]
    x = torch.ones(1, 3, dtype=torch.float64)
    assert len({float(model(x)[0, 0].detach()) for model in models}) == len(NAMES)


def test_a_second_export_goes_over_the_first(odd: fedloom.Run, tmp_path: Path) -> None:
    path = odd.export("plain", tmp_path)
    path.write_bytes(b"an older one")
    assert odd.export("plain", tmp_path) == path
    assert safetensors.torch.load_file(path).keys() == dict(odd.model("plain").named_parameters()).keys()
    assert len(list(tmp_path.iterdir())) == 2
    content = path.read_bytes()
    assert all(odd.export("plain", tmp_path).read_bytes() == content for _ in range(3))  # equal models, equal files


def test_running_statistics_are_exported_too(tmp_path: Path) -> None:
    model = Model(parse("testnets:Normed", (1, 6, 6), 3))
    buffers = model.fresh_buffers()
    buffers["norm.running_mean"] += 2
    module = model.module(model.init(1), buffers)
    path = export(tmp_path, "0", module, model.spec, "FedAvg")
    loaded = runpy.run_path(str(path.with_suffix(".py")))["model"]
    x = torch.ones(2, 1, 6, 6)
    assert torch.equal(loaded.norm.running_mean, torch.full((2,), 2.0))
    assert torch.equal(loaded(x), module(x))


def test_a_client_that_is_not_there(odd: fedloom.Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Unknown client 'plane'; did you mean 'plain'"):
        odd.export("plane", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_written(odd: fedloom.Run, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="make it writable or give another --out"):
        odd.export("plain", tmp_path / place)


def test_the_code_of_a_users_network_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ownpackage"
    (package / "deep").mkdir(parents=True)
    (package / "notes.txt").touch()
    text = "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(3, 2)\n"
    for name, code in {"__init__.py": "", "deep/__init__.py": "", "deep/net.py": text}.items():
        (package / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    for network in ("ownpackage.deep.net:Net", "torch.nn:Identity", "mlp:hidden=4"):
        spec, folder = parse(network, (3,), 2), tmp_path / network[:3]
        export(folder, "0", nn.Identity(), spec, "FedAvg")
        found[network[:3]] = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    files = ["client-0.py", "client-0.safetensors"]
    own = [f"code/ownpackage/{name}" for name in ("__init__.py", "deep/__init__.py", "deep/net.py")]
    assert found == {"own": files + own, "tor": files, "mlp": files}
    in_a_script = replace(parse("torch.nn:Identity", (3,), 2), name="__main__:Net")
    path = export(tmp_path / "script", "0", nn.Identity(), in_a_script, "FedAvg")
    assert not (path.parent / "code").exists()


@pytest.mark.slow
def test_an_exported_network_of_ones_own_loads_where_its_file_is_not(tmp_path: Path) -> None:
    text = "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(3, 2)\n"
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "elsewhere_nets.py").write_text(text)
    train = (
        "import fedloom, numpy as np; from elsewhere_nets import Net; x = np.eye(3)[[0, 1, 2] * 8]\n"
        "run = fedloom.run('local', dataset=(x, np.arange(24) % 2), model=Net, clients=2, partition='iid', rounds=1,"
        " local_steps=1, progress='quiet', device='cpu')\n"
        "run.export(0, '../there')"
    )
    load = "import runpy; print(runpy.run_path('client-0.py')['model'])"
    (tmp_path / "there").mkdir()
    for folder, code in (("here", train), ("there", load)):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Net(in_features=3")
