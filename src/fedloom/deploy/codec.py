# SPDX-License-Identifier: Apache-2.0
"""Between fedloom's world and Flower's: trees and facts as records, and back.

A message is a few facts (text, numbers) and trees. A tree is the bytes of ``core.wire`` in one Flower array, which
Flower cuts into pieces as it likes. No code and no pickle: a program travels as its name, and a client makes it from
its own method file and config (``programs.allowed``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedloom.core.trees import Tree
from fedloom.core.wire import decode, encode

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
