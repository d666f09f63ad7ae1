# SPDX-License-Identifier: Apache-2.0
"""The run directory::

    RUN/
      config.yaml          the resolved config: the file that repeats the run
      roster.json          who the clients are, and the form of their samples
      environment.json     what it ran on
      metrics.jsonl        one JSON object per line and round
      scores.jsonl         one JSON object per line and evaluation: every client's score
      embeddings.jsonl     likewise, for methods with embeddings: what each client's model is woven from
      estimates.jsonl      likewise, for adapted methods: what unseen clients found out of their label shares
      privacy.jsonl        likewise, for private runs: what was made public, never shortened
      checkpoints/round-000012/{state.safetensors, memory.safetensors, meta.json}
      summary.json         written at the end, or when interrupted; gone while a run is resumed
      lock                 held while a process works on it

Whoever writes holds ``lock()``; readers need no lock, and never see half a file. A run directory needs nothing but
itself to hand its models on: only evaluating and resuming take the data.

Checkpoints say which config, roster and data they were made with (``digests``). What was changed since is refused,
unless the caller forces it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal

import yaml

from fedloom.core.errors import RunError
from fedloom.runs import files
from fedloom.runs.checkpoint import FORMAT, MEMORY, META, STATE, Checkpoint, digest, pack, unpack
from fedloom.runs.lock import LOCK, locked
from fedloom.runs.roster import Roster

if TYPE_CHECKING:
    from fedloom.core.trees import ClientId, Tree

CONFIG, ROSTER, ENVIRONMENT = "config.yaml", "roster.json", "environment.json"
METRICS, SCORES, SUMMARY = "metrics.jsonl", "scores.jsonl", "summary.json"
EMBEDDINGS, ESTIMATES = "embeddings.jsonl", "estimates.jsonl"
PRIVACY = "privacy.jsonl"
APPENDED = (METRICS, SCORES, EMBEDDINGS, ESTIMATES)
"""Files to which a line is added at a time."""
DATA = "data"
"""Under which name checkpoints have the digest of the clients' data."""
MAY_CHANGE = ("rounds", "keep", "tracker")
"""Options that say nothing of what was computed so far."""
_KINDS: dict[str, type | UnionType] = {
    "best": int | None, "sha256": dict, "digests": dict, "released": int, "settled": int,
    "proven": int, "adapted": bool, "deployment": dict | None,
}  # fmt: skip
"""Of what type the parts of a checkpoint's description are, where it has them."""
_ROUND = re.compile(r"round-(\d{6,})")


class RunDirectory:
    """A directory with the layout above, and its config.

    A checkpoint is there as a whole or not at all, and never without the records of the rounds that led to it: records
    are brought to the disk before it, and removed after it. So a process may be killed at any moment, and whatever is
    on disk then is a run that can go on.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = dict(config)

    @classmethod
    def create(cls, path: Path | str, config: Mapping[str, Any], *, need_bytes: int = 0) -> RunDirectory:
        """A new run in a new or empty directory, on a disk that has ``need_bytes`` left.

        Of two processes that begin in one directory, one gets it and the other an error.
        """
        path = Path(path)
        with files.writing(path):
            _check_space(path, need_bytes)
            path.mkdir(parents=True, exist_ok=True)
            _check_empty(path)  # before a lock is put into what may be somebody's directory
        text = yaml.safe_dump(dict(config), sort_keys=False)
        with locked(path):
            _check_empty(path)  # again: another process may have been quicker
            files.write_file(path / CONFIG, text.encode())
        return cls.open(path)

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """A run that is there. Its config is read and looked at for what a config can hold; nothing else is read."""
        file = Path(path) / CONFIG
        if not file.is_file():
            inner = sorted(config.parent.name for config in Path(path).glob(f"*/{CONFIG}"))
            held = f"it holds the runs {', '.join(inner[:3])}{' ...' if inner[3:] else ''}; give one of them."
            raise RunError(
                f"{path} is not a run directory: {held if inner else f'it has no {CONFIG}; give the --out of a run.'}"
            )
        try:
            config = files.from_yaml(files.read_file(file))
        except (OSError, ValueError) as error:
            raise RunError(f"Cannot read {file}: it is damaged or not readable; restore it.") from error
        if not isinstance(config, dict):
            raise RunError(f"{file} holds no mapping of options to values; restore it.")
        for name, value in config.items():
            parts = value if isinstance(value, list) else [value]
            if not isinstance(name, str) or not all(isinstance(part, str | int | float | None) for part in parts):
                raise RunError(
                    f"{file} has {str(name)!r}, which is no option with text, numbers or a list; restore it."
                )
        return cls(Path(path), config)

    def write_roster(self, roster: Roster) -> None:
        """Keep who the clients are."""
        files.write_file(self.path / ROSTER, files.to_json(roster.as_json()))

    def has_roster(self) -> bool:
        """Whether it is written down who the clients are."""
        return (self.path / ROSTER).is_file()

    def roster(self) -> Roster:
        """Who the clients are."""
        found = _json_if_there(self.path / ROSTER)
        if found is None:
            raise RunError(
                f"{self.path} has no {ROSTER}: it was written by an earlier version of fedloom, or the file was lost. "
                f"Train again from its {CONFIG} with another --out."
            )
        return Roster.of_json(found, str(self.path / ROSTER))

    def digests(self) -> dict[str, str]:
        """The SHA-256 of the config and of the roster, as checkpoints have them.

        Options that say nothing of what was computed (``MAY_CHANGE``) are left out: a run may go on with others.
        """
        fixed = {name: value for name, value in self.config.items() if name not in MAY_CHANGE}
        roster = self.path / ROSTER
        return {
            "config": digest(json.dumps(fixed, sort_keys=True, default=str).encode()),
            "roster": digest(_read(roster)) if roster.exists() else "",
        }

    def check(self, meta: Mapping[str, Any], *, force: bool = False, **others: str) -> None:
        """Refuse a config or roster, or other digests such as that of the data, that is not the checkpoint's."""
        kept = meta.get("digests", {})
        for what, found in {**self.digests(), **others}.items():
            if not force and kept.get(what) not in (None, found):
                named = {"config": f"{self.path / CONFIG} was", "roster": f"{self.path / ROSTER} was"}
                raise RunError(
                    f"{named.get(what, f'The {what} were')} changed since round {meta['round']} was saved; the results "
                    "would be of another run. Restore what it was, or give --force to go on all the same."
                )

    def check_records(self, round: int, *, force: bool = False) -> None:
        """Refuse to go on from ``round`` where the records of the rounds before are not there."""
        there = {record.get("round") for record in self.records()}
        missing = [number for number in range(1, round + 1) if number not in there]
        if missing and not force:
            raise RunError(
                f"{self._metrics} lacks the record of round {missing[0]} of {round}; without it the best round so far "
                "would be forgotten. Restore the file, or give --force to go on all the same."
            )

    def update_config(self, **changes: Any) -> None:
        """Change options of the run, in memory and in its file."""
        self.config.update(changes)
        text = yaml.safe_dump(self.config, sort_keys=False)
        files.write_file(self.path / CONFIG, text.encode())

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory; what an earlier, killed holder left half done is removed first."""
        with locked(self.path):
            with files.writing(self.path):
                files.sweep(self.path)
                files.sweep(self._checkpoints)
                for name in (*APPENDED, PRIVACY):
                    files.cut_torn_line(self.path / name)
            yield

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record of a round; NaN and infinities become null."""
        files.append(self._metrics, files.to_json(record))

    def records(self) -> list[dict[str, Any]]:
        """The record of every round."""
        return self.lines(METRICS)

    def scores(self) -> list[dict[str, Any]]:
        """The scores of all evaluations."""
        return self.lines(SCORES)

    def append_to(self, name: str, line: Mapping[str, Any]) -> None:
        """Add a line to one of the ``APPENDED``."""
        files.append(self.path / name, files.to_json(line))

    def lines(self, name: str) -> list[dict[str, Any]]:
        """All lines of one of the ``APPENDED``; a last one that a killed process did not finish is left out."""
        path = self.path / name
        if not path.exists():
            return []
        *lines, _ = _read(path).split(b"\n")
        return [self._record(number, line, path) for number, line in enumerate(lines, start=1)]

    def rewind(self, round: int) -> None:
        """Go back to the end of ``round``: drop the summary and later records and checkpoints, for resuming."""
        with files.writing(self.path / SUMMARY):
            (self.path / SUMMARY).unlink(missing_ok=True)  # it would be of another run than this one becomes
        # In this order, so that when killed in between, no checkpoint lacks its records or its best one.
        for later in reversed(self.checkpoints()):
            if later > round:
                files.remove_folder(self._folder(later))
        for name in APPENDED:
            lines = self.lines(name)
            # what was found when training ended is found again when it ends
            kept = [line for line in lines if line.get("round", 0) <= round and not line.get("end")]
            if len(kept) < len(lines) or name == METRICS:
                files.write_file(self.path / name, b"".join(files.to_json(line) for line in kept))

    def save(
        self,
        round: int,
        state: Tree,
        memory: Mapping[ClientId, Tree],
        meta: Mapping[str, Any],
        *,
        best: bool,
        keep: int = 2,
    ) -> Path:
        """Save the end of ``round``. The newest ``keep`` checkpoints and the best one stay, others go.

        ``meta`` is what its trainer says of it; the round, the best one so far, the digests and the number of privacy
        releases are added. The new checkpoint is there before any old one is removed.
        """
        contents, facts = pack(state, memory)
        best_round = round if best else self.best_round()
        own = {"round": round, "best": best_round, "method": self.config.get("method"), **facts}
        own["released"] = len(self.lines(PRIVACY))
        own["digests"] = {**self.digests(), **meta.get("digests", {})}
        files.sync_file(self._metrics)  # so that no checkpoint outlives the records that lead to it

        def description() -> Iterator[bytes]:  # when the others are written, whose digests it has
            own["sha256"] = {name: content.sha256 for name, content in contents.items()}
            yield files.to_json({**meta, **own}, indent=1)

        files.write_folder(self._folder(round), {**contents, META: description()})
        saved = self.checkpoints()
        for old in saved[: -max(keep, 1)]:
            if old != best_round:
                files.remove_folder(self._folder(old))
        return self._folder(round)

    def load(self, which: Literal["last", "best"] | int = "last") -> Checkpoint:
        """A checkpoint, verified: its files are those that its description has digests of. Tensors are on the CPU."""
        round = self._which(which)
        meta = self.meta(round)
        contents = {name: self._verified(round, name, meta) for name in (STATE, MEMORY)}
        try:
            state, memory = unpack(contents, meta["layout"])
        except Exception as error:  # whatever is wrong with it, the file is at fault
            raise self._unusable(round, META, "does not describe the files beside it") from error
        return Checkpoint(round, state, memory, meta)

    def forget(self, round: int) -> None:
        """Remove a checkpoint that turned out to be of no use."""
        files.remove_folder(self._folder(round))

    def checkpoints(self) -> list[int]:
        """The rounds with a checkpoint, oldest first."""
        found = (_ROUND.fullmatch(file.parent.name) for file in self._checkpoints.glob(f"*/{META}"))
        return sorted(int(match[1]) for match in found if match)

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Keep what the run runs on (``environment.environment``)."""
        files.write_file(self.path / ENVIRONMENT, files.to_json(environment, indent=2))

    def environment(self) -> dict[str, Any] | None:
        """What the run ran on, if it was kept."""
        return _json_if_there(self.path / ENVIRONMENT)

    def write_extra(self, name: str, found: Mapping[str, Any]) -> None:
        """Keep what was found out of the run later, beside its records."""
        files.write_file(self.path / name, files.to_json(found))

    def extra(self, name: str) -> dict[str, Any] | None:
        """What was found out later, if it was."""
        return _json_if_there(self.path / name)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep the outcome of the run."""
        files.write_file(self.path / SUMMARY, files.to_json(summary, indent=2))

    def summary(self) -> dict[str, Any] | None:
        """The outcome of the run, once there is one."""
        return _json_if_there(self.path / SUMMARY)

    @property
    def _metrics(self) -> Path:
        return self.path / METRICS

    @property
    def _checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def _folder(self, round: int) -> Path:
        return self._checkpoints / f"round-{round:06d}"

    def _record(self, number: int, line: bytes, path: Path) -> dict[str, Any]:
        """One line of a file of records; damage is told with its place, since other lines can be used."""
        try:
            found = files.from_json(line)
        except ValueError as error:
            raise RunError(
                f"Line {number} of {path} is not a JSON object; remove that line to use the others."
            ) from error
        if type(found.get("round", 0)) is not int:
            raise RunError(f"Line {number} of {path} is of no round; remove that line to use the others.")
        return found

    def best_round(self) -> int | None:
        """The round of the best checkpoint, if any was evaluated."""
        saved = self.checkpoints()
        return self.meta(saved[-1])["best"] if saved else None

    def _which(self, which: Literal["last", "best"] | int) -> int:
        """The round of a checkpoint that is there; errors say which there are."""
        saved = self.checkpoints()
        if not saved:
            raise RunError(f"{self.path} has no checkpoint; start the run again from its {CONFIG} with another --out.")
        if which == "last":
            return saved[-1]
        wanted = self.best_round() if which == "best" else which
        if wanted is None:
            raise RunError(f"{self.path} has no best checkpoint, as nothing was evaluated; use the last one.")
        if wanted not in saved:
            raise RunError(
                f"{self.path} has no checkpoint of round {wanted}; choose from: {', '.join(map(str, saved))}."
            )
        return wanted

    def meta(self, round: int) -> dict[str, Any]:
        """The description of a checkpoint, if it is one of this run and of a format that we know."""
        try:
            meta = files.from_json(files.read_file(self._folder(round) / META))
        except (OSError, ValueError) as error:
            raise self._unusable(round, META, "is damaged") from error
        if not {"format", "round", "best", "method", "sha256", "layout"} <= set(meta):
            raise self._unusable(round, META, "is not of a fedloom checkpoint")
        if meta["format"] != FORMAT:
            older = " (it was written by an earlier version)" if meta["format"] == 1 else ""
            raise self._unusable(round, META, f"has format {meta['format']!r} where this fedloom knows {FORMAT}{older}")
        if meta["round"] != round:
            raise self._unusable(round, META, f"is of round {meta['round']!r}")
        if meta["method"] != self.config.get("method"):
            raise self._unusable(
                round, META, f"is of the method {meta['method']!r} in a run of {self.config.get('method')!r}"
            )
        for name, kind in _KINDS.items():
            if name in meta and not isinstance(meta[name], kind):
                raise self._unusable(round, META, f"has {name} of another type than it is written with")
        return meta

    def _verified(self, round: int, name: str, meta: Mapping[str, Any]) -> bytes:
        try:
            data = files.read_file(self._folder(round) / name)
        except OSError as error:
            raise self._unusable(round, name, "is missing or not readable") from error
        if digest(data) != meta["sha256"].get(name):
            raise self._unusable(round, name, f"is damaged (its SHA-256 is not the one in {META})")
        return data

    def _unusable(self, round: int, name: str, fault: str) -> RunError:
        """The error about a checkpoint's file, with what can be done: go on from an older one, if there is one."""
        older = [saved for saved in self.checkpoints() if saved < round]
        folder = self._folder(round)
        if older:
            advice = f"remove the folder {folder.name} to go on from {self._folder(older[-1]).name}"
        else:
            advice = f"there is no older one, so start the run again from its {CONFIG} with another --out"
        return RunError(f"Checkpoint file {folder / name} {fault}; {advice}.")


def _read(path: Path) -> bytes:
    try:
        return files.read_file(path)
    except OSError as error:
        raise RunError(f"Cannot read {path}: {error.strerror}; restore or remove it.") from error


def _json_if_there(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        return files.from_json(files.read_file(path))
    except (OSError, ValueError) as error:
        raise RunError(f"Cannot read {path}: it is damaged or not readable; restore or remove it.") from error


def _check_space(path: Path, need_bytes: int) -> None:
    """Refuse a disk on which the run would not fit: better now than after hours."""
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < need_bytes:
        raise RunError(
            f"The disk of {path} has {free / 1e6:,.0f} MB left, and the run needs about "
            f"{need_bytes / 1e6:,.0f} MB; free some space or give another --out."
        )


def _check_empty(path: Path) -> None:
    """Refuse a directory that holds anything but what a start that was killed left."""
    names = sorted(one.name for one in path.iterdir() if one.name != LOCK and not one.name.startswith(files.TEMPORARY))
    if CONFIG in names:
        raise RunError(f"{path} already holds a run; give another --out, or go on with it: `fedloom resume {path}`.")
    if names:
        raise RunError(f"{path} is not empty (it holds {names[0]!r}); give another --out: a new or empty directory.")
