# SPDX-License-Identifier: Apache-2.0
"""Find options of a method by successive halving, on participants' validation data. Test data choose nothing.

    OUT/tune.json           what is tried: method, options, values, budget
    OUT/01-local_lr=0.01/   a trial: the run directory of a run that is paused when others were better

All trials are trained for a few rounds, the better half goes on, and so forth until one is left (Jamieson and Talwalkar
2016). A trial is a run of full length that is paused after the rounds of each rung: going on costs only what is new,
and what was found stands in the runs alone. So the same call goes on where it was stopped, however it was.
"""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedloom import algorithms, api
from fedloom.core.config import instead
from fedloom.core.errors import ConfigError, RoundError, RunError
from fedloom.core.trust import outside
from fedloom.data.arrays import Arrays
from fedloom.data.registry import load as load_data
from fedloom.data.samples import as_arrays
from fedloom.progress import Quiet
from fedloom.reports.compare import FEDERATION, NOT_COMPARED
from fedloom.runs.directory import CONFIG, SCORES, RunDirectory
from fedloom.runs.files import TEMPORARY, from_json, read_file, to_json, write_file, writing
from fedloom.runs.lock import LOCK, locked
from fedloom.runs.options import RunOptions
from fedloom.tables.perform import folder_name, release
from fedloom.training.config import parse_options
from fedloom.training.loop import chosen_by

PLAN = "tune.json"
LOCAL, OTHER = (0.1, 0.3, 1, 3, 10), (0.3, 1, 3)
"""What a rate is multiplied by where no values are given: the local one, and each other one."""
FIXED = {*FEDERATION, *NOT_COMPARED, "rounds", "eval_every", "eval_clients", "split_by", "unseen_groups", "target",
         "groups"}  # fmt: skip
"""Options with other values of which scores could not be compared."""


@dataclass(frozen=True)
class Trial:
    """One choice, and how far it came."""

    chosen: Mapping[str, Any]
    path: Path
    rounds: int = 0
    score: float | None = None
    """Of its best round so far, on validation data."""
    failed: str = ""
    """Why it has no score, if its training failed."""


@dataclass(frozen=True)
class Tuned:
    """The trials, the best one first, then by how far they came."""

    trials: Sequence[Trial]
    metric: str
    trust: bool
    """Options name code outside of fedloom."""

    @property
    def best(self) -> Trial:
        """The one that was left."""
        return self.trials[0]

    @property
    def config(self) -> Path:
        """The config file of the best trial, at full length."""
        return self.best.path / CONFIG

    @property
    def command(self) -> str:
        """Runs the best trial's config from its first round."""
        return f"fedloom run --config {shlex.quote(str(self.config))}{' --trust' * self.trust}"

    @property
    def going_on(self) -> str:
        """Trains the best trial to its full length, from where it was paused."""
        return f"fedloom resume {shlex.quote(str(self.best.path))}{' --trust' * self.trust}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        trials = [{**asdict(trial), "path": str(trial.path)} for trial in self.trials]
        return {"chosen": self.best.chosen, "metric": self.metric, "score": self.best.score,
                "config": str(self.config), "command": self.command, "resume": self.going_on,
                "trials": trials}  # fmt: skip


def tune(
    method: str,
    *,
    tries: Mapping[str, Sequence[Any]] | None = None,
    budget: int | None = None,
    dataset: Any = "digits",
    model: Any = "auto",
    out: str | Path | None = None,
    say: Callable[[str], None] = print,
    **options: Any,
) -> Tuned:
    """Find options of ``method`` by successive halving on participants' validation data.

    Args:
        method: A name from ``fedloom methods``.
        tries: Values by option; all combinations are tried. Without it, rates around those of the options.
        budget: Rounds of all trials together; without it, as many as four runs have.
        dataset: As in ``run``.
        model: As in ``run``.
        out: Where the trials are kept; the same call goes on with what is there. Without it, a folder of ``runs/``.
        say: Is told of every trial in a line.
        options: The options that all trials share, as in ``run``.
    """
    return Tuning(
        method, api.as_options(dataset, model, options), tries, budget, None if out is None else Path(out), say
    ).run(None if isinstance(dataset, str | Path) else dataset)


class Tuning:
    """What is to be tried, checked; and trying it."""

    def __init__(
        self,
        method: str,
        options: Mapping[str, Any],
        tries: Mapping[str, Sequence[Any]] | None,
        budget: int | None,
        out: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self.method, self.options, self.say = method, dict(options), say
        self.shared, config = parse_options(method, options)
        if self.shared.engine.startswith("flower"):
            raise ConfigError(f"tune trains in this process; --engine {self.shared.engine} does not. Leave it out.")
        stem = Path(self.shared.dataset).stem
        self.out = out or Path("runs") / f"tune-{method}-{stem}-seed{self.shared.seed}"
        self.tries = {name: list(values) for name, values in (tries or around(config)).items()}
        self.trials = self._combinations()
        least = len(rungs(len(self.trials))) * len(self.trials)
        self.budget = max(4 * self.shared.rounds, least) if budget is None else budget
        if self.budget < least:
            raise ConfigError(
                f"--budget is {self.budget} rounds; {len(self.trials)} trials take at least {least}. Give more, or "
                "try fewer values."
            )

    def _options_with(self, chosen: Mapping[str, Any]) -> tuple[RunOptions, Any]:
        """The options of a trial; a choice wins over the others, and over what they imply."""
        implied = instead(algorithms.get(self.method).config, chosen)
        return parse_options(self.method, {**self.options, **implied, **chosen})

    def _combinations(self) -> list[Trial]:
        fixed = sorted(set(self.tries) & FIXED)
        if fixed:
            raise ConfigError(
                f"--try {fixed[0]}: scores with other values of it cannot be compared. Run tune once for each."
            )
        found: dict[str, dict[str, Any]] = {}
        for values in itertools.product(*self.tries.values()):
            shared, config = self._options_with(dict(zip(self.tries, values)))
            read = {**asdict(shared), **asdict(config)}  # 0.1 and 1e-1 are one value
            chosen = {name: read[name] for name in self.tries}
            found.setdefault(repr(chosen), chosen)
        if len(found) < 2:
            raise ConfigError(
                f"There {'is one trial' if found else 'are no values'} to choose from; give --try OPTION=VALUE,VALUE."
            )
        digits = len(str(len(found)))
        return [
            Trial(chosen, self.out / folder_name(f"{number:0{digits}d}", chosen))
            for number, chosen in enumerate(found.values(), start=1)
        ]

    def run(self, dataset: Any = None) -> Tuned:
        """Train what is missing, and choose. ``dataset`` is for data from Python."""
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        with locked(self.out):
            self._check_same()
            shared = self.shared
            arrays = (
                load_data(shared.dataset, shared.data_root, shared.roles)
                if dataset is None
                else as_arrays(dataset, shared.roles)
            )
            dropped: list[Trial] = []
            left = self.trials
            steps = rungs(len(left), self.budget, shared.rounds)
            for number, (planned, rounds) in enumerate(steps, start=1):
                tried = [self._trained(one, rounds, arrays, f"rung {number} of {len(steps)}") for one in left]
                ranked = sorted(tried, key=_rank)
                kept = [one for one in ranked[: (planned + 1) // 2] if not one.failed]
                if not kept:
                    raise RoundError(f"Every trial failed. The first: {tried[0].failed}")
                left, dropped = kept, ranked[len(kept) :] + dropped
        best = left[0]
        return Tuned(left + dropped, _measure(best.path)[0], self._trust(*self._options_with(best.chosen)))

    def _check_same(self) -> None:
        """Refuse a folder in which other things were tried, or that is somebody's for another purpose."""
        plan = {"method": self.method, "options": self.options, "try": self.tries, "budget": self.budget}
        plan, path = from_json(to_json(plan)), self.out / PLAN
        if path.exists():
            try:
                before = from_json(read_file(path))
            except (OSError, ValueError) as error:
                raise RunError(f"{path} is damaged or not readable; restore it, or give another --out.") from error
            differing = [name for name in plan if before.get(name) != plan[name]]
            if differing:
                raise RunError(
                    f"{self.out} has trials of another tuning (its {', '.join(differing)} differ: see {path}); give "
                    "another --out."
                )
            return
        others = [one.name for one in self.out.iterdir() if one.name != LOCK and not one.name.startswith(TEMPORARY)]
        if others:
            raise RunError(f"{self.out} is not empty (it holds {min(others)!r}) and has no {PLAN}; give another --out.")
        write_file(path, to_json(plan, indent=1))

    def _trained(self, trial: Trial, rounds: int, arrays: Arrays, rung: str) -> Trial:
        """A trial, trained as far as that."""
        shared, config = self._options_with(trial.chosen)
        label, start = words_of(trial.chosen), time.perf_counter()
        try:
            if not (trial.path / CONFIG).is_file():
                api.begin(self.method, shared, config, arrays, trial.path, Quiet(), rounds)
                release()
            elif not _reached(trial.path, rounds):
                trust = self._trust(shared, config)
                api.resume(trial.path, dataset=arrays, progress=Quiet(), trust=trust, until=rounds)
                release()
        except (ConfigError, RoundError) as error:
            self.say(f"{rung}: {label} failed: {error}")
            return replace(trial, failed=str(error))
        score = _score(trial.path, rounds)
        if score is None:
            self.say(f"{rung}: {label} failed: its scores are no numbers")
            return replace(trial, failed="its scores are no numbers")
        self.say(
            f"{rung}: {label}: {_measure(trial.path)[0]} {score:.4f} on validation data after {rounds} "
            f"round{'s' * (rounds > 1)} ({time.perf_counter() - start:.1f} s)"
        )
        return replace(trial, rounds=rounds, score=score)

    def _trust(self, shared: RunOptions, config: Any) -> bool:
        """Whether the options name code outside of fedloom: whoever gave them trusts it."""
        return bool(outside({**asdict(shared), **asdict(config)}, RunOptions, type(config)))


def around(config: Any) -> dict[str, list[float]]:
    """Values to try for each of a method's rates: of options called ``..._lr``, but for those that newcomers have."""
    found = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name.endswith("_lr") and field.name != "admit_lr" and isinstance(value, float) and value > 0:
            found[field.name] = [float(f"{value * k:.3g}") for k in (LOCAL if field.name == "local_lr" else OTHER)]
    if not found:
        raise ConfigError("The method has no rates above 0 to vary; give --try OPTION=VALUE,VALUE.")
    return found


def rungs(trials: int, budget: int = 0, most: int = 0) -> list[tuple[int, int]]:
    """For each rung, how many trials are left, and after how many rounds it ends; each has the same share of rounds."""
    sizes = []
    while trials > 1:
        sizes.append(trials)
        trials = (trials + 1) // 2
    found, rounds = [], 0
    for size in sizes:
        rounds += budget // (len(sizes) * size)
        found.append((size, min(rounds, most)))
    return found


def words_of(chosen: Mapping[str, Any]) -> str:
    """A choice for people: ``local lr 0.01, cohort 5``."""
    shown = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in chosen.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())


def _reached(path: Path, rounds: int) -> bool:
    """Whether a run was trained so far and, if it was paused there, is complete."""
    directory = RunDirectory.open(path)
    summary = directory.summary()
    if summary is not None and summary["finished"] and summary["rounds"] >= rounds:
        return True
    saved = directory.checkpoints()
    return bool(saved) and saved[-1] > rounds


def _rank(trial: Trial) -> tuple[bool, float]:
    """Smaller is better."""
    if trial.score is None or trial.failed:
        return True, 0.0
    return False, -trial.score if _measure(trial.path)[1] else trial.score


def _measure(path: Path) -> tuple[str, bool]:
    """The metric of a run, and whether more of it is better."""
    line = RunDirectory.open(path).lines(SCORES)[0]
    return str(line["name"]), bool(line["higher_is_better"])


def _score(path: Path, rounds: int) -> float | None:
    """Of the best round until then on validation data; None where no score is a number."""
    metric, higher_is_better = _measure(path)
    found = [record["metrics"] for record in RunDirectory.open(path).records()
             if record["round"] <= rounds and "metrics" in record]  # fmt: skip
    name = chosen_by(found[-1], metric)
    if name is None:
        raise ConfigError("No participant has validation data to choose by; give a --val-share above 0.")
    known = [metrics[name] for metrics in found if metrics.get(name) is not None]
    return (max if higher_is_better else min)(known, default=None)
