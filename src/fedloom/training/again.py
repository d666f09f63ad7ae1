# SPDX-License-Identifier: Apache-2.0
"""A simulation made again from a run directory and the data, to be resumed or evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedloom import algorithms
from fedloom.core.errors import ConfigError, DataError, RunError
from fedloom.core.trust import check as check_trust
from fedloom.data.registry import load as load_data
from fedloom.data.samples import as_arrays
from fedloom.runs.directory import RunDirectory
from fedloom.runs.options import PYTHON_DATA, RunOptions
from fedloom.training.config import parse_options
from fedloom.training.machine import device_of
from fedloom.training.server import method_of
from fedloom.training.simulation import Simulation, resolve, split


def simulated(directory: RunDirectory, dataset: Any, trust: bool, **changes: Any) -> Simulation:
    """The simulation that a run directory describes, before any round; ``changes`` are options with other values.

    ``dataset`` stands for the data where they have moved, or were given from Python. ``trust``: the config may name
    code outside of fedloom. Changes must leave the run the one that was trained: participants keep their samples, and
    models their form. On another kind of device the engine is chosen anew.
    """
    given = dict(directory.config)
    method = method_of(directory)
    given.pop("method")
    if given.get("engine") == "flower":
        raise RunError(
            f"{directory.path} was run over a network: its clients have the data. Models, exports and admissions work "
            "without them; go on with `fedloom deploy resume`, or with resume=true in the app's settings."
        )
    from_file = {name: value for name, value in given.items() if changes.get(name) is None}
    check_trust(directory.path / "config.yaml", from_file, RunOptions, algorithms.get(method).config, trust=trust)
    before, trained = str(given.get("device", "auto")), dict(given)
    given |= {name: value for name, value in changes.items() if value is not None}
    if before != "auto" and not before.startswith(device_of(str(given["device"])).type):
        given["engine"] = "auto"  # the one in the config is for another kind of device
    shared, config = parse_options(method, given)
    if dataset is None and shared.dataset == PYTHON_DATA:
        raise RunError(
            f"{directory.path} was run on data given from Python; give them again there: load(run, dataset=(x, y))."
        )
    if isinstance(dataset, str | Path):
        arrays = load_data(dataset, shared.data_root, shared.roles)
    elif dataset is not None:
        arrays = as_arrays(dataset, shared.roles)
    else:
        try:
            arrays = load_data(shared.dataset, shared.data_root, shared.roles)
        except DataError as error:
            raise DataError(
                f"Evaluating or resuming {directory.path} takes the data it was trained on. {error} Where they have "
                f"moved: `fedloom resume {directory.path} --dataset PATH`, or dataset=PATH in Python."
            ) from error
    preparation = None
    if directory.has_roster():  # other data may lack a class, and are prepared as the run's were
        roster = directory.roster()
        arrays, preparation = arrays.with_classes(roster.class_names, roster.num_classes), roster.preparation
    simulation = Simulation(method, shared, config, arrays, preparation)
    changed = [
        name for name, value in changes.items() if value is not None and name not in ("adapt", "device", "data_root")
    ]
    if changed:
        _check_as_trained(simulation, method, trained, changed)
    return simulation


def _check_as_trained(simulation: Simulation, method: str, trained: Mapping[str, Any], changed: list[str]) -> None:
    """Refuse other values of options with which the run would not be the one that was trained."""
    shared, config = parse_options(method, dict(trained))
    dealt = [split(resolve(shared, simulation.arrays), simulation.arrays), simulation.partition]
    rows = [[(c.id, *map(np.ndarray.tobytes, (c.train, c.val, c.test))) for c in p.participants] for p in dealt]
    names = ", ".join(changed)
    if rows[0] != rows[1]:
        raise ConfigError(
            f"With {names} as given participants would have other data than in training, and some of what they were "
            "trained on would pass for unseen. Leave it out, or train again."
        )
    before, now = set(config.form), set(simulation.server.config.form)
    if before != now:
        how, what = ("with", before - now) if before - now else ("without", now - before)
        raise ConfigError(
            f"The run was trained {how} {' and '.join(sorted(what))}, which {names} as given would change. Leave it "
            "out, or train again."
        )
