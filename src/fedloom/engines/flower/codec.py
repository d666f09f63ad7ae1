# SPDX-License-Identifier: Apache-2.0
"""Between fedloom's world and Flower's: trees, facts and programs as records, and back.

A message is a few facts (text, numbers) and trees. A tree is the bytes of ``core.wire`` in one Flower array, which
Flower cuts into pieces as it likes. A program travels by name: the names of its functions, which must be fedloom's own,
its batches, and the spec of its guest. No code and no pickle.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedloom.adaptation.calibration import Privacy
from fedloom.core.contract import Algorithm, Batches, Program
from fedloom.core.errors import NeedsError
from fedloom.core.trees import Tree
from fedloom.core.wire import decode, encode
from fedloom.models.model import Model
from fedloom.models.spec import ModelSpec

Facts = Mapping[str, str | int | float | bool]

FACTS, TREES, FORM = "facts", "trees", "safetensors"

DEEPEST = 32
"""Levels of a tree; no method has more than a few, and recursion must end."""


class Malformed(Exception):
    """A message that is not as it should be; the text says what its sender did, on one line and in few words."""

    def __init__(self, text: str) -> None:
        super().__init__("".join(letter if letter.isprintable() else " " for letter in text[:300]))


def pack(facts: Facts, **trees: Tree) -> RecordDict:
    """A message's content."""
    coded = {name: encode(tree) for name, tree in trees.items()}
    arrays = {name: Array("uint8", (len(data),), FORM, data) for name, data in coded.items()}
    return RecordDict({FACTS: ConfigRecord(dict(facts)), TREES: ArrayRecord(arrays)})


def facts_of(content: RecordDict) -> dict[str, Any]:
    """The facts of a message."""
    records = dict(content.config_records)
    if set(records) != {FACTS}:
        raise Malformed(f"sent records named {sorted(records)} where {FACTS!r} is expected")
    return dict(records[FACTS])


def refusal(content: RecordDict | str) -> str | None:
    """Why an answer is none; None if it is one."""
    try:
        facts = {"error": content} if isinstance(content, str) else facts_of(content)
    except Malformed as fault:
        return str(fault)
    return str(Malformed(str(facts["error"]))) if "error" in facts else None


def tree_of(content: RecordDict, name: str, device: torch.device, most: int | None = None) -> dict[str, Any]:
    """A tree of a message, of at most so many bytes."""
    records = dict(content.array_records)
    arrays = dict(records[TREES]) if set(records) == {TREES} else {}
    if name not in arrays or arrays[name].stype != FORM:
        raise Malformed(f"sent no tree named {name!r}")
    size = sum(len(array.data) for array in arrays.values())
    if most is not None and size > most:
        raise Malformed(f"sent {size:,} bytes where at most {most:,} are expected")
    try:
        tree = decode(arrays[name].data, device)
    except Exception as error:  # whatever a stranger made of it
        raise Malformed(f"sent a tree that cannot be read ({type(error).__name__})") from error
    level: list[Mapping[str, Any]] = [tree]
    for _ in range(DEEPEST):
        level = [branch for part in level for branch in part.values() if isinstance(branch, Mapping)]
        if not level:
            return tree
    raise Malformed(f"sent a tree of more than {DEEPEST} levels")


def describe(program: Program, plain: Algorithm, adapted: Algorithm) -> str:
    """A program by name, as text. ``plain`` is the method, ``adapted`` what the run made of it."""
    known = {id(plain): "plain", id(adapted): "adapted"}
    return json.dumps(
        {
            "name": program.name,
            **{part: _name_of(getattr(program, part), known) for part in ("init", "step", "final")},
            "batches": asdict(program.batches) if program.batches else None,
            "guest": _spec_of(program) if program.guest else None,
        }
    )


def program_of(text: str, plain: Algorithm, adapted: Algorithm, privacy: Privacy, like: Model) -> Program:
    """The program that ``text`` names. Privacy is the client's own; a guest is a network of fedloom or its own."""
    told = json.loads(text)
    known = {"plain": plain, "adapted": adapted}
    parts = {part: _function(told[part], known, privacy) for part in ("init", "step", "final")}
    batches = Batches(**told["batches"]) if told["batches"] else None
    guest = _guest(json.dumps(told["guest"]), like) if told["guest"] else None
    return Program(told["name"], **parts, batches=batches, expects=_nothing, guest=guest)


def _nothing(shared: Tree, mine: Tree) -> Tree:
    raise AssertionError("what a reply should be is the server's to know")


def _name_of(function: Any, known: Mapping[int, str]) -> list[Any]:
    """``[module, function, arguments of a partial...]``."""
    if isinstance(function, partial):
        return [*_name_of(function.func, known), *(_argument(value, known) for value in function.args)]
    return [function.__module__, function.__qualname__]


def _argument(value: Any, known: Mapping[int, str]) -> Any:
    if isinstance(value, Algorithm):
        return {"algorithm": known[id(value)]}
    if isinstance(value, Privacy):
        return {"privacy": True}
    if isinstance(value, FunctionType):
        return {"function": _name_of(value, known)}
    return value


def _function(told: list[Any], known: Mapping[str, Algorithm], privacy: Privacy) -> Any:
    module, name, *arguments = told
    if not module.startswith("fedloom."):
        raise Malformed(f"sent a program of {module}, which is not fedloom")
    function = getattr(importlib.import_module(module), name, None)
    if not isinstance(function, FunctionType) or function.__module__ != module:
        raise Malformed(f"sent a program with {module}:{name}, which is no function there")
    values = [
        known[value["algorithm"]] if isinstance(value, dict) and "algorithm" in value
        else _function(value["function"], known, privacy) if isinstance(value, dict) and "function" in value
        else privacy if isinstance(value, dict)
        else value
        for value in arguments
    ]  # fmt: skip
    return partial(function, *values) if values else function


def _spec_of(program: Program) -> list[Any]:
    spec = program.guest.spec if program.guest else None
    if not isinstance(spec, ModelSpec):
        raise NeedsError(
            f"{program.name} sends a network to clients, and the server knows only the sizes of theirs. "
            "Name the network: --global-model."
        )
    return [spec.name, spec.options, spec.input_shape, spec.num_outputs]


@cache
def _guest(text: str, like: Model) -> Model:
    name, options, shape, outputs = json.loads(text)
    if ":" in name and not name.startswith("fedloom.") and name != like.spec.name:
        raise Malformed(f"sent a network {name}, which is neither fedloom's nor this client's")
    fixed = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in options)
    return Model(ModelSpec(name, fixed, tuple(shape), outputs), like.device, like.dtype)
