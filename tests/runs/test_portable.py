# SPDX-License-Identifier: Apache-2.0
"""Models as ONNX and torch.export files: equal to the model for batches of any size, and of use without fedloom."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom
from fedloom.adaptation import prior
from fedloom.adaptation.trial import Trusted
from fedloom.core.errors import ConfigError, NeedsError
from fedloom.data.registry import load as load_data
from fedloom.models.spec import parse
from fedloom.runs.portable import write_portable

HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
ONNX = pytest.param("onnx", marks=pytest.mark.skipif(not HAS_ONNX, reason="needs onnx, onnxscript and onnxruntime"))
TINY = {"dataset": "digits", "clients": 4, "unseen": 1, "rounds": 2, "local_steps": 2, "progress": "quiet"}
ABOUT = {"client": "3", "method": "FedAvg", "model": "mlp"}
RUNS = {
    "pfedhn": {"model": "lenet:kernels=4"},
    "fedavg": {"model": "mlp:hidden=8"},
    "fedavg+bn": {"model": "testnets:Normed"},
    "mh_pfedhn": {"model": "mlp:hidden=8"},
    "fedsr": {"model": "lenet:kernels=4"},
    "hyperfedzero": {"model": "mlp:hidden=8", "hidden": "16", "chunk_size": 64},
    "hyperfedzero+lenet": {"model": "lenet:kernels=4", "hidden": "16", "chunk_size": 64, "samples_at_once": 2},
    "hyperfedzero+input": {"model": "mlp:hidden=8", "condition": "input"},
}


def answers(path: Path, x: Tensor) -> Tensor:
    """What the file says of ``x``."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(x)
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    kept: dict[str, Path] = {}

    def make(name: str, adapt: str | None = None) -> fedloom.Run:
        if name not in kept:
            out = tmp_path_factory.mktemp("portable") / "run"
            kept[name] = fedloom.run(name.partition("+")[0], out=out, **TINY, **RUNS[name]).path
        return fedloom.load(kept[name], adapt=adapt, trust=True)

    return make


@pytest.mark.parametrize("form", [ONNX, "pt2"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("fedavg", "pfedhn"))) for name in RUNS]
)
def test_a_participants_model(trained, tmp_path: Path, name: str, form: str) -> None:
    run = trained(name)
    path = run.export(1, tmp_path, format=form)
    assert path == tmp_path / f"client-1.{form}" and [path] == list(tmp_path.iterdir())
    x = torch.as_tensor(load_data("digits").x)
    for number in (1, 3, 40):
        torch.testing.assert_close(answers(path, x[:number]), run.predict(1, x[:number]), atol=1e-5, rtol=1e-5)
    content = path.read_bytes()
    assert str(Path(__file__).parents[2]).encode() not in content and str(Path.home()).encode() + b"/" not in content


@pytest.mark.parametrize("form", [ONNX, "pt2"])
@pytest.mark.parametrize("name", ["fedavg+bn", pytest.param("hyperfedzero+lenet", marks=pytest.mark.slow)])
def test_a_newcomers_adapted_model(
    trained, tmp_path: Path, name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # after so little training the correction gains nothing that is clear, and would not be used
    wholly = Trusted(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(0))
    monkeypatch.setattr(prior, "trusted", lambda trial, number, labelled: wholly)
    run = trained(name, adapt="prior")
    arrays = load_data("digits")
    x = torch.as_tensor(arrays.x[arrays.y == 3][:20])
    admission = run.admit(x)
    path = admission.export(tmp_path, "new", format=form)
    torch.testing.assert_close(answers(path, x), admission.predict(x), atol=1e-5, rtol=1e-5)
    written = json.loads((tmp_path / "client-new.json").read_text())
    assert written["samples"] == 20
    plain = trained(name).admit(x)
    assert not torch.allclose(answers(path, x), plain.predict(x))  # the scale and the offset are in it


@pytest.mark.slow
@pytest.mark.parametrize("form", [ONNX, "pt2"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("lenet", (1, 28, 28)), ("lenet", (2, 32)), ("vgg8", (3, 32, 32)), ("resnet10", (3, 32, 32)), ("vit", (3, 16, 16)),
     ("zenkenet", (3, 32, 32)), ("mh_lenet", (3, 32, 32)), ("squeezenet1_1", (3, 64, 64))],
)  # fmt: skip
def test_networks_of_the_zoo(tmp_path: Path, name: str, shape: tuple[int, ...], form: str) -> None:
    torch.manual_seed(0)
    module = parse(name, shape, 5).build().eval()
    path = write_portable(tmp_path / "m", form, module, shape, ABOUT)
    x = torch.randn(4, *shape)
    torch.testing.assert_close(answers(path, x), module(x), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not HAS_ONNX, reason="needs onnx, onnxscript and onnxruntime")
@pytest.mark.slow
def test_onnx_runs_where_neither_fedloom_nor_torch_is(trained, tmp_path: Path) -> None:
    """A Python without site-packages gets links to onnxruntime and NumPy, and to nothing else."""
    run = trained("hyperfedzero+lenet", adapt="prior")
    x = torch.as_tensor(load_data("digits").x[:9])
    admission = run.admit(x)
    path = admission.export(tmp_path, format="onnx")
    np.save(tmp_path / "x.npy", x.numpy())
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("onnxruntime", "numpy", "numpy.libs", "flatbuffers", "google", "packaging", "ml_dtypes"):
        for place in map(Path, sys.path):
            if (place / name).is_dir():
                (alone / name).symlink_to(place / name)
                break
    code = (
        "import sys, importlib.util\n"
        f"sys.path.append({str(alone)!r})\n"
        "assert not any(importlib.util.find_spec(name) for name in ('torch', 'fedloom', 'onnx', 'onnxscript'))\n"
        "import numpy, onnxruntime\n"
        f"session = onnxruntime.InferenceSession({str(path)!r}, providers=['CPUExecutionProvider'])\n"
        f"x = numpy.load({str(tmp_path / 'x.npy')!r})\n"
        f"numpy.save({str(tmp_path / 'y.npy')!r}, session.run(None, {{'x': x}})[0])\n"
        "print(session.get_modelmeta().custom_metadata_map['method'])\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "HyperFedZero + prior"
    found = torch.from_numpy(np.load(tmp_path / "y.npy"))
    torch.testing.assert_close(found, admission.predict(x), atol=1e-5, rtol=1e-5)


class Branching(nn.Module):
    """Its answer depends on a value, which no graph can follow."""

    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.sum() > 0) else -x


class Drifting(nn.Module):
    """Another answer every time: no file can be equal to it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(1)


@pytest.mark.parametrize("form", [ONNX, "pt2"])
def test_what_cannot_be_exported_says_why(tmp_path: Path, form: str) -> None:
    with pytest.raises(NeedsError, match=r"cannot be written by .*Give --format safetensors") as told:
        write_portable(tmp_path / "m", form, Branching(), (3,), ABOUT)
    assert "\n" not in str(told.value)
    with pytest.raises(NeedsError, match="differs from the model by"):
        write_portable(tmp_path / "m", form, Drifting(), (3,), ABOUT)
    assert not list(tmp_path.iterdir())


def test_refusals(trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="Unknown format 'tflite'"):
        trained("fedavg").export(1, tmp_path, format="tflite")
    with pytest.raises(NeedsError, match="give --format onnx or pt2"):
        trained("hyperfedzero").export(1, tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NeedsError, match=r"needs onnx, which is not installed; pip install 'fedloom\[onnx\]'"):
        trained("fedavg").export(1, tmp_path, format="onnx")
