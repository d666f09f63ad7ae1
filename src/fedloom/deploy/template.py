# SPDX-License-Identifier: Apache-2.0
"""A Flower app for a method, ready to run; in ``federation/client.py`` a user fills two functions.

Its ``pyproject.toml`` has every option of ``deploy.options`` with a comment that says what it means. An option that a
preset decides, or that is not used beside another, is left empty there: written down, its default would count as given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedloom import __version__, algorithms
from fedloom.core.config import build, by_preset, flag
from fedloom.core.errors import ConfigError, RunError, unknown
from fedloom.deploy.options import SHARED, DeployOptions, in_toml
from fedloom.runs.files import write_file
from fedloom.runs.options import RunOptions

NAME = "[A-Za-z][A-Za-z0-9-]{0,31}"
"""What Flower takes as the name of an app and of its folder."""

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "A federation for {title}, by fedloom."
license = {{ file = "LICENSE" }}
dependencies = ["fedloom[flower]=={version}", "flwr>=1.41,<1.43"]

[tool.hatch.build.targets.wheel]
packages = ["federation"]

[tool.flwr.app]
publisher = "fedloom"
fab-format-version = 1
fab-include = ["federation/**/*.py", "LICENSE"]
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "federation.server:app"
clientapp = "federation.client:app"

# Server and clients read this table. Change it here, or for one run: flwr run . --run-config 'rounds=20'
[tool.flwr.app.config]
{config}
# What `fedloom deploy local` gives its nodes, for a trial on one machine.
[tool.fedloom]
{trial}"""

SERVER = '''\
"""The server's half of the app. There is nothing to fill in."""

from fedloom.deploy.server import server_app

app = server_app()
'''

CLIENT = '''\
"""The client's half of the app: fill in the two functions. Everything in them stays on the client's machine.

`node` is what the node was started with: flower-supernode --node-config 'client="ward-3" data="/data/ward-3.npz"'
"""

from typing import Any

import numpy as np

from fedloom.deploy.client import client_app


def load_data(node: Any) -> dict[str, tuple[Any, Any]]:
    """My samples and labels: {"train": (x, y), "val": (x, y), "test": (x, y)}; x has the shape of input-shape."""
    with np.load(node["data"]) as file:
        splits = [split for split in ("train", "val", "test") if f"x_{split}" in file]
        return {split: (file[f"x_{split}"], file.get(f"y_{split}")) for split in splits}


def build_model(node: Any) -> str:
    """My network: a name that `fedloom models` lists, or a class of my own (add it to `networks`)."""
    return str(node.get("model", "auto"))


app = client_app(load_data, build_model)
'''


LICENCE = """\
This app is yours; put its licence here. What it uses of fedloom and Flower is under the Apache License 2.0:
https://www.apache.org/licenses/LICENSE-2.0
"""


def write_app(folder: Path, method: str, given: Mapping[str, Any], trial: Mapping[str, Any]) -> Path:
    """Write an app for ``method`` into a new or empty folder, with ``given`` settings in place of the defaults.

    Every setting is in it, with what it means: the file is also the list of what can be set. ``trial`` says how
    ``fedloom deploy local`` deals data over nodes, and is of no use to real ones.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; give a new or empty folder.")
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty; give a new or empty folder.")
    name = folder.resolve().name
    if not re.fullmatch(NAME, name):
        raise ConfigError(
            f"{name!r} cannot be an app's name; name its folder with at most 32 letters, digits and hyphens, "
            "a letter first, e.g. ward-3."
        )
    title = algorithms.get(method).name
    project = PROJECT.format(
        name=name.lower(),
        title=title,
        version=__version__,
        config="".join(_settings(method, given)),
        trial="".join(f"{name} = {in_toml(value)}\n" for name, value in trial.items()),
    )
    try:
        (folder / "federation").mkdir(parents=True)
    except OSError as error:
        raise RunError(f"Cannot make {folder}: {error.strerror}; give a folder that can be written to.") from error
    for name, text in {
        "pyproject.toml": project.encode(),
        "LICENSE": LICENCE.encode(),
        ".gitignore": b"local/\nkeys/\n",
        "federation/__init__.py": b"",
        "federation/server.py": SERVER.encode(),
        "federation/client.py": CLIENT.encode(),
    }.items():
        write_file(folder / name, text)
    return folder


def _settings(method: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Every setting with what it means: those of the federation, of a run, of the method."""
    own = algorithms.get(method).config
    parts = [(DeployOptions, None), (RunOptions, SHARED), (own, None)]
    known = {field.name for kind, names in parts for field in fields(kind) if names is None or field.name in names}
    for name in given:
        if name not in known:
            raise unknown(f"setting of an app for {method}", name, known)
    yield f'method = "{method}"\n'
    for kind, names in parts:
        wanted = [field for field in fields(kind) if names is None or field.name in names]
        made: Any = build(kind, {field.name: given[field.name] for field in wanted if field.name in given})
        governed = by_preset(kind) - given.keys()
        unused = {
            name: ", ".join(flag(other).lstrip("-") for other in others)
            for name, others in getattr(kind, "INSTEAD", {}).items()
            if any(getattr(made, other) != value for other, value in others.items())
        }
        for field in wanted:
            value, about = getattr(made, field.name), field.metadata["help"]
            if field.name in unused:  # written down it would be used
                value, about = "", f"{about} Empty: not used. To use it, make {unused[field.name]} empty."
            if field.name in governed:  # written down it would win over a preset that is chosen later
                value, about = "", f"{about} Empty: as the preset has it."
            yield f"# {about}\n{field.name.replace('_', '-')} = {_value(value)}\n"


def _value(value: Any) -> str:
    """In TOML, and of the kinds that Flower passes on."""
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    if value is None:
        value = ""
    if not isinstance(value, bool | int | float | str):
        raise ConfigError(f"{value!r} cannot be a setting of an app; give text or a number.")
    return in_toml(value)
