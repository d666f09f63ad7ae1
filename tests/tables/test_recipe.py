# SPDX-License-Identifier: Apache-2.0
"""Recipes: each file says what its methods can do; those that make no sense, or name code, are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.core.errors import ConfigError
from fedloom.tables.recipe import COLUMNS, Recipe, Row, expanded, read
from fedloom.training.config import parse_options

FILES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_option_is_known(path: Path) -> None:
    recipe = read(path)
    for row in recipe.rows:
        trained = recipe.trained(row)
        for chosen in trained.variants():
            parse_options(trained.method, {**recipe.settings(trained, None), **chosen})
        if row.of:
            parse_options(trained.method, {**recipe.settings(trained, None), **row.options})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_table_has_its_controls(path: Path) -> None:
    """Local or FedAvg and the corrected FedAvg stand in every table but those that have their reason in the note."""
    recipe = read(path)
    assert not recipe.setting or any(row.method in ("local", "fedavg") for row in recipe.rows)


def test_rounds_are_scaled_in_proportion() -> None:
    rows = (Row("a", method="mh_pfedhn"), Row("b", method="it_pfl_hn", options={"rounds": 500}))
    recipe = Recipe("t", rows, options={"rounds": 50, "finetune_after": 40}, evaluations=5)
    assert recipe.settings(rows[0], None)["rounds"] == 50
    assert recipe.settings(rows[1], 10) == {"eval_every": 20, "dataset": "digits", "rounds": 100, "finetune_after": 8}


@pytest.mark.parametrize(("given", "scaled"), [({}, 5), ({"pretrain_rounds": 80}, 8), ({"pretrain_rounds": 0}, 0)])
def test_stages_of_a_shortened_table_keep_their_share(given: dict[str, int], scaled: int) -> None:
    """LG-FedAvg in ten of a hundred rounds must not be FedAvg, whose rounds come first: 50, unless they are given."""
    rows = (Row("a", method="lg_fedavg", options=given), Row("b", method="fedjets"))
    recipe = Recipe("t", rows, options={"rounds": 100})
    assert recipe.settings(rows[0], 10)["pretrain_rounds"] == scaled
    assert recipe.settings(rows[1], 10)["common_rounds"] == 2
    assert recipe.settings(rows[0], None) == {"eval_every": 10, "dataset": "digits", "rounds": 100, **given}


def test_the_guide_names_every_column() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "how-to-repeat-a-table.md").read_text(encoding="utf-8")
    assert not [column for column in COLUMNS if f"`{column}`" not in guide]


def test_a_short_recipe_cannot_stand_for_endless_rows(tmp_path: Path) -> None:
    each = {f"option {number}": [0] * 1000 for number in range(5)}
    (tmp_path / "r.yaml").write_text(
        json.dumps({"title": "t", "rows": [{"name": "r", "method": "local", "each": each}]})
    )
    with pytest.raises(ConfigError, match=r"stands for 1,000,000,000,000,000 in a recipe; expected at most 10,000"):
        read(tmp_path / "r.yaml")


def test_each_makes_a_row_of_every_combination() -> None:
    (row, *_, last) = expanded({"name": "r", "of": "x", "each": {"samples": [3, 4], "unseen_shift": ["blur"]}})
    assert (row.name, row.samples, row.options) == ("r, n = 3, blur", 3, {"unseen_shift": "blur"})
    assert last.samples == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("title: t\nrows: [{name: a, method: fedavg}, {name: a, method: local}]", "two rows called 'a'"),
        ("title: t\nrows: [{name: a, of: b}]", "the row 'a' needs either a method or, in `of`, another row's name"),
        ("title: t\nrows: [{name: a}]", "the row 'a' needs either a method"),
        ("title: t\ncolumns: [bset]\nrows: [{name: a, method: local}]", "has the column 'bset'; choose from best"),
        ("title: t\nseeds: [0]\nchoose_seeds: [1]\nrows: [{name: a, method: local}]", "choose_seeds from its seeds"),
        ("title: t\nrows: [{nmae: a, method: local}]", "Unknown key of a row 'nmae'; did you mean 'name'"),
        ("title: t\nrows: {a: local}", "is no recipe"),
        ("title: t\nlines: []", "is no recipe; expected a mapping with rows"),
        ("- a list", "is no recipe"),
        ("title: t\nrows: []", "it has no rows"),
        ("title: t\nseeds: 3\nrows: [{name: a, method: local}]", "seeds that are no list"),
        ("title: t\ncolumns: [[best]]\nrows: [{name: a, method: local}]", r"\['best'\] among its columns"),
        ("title: t\nevaluations: 0\nrows: [{name: a, method: local}]", "0 evaluations"),
        ("title: t\noptions: [1]\nrows: [{name: a, method: local}]", "options of all rows that are no mapping"),
        (
            "title: t\noptions: {out: /x}\nrows: [{name: a, method: local}]",
            "the option 'out' of all rows, which is not",
        ),
        ("title: t\nrows: [{name: a, method: [local]}]", "name, method or `of` is no text"),
        ("title: t\nrows: [{name: a, method: local, choose: {local_lr: 1}}]", "no lists to choose from in 'a'"),
        ("title: t\noptions: {rounds: many}\nrows: [{name: a, method: local}]", "rounds 'many' of all rows"),
        ("title: t\nrows: [{name: a, method: local, options: {dataset: 5}}]", "dataset 5 of 'a'"),
        ("method: [local]", "name, method or `of` is no text"),
        ("method: local\nlocal_lr: fast", "--local-lr is 'fast'; expected a number"),
        ("title: " + "[" * 20_000, "nested too deeply"),
        ("title: [", "is not YAML"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match=sentence.replace("(", r"\(")):
        read(tmp_path / "r.yaml")


def test_the_config_of_a_run_is_a_recipe_of_one_row(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("method: local\nrounds: 7\nseed: 3\ndevice: cpu\nkeep: 2\ndataset: digits\n")
    found = read(tmp_path / "config.yaml")
    assert found.settings(found.rows[0], None) == {"eval_every": 1, "rounds": 7, "dataset": "digits"}


def test_a_recipe_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read the recipe"):
        read(tmp_path / "r.yaml")


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
        read(tmp_path / "r.yaml")
    assert read(tmp_path / "r.yaml", trust=True).rows
