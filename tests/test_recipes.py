# SPDX-License-Identifier: Apache-2.0
"""Recipes: each file says what its methods can do, and runs; on digits in place of its own data, in two rounds."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedloom.api import parse_options
from fedloom.core.errors import ConfigError

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "recipes").glob("*.yaml"))


def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("recipes", ROOT / "benchmarks" / "recipes.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipes"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


recipes = script()
GIVEN = argparse.Namespace(device="cpu", data_root=None, rounds=2, only=[])
SMALL = {"dataset": "digits", "local_steps": 1, "local_epochs": 0, "model": "mlp:hidden=4"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_option_is_known(path: Path) -> None:
    recipe = recipes.read(path)
    for row in recipe.rows:
        trained = recipe.trained(row)
        for chosen in trained.variants():
            parse_options(trained.method, {**recipe.settings(trained, None), **chosen})
        if row.of:
            parse_options(trained.method, {**recipe.settings(trained, None), **row.options})


def small(recipe: Any, **options: Any) -> Any:
    """The recipe with tiny models on digits, one variant of each row."""
    rows = []
    for row in recipe.rows:
        own = {k: v for k, v in row.options.items() if k not in ("rounds", "cohort", *SMALL)}
        if row.of:
            own = {k: v for k, v in own.items() if k != "unseen_shift"}
        if row.method in ("pfedhn", "mh_pfedhn"):
            own["admit_rounds"] = 1
        rows.append(replace(row, options=own, choose={k: v[:1] for k, v in row.choose.items()}))
    shared = {**recipe.options, **SMALL, "clients": 6, "cohort": 2, "rounds": 2, **options}
    if recipe.options.get("unseen"):
        shared["unseen"] = 2
    return replace(recipe, rows=tuple(rows), options=shared)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_row_runs(path: Path, tmp_path: Path) -> None:
    recipe = small(recipes.read(path))
    if "it-pfl-hn" in path.stem:
        trained = {row.name for row in recipe.rows if row.method}
        views = [row for row in recipe.rows if row.of]
        recipe = replace(recipe, rows=(*(r for r in recipe.rows if r.name in trained), *views[::3]))
    results = recipes.Results(tmp_path, recipe)
    recipes.perform(recipe, results, [0], GIVEN, say=lambda line: None)
    assert [run.get("failed") for run in results.runs] == [None] * len(recipe.rows)
    lines = recipes.table(recipe, results.runs).splitlines()
    assert len(lines) == 2 + len(recipe.rows)
    for run in results.runs:
        assert set(recipe.columns) <= set(run["metrics"]), run["row"]
    assert not list(tmp_path.glob("runs/*/checkpoints"))


def tiny(**more: Any) -> Any:
    rows = (
        recipes.Row("FedAvg", method="fedavg", choose={"local_lr": [0.5, 1e-9]}, paper=12.5),
        recipes.Row("told", of="FedAvg", adapt="prior"),
        recipes.Row("wrong", method="fedavg", options={"model": "mlp,mlp:hidden=3"}),
    )
    shared = {**SMALL, "clients": 4, "cohort": 2, "rounds": 3, "local_steps": 5}
    return recipes.Recipe("A table", rows, options=shared, **more)


def test_what_is_measured_is_kept_and_not_repeated(tmp_path: Path) -> None:
    told: list[str] = []
    for seeds in ([0], [0, 1], [0, 1]):
        results = recipes.Results(tmp_path, tiny())
        recipes.perform(tiny(), results, seeds, argparse.Namespace(**{**vars(GIVEN), "rounds": 3}), say=told.append)
    assert len(told) == 2 * 5  # of each seed: two rates of two rows, and the row that fails
    assert sum("wrong seed" in line and "needs one architecture" in line for line in told) == 2
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [(run["row"], run["seed"]) for run in saved if run["chosen"] == {"local_lr": 0.5}] == [
        ("FedAvg", 0),
        ("told", 0),
        ("FedAvg", 1),
        ("told", 1),
    ]
    table = (tmp_path / "table.md").read_text()
    assert "| FedAvg (local_lr 0.5) |" in table and " ± " in table and "| 12.5 | 2 |" in table
    assert "wrong" not in table


def test_rounds_are_scaled_in_proportion() -> None:
    rows = (recipes.Row("a", method="mh_pfedhn"), recipes.Row("b", method="it_pfl_hn", options={"rounds": 500}))
    recipe = recipes.Recipe("t", rows, options={"rounds": 50, "finetune_after": 40}, evaluations=5)
    assert recipe.settings(rows[0], None)["rounds"] == 50
    assert recipe.settings(rows[1], 10) == {"eval_every": 20, "rounds": 100, "finetune_after": 8}


def test_each_makes_a_row_of_every_combination(tmp_path: Path) -> None:
    (row, *_, last) = recipes.expanded({"name": "r", "of": "x", "each": {"samples": [3, 4], "unseen_shift": ["blur"]}})
    assert (row.name, row.samples, row.options) == ("r, n = 3, blur", 3, {"unseen_shift": "blur"})
    assert last.samples == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("title: t\nrows: [{name: a, method: fedavg}, {name: a, method: local}]", "two rows called 'a'"),
        ("title: t\nrows: [{name: a, of: b}]", "the row 'a' needs either a method or, in `of`, another row's name"),
        ("title: t\nrows: [{name: a}]", "the row 'a' needs either a method"),
        ("title: t\ncolumns: [bset]\nrows: [{name: a, method: local}]", "has the column 'bset'; choose from best"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        recipes.read(tmp_path / "r.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "title: t\noptions: {rounds: 1, model: 'trap:Net'}\nrows: [{name: a, method: local}]",
        "title: t\noptions: {rounds: 1}\nrows: [{name: a, method: local, options: {model: 'trap:Net'}}]",
        "title: t\noptions: {rounds: 1}\nrows: [{name: a, method: local, choose: {model: [mlp, 'trap:Net']}}]",
        "title: t\noptions: {rounds: 1}\nrows: [{name: a, method: local, each: {model: [mlp, 'trap:Net']}}]",
        "title: t\nrows: [{name: a, method: local}, {name: b, of: a, options: {model: 'trap:Net'}}]",
        "method: local\nmodel: trap:Net",
    ],
    ids=["options", "row", "choose", "each", "view", "config"],
)
def test_a_recipe_names_no_code_without_trust(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"r\.yaml names code outside of fedloom, --model trap:Net, which"):
        recipes.read(tmp_path / "r.yaml")
    assert recipes.read(tmp_path / "r.yaml", trust=True).rows
