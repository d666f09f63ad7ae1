# SPDX-License-Identifier: Apache-2.0
"""The pages say what the files in ``results/`` say."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedloom import algorithms
from fedloom.core.errors import RunError
from fedloom.reports.measured import Line, Made, Measured
from fedloom.tables.recipe import read

ROOT = Path(__file__).parents[1]
AGAIN = "run `python benchmarks/pages.py`"


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_pages", ROOT / "benchmarks" / "pages.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_agree_with_the_files(pages: ModuleType) -> None:
    for page in pages.pages():
        text = page.read_text(encoding="utf-8")
        assert pages.filled(text) == text, f"{page.name} is not what the files in results/ say; {AGAIN}."


def test_every_mark_is_a_block(pages: ModuleType) -> None:
    """A mark that is spelled wrong, or has no end, would stay as it is for ever."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        assert text.count("<!-- generated") == text.count("<!-- end -->") == len(pages.BLOCK.findall(text)), page.name


def test_the_figures_agree_with_the_files(pages: ModuleType) -> None:
    for name in pages.FIGURES:
        text = (ROOT / "docs" / "img" / f"{name}.svg").read_text(encoding="utf-8")
        assert pages.digest(name) in text, f"{name}.svg is not what the files in results/ say; {AGAIN}."


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda path: path.stem)
def test_a_file_of_results_is_of_its_recipe(path: Path) -> None:
    found = Measured.read(path)
    recipe = read(ROOT / "recipes" / found.recipe)
    assert path.stem == Path(found.recipe).stem
    assert {run["row"] for run in (*found.runs, *found.means)} <= {row.name for row in recipe.rows}
    assert [tuple(line) for line in found.rows] == [(r.name, r.paper, r.board) for r in recipe.rows]
    assert found.made and all(one.commit and one.date and one.hardware and one.torch for one in found.made)


def test_a_page_says_that_nothing_is_measured_only_where_nothing_is(pages: ModuleType) -> None:
    for page in sorted((ROOT / "docs" / "methods").glob("*.md")):
        if "There is no measurement yet." in page.read_text(encoding="utf-8"):
            with pytest.raises(ValueError, match="has a number of"):
                pages.rows(algorithms.get(page.stem).name)


def test_a_number_that_changes_changes_the_page(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "results", tmp_path / "results")
    path = tmp_path / "results" / "performance" / "clients.json"
    content = json.loads(path.read_text())
    content["rows"][0][1] = "91 (88)"
    path.write_text(json.dumps(content))
    page = "before\n<!-- generated: performance clients -->\nold\n<!-- end -->\nafter\n"
    was = pages.filled(page)
    monkeypatch.setattr(pages, "RESULTS", tmp_path / "results")
    assert "| 100 | 92 (88) |" in was and "| 100 | 91 (88) |" in pages.filled(page)
    assert was.startswith("before\n<!-- generated: performance clients -->\n|") and was.endswith(
        "<!-- end -->\nafter\n"
    )
    assert pages.filled(was) != was and pages.filled(pages.filled(was)) == pages.filled(was)


@pytest.mark.parametrize(
    ("published", "best", "prior", "sentence"),
    [
        (80.0, (0.80, 0.82, 0.84), 0.5, "Level with the best published figure; 32.0 points above FedAvg + prior."),
        (90.0, (0.80, 0.82, 0.84), 0.8, "Below the best published figure; 2.0 points above FedAvg + prior, intervals "),
        (70.0, (0.80, 0.82, 0.84), 0.9, "Above the best published figure, by a control."),
        (70.0, (0.80, 0.82, 0.84), None, "Above the best published figure; the control is not measured."),
    ],
)
def test_a_verdict_follows_from_the_numbers(
    pages: ModuleType, published: float, best: tuple[float, ...], prior: float | None, sentence: str
) -> None:
    runs = [{"row": "X", "seed": i, "chosen": {}, "made": 0, "metrics": {"best": b}} for i, b in enumerate(best)]
    if prior is not None:
        for i, less in enumerate((-0.01, 0, 0.01)):
            one = {"row": "FedAvg + prior", "seed": i, "chosen": {}, "made": 0, "metrics": {"best": prior + less}}
            runs.append(one)
    rows = [Line("X", published), Line("FedAvg + prior")]
    found = Measured("r", "t", ["best"], rows, "s", made=[Made("c", "d", "h", "t")], runs=runs)
    assert pages.verdict(found).startswith(sentence)


def test_a_block_of_nothing_is_refused(pages: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"No file in .* has a number of 'FedNothing'"):
        pages.rows("FedNothing")
    with pytest.raises(RunError):
        pages.table("nothing")
