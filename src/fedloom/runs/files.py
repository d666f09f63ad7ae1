# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are there as a whole or not at all, whenever the process is killed.

New content is written beside its place under a hidden name, brought to the disk, and then renamed. What a
killed process leaves under such names is removed by ``sweep``, which only the holder of the lock may call.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple
from urllib.parse import quote

from fedloom.core.errors import RunError

TEMPORARY = ".tmp-"  # may be removed
ASIDE = ".old-"  # was moved out of the way: to be put back if its successor never came


_HARMLESS = re.compile(r"(?!\.)[\w.-]{1,64}")
_LONGEST = 150  # letters; file systems take 255 bytes
_MOST_VALUES = 100_000  # in a file that people write


def file_name(id: str) -> str:
    """The name of the file or folder of a client, whatever its id is: it leads nowhere else, and no other id has it."""
    if _HARMLESS.fullmatch(id):
        return id
    name = re.sub(r"^\.", "%2E", quote(id, safe="", errors="surrogatepass")) or "%"
    if len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Any failure of the disk in here is the one-sentence error about ``path``."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space" if full else "make it writable or give another --out"
        raise RunError(
            f"Cannot write {path}: {error.strerror or error}; {advice} and try again, what was saved before is intact."
        ) from error


def read_file(path: Path) -> bytes:
    """What a file holds. An ``OSError`` for what is no file: reading a pipe could last for ever."""
    with opened(path) as file:
        return file.read()


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file to read from, as ``read_file`` does."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        yield file


def write_file(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path``, over what is there."""
    temporary = path.with_name(TEMPORARY + path.name)
    with writing(path):
        try:
            _write(temporary, [data])
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def write_folder(path: Path, files: Mapping[str, Iterable[bytes]]) -> None:
    """Put a folder of ``files`` at ``path``, in place of what is there; they are written one after another."""
    temporary = path.with_name(TEMPORARY + path.name)
    with writing(path):
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for name, pieces in files.items():
                _write(temporary / name, pieces)
            _sync_folder(temporary)
            _move_in(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_folder(path.parent)


def fresh(path: Path) -> BinaryIO:
    """A new file in the place of what is there, which is not written through: a link can lead to any file."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def append(path: Path, line: bytes) -> None:
    """Add a line in one write. If it does not fit, nothing of it stays."""
    with writing(path), _appending(path) as file:
        before = file.tell()
        try:
            while line:  # once; after a short write the next attempt says why
                line = line[file.write(line) :]
        except BaseException:
            file.truncate(before)
            raise


def _appending(path: Path) -> FileIO:
    """A file open at its end, without a buffer: what a write takes is there."""
    _check_file(path)
    return path.open("ab", buffering=0)


def _check_file(path: Path) -> None:
    """Refuse what must not be changed: opening a pipe could last for ever, and what a link leads to is not ours."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "it is not a file", str(path))


class Identity(NamedTuple):
    """Which file is open, and how long it is: another one may be put in its place."""

    number: int
    size: int


def identity(file: IO[bytes]) -> Identity:
    """Of an open file."""
    state = os.fstat(file.fileno())
    return Identity(state.st_ino, state.st_size)


def sync_file(path: Path) -> None:
    """Bring to the disk what was appended to a file, if it is there."""
    if path.exists():
        with writing(path), _appending(path) as file:
            os.fsync(file.fileno())


def cut_torn_line(path: Path) -> None:
    """Drop what follows the last line break: a line that a killed process did not finish."""
    if path.exists():
        _check_file(path)
        whole = read_file(path).rpartition(b"\n")
        if whole[2]:
            os.truncate(path, len(whole[0]) + len(whole[1]))


def remove_folder(path: Path) -> None:
    """Remove a folder so that nobody ever sees a part of it."""
    with writing(path):
        hidden = path.with_name(TEMPORARY + path.name)
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)
        shutil.rmtree(hidden)


def sweep(folder: Path) -> None:
    """Remove what a killed process left half done in ``folder``. Only for the holder of the lock."""
    for old in folder.glob(f"{ASIDE}*"):
        place = old.with_name(old.name.removeprefix(ASIDE))
        if place.exists():
            shutil.rmtree(old)
        else:
            old.rename(place)
    for left in folder.glob(f"{TEMPORARY}*"):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def to_json(value: Any, indent: int | None = None) -> bytes:
    """One JSON value and a line break; numbers that JSON does not know (NaN, infinities) are null."""
    return (json.dumps(_plain(value), indent=indent, allow_nan=False) + "\n").encode()


def from_json(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``; a ValueError if it is not one."""
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def from_yaml(data: bytes) -> Any:
    """The value in ``data``; a ValueError if it is not YAML, or far larger than it looks: aliases can multiply it."""
    import yaml

    try:
        value = yaml.safe_load(data)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    left, number = [value], 0
    while left:
        one, number = left.pop(), number + 1
        left += [*one, *one.values()] if isinstance(one, dict) else one if isinstance(one, list | set) else ()
        if number > _MOST_VALUES or len(left) > _MOST_VALUES:
            raise ValueError(f"it holds more than {_MOST_VALUES:,} values")
    return value


def _plain(value: Any) -> Any:
    """The value in types of JSON."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    """A new file, on the disk when this returns."""
    with fresh(path) as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    if sys.platform == "win32":  # which cannot open folders, and does this by itself
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_in(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``. It cannot go over a full folder, so that one steps aside first."""
    if not path.exists():
        new.rename(path)
        return
    aside = path.with_name(ASIDE + path.name)
    path.rename(aside)
    try:
        new.rename(path)
    except BaseException:
        aside.rename(path)
        raise
    shutil.rmtree(aside)
