# SPDX-License-Identifier: Apache-2.0
"""What a run's records say, in columns. Read from its directory alone; no torch, and nothing is computed again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedloom.core.errors import FedloomError, RunError
from fedloom.reports.about import About, about
from fedloom.reports.statistics import worst_tenth
from fedloom.runs.directory import APPENDED, EMBEDDINGS, ESTIMATES, METRICS, PRIVACY, SCORES, RunDirectory
from fedloom.runs.options import PYTHON_DATA
from fedloom.runs.records import ADMISSION, AUDIT, MIX
from fedloom.runs.roster import Member, Roster

Floats = npt.NDArray[np.float64]


LARGEST_PICTURE = 100_000
"""Bytes of a picture in a page, which is to be small as a whole."""


class Scores(NamedTuple):
    """The scores of a group of clients at one round."""

    round: int
    clients: Sequence[str]
    metric: Floats
    loss: Floats
    samples: npt.NDArray[np.int64]
    everybody: int
    """How many clients there were, of whom these are some."""
    quantiles: Sequence[float] | None
    """Of the metric of all of them, at 0, 1, ... 100 percent, where there are more than these."""

    @property
    def pooled(self) -> float:
        """The metric with every sample counted once."""
        return float(self.metric @ self.samples / max(self.samples.sum(), 1))

    def band(self, share: float) -> tuple[float, float]:
        """Between which values all but that share of the clients at each end lie."""
        if self.quantiles:
            return self.quantiles[round(100 * share)], self.quantiles[round(100 * (1 - share))]
        low, high = np.quantile(self.metric, [share, 1 - share])
        return float(low), float(high)


@contextmanager
def readable() -> Iterator[None]:
    """Whatever goes wrong within, of a kind that is no user's error yet, is the fault of records that were changed."""
    try:
        yield
    except FedloomError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise RunError(
            f"A run's records are not what this fedloom writes ({why}); restore its files, or train again."
        ) from error


@dataclass(frozen=True, eq=False)
class Facts:
    """A run as its records have it."""

    path: Path
    config: Mapping[str, Any]
    roster: Roster | None
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    """Empty while the run goes on."""
    lines: Mapping[str, Sequence[Mapping[str, Any]]]
    """Of each of the files to which lines are added."""
    extras: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What was found out of it later, by name: mixed models, an admission round by round."""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """PNG files of what attacks reconstructed, by attack."""
    released: Sequence[Mapping[str, Any]] = ()
    """What a private run has made public."""

    @classmethod
    def read(cls, directory: RunDirectory) -> Facts:
        """All that a run directory has."""
        lines = {name: directory.lines(name) for name in APPENDED}
        return cls.of(directory, lines)

    @classmethod
    def of(cls, directory: RunDirectory, lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> Facts:
        """A run directory whose lines are known already."""
        roster = directory.roster() if directory.has_roster() else None
        extras = {name: found for name in (MIX, ADMISSION, AUDIT) if (found := directory.extra(name))}
        given = directory.environment() or {}, directory.summary() or {}
        pictures = {attack: png for attack in extras.get(AUDIT, ()) if (png := _picture(directory, attack))}
        return cls(directory.path, directory.config, roster, *given, lines, extras, pictures, directory.lines(PRIVACY))

    @property
    def records(self) -> Sequence[Mapping[str, Any]]:
        """One for each round."""
        return self.lines[METRICS]

    @property
    def dataset(self) -> str:
        """What the run was trained on, as a title has it."""
        named = str(self.config.get("dataset", PYTHON_DATA))
        return "data given in Python" if named == PYTHON_DATA else named

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return int(self.records[-1]["round"]) if self.records else 0

    @property
    def planned(self) -> int:
        """Rounds that the run is to have."""
        return int(self.config.get("rounds", 0))

    @property
    def finished(self) -> bool:
        """Whether training came to its end."""
        return bool(self.summary.get("finished"))

    @property
    def stopped(self) -> str:
        """Why training that came to its end did so before the last round; "" otherwise."""
        return str(self.summary.get("stopped", "")) if self.finished else ""

    @cached_property
    def about(self) -> About:
        """The method in its own words."""
        return about(str(self.config.get("method", "")))

    @property
    def name(self) -> str:
        """The method as a title has it."""
        adapted = self.config.get("adapt", "none")
        return str(self.summary.get("name") or self.about.name + (f" + {adapted}" if adapted != "none" else ""))

    @cached_property
    def metric(self) -> str:
        """The name of the metric."""
        named = [str(line["name"]) for line in self.lines[SCORES][:1] if "name" in line]
        return str(self.summary.get("metric") or (named[0] if named else "accuracy"))

    @cached_property
    def higher_is_better(self) -> bool:
        """Of the metric."""
        return all(line.get("higher_is_better", True) for line in self.lines[SCORES][:1])

    @property
    def is_share(self) -> bool:
        """The metric is a share of the samples, so that it has an interval of its own."""
        return self.metric == "accuracy"

    @cached_property
    def evaluated(self) -> list[Mapping[str, Any]]:
        """The records of rounds that were followed by an evaluation."""
        return [record for record in self.records if record.get("metrics")]

    @cached_property
    def best(self) -> Mapping[str, Any]:
        """The metrics of the best round by validation, with its number; empty where nothing was validated."""
        names = [f"{model}/participants/val/{self.metric}" for model in ("plain", "deployed")]
        found: Mapping[str, Any] = {}
        for record in self.evaluated:
            name = next((one for one in names if record["metrics"].get(one) is not None), None)
            if name is None:
                continue
            gain = record["metrics"][name] - found[name] if name in found else 1.0 if self.higher_is_better else -1.0
            if gain > 0 if self.higher_is_better else gain < 0:
                found = {"round": record["round"], **record["metrics"]}
        return {**found, **(self.summary.get("best") or {})}

    @property
    def shown(self) -> int:
        """The round that a report speaks of: the best one, or the last where there is no best."""
        return int(self.best.get("round", self.evaluated[-1]["round"] if self.evaluated else self.rounds))

    @cached_property
    def _scores(self) -> dict[tuple[int, str, str, str], Mapping[str, Any]]:
        return {(line["round"], line["model"], line["group"], line["split"]): line for line in self.lines[SCORES]}

    def scores(
        self, round: int, who: str = "participants", split: str = "test", model: str = "deployed"
    ) -> Scores | None:
        """The scores of a group of clients at a round, if there are any."""
        line = self._scores.get((round, model, who, split))
        if line is None or not line["client"]:
            return None
        metric, loss = (
            np.array([np.nan if v is None else v for v in line[n]], dtype=float) for n in ("metric", "loss")
        )
        samples, quantiles = np.array(line["samples"], dtype=np.int64), line.get("quantiles", {}).get("metric")
        return Scores(round, line["client"], metric, loss, samples, line["clients"], quantiles)

    def of_all(self, scores: Scores, who: str = "participants", of: str = "") -> float | None:
        """The mean of everybody in a group of whom ``scores`` may be some; ``_pooled`` or ``_worst10`` instead."""
        name = f"deployed/{who}/test/{self.metric}{of}"
        if len(scores.clients) < scores.everybody:
            told = [{"round": record["round"], **record["metrics"]} for record in self.evaluated]
            told += [self.summary.get(part) or {} for part in ("best", "last")]
            told.append({"round": self.summary.get("rounds"), **(self.summary.get("unseen") or {})})
            told = [one for one in told if one.get("round") == scores.round]
            known = [one[name] for one in told if one.get(name) is not None]
            if known:
                return float(known[0])
        if of == "_worst10":
            return worst_tenth(scores.metric, self.higher_is_better)
        return scores.pooled if of == "_pooled" else float(scores.metric.mean())

    def unseen(self) -> Scores | None:
        """The scores of unseen clients at the round that is shown, or at the last at which they were tried."""
        at = [line["round"] for line in self.lines[SCORES] if line["group"] == "unseen" and line["client"]]
        return self.scores(self.shown if self.shown in at else at[-1], "unseen") if at else None

    def elapsed(self) -> dict[int, tuple[float, float]]:
        """Seconds of training and megabytes that have travelled, at the end of each round."""
        seconds = megabytes = 0.0
        found = {}
        for record in self.records:
            seconds += record["seconds"]["round"] or 0.0
            megabytes += sum(record["bytes"].values()) / 1e6
            found[int(record["round"])] = (seconds, megabytes)
        return found

    @cached_property
    def members(self) -> dict[str, Member]:
        """The roster by name."""
        return {member.id: member for member in self.roster.members} if self.roster else {}

    def embeddings(self) -> tuple[list[str], Floats, list[bool]] | None:
        """At the round that is shown: whose they are, a row for each, and who of them is unseen."""
        lines = [line for line in self.lines[EMBEDDINGS] if line["embedding"]]
        at = {line["round"] for line in lines if line["group"] == "participants"}
        if not at:
            return None
        round = self.shown if self.shown in at else max(at)
        found = [line for line in lines if line["round"] == round]
        clients = [client for line in found for client in line["client"]]
        unseen = [line["group"] == "unseen" for line in found for _ in line["client"]]
        return clients, np.array([row for line in found for row in line["embedding"]], dtype=float), unseen

    def estimates(self) -> Mapping[str, Any] | None:
        """What unseen clients found out about their label shares, at the round that is shown or the last."""
        lines = self.lines[ESTIMATES]
        at = [line for line in lines if line["round"] == self.shown] or lines
        return at[-1] if at else None

    def local_losses(self) -> list[tuple[int, float | None]]:
        """The mean training loss of each round; None where it was not a number."""
        told = [(int(r["round"]), r["diagnostics"]) for r in self.records]
        return [(number, found["local_loss"]) for number, found in told if "local_loss" in found]

    def dropped(self) -> list[Mapping[str, Any]]:
        """Replies that were not used, with their rounds."""
        return [{"round": r["round"], **one} for r in self.records for one in r.get("dropped", ())]


def _picture(directory: RunDirectory, attack: str) -> bytes:
    """The picture of an attack, if there is one that can stand in a page; ``attack`` comes from a file."""
    path = directory.path / f"audit-{attack}.png"
    if not (attack.isascii() and attack.isalpha() and path.is_file() and path.stat().st_size <= LARGEST_PICTURE):
        return b""
    found = path.read_bytes()
    return found if found.startswith(b"\x89PNG\r\n\x1a\n") else b""


def facts_of(directory: RunDirectory) -> Facts:
    """The facts of a run that has something to show."""
    found = Facts.read(directory)
    if not found.records and not found.lines[SCORES]:
        raise RunError(f"{directory.path} has no record of any round yet; there is nothing to show.")
    return found
