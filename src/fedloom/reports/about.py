# SPDX-License-Identifier: Apache-2.0
"""What a method says of itself in its file, which is read and not imported: a report needs no torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

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
    return About(name, idea.strip(), paper, travels, _constant(tree, "CITATION"))


def _constant(tree: ast.Module, name: str) -> str:
    """The text that a module assigns to a name."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            try:
                return str(ast.literal_eval(node.value))
            except ValueError:
                return ""
    return ""
