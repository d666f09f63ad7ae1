# SPDX-License-Identifier: Apache-2.0
"""Write what the page needs, from a run with one global model: model.onnx and prior.json.

    python examples/browser/prepare.py RUN FOLDER [--mean 0.5 --std 0.25]

FOLDER gets the page too. It also needs ``ort/``, with files of the npm package onnxruntime-web: see
docs/how-to-serve.md. ``--mean`` and ``--std`` are how the federation's images were scaled, after division by 255; a run
on images of bytes has that in itself.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import fedloom
from fedloom.adaptation.trial import SIZES
from fedloom.core.contract import Seeds
from fedloom.core.errors import ConfigError, FedloomError
from fedloom.models.load import with_preparation
from fedloom.runs.portable import write_portable

PAGE = ("index.html", "page.js", "page.css", "prior.js")


def prepare(run: fedloom.Run, folder: Path, mean: float | None = None, std: float | None = None) -> None:
    """Write the page, the plain model and the calibration to ``folder``."""
    server = run.for_newcomers.server
    state, roster = server.state, server.roster
    if len(roster.input_shape) != 3 or roster.input_shape[0] not in (1, 3):
        raise ConfigError(f"The page is for images, grey or in colours; samples are of shape {roster.input_shape}.")
    if roster.preparation and (mean is not None or std is not None):
        raise ConfigError("The run prepares images itself; leave out --mean and --std.")
    setup, base, client = server.setup, server.base, run.clients[0]
    model = setup.models[client]
    shared, mine = base.send(setup, base.state(**state.base), [client])
    statistics = model.fresh_buffers()
    if statistics and not any("buffers" in tree for tree in (shared, mine[client])):
        raise ConfigError("Clients keep running statistics of their own, which the page has not; take another --model.")
    memory = {"buffers": statistics, **base.first_memory(model, setup.config, Seeds(0, setup.common_seed))}
    home = server.home_of(model, 0)
    network = base.module(home, base.client_deploy(home, shared, mine[client], memory))
    folder.mkdir(parents=True, exist_ok=True)
    about = {"method": server.base.name, "client": "nobody yet", "model": str(model.spec)}
    whole = with_preparation(network.cpu(), roster.preparation)
    write_portable(folder / "model", "onnx", whole, roster.input_shape, about, roster.preparation)
    prior: dict[str, Any] = {name: getattr(state, name).tolist() for name in ("alpha", "slope", "bias")}
    prior["reference"] = {name: value.tolist() for name, value in state.reference.items()}
    prior["trial"] = {"sizes": SIZES, **{name: state.trial[name].tolist() for name in ("trust", "samples")}}
    prior["names"] = list(roster.class_names) or [f"class {number}" for number in range(roster.num_classes)]
    prior["shape"] = list(roster.input_shape)
    scaled = {"mean": 255 * (mean or 0.0), "std": 255 * (1.0 if std is None else std)}
    prior["preparation"] = {"mean": 0.0, "std": 1.0} if roster.preparation else scaled  # of bytes
    (folder / "prior.json").write_text(json.dumps(prior))
    for name in PAGE:
        shutil.copy(Path(__file__).parent / name, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mean", type=float)
    parser.add_argument("--std", type=float)
    given = parser.parse_args()
    try:
        prepare(fedloom.load(given.run, adapt="prior"), given.folder, given.mean, given.std)
    except FedloomError as error:
        parser.error(str(error))
    print(f"wrote {given.folder}; it still needs {given.folder / 'ort'}, from the npm package onnxruntime-web")
