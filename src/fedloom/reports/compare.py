# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: one row per method and config, means and spreads over seeds.

Numbers come from the runs' summaries alone; nothing is computed again. ``best`` is the test metric at the round that
was best on validation data, ``last`` that of the last round, ``worst10`` the best round's mean over the tenth of the
clients that fare worst. ``unseen`` is the test metric of clients that took no part, at the best round too where they
were tried then, as they are unless clients are on machines of their own. A spread is the standard deviation of the
sample of seeds (n - 1).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.core.errors import RunError
from fedloom.reports.facts import readable
from fedloom.runs.directory import CONFIG, DATA, RunDirectory

NOT_COMPARED = ("method", "adapt", "seed", "data_root", "keep", "tracker")
"""What a config holds that makes no other experiment; the method and its adaptation are compared apart."""


FEDERATION = (
    "dataset", "target", "groups", "partition", "clients", "unseen", "unseen_partition", "unseen_groups",
    "client_shift", "unseen_shift", "unseen_shift_strength", "split_by", "val_share", "test_share", "task",
)  # fmt: skip
"""What a config says of the data: numbers of runs that differ in it tell nothing of their methods."""


class Spread(NamedTuple):
    """Mean and standard deviation over seeds; the latter is None for one seed."""

    mean: float
    std: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.std is None else f"{self.mean:.4f} ± {self.std:.4f}"


@dataclass(frozen=True)
class Row:
    """One method with one config; a number is None where the runs do not have it."""

    method: str
    options: Mapping[str, Any]
    """What differs between rows."""
    metric: str
    seeds: tuple[int, ...]
    runs: tuple[str, ...]
    best: Spread | None
    last: Spread | None
    worst10: Spread | None
    unseen: Spread | None
    seconds: Spread
    megabytes: Spread


@dataclass(frozen=True)
class Comparison:
    """The rows, in the order of the first run of each, and one sentence for each run that was left out."""

    rows: tuple[Row, ...]
    left_out: tuple[str, ...]
    unlike: str = ""
    """A sentence where the rows are not of one federation; else nothing."""


class _Finished(NamedTuple):
    path: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    data: str
    """A fingerprint of the samples; "" where it is not known, as over a network."""


def find_runs(paths: Iterable[Path | str]) -> list[RunDirectory]:
    """The runs at ``paths``; a directory that is no run itself stands for those in it, or in folders such as ``OUT``.

    ``fedloom run --seeds`` makes ``OUT/seed-*``.
    """
    found: dict[Path, RunDirectory] = {}
    for path in map(Path, paths):
        below = [] if (path / CONFIG).is_file() else [f"*/{CONFIG}", f"*/*/{CONFIG}"]
        inside = next(filter(None, (sorted(file.parent for file in path.glob(name)) for name in below)), [])
        for one in inside or [path]:
            found.setdefault(one.resolve(), RunDirectory.open(one))
    return list(found.values())


@readable()
def compare(paths: Iterable[Path | str]) -> Comparison:
    """The runs at ``paths`` side by side. Runs that were stopped are left out."""
    finished, left_out = [], []
    for run in find_runs(paths):
        summary = run.summary()
        if summary is None or not summary["finished"]:
            left_out.append(f"{run.path} is left out: it has not finished; use `fedloom resume {run.path}`.")
        else:
            finished.append(_Finished(run.path, run.config, summary, _data_of(run)))
    if not finished:
        raise RunError("There is no finished run to compare. " + " ".join(left_out))
    groups: dict[str, list[_Finished]] = {}
    for one in finished:
        group = groups.setdefault(repr((_method(one), sorted(_compared(one).items()))), [])
        same = next((known for known in group if known.config["seed"] == one.config["seed"]), None)
        if same is None:
            group.append(one)
        else:  # it would count as another seed, and make a spread smaller than it is
            left_out.append(f"{one.path} is left out: it has the config and the seed of {same.path}.")
    differing = _differing([_compared(group[0]) for group in groups.values()])
    rows = tuple(_row(group, differing) for group in groups.values())
    return Comparison(rows, tuple(left_out), _unlike([group[0] for group in groups.values()], differing))


def _unlike(runs: Sequence[_Finished], differing: set[str]) -> str:
    parts = []
    for name in FEDERATION:
        if name in differing:
            seen = dict.fromkeys(str(_plain(run.config[name])) for run in runs if name in run.config)
            parts.append(f"{name} ({', '.join(seen)})")
    if "dataset" not in differing and len({run.data for run in runs if run.data}) > 1:
        parts.append("what is in the data")
    metrics = dict.fromkeys(str(run.summary["metric"]) for run in runs)
    if len(metrics) > 1:
        parts.append(f"metric ({', '.join(metrics)})")
    if not parts:
        return ""
    return f"These runs are not of one federation: they differ in {' and '.join(parts)}. Compare rows that agree in it."


def _data_of(run: RunDirectory) -> str:
    try:
        saved = run.checkpoints()
        return str(run.meta(saved[-1]).get("digests", {}).get(DATA, "")) if saved else ""
    except RunError:  # that a checkpoint is damaged says nothing against the records
        return ""


def _method(run: _Finished) -> str:
    """As a table names it: ``fedavg``, ``fedavg + prior``."""
    adapted = run.config.get("adapt", "none")
    return str(run.config["method"]) if adapted == "none" else f"{run.config['method']} + {adapted}"


def _compared(run: _Finished) -> dict[str, Any]:
    return {name: _plain(value) for name, value in run.config.items() if name not in NOT_COMPARED}


def _plain(value: Any) -> Any:
    """A count that could have been a share is written as a count."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _differing(configs: Sequence[Mapping[str, Any]]) -> set[str]:
    """The options that have more than one value among the configs that have them."""
    values: dict[str, set[str]] = {}
    for config in configs:
        for name, value in config.items():
            values.setdefault(name, set()).add(repr(value))
    return {name for name, seen in values.items() if len(seen) > 1}


def _row(group: Sequence[_Finished], differing: set[str]) -> Row:
    first = group[0]
    metric: str = first.summary["metric"]
    test, unseen = f"deployed/participants/test/{metric}", f"deployed/unseen/test/{metric}"
    parts = {name: [run.summary.get(name) or {} for run in group] for name in ("best", "last", "unseen")}
    return Row(
        method=_method(first),
        options={name: value for name, value in _compared(first).items() if name in differing},
        metric=metric,
        seeds=tuple(run.config["seed"] for run in group),
        runs=tuple(str(run.path) for run in group),
        best=_if_all(part.get(test) for part in parts["best"]),
        last=_if_all(part.get(test) for part in parts["last"]),
        worst10=_if_all(part.get(f"{test}_worst10") for part in parts["best"]),
        unseen=_if_all(
            best.get(unseen, last.get(unseen)) for best, last in zip(parts["best"], parts["unseen"], strict=True)
        ),
        seconds=_spread([run.summary["seconds"] for run in group]),
        megabytes=_spread([sum(run.summary["bytes"].values()) / 1e6 for run in group]),
    )


def _if_all(values: Iterable[float | None]) -> Spread | None:
    """The spread, if every run has the number: one over some of the seeds would pass for one over all."""
    numbers = list(values)
    known = [number for number in numbers if number is not None]
    return _spread(known) if len(known) == len(numbers) else None


def _spread(numbers: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else None)
