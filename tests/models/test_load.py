# SPDX-License-Identifier: Apache-2.0
"""Exported models, loaded by the file that was written beside them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from fedloom.core.errors import DataError
from fedloom.models.load import Mixed, Shifted, load_model
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.runs.export import export

SHAPE, OUTPUTS = (1, 8, 8), 4


class Odd(nn.Module):
    """Tied weights, and a buffer that a state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.out = nn.Linear(64, OUTPUTS)
        self.register_buffer("shift", torch.zeros(OUTPUTS), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.out(self.second(self.first(x.flatten(1)))) + self.shift
        return outputs


def exported(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Tensor, Tensor]:
    """The file, some inputs, and what the exported model gives for them."""
    model = Model(parse(name, SHAPE, OUTPUTS), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    buffers = {
        n: torch.rand(b.shape, generator=generator).to(b) + 1 if b.is_floating_point() else b + 3
        for n, b in model.fresh_buffers().items()
    }
    params = model.init(5)
    x = torch.rand(3, *SHAPE, generator=generator, dtype=dtype)
    path = export(folder, "writer 1/a.b", model.module(params, buffers), model.spec, "pFedHN")
    return path, x, model(params, buffers, x)


class Named(nn.Module):
    """A network whose own parameters are called as those of an adapted predictor."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.network = nn.Linear(math.prod(input_shape), num_outputs)
        self.offset, self.part = nn.Parameter(torch.ones(num_outputs)), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part * self.network(x.flatten(1)) + self.offset


def test_a_networks_own_names_do_not_pass_for_a_predictors(tmp_path: Path) -> None:
    path, x, wanted = exported(tmp_path, f"{__name__}:Named", torch.float32)
    assert torch.equal(load_model(path, f"{__name__}:Named", SHAPE, OUTPUTS)(x), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_adapted_predictor_is_loaded_with_its_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Model(parse("mlp:hidden=7", SHAPE, OUTPUTS), dtype=dtype)
    line = torch.tensor(1.5, dtype=dtype), torch.arange(OUTPUTS, dtype=dtype)
    one, other = (Shifted(model.module(model.init(seed), {}), *line) for seed in (1, 2))  # both have the same line
    x = torch.rand(3, *SHAPE, dtype=dtype)
    for number, module in enumerate((one, Mixed(one, other, torch.tensor(0.25, dtype=dtype)))):
        path = export(tmp_path, str(number), module.eval(), model.spec, "FedAvg + tune")
        assert torch.equal(load_model(path, "mlp:hidden=7", SHAPE, OUTPUTS)(x), module(x))


def test_a_predictor_of_a_later_version_is_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors", {"predictor": "later"})
    with pytest.raises(DataError, match="has a predictor 'later', which this version of fedloom does not know"):
        load_model(tmp_path / "model.safetensors", "mlp", SHAPE, OUTPUTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["mlp:hidden=7x", "mlp:hidden=x", "resnet10", f"{__name__}:Odd"])
def test_a_loaded_model_gives_the_exported_models_bits(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    path, x, wanted = exported(tmp_path, name, dtype)
    module = load_model(path, name, SHAPE, OUTPUTS)
    assert not module.training
    assert torch.equal(module(x), wanted)


def test_the_written_file_loads_the_model_in_a_process_of_its_own(tmp_path: Path) -> None:
    path, x, wanted = exported(tmp_path, "mlp:hidden=7x")
    torch.save({"x": x, "wanted": wanted}, tmp_path / "data.pt")
    script = (
        "import runpy, torch\n"
        f"model = runpy.run_path({str(path.with_suffix('.py'))!r})['model']\n"
        f"data = torch.load({str(tmp_path / 'data.pt')!r})\n"
        "assert torch.equal(model(data['x']), data['wanted'])\n"
    )
    source = str(Path(sys.modules["fedloom"].__file__ or "").parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": source},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(path.with_suffix(".py").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("model", "outputs", "message"),
    [
        ("mlp:hidden=8x", OUTPUTS, r"hidden.0.weight of shape \(7, 64\); MLP has it of shape \(8, 64\)"),
        ("mlp:hidden=7x", 9, r"output.weight of shape \(4, 7\)"),
        ("mlp:hidden=7x7", OUTPUTS, r"hidden.1.weight of shape None"),
        ("mlp:hidden=x", OUTPUTS, r"output.weight of shape \(4, 7\)"),
    ],
)
def test_a_file_of_another_model_is_refused(tmp_path: Path, model: str, outputs: int, message: str) -> None:
    path, _, _ = exported(tmp_path, "mlp:hidden=7x")
    with pytest.raises(DataError, match=message):
        load_model(path, model, SHAPE, outputs)
