# SPDX-License-Identifier: Apache-2.0
"""A recipe: a published table as a YAML file.

``title``, ``setting`` (a few words, for the board), ``source`` (the citation), ``note``, ``seeds``, ``columns``,
``evaluations`` (how many in a run), ``options`` (what all rows share and what differs from the defaults) and ``rows``.

A row has a ``name``, the ``paper``'s figure, if it has one, and either a ``method`` with ``options`` of its own, which
is trained; or ``of``, the name of a row that is trained and tried here in another way: with ``adapt: prior``, with
participants' models for newcomers (``mode``), with few ``samples`` of each newcomer, with other ``options``.
``choose: {option: [values]}`` trains a row with each value, for the seeds in ``choose_seeds`` (all, unless given); with
the value that is best on the participants' validation data it is trained for the other seeds too. ``each: {what:
[values]}`` makes a row for every combination of values, of options or of what a row can have. ``board`` is the row's
name on the board, if that is another one; empty, to leave it out. Of rows with one such name the first that was
measured is there.

A file without rows is a config of ``fedloom run``: one row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fedloom import algorithms
from fedloom.core.errors import ConfigError, unknown
from fedloom.core.trust import check as check_trust
from fedloom.runs.files import from_yaml, read_file
from fedloom.runs.options import RunOptions
from fedloom.training.config import parse_options

COLUMNS: Mapping[str, tuple[Literal["best", "last"], str, str]] = {
    # the checkpoint, the clients' data, the metric
    "best": ("best", "participants/test", "accuracy"),
    "last": ("last", "participants/test", "accuracy"),
    "pooled best": ("best", "participants/test", "accuracy_pooled"),
    "pooled last": ("last", "participants/test", "accuracy_pooled"),
    "worst tenth": ("last", "participants/test", "accuracy_worst10"),
    "val": ("best", "participants/val", "accuracy"),
    "unseen": ("last", "unseen/test", "accuracy"),
    "unseen best": ("best", "unseen/test", "accuracy"),
    "zACC": ("last", "unseen/all", "accuracy"),
    "zACC best": ("best", "unseen/all", "accuracy"),
}
"""What a column shows, in per cent. Participants' validation data choose the best checkpoint."""

SHOWN = {"samples": "n = {}", "descriptor_epsilon": "epsilon = {}", "local_lr": "rate {}", "rounds": "{} rounds"}
"""How values are written in the name of a row; others are written as they are."""


OURS = ("method", "out", "seed", "device", "data_root", "progress", "keep")
"""Options that whoever runs a recipe gives, or that the table needs itself."""

COUNTED = ("rounds", "finetune_after", "pretrain_rounds", "common_rounds")
"""Options that say when a stage of training ends: where a table is shortened, each keeps its share of the rounds."""

MOST_ROWS = 10_000
"""Rows that one entry of a recipe may stand for."""

USUAL = {"rounds": RunOptions().rounds, "dataset": RunOptions().dataset}
"""Options that a table needs itself, where a recipe leaves them out."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    paper: float | str | None = None
    method: str = ""
    of: str = ""
    adapt: str | None = None
    mode: str = "admit"
    samples: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    choose: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    board: str | None = None

    def variants(self) -> Iterator[dict[str, Any]]:
        """The options of each run of this row, for one seed."""
        if not self.choose:
            yield {}
        for name, values in self.choose.items():
            yield from ({name: value} for value in values)


@dataclass(frozen=True)
class Recipe:
    """A table."""

    title: str
    rows: tuple[Row, ...]
    setting: str = ""
    source: str = ""
    note: str = ""
    seeds: tuple[int, ...] = (0, 1, 2)
    choose_seeds: tuple[int, ...] | None = None
    columns: tuple[str, ...] = ("best", "last")
    evaluations: int = 10
    options: Mapping[str, Any] = field(default_factory=dict)

    def trained(self, row: Row) -> Row:
        """The row whose run this row is about."""
        return self.row(row.of) if row.of else row

    def row(self, name: str) -> Row:
        """The row of that name."""
        names = [row.name for row in self.rows]
        if name not in names:
            raise unknown("row", name, names)
        return self.rows[names.index(name)]

    def settings(self, row: Row, rounds: int | None) -> dict[str, Any]:
        """The options that a row is trained with; with ``rounds``, shortened or prolonged in proportion."""
        given = {**USUAL, **self.options, **row.options}
        if rounds is not None:
            first = {**USUAL, **self.options, **self.rows[0].options}["rounds"]
            own = {one.name: one.default for one in fields(algorithms.get(self.trained(row).method).config)}
            for name in COUNTED:
                if whole := given.get(name, own.get(name)):
                    given[name] = max(1, round(whole * rounds / first))
        return {"eval_every": max(1, given["rounds"] // self.evaluations), **given}


def read(path: Path, trust: bool = False) -> Recipe:
    """A recipe from its file, checked; it names no code outside of fedloom without the user's trust."""
    recipe = _read(path)
    for row in recipe.rows:
        method = recipe.trained(row).method
        config = algorithms.get(method).config
        for chosen in row.variants():
            given = {**recipe.options, **row.options, **chosen}
            check_trust(path, given, RunOptions, config, trust=trust)
            if row.method:
                parse_options(method, given)  # what cannot be is told before anything is trained
    return recipe


def _read(path: Path) -> Recipe:
    try:
        content = from_yaml(read_file(path))
    except OSError as error:
        raise ConfigError(f"Cannot read the recipe {path}: {error.strerror or error}; give a YAML file.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not YAML: {error}; write a recipe as those in recipes/.") from error
    if not isinstance(content, dict) or not ("rows" in content or "method" in content):
        raise ConfigError(f"{path} is no recipe; expected a mapping with rows, each with a method.")
    if "rows" not in content:
        options = {name: value for name, value in content.items() if name not in OURS}
        one = Recipe(path.stem, (Row(content["method"], method=content["method"]),), options=options)
        _check_kinds(path, one)
        return one
    try:
        rows = tuple(row for described in content.pop("rows") for row in expanded(described))
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
        recipe = Recipe(rows=rows, **given)
    except (TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{path} is no recipe ({error}); expected what those in recipes/ have.") from error
    _check_kinds(path, recipe)
    names = [row.name for row in rows]
    for row in rows:
        if names.count(row.name) > 1:
            raise ConfigError(f"{path} has two rows called {row.name!r}; give each a name of its own.")
        if bool(row.method) == bool(row.of) or (row.of and (row.of not in names or recipe.row(row.of).of)):
            raise ConfigError(f"{path}: the row {row.name!r} needs either a method or, in `of`, another row's name.")
    wrong = [column for column in recipe.columns if column not in COLUMNS]
    if wrong:
        raise ConfigError(f"{path} has the column {wrong[0]!r}; choose from {', '.join(COLUMNS)}.")
    if not set(recipe.choose_seeds or ()) <= set(recipe.seeds):
        raise ConfigError(f"{path} chooses with seeds that it does not train; take choose_seeds from its seeds.")
    return recipe


def _check_kinds(path: Path, recipe: Recipe) -> None:
    """Refuse values of another kind than a recipe's."""
    of_all = [(recipe.columns, "columns", str), (recipe.seeds, "seeds", int), (recipe.choose_seeds or (), "seeds", int)]
    wrong = [f"{name} that are no list" for values, name, _ in of_all if not isinstance(values, tuple)]
    wrong = wrong or [f"{one!r} among its {name}" for values, name, kind in of_all for one in values
                      if type(one) is not kind]  # fmt: skip
    if type(recipe.evaluations) is not int or recipe.evaluations < 1:
        wrong.append(f"{recipe.evaluations!r} evaluations")
    for where, options in [
        ("of all rows", recipe.options),
        *((f"of {row.name!r}", row.options) for row in recipe.rows),
    ]:
        if not isinstance(options, Mapping):
            wrong.append(f"options {where} that are no mapping")
        else:
            wrong += [
                f"the option {name!r} {where}, which is not a recipe's to say" for name in OURS if name in options
            ]
            given = {**USUAL, **options}
            wrong += [f"{name} {given[name]!r} {where}" for name in USUAL if type(given[name]) is not type(USUAL[name])]
    for row in recipe.rows:
        if not isinstance(row.method, str) or not isinstance(row.of, str) or not isinstance(row.name, str):
            wrong.append(f"a row whose name, method or `of` is no text ({row.name!r})")
        choices = list(row.choose.values()) if isinstance(row.choose, Mapping) else [None]
        wrong += [f"no lists to choose from in {row.name!r}" for one in choices if not isinstance(one, list)]
    if wrong or not recipe.rows:
        raise ConfigError(
            f"{path} is no recipe: it has {wrong[0] if wrong else 'no rows'}. Write it as those in recipes/."
        )


def expanded(described: dict[str, Any]) -> Iterator[Row]:
    """The rows that an entry stands for: one, or one for every combination of what is in ``each``."""
    each = described.pop("each", {})
    own = {one.name for one in fields(Row)}
    if strange := [name for name in described if name not in own]:
        raise unknown("key of a row", strange[0], {*own, "each"})
    number = math.prod(len(values) for values in each.values())
    if number > MOST_ROWS:
        raise ConfigError(f"A row stands for {number:,} in a recipe; expected at most {MOST_ROWS:,}: shorten its each.")
    for values in itertools.product(*each.values()):
        changed = dict(zip(each, values))
        name = ", ".join(
            [described["name"], *(str(v) if k not in SHOWN else SHOWN[k].format(v) for k, v in changed.items())]
        )
        options = {**described.get("options", {}), **{k: v for k, v in changed.items() if k not in own}}
        yield Row(**{**described, **{k: v for k, v in changed.items() if k in own}, "name": name, "options": options})
