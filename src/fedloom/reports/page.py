# SPDX-License-Identifier: Apache-2.0
"""A page as a value, and as one HTML file that loads nothing.

The page's content is JSON in a script element of a kind that is never run; the page's own script builds every element
from it as text. A Content-Security-Policy allows the scripts that are in the file, by their digests, and no other.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from fedloom.reports.charts import Chart
from fedloom.reports.vega import legend_of, spec_of

HERE = Path(__file__).parent
VENDOR = HERE / "vendor"
SCRIPTS = ("vega.min.js", "vega-lite.min.js", "vega-embed.min.js", "vega-interpreter.js")

DIGITS = 6
"""Significant digits of the numbers in a page."""

SEARCHED = 500
"""Clients whose names are offered to whoever looks for one."""

TURNS = re.compile("[\u202a-\u202e\u2066-\u2069]")
"""Characters that turn the direction in which what follows is read."""
AS_THEY_ARE = ("data", "rows", "specs", "clients", "text", "png")
"""Parts of a page that are names and numbers, or are to be copied."""

Block = dict[str, Any]
"""A part of a section: a chart, a table, a picture, paragraphs, facts, code. Made by the functions below."""


@dataclass(frozen=True)
class Tile:
    """A number that is to be seen first."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading."""

    id: str
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """What a page says."""

    title: str
    verdict: Sequence[str]
    """Sentences; the first is set large."""
    badges: Sequence[str] = ()
    warnings: Sequence[str] = ()
    refusal: str = ""
    """Why some of it must not be read as a comparison; set in red."""
    tiles: Sequence[Tile] = ()
    sections: Sequence[Section] = ()
    progress: Mapping[str, Any] | None = None
    """Of a run that goes on: rounds done and planned, and sentences."""
    footer: str = ""
    clients: Sequence[str] = field(default_factory=tuple)
    """Those that can be looked for."""

    def as_json(self) -> dict[str, Any]:
        """For the page's script."""
        found: dict[str, Any] = _straight(
            {
                "title": self.title,
                "verdict": list(self.verdict),
                "badges": list(self.badges),
                "warnings": list(self.warnings),
                "refusal": self.refusal,
                "tiles": [vars(tile) for tile in self.tiles],
                "sections": [
                    {**vars(one), "blocks": [_packed(block) for block in one.blocks]} for one in self.sections
                ],
                "progress": self.progress,
                "footer": self.footer,
                "clients": list(self.clients[:SEARCHED]),
            }
        )
        return found


def chart_block(chart: Chart) -> Block:
    """A chart with its specifications, one for each combination of choices, and its data, once."""
    return {
        "type": "chart",
        "id": chart.name,
        "title": chart.title,
        "caption": chart.caption,
        "switches": [{"title": s.title, "options": list(s.options)} for s in chart.switches],
        "specs": {key: spec_of(variant) for key, variant in chart.variants().items()},
        "columns": chart.column_titles(),
        "data": {name: list(column) for name, column in chart.data.items()},
        "legend": max((len(name) for v in chart.variants().values() for name in legend_of(v)), default=0),
    }


def _straight(value: Any) -> Any:
    """The same with sentences in one direction: what a name in one turns round would be read as another number.

    Names by themselves stay as they are; each is shown in a place of its own.
    """
    if isinstance(value, str):
        return TURNS.sub("", value)
    if isinstance(value, Mapping):
        return {name: one if name in AS_THEY_ARE else _straight(one) for name, one in value.items()}
    return [_straight(one) for one in value] if isinstance(value, list | tuple) else value


def _packed(block: Block) -> Block:
    """The same with every text of a column once: ``names``, and for each row ``at`` which of them it has."""
    return {**block, "data": {n: _texts(c) for n, c in block["data"].items()}} if block["type"] == "chart" else block


def _texts(column: Sequence[Any]) -> Any:
    names = {text: i for i, text in enumerate(dict.fromkeys(column))}
    if 2 * len(names) > len(column) or not all(isinstance(text, str) for text in names):
        return column
    return {"names": list(names), "at": [names[text] for text in column]}


def table_block(name: str, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], note: str = "") -> Block:
    """A table that is seen at once."""
    return {
        "type": "table", "id": name, "title": title, "note": note, "columns": list(columns),
        "rows": [list(row) for row in rows],
    }  # fmt: skip


def text_block(*paragraphs: str) -> Block:
    """Paragraphs."""
    return {"type": "text", "paragraphs": list(paragraphs)}


def facts_block(items: Iterable[tuple[str, Any]]) -> Block:
    """Names with what they are."""
    return {"type": "facts", "items": [[name, value] for name, value in items]}


def image_block(name: str, title: str, png: bytes, alt: str, note: str = "") -> Block:
    """A picture; ``alt`` says what is on it."""
    return {
        "type": "image", "id": name, "title": title, "note": note, "alt": alt,
        "png": base64.b64encode(png).decode(),
    }  # fmt: skip


def code_block(title: str, text: str, *, folded: bool = False) -> Block:
    """Text to copy."""
    return {"type": "code", "title": title, "text": text, "folded": folded}


def html(page: Page, *, live: bool = False) -> str:
    """The file. ``live``: it asks the server that it came from for newer content."""
    content = embedded({**page.as_json(), "live": live})
    scripts = [_library(), (HERE / "page.js").read_text(encoding="utf-8")]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}; base-uri 'none'; form-action 'none'"
    )
    return "\n".join([
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta name="referrer" content="no-referrer">',
        '<link rel="icon" href="data:,">',
        f"<title>{plain(page.title)}</title>",
        f"<style>{(HERE / 'page.css').read_text(encoding='utf-8')}</style>",
        "</head>",
        "<body>",
        '<a class="skip" href="#content">Skip to the content</a>',
        '<div id="page"><noscript><main><h1>',
        plain(page.title),
        "</h1><p>",
        plain(" ".join(page.verdict)),
        "</p><p>Charts and tables are drawn by the script in this file, which this browser does not run.</p></main>",
        "</noscript></div>",
        f'<script type="application/json" id="data">{content}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>",
        "",
    ])  # fmt: skip


def plain(text: str) -> str:
    """A text from a record as text in HTML: what is no character, which JSON lets through, as a question mark."""
    return escape(TURNS.sub("", text).encode(errors="replace").decode())


def embedded(content: Any) -> str:
    """JSON that can stand in a script element, whatever is in its texts."""
    text = json.dumps(finite(content), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def finite(value: Any) -> Any:
    """The same with numbers as short as a page can show them; None for those that JSON does not know."""
    if isinstance(value, Mapping):
        return {str(name): finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


@cache
def _library() -> str:
    """The drawing library as one script, under its licences, without the map files that only its developers have.

    Whoever hands a page on hands the library on, which its licences allow where they come with it.
    """
    parts = [f"/*\n{(VENDOR / 'LICENSES.txt').read_text(encoding='utf-8')}*/"]
    for name in SCRIPTS:
        text = (VENDOR / name).read_text(encoding="utf-8")
        text = "\n".join(line for line in text.splitlines() if not line.startswith("//# sourceMappingURL="))
        parts.append(_as_global(text) if name == "vega-interpreter.js" else text)
    return "\n;\n".join(parts)


def _as_global(module: str) -> str:
    """The interpreter, which is published as a module, as a script: what it imports is part of Vega."""
    body = module.replace("import {", "const {", 1).replace("} from 'vega-util';", "} = vega;", 1)
    before, export, _ = body.partition("export { expression as expressionInterpreter };")
    assert export, "vega-interpreter.js has another form than this code knows"
    return f"const fedloomInterpreter = (() => {{\n{before}return expression;\n}})();"


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
