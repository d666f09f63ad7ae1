# SPDX-License-Identifier: Apache-2.0
"""A node's own folder: its secret, and the versions of its memory that a server may still count on::

    FOLDER/
      secret                       made at the first start; without keys, who has it is this client
      name                         the client's name, where none is given
      client                       whose folder this is: the first client that used it
      RUN/answers/DIGEST           an answer with noise on it, by what was asked; one such file for each of the last
      answers                      how many of these it has given in all its runs
      RUN/memory-12.safetensors    what the client remembers, by the number that the server gave it
      RUN/sums/notes.json          its part in the secure sum that is being made, and which was the last
      RUN/model/                   the model it was given in the end

Files are written beside and then renamed: a node that is killed finds the one or the other whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import mkstemp
from typing import NamedTuple

from fedloom.core.errors import RunError
from fedloom.core.trees import Tree
from fedloom.core.wire import decode, encode
from fedloom.privacy.ledger import Release, epsilon, releases_of
from fedloom.runs.files import TEMPORARY, append, cut_torn_line, to_json, write_file, writing
from fedloom.runs.lock import locked

PATIENCE = 60.0
"""Seconds that a process waits for another one of this client's."""

KEPT = 100
"""Answers of a run that are kept, to be given again to whoever asks the same."""

_RUN = re.compile(r"(?!(?:secret|name|client|answers|lock)$)[\w-]{1,64}")  # not those of the files beside
_MEMORY = re.compile(rf"(?:{re.escape(TEMPORARY)})?memory-(\d+)\.safetensors")


class Limit(NamedTuple):
    """The most that may be spent of the privacy of each sample."""

    epsilon: float
    """0: no limit."""
    delta: float


UNLIMITED = Limit(0.0, 1e-5)


class Refusal(RunError):
    """A client's reason to refuse, in words that may leave its machine: nothing of its data is in them."""


def write_private(path: Path, data: bytes) -> bool:
    """Put ``data`` at ``path``, for this user alone from the first byte; False if something is there, which stays."""
    with writing(path):
        descriptor, temporary = mkstemp(prefix=TEMPORARY, dir=path.parent)  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, path)  # which never replaces a file, whoever else writes it now
        except FileExistsError:
            return False
        finally:
            Path(temporary).unlink()
    return True


class Store:
    """The folder of one client."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = folder
        self.secret = self._kept("secret", 32)

    @property
    def name(self) -> str:
        """A name of its own, for a node that was given none."""
        return f"client-{self._kept('name', 6)}"

    def claim(self, client: str) -> None:
        """The folder is this client's from now on; refuses one that is another's: memories are not shared."""
        file = self.folder / "client"
        write_private(file, client.encode())
        if file.read_text() != client:
            raise Refusal("has a folder that belongs to another client; give each node a folder of its own.")

    def mark(self, run: str) -> str:
        """What only the holder of this folder can say, another for every run."""
        return hashlib.sha256(f"{run}:{self.secret}".encode()).hexdigest()

    def of_run(self, run: str) -> Path:
        """The folder for a run."""
        if not _RUN.fullmatch(run):
            raise Refusal(f"was told that the run is called {run!r}, which is no name of a folder.")
        return self.folder / run

    def made_for(self, run: str) -> Path:
        """The folder for a run, there and for this user alone."""
        folder = self.of_run(run)
        folder.mkdir(exist_ok=True, mode=0o700)
        return folder

    def load(self, run: str, version: int) -> Tree | None:
        """A version of the memory; None for version 0, before anything was remembered."""
        if version == 0:
            return None
        file = self._file(run, version)
        if not file.is_file():
            raise Refusal(
                f"has no version {version} of its memory of this run any more. Bring its folder back, or let it come "
                "under another name and with another folder, as a new client."
            )
        return decode(file.read_bytes())

    def save(self, run: str, version: int, memory: Tree, keep: set[int]) -> None:
        """Write a version. Older ones go, but for ``keep``; newer ones stay: this may be the late end of an old ask."""
        folder = self.made_for(run)
        write_file(self._file(run, version), encode(memory))
        for file in folder.iterdir():  # and what a process that was killed left half done
            found = _MEMORY.fullmatch(file.name)
            if found and int(found[1]) < version and int(found[1]) not in keep:
                file.unlink(missing_ok=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Meanwhile no other process changes what this client keeps count of.

        Runs are served side by side: who asks in several at once must not get more than is left.
        """
        end = time.monotonic() + PATIENCE
        with ExitStack() as held:
            while True:
                try:
                    held.enter_context(locked(self.folder))
                    break
                except RunError as error:
                    if time.monotonic() > end:
                        raise Refusal(
                            "cannot keep count of its answers: its folder is in use, or cannot be locked."
                        ) from error
                    time.sleep(0.05)
            yield

    def once(
        self, run: str, question: bytes, answer: Tree, most: int, spent: Release | None = None, limit: Limit = UNLIMITED
    ) -> Tree:
        """The answer that was given to that question before; else this one, which counts as one of ``most``.

        Noise that is drawn anew whenever somebody asks can be averaged away. ``spent``: what this answer makes public.
        """
        folder, count = self.of_run(run) / "answers", self.folder / "answers"
        file = folder / f"{hashlib.sha256(question).hexdigest()}.safetensors"
        if file.is_file():
            return decode(file.read_bytes())
        given = int(count.read_text()) if count.is_file() else 0
        if given >= most:
            raise Refusal(f"has given {given} answers with noise on them, as many as its own max-answers allows.")
        if spent:
            self.release(spent, limit)
        self.made_for(run)
        folder.mkdir(exist_ok=True, mode=0o700)
        write_file(count, str(given + 1).encode())  # before anything is told
        write_file(file, encode(answer))
        kept = sorted(folder.glob("*.safetensors"), key=lambda one: one.stat().st_mtime_ns)
        for old in kept[:-KEPT]:
            old.unlink(missing_ok=True)
        return answer

    def releases(self) -> list[Release]:
        """What this client has told of its samples with noise on it, in all runs."""
        path = self.folder / "privacy.jsonl"
        if not path.is_file():
            return []
        *lines, _ = path.read_text().split("\n")  # after the last one is what a killed process did not finish
        return releases_of(map(json.loads, lines))

    def release(self, one: Release, limit: Limit = UNLIMITED) -> None:
        """Write down what is about to be told; refuse what would spend more of a sample's privacy than the limit."""
        if limit.epsilon:
            alike = [other for other in self.releases() if other.split == one.split]
            if epsilon([*alike, one], limit.delta) > limit.epsilon:
                raise Refusal(
                    f"would spend more than epsilon {limit.epsilon:g} on each of its samples, its own max-epsilon."
                )
        path = self.folder / "privacy.jsonl"
        cut_torn_line(path)
        append(path, to_json(one._asdict()))

    def _file(self, run: str, version: int) -> Path:
        return self.of_run(run) / f"memory-{version}.safetensors"

    def _kept(self, name: str, size: int) -> str:
        file = self.folder / name
        if not file.is_file():
            write_private(file, secrets.token_hex(size).encode())
        return file.read_text()
