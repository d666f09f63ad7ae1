# SPDX-License-Identifier: Apache-2.0
"""A model as files that need no run directory: safetensors, and a loader of a few lines."""

from __future__ import annotations

import importlib
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from fedloom.core.tensors import write_tensors
from fedloom.data.preparation import Preparation
from fedloom.models.load import form_of, with_preparation
from fedloom.models.spec import ModelSpec
from fedloom.runs.files import file_name, write_file, writing
from fedloom.runs.portable import SAFETENSORS, write_portable

CODE = "code"
"""The folder of a user's own network, beside a model."""


def export(
    folder: Path, client: str, module: nn.Module, spec: ModelSpec, method: str, stem: str = "",
    form: str = SAFETENSORS, *, classes: Sequence[str] = (),
    preparation: Preparation | None = None,
) -> Path:  # fmt: skip
    """Write ``client-ID.safetensors`` (a state dict) and ``client-ID.py``, which loads it; or by another ``stem``.

    ``classes`` are the names of the outputs, written beside the parameters as a list in JSON, and so is
    ``preparation``: the model in each file takes raw samples.

    A network of the user's own is copied beside them, so that they can be moved to where it is not. As ``onnx`` or
    ``pt2`` it is one file, which needs neither.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    stem = stem or "client-" + file_name(client)
    about = {"client": client, "method": method, "model": str(spec)}
    if classes:
        about["classes"] = json.dumps(list(classes))
    if preparation:
        about["preparation"] = preparation.as_text()
    if form != SAFETENSORS:
        whole = with_preparation(module.cpu(), preparation)
        return write_portable(folder / stem, form, whole, spec.input_shape, about, preparation, spec.tokens)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    path = folder / f"{stem}.safetensors"
    write_file(path, write_tensors(tensors, {**about, "format": "pt", **form_of(module)}))
    path_of_code = ""
    if _copy_code(spec.name, folder / CODE):
        path_of_code = f'import sys\nsys.path.insert(0, str(Path(__file__).parent / "{CODE}"))\n'
    loader = (
        "from pathlib import Path\n"
        "from fedloom.models.load import load_model\n"
        f"{path_of_code}"
        f'model = load_model(Path(__file__).with_suffix(".safetensors"), {str(spec)!r}, '
        f"input_shape={spec.input_shape}, num_outputs={spec.num_outputs}"
        f"{f', tokens={tuple(spec.tokens)}' if spec.tokens else ''})\n"
        + (f"classes = {list(classes)!r}\n" if classes else "")
    )
    write_file(folder / f"{stem}.py", loader.encode())
    return path


def _copy_code(name: str, folder: Path) -> bool:
    """Copy the module or package of the network at an import path; False for what is installed, or fedloom's own.

    Nor is a script copied: its classes have no name that another program can import.
    """
    package = name.partition(":")[0].partition(".")[0]
    if ":" not in name or package == "__main__":
        return False
    top = importlib.import_module(package)
    source = Path(top.__file__ or next(iter(top.__path__)))
    if any(source.is_relative_to(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")):
        return False
    root = source.parent if source.name == "__init__.py" else source
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
    for file in files:
        place = folder / file.relative_to(root.parent)
        with writing(place):
            place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, file.read_bytes())
    return True
