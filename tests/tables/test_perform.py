# SPDX-License-Identifier: Apache-2.0
"""Recipes run: every kind of row, on digits in place of its own data; nothing is measured twice or lost."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from conftest import few
from fedloom import algorithms
from fedloom.core.errors import RunError
from fedloom.reports.measured import Measured
from fedloom.runs.lock import locked
from fedloom.tables import perform
from fedloom.tables.perform import RESULTS, RUNS, TABLE, Performance, Task
from fedloom.tables.recipe import Recipe, Row, read

FILES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
SMALL = {"dataset": "digits", "local_steps": 1, "local_epochs": 0, "model": "mlp:hidden=4"}


def soon_done(method: str) -> dict[str, Any]:
    """Options with which neither training nor an admission takes many steps."""
    algorithm = algorithms.get(method)
    return few(algorithm) | ({"admit_rounds": 1} if hasattr(algorithm.config, "admit_rounds") else {})


def kind(recipe: Recipe, row: Row) -> tuple[Any, ...]:
    """What a row is about, but for the values of its options: all of them are parsed whenever a recipe is read."""
    own = (row.method, row.adapt, row.mode, frozenset(row.options), frozenset(row.choose))
    return (*own, frozenset(recipe.options), kind(recipe, recipe.row(row.of)) if row.of else None)


@cache
def one_of_each_kind() -> dict[str, Recipe]:
    """The recipes with the rows of which no row before them, in any recipe, is alike; and what these are rows of."""
    seen: set[tuple[Any, ...]] = set()
    found = {}
    for recipe, path in ((read(path), path) for path in FILES):
        first = {kind(recipe, row): row.name for row in reversed(recipe.rows)}
        new = {first[one] for one in first.keys() - seen}
        rows = [replace(row, of=row.of and first[kind(recipe, recipe.row(row.of))]) for row in recipe.rows]
        new |= {row.of for row in rows if row.name in new}
        seen |= first.keys()
        if kept := tuple(row for row in rows if row.name in new):
            found[path.stem] = replace(recipe, rows=kept)
    return found


def small(recipe: Recipe) -> Recipe:
    """The recipe with tiny models on digits, one variant of each row."""
    rows = []
    for row in recipe.rows:
        own = {k: v for k, v in row.options.items() if k not in ("rounds", "cohort", *SMALL)}
        if row.of:
            own = {k: v for k, v in own.items() if k != "unseen_shift"}
        if row.method:
            own |= soon_done(row.method)
        if "admit_rounds" in own:
            own["admit_rounds"] = 1
        if ":" in own.get("aggregate", ""):  # one of a cohort of three may lie
            own["aggregate"] = own["aggregate"].partition(":")[0] + ":1"
        rows.append(replace(row, options=own, choose={k: v[:1] for k, v in [*row.choose.items()][:1]}))
    shared = {**recipe.options, **SMALL, "clients": 6, "cohort": 3, "rounds": 2}
    if recipe.options.get("unseen"):
        shared["unseen"] = 2
    if str(shared.get("partition")).startswith("group:"):  # digits have none
        shared["partition"] = "iid"
    return replace(recipe, rows=tuple(rows), options=shared)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_kind_of_row_runs(path: Path, tmp_path: Path) -> None:
    if path.stem not in one_of_each_kind():
        pytest.skip("its rows are like those of other recipes")
    recipe = small(one_of_each_kind()[path.stem])
    found = Performance(recipe, path, tmp_path, seeds=[0], device="cpu", rounds=2, say=lambda line: None).run()
    assert [run.get("failed") for run in found.runs] == [None] * len(recipe.rows)
    assert len(found.cells().rows) == len(recipe.rows)
    for run in found.runs:
        lacking = set(recipe.columns) - set(run["metrics"])
        assert all("zACC" in column or column == "unseen" for column in lacking) and len(run["metrics"]) > 1, run["row"]
        assert not lacking or recipe.row(run["row"]).mode == "admit"
    assert not list(tmp_path.glob("runs/*/run/checkpoints"))


def tiny(**more: Any) -> Recipe:
    rows = (
        Row("FedAvg", method="fedavg", choose={"local_lr": [0.1, 1e-9]}, paper=12.5),
        Row("told", of="FedAvg", adapt="prior"),
        Row("wrong", method="fedavg", options={"model": "mlp,mlp:hidden=3"}),
    )
    shared = {**SMALL, "clients": 4, "cohort": 2, "rounds": 3, "local_steps": 5}
    return Recipe("A table", rows, options=shared, **more)


def performed(recipe: Recipe, out: Path, told: list[str], **more: Any) -> Measured:
    return Performance(recipe, Path("recipes/tiny.yaml"), out, device="cpu", say=told.append, **more).run()


def test_what_is_measured_is_kept_and_not_repeated(tmp_path: Path) -> None:
    told: list[str] = []
    for seeds in ([0], [0, 1], [0, 1]):
        performed(tiny(), tmp_path, told, seeds=seeds)
    assert len(told) == 2 * 5  # of each seed: two rates of two rows, and the row that fails
    assert sum("wrong" in line and "needs one architecture" in line for line in told) == 2
    saved = Measured.read(tmp_path / RESULTS)
    assert [(run["row"], run["seed"]) for run in saved.runs if run["chosen"] == {"local_lr": 0.1}] == [
        ("FedAvg", 0), ("FedAvg", 1), ("told", 0), ("told", 1),
    ]  # fmt: skip
    table = (tmp_path / TABLE).read_text()
    assert "| FedAvg (local lr 0.1) |" in table and " ± " in table and "| 12.5 | 2 |" in table
    assert "wrong" not in table


def test_a_choice_takes_the_seeds_that_it_is_made_with_and_no_more(tmp_path: Path) -> None:
    """Asked for seed 1 alone, the rates are tried with seed 0, and the best one is trained with seed 1."""
    recipe = tiny(seeds=(0, 1), choose_seeds=(0,))
    recipe = replace(recipe, rows=(recipe.rows[0], replace(recipe.rows[0], name="plain", choose={})))
    found = performed(recipe, tmp_path, [], seeds=[1])
    assert {(run["row"], run["seed"], run["chosen"].get("local_lr")) for run in found.runs} == {
        ("FedAvg", 0, 0.1), ("FedAvg", 0, 1e-9), ("FedAvg", 1, 0.1), ("plain", 1, None),
    }  # fmt: skip


def test_two_processes_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another holds one of the runs, this one does the rest, then waits for it."""
    monkeypatch.setattr(perform, "PAUSE", 0.01)
    recipe, told = replace(tiny(), rows=tiny().rows[:1]), []
    held = Task(recipe.rows[0], [], 0, {"local_lr": 0.1}).name
    folder = tmp_path / RUNS / held
    folder.mkdir(parents=True)
    with locked(folder):
        other = threading.Thread(target=lambda: performed(recipe, tmp_path, told, seeds=[0]))
        other.start()
        while not told:
            pass
        assert "1e-09" in told[0] and other.is_alive()
    other.join(60)
    assert len(told) == 2 and "0.1" in told[1]


def test_results_of_other_lengths_do_not_mix(tmp_path: Path) -> None:
    recipe = replace(tiny(), rows=tiny().rows[2:])
    performed(recipe, tmp_path, [], seeds=[0], rounds=2)
    with pytest.raises(
        RunError, match=r"has results of tiny\.yaml with --rounds 2, not of tiny\.yaml with --rounds None"
    ):
        performed(recipe, tmp_path, [], seeds=[0])


def test_results_of_other_options_do_not_mix(tmp_path: Path) -> None:
    recipe = replace(tiny(), rows=tiny().rows[:1])
    performed(recipe, tmp_path, [], seeds=[0])
    with pytest.raises(RunError, match=r"seed0 was trained with other options than recipes/tiny\.yaml says now"):
        performed(replace(recipe, options={**recipe.options, "local_steps": 4}), tmp_path, [], seeds=[0])


def test_a_run_that_was_cut_off_is_done_again(tmp_path: Path) -> None:
    recipe, told = replace(tiny(), rows=tiny().rows[:1]), []
    performed(recipe, tmp_path, told, seeds=[0])
    (tmp_path / RUNS / Task(recipe.rows[0], [], 0, {"local_lr": 0.1}).name / perform.MEASURED).unlink()
    performed(recipe, tmp_path, told, seeds=[0])
    assert len(told) == 3 and "0.1" in told[2]


def test_what_ran_is_written_down(tmp_path: Path) -> None:
    performed(replace(tiny(), rows=tiny().rows[:1]), tmp_path, [], seeds=[0])
    saved = json.loads((tmp_path / RESULTS).read_text())
    assert saved["command"] == "fedloom table recipes/tiny.yaml"
    (made,) = saved["made"]
    assert made["hardware"].startswith("CPU") and made["commit"] and made["date"] and made["torch"]


def test_those_who_share_a_folder_write_its_results_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perform, "PAUSE", 0.01)
    tables = [Performance(tiny(), Path("tiny.yaml"), tmp_path, device="cpu", say=lambda line: None) for _ in range(4)]
    with ThreadPoolExecutor(len(tables)) as pool:
        list(pool.map(lambda table: [table.collect() for _ in range(10)], tables))
    assert (tmp_path / RESULTS).exists() and (tmp_path / TABLE).exists()


@pytest.mark.parametrize("text", ["[", "{}", '{"runs": [3]}', '{"runs": [{"row": "a"}]}'])
def test_measurements_that_were_damaged_are_told_by_their_file(text: str, tmp_path: Path) -> None:
    table = Performance(tiny(), Path("tiny.yaml"), tmp_path, device="cpu", say=lambda line: None)
    (tmp_path / RUNS / "a-seed0").mkdir()
    (tmp_path / RUNS / "a-seed0" / "measured.json").write_text(text)
    with pytest.raises(RunError, match=r"measured\.json .*; remove it, and"):
        table.collect()
