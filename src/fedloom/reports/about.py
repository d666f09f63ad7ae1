# SPDX-License-Identifier: Apache-2.0
"""What a method says of itself in its file, which is read and not imported: a report needs no torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedloom import algorithms
from fedloom.core.errors import FedloomError

TRAVELS = ("Sent down", "Sent up", "Kept by the client", "Kept by the server")
"""What the head of every method's file lists."""


class About(NamedTuple):
    """A method in its own words."""

    name: str
    """As the paper spells it."""
    idea: str
    paper: str
    travels: Mapping[str, str]
    citation: str
    newcomers_privacy: tuple[str, ...] = ()
    """Its options with the epsilon and the delta of what a newcomer tells: ``NEWCOMERS_PRIVACY`` of its Config."""


def about(method: str) -> About:
    """What the file of that method says; where there is none to read, its name alone."""
    nothing = About(method, "", "", {}, "")
    try:
        _, where = algorithms.place(method)
        if isinstance(where, str):
            return nothing
        tree = ast.parse(Path(where).read_bytes())
    except (FedloomError, OSError, SyntaxError, ValueError):  # of a folder that was not given, or being worked on
        return nothing
    first, _, rest = (ast.get_docstring(tree) or "").partition("\n")
    name, _, idea = first.partition(":")
    paragraphs = re.split(r"\n\s*\n", rest.strip())
    travels = {}
    for line in TRAVELS:
        found = re.search(rf"^{line}: (.*?)(?=^\S|\Z)", rest, re.MULTILINE | re.DOTALL)
        if found:
            travels[line] = " ".join(found[1].split()).rstrip(".")
    paper = " ".join(paragraphs[0].split()) if paragraphs and re.search(r"\d{4}", paragraphs[0]) else ""
    citation, private = _constant(tree.body, "CITATION", ""), ()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Config":
            private = _constant(node.body, "NEWCOMERS_PRIVACY", ())
    return About(name, idea.strip(), paper, travels, citation, private)


def _constant(body: Sequence[ast.stmt], name: str, default: Any) -> Any:
    """What a module or class assigns to a name, where that is written out."""
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            try:
                return ast.literal_eval(node.value)  # type: ignore[attr-defined]
            except (ValueError, AttributeError):
                return default
    return default
