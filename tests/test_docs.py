# SPDX-License-Identifier: Apache-2.0
"""The documents say what is so: their commands and Python run, their links lead somewhere, their tables are complete.

Of a ``bash`` or ``console`` block, the commands that start with ``fedloom`` are run, long ones for fewer rounds; of
``python`` blocks, everything.
The blocks of one page run in order, in one empty folder and one namespace. A comment in the line before a block
changes that::

    <!-- file: nets.py -->              the block is written to that file
    <!-- needs: cifar10 -->             skipped unless FEDLOOM_DATA has that dataset
    <!-- not run: needs a GPU -->       never run; the reason is for readers

A page with the comment ``<!-- slow -->`` trains for many seconds, and is left to the slow tests, as are the pages of
methods, of which there are many.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest

from fedloom import algorithms
from fedloom.data.registry import dataset

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
METHOD_PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
HEADINGS = ["The idea", "The algorithm in our words", "What travels and what stays", "Options",
            "Implementation decisions", "Results", "Citation"]  # fmt: skip
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file())

FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[\w ]+): (?P<value>[^\n]+?) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def is_slow(page: Path) -> bool:
    return "<!-- slow -->" in page.read_text(encoding="utf-8")


class Block(NamedTuple):
    kind: str
    text: str
    line: int
    mark: str
    value: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page that name their language."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            found["kind"],
            found["text"],
            text[: found.start("text")].count("\n") + 1,
            found["mark"] or "",
            found["value"] or "",
        )
        for found in FENCE.finditer(text)
    ]


def commands(text: str) -> list[list[str]]:
    """The words of every ``fedloom`` command of a shell block."""
    lines = (line.removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines())
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("fedloom ")]


def absent(name: str) -> bool:
    """Whether FEDLOOM_DATA lacks a dataset."""
    root = os.environ.get("FEDLOOM_DATA")
    return root is None or bool(dataset(name).missing(Path(root)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in; what a page imports or adds to the methods is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv(algorithms.VARIABLE, "")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = str(getattr(sys.modules[name], "__file__", ""))
        if str(tmp_path) in file or name in ("page", algorithms.PACKAGE):
            del sys.modules[name]


def shorter(words: list[str]) -> list[str]:
    """The command with a fifth of its rounds beyond ten: more make a better model, and show nothing else.

    What is resumed with more rounds still has more.
    """
    if "--rounds" not in words:
        return words
    place = words.index("--rounds") + 1
    rounds = int(words[place])
    return [*words[:place], str(min(rounds, 10 + (rounds - 10) // 5)), *words[place + 1 :]]


def call(words: list[str]) -> None:
    """A command in this process; it must succeed."""
    from fedloom.cli.main import main

    with pytest.raises(SystemExit) as end:
        main(words)
    assert not end.value.code, f"fedloom {shlex.join(words)} ended with exit code {end.value.code}"


def execute(block: Block, page: Path, module: types.ModuleType) -> None:
    """Run Python in the page's namespace; lines of errors are those of the page. Tests that it defines are called."""
    before = dict(vars(module))
    exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), vars(module))
    for name, value in list(vars(module).items()):
        if name.startswith("test_") and before.get(name) is not value:
            value()


@pytest.mark.parametrize(
    "page",
    [
        *(pytest.param(page, marks=[pytest.mark.slow] * is_slow(page)) for page in PAGES),
        *(pytest.param(page, marks=pytest.mark.slow) for page in METHOD_PAGES),
    ],
    ids=lambda page: page.name,
)
def test_what_a_page_shows_runs(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("page")  # a module, as classes of a namespace without one have no import path
    monkeypatch.setitem(sys.modules, "page", module)
    for block in blocks(page):
        if block.mark == "not run" or (block.mark == "needs" and absent(block.value)):
            continue
        if block.mark == "file":
            Path(block.value).write_text(block.text, encoding="utf-8")
        elif block.kind == "python":
            execute(block, page, module)
        elif block.kind in ("bash", "console"):
            for words in commands(block.text):
                call(shorter(words))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(example: Path, folder: Path) -> None:
    runpy.run_path(str(example), run_name="__main__")


@pytest.mark.parametrize("page", [*PAGES, *METHOD_PAGES], ids=lambda page: page.name)
def test_marks_are_known(page: Path) -> None:
    for block in blocks(page):
        assert block.mark in ("", "file", "needs", "not run"), f"{page.name}:{block.line}"
        if block.mark == "needs":
            dataset(block.value)  # refuses unknown names


@pytest.mark.parametrize("page", [*PAGES, *METHOD_PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if not target.startswith(("https://", "http://", "mailto:")):
            file, _, anchor = target.partition("#")
            found = (page.parent / file) if file else page
            assert found.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(found), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """The headings of a page as they are linked to."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_links_every_page() -> None:
    linked = LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    assert {page.name for page in PAGES[2:]} - {"index.md"} <= set(linked)
    assert {f"methods/{page.name}" for page in METHOD_PAGES} <= set(linked)


def test_every_method_has_its_page_and_every_page_its_method() -> None:
    assert {page.stem for page in METHOD_PAGES} == set(algorithms.built_in())


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_a_methods_page_has_the_headings_in_order(page: Path) -> None:
    text, method = page.read_text(encoding="utf-8"), algorithms.get(page.stem)
    assert re.findall(r"^## (.+)$", text, re.M) == HEADINGS
    assert f"fedloom run {page.stem}" in text and f"algorithms/{page.stem}.py" in text
    cited = text.partition("## Citation")[2]
    assert method.citation in cited if method.citation else "no paper" in cited


def test_methods_pages_name_files_that_are_there() -> None:
    named = {(page.stem, file) for page in METHOD_PAGES
             for file in re.findall(r"`(\w+/[\w/]+\.py)`", page.read_text(encoding="utf-8"))}  # fmt: skip
    places = (ROOT / "src" / "fedloom", ROOT)
    assert [one for one in sorted(named) if not any((place / one[1]).is_file() for place in places)] == []


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_a_methods_page_names_its_own_options(page: Path) -> None:
    """Those that the method or its loom adds to local training; a variant's page refers to the other's."""
    config = algorithms.get(page.stem).config
    variant = "algorithms" in config.__bases__[0].__module__
    parts = [part for part in config.__mro__ if part is config or ("looms" in part.__module__ and not variant)]
    own = {name for part in parts for name in part.__annotations__} & {f.name for f in fields(config)}
    text = page.read_text(encoding="utf-8")
    assert not [name for name in sorted(own) if f"--{name.replace('_', '-')}" not in text]


@pytest.mark.parametrize("path", [*PAGES, *METHOD_PAGES, *EXAMPLES, *SCRIPTS], ids=lambda path: path.name)
def test_no_machine_is_named(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(tmp|work|root|home|Users|opt|mnt)\b|\.\./shared", text)


@pytest.mark.parametrize("page", [*PAGES, *METHOD_PAGES], ids=lambda page: page.name)
def test_lines_of_code_are_short(page: Path) -> None:
    """Tables that were printed are as wide as they were printed."""
    for block in blocks(page):
        if block.kind != "text":
            assert max(map(len, block.text.splitlines()), default=0) <= 120, f"{page.name}:{block.line}"
