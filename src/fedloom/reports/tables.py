# SPDX-License-Identifier: Apache-2.0
"""A table of texts as LaTeX, Markdown and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import NamedTuple

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip


class Cells(NamedTuple):
    """A table, its numbers written out."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str


def as_latex(table: Cells) -> str:
    """For ``booktabs``."""
    kinds = "".join("r" if _is_number(table, column) else "l" for column in range(len(table.columns)))
    lines = [
        f"% {table.note}",
        rf"\begin{{tabular}}{{{kinds}}}",
        r"\toprule",
        *(f"{' & '.join(map(_latex, row))} \\\\" for row in [table.columns]),
        r"\midrule",
        *(f"{' & '.join(map(_latex, row))} \\\\" for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def as_markdown(table: Cells) -> str:
    """A table as GitHub and most others read it."""
    rule = ["---:" if _is_number(table, column) else "---" for column in range(len(table.columns))]
    lines = [f"| {' | '.join(map(_markdown, row))} |" for row in (table.columns, *table.rows)]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:], "", table.note]) + "\n"


def as_csv(table: Cells) -> str:
    """Commas and quotes, and no formula for a spreadsheet."""
    text = io.StringIO()
    rows = [[_no_formula(cell) for cell in row] for row in (table.columns, *table.rows)]
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _no_formula(text: str) -> str:
    """Names come from others; a number with a sign is no formula."""
    return f"'{text}" if re.match(r"[=+\-@\t\r]", text) and not re.fullmatch(r"[-+\d.,e±%() ]+", text) else text


def _is_number(table: Cells, column: int) -> bool:
    return all(re.match(r"[+-]?\d|–|baseline", row[column]) for row in table.rows)


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in _line(text))


def _markdown(text: str) -> str:
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", _line(text))


def _line(text: str) -> str:
    return " ".join(str(text).split())
