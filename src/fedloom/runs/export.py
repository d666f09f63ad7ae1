# SPDX-License-Identifier: Apache-2.0
"""A model as files that need no run directory: safetensors, and a loader of three lines."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import safetensors.torch

from fedloom.core.trees import Tree
from fedloom.models.spec import ModelSpec
from fedloom.runs.files import write_file, writing


def export(folder: Path, client: str, deployed: Tree, spec: ModelSpec, method: str, stem: str = "") -> Path:
    """Write ``client-ID.safetensors`` (a state dict) and ``client-ID.py``, which loads it; or by another ``stem``."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    stem = stem or "client-" + quote(client, safe="")
    plain = deployed.get("base", deployed)
    weights = {**plain["params"], **plain["buffers"]}
    if "base" in deployed:  # an adapted predictor: models.load.Shifted
        weights = {f"network.{name}": value for name, value in weights.items()}
        weights |= {"slope": deployed["slope"], "offset": deployed["offset"]}
    weights = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    metadata = {"client": client, "method": method, "model": str(spec), "format": "pt"}
    path = folder / f"{stem}.safetensors"
    write_file(path, safetensors.torch.save(weights, metadata))
    loader = (
        "from pathlib import Path\n"
        "from fedloom.models.load import load_model\n"
        f'model = load_model(Path(__file__).with_suffix(".safetensors"), {str(spec)!r}, '
        f"input_shape={spec.input_shape}, num_outputs={spec.num_outputs})\n"
    )
    write_file(folder / f"{stem}.py", loader.encode())
    return path
