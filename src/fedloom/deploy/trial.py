# SPDX-License-Identifier: Apache-2.0
"""Data for a trial on one machine: a dataset dealt over nodes, a file each, as if each had brought its own."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.clients.federation import SPLITS
from fedloom.clients.partition import parse_scheme
from fedloom.core.config import build, option
from fedloom.core.errors import DataError
from fedloom.core.tokens import Tokens
from fedloom.data.registry import load
from fedloom.data.tables import Roles
from fedloom.deploy.options import check_name
from fedloom.models.spec import parse, usual_network
from fedloom.runs.files import file_name, write_file
from fedloom.runs.options import RunOptions
from fedloom.training.simulation import split


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What nodes get in a trial: the options of ``fedloom run`` that name data and networks."""

    dataset: str = option("digits", "A dataset's name, an .npz file, a table, or a folder with one per client.")
    target: str | None = option(None, "Of a table: the column that is predicted; without it, y.")
    groups: str | None = option(None, "Of a table: columns that are no features, separated by commas.")
    partition: str = option("auto", "How samples are split over nodes: see `fedloom datasets`.")
    model: str = option("auto", "A network, or several separated by commas: nodes take them in turn.")


def about(trial: Trial) -> dict[str, Any]:
    """The settings of an app that follow from its data: the shape of samples, the classes, and how raw ones are."""
    dataset = trial.dataset
    arrays = load(dataset, roles=Roles.of(trial.target, trial.groups))
    raw, sides = arrays.preparation, tuple(arrays.x.shape[1:])
    shape = "x".join(map(str, raw.shape(sides) if raw else sides))
    if any("," in name for name in arrays.class_names):
        raise DataError(f"{dataset} has a class whose name has a comma, which separates names in an app; rename it.")
    classes = ",".join(arrays.class_names)
    found = {"input_shape": shape, "num_outputs": arrays.num_outputs, "classes": classes, "task": arrays.task}
    found |= {"preparation": raw.as_text()} if raw else {}
    return {**found, "vocabulary": arrays.vocabulary} if arrays.vocabulary else found


def check(trial: Trial) -> None:
    """Refuse a network or a way to deal samples that does not exist."""
    for name in trial.model.split(",") if trial.model != "auto" else ():
        parse(name, (1,), 1)
    if trial.partition != "auto":
        parse_scheme(trial.partition)


def network(trial: Trial, number: int, shape: tuple[int, ...], tokens: Tokens | None) -> str:
    """The network of the node of that number."""
    names = trial.model if trial.model != "auto" else usual_network(shape, tokens)
    return names.split(",")[number % len(names.split(","))]


def deal(trial: Trial, nodes: int, newcomers: int, seed: int, folder: Path) -> dict[str, Path]:
    """``{client: file}``, each with its own samples; newcomers' training samples have no labels.

    They are dealt as in ``fedloom run`` with this seed, so that a trial can be compared with a simulation. Labels are
    names where the classes have some, as they would be in a file of the user's own.
    """
    arrays = load(trial.dataset, roles=Roles.of(trial.target, trial.groups))
    given: Mapping[str, Any] = {"clients": nodes, "unseen": newcomers, "seed": seed, "partition": trial.partition}
    found = {}
    clients = split(build(RunOptions, given), arrays).clients
    for one in clients:
        check_name(one.id)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for one in clients:
        rows = {"train": one.train, "val": one.val, "test": one.test}
        content = {f"x_{part}": arrays.x[rows[part]] for part in SPLITS}
        labelled = SPLITS[1:] if one.unseen else SPLITS
        y = np.array(arrays.class_names)[arrays.y] if arrays.num_classes and arrays.class_names else arrays.y
        content |= {f"y_{part}": y[rows[part]] for part in labelled}
        data = io.BytesIO()
        np.savez(data, **content)
        found[one.id] = folder / file_name(one.id) / "data.npz"
        found[one.id].parent.mkdir(parents=True, exist_ok=True)
        write_file(found[one.id], data.getvalue())
    return found
