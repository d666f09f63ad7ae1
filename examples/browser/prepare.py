# SPDX-License-Identifier: Apache-2.0
"""Write what the page needs, from a run with one global model: model.onnx and prior.json.

    python examples/browser/prepare.py RUN FOLDER [--mean 0.5 --std 0.25]

FOLDER gets the page too. It also needs ``ort/``, with files of the npm package onnxruntime-web: see
docs/how-to-serve.md. ``--mean`` and ``--std`` are how the federation's images were scaled, after division by 255.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import fedloom
from fedloom.adaptation.trial import SIZES
from fedloom.runs.portable import write_portable

PAGE = ("index.html", "page.js", "page.css", "prior.js")


def prepare(run: fedloom.Run, folder: Path, mean: float = 0.0, std: float = 1.0) -> None:
    """Write the page, the plain model and the calibration to ``folder``."""
    server = run.for_newcomers.server
    state, roster = server.state, server.roster
    model = server.setup.models[run.clients[0]]
    network = server.base.module(
        server.home_of(model, 0), {"params": state.base["params"], "buffers": state.base["buffers"]}
    )
    folder.mkdir(parents=True, exist_ok=True)
    about = {"method": server.base.name, "client": "nobody yet", "model": str(model.spec)}
    write_portable(folder / "model", "onnx", network, roster.input_shape, about)
    prior: dict[str, Any] = {name: getattr(state, name).tolist() for name in ("alpha", "slope", "bias")}
    prior["reference"] = {name: value.tolist() for name, value in state.reference.items()}
    prior["trial"] = {"sizes": SIZES, **{name: state.trial[name].tolist() for name in ("trust", "samples")}}
    prior["names"] = list(roster.class_names) or [f"class {number}" for number in range(roster.num_classes)]
    prior["shape"], prior["preparation"] = list(roster.input_shape), {"mean": mean, "std": std}
    (folder / "prior.json").write_text(json.dumps(prior))
    for name in PAGE:
        shutil.copy(Path(__file__).parent / name, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mean", type=float, default=0.0)
    parser.add_argument("--std", type=float, default=1.0)
    given = parser.parse_args()
    prepare(fedloom.load(given.run, adapt="prior"), given.folder, given.mean, given.std)
    print(f"wrote {given.folder}; it still needs {given.folder / 'ort'}, from the npm package onnxruntime-web")
