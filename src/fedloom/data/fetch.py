# SPDX-License-Identifier: Apache-2.0
"""Fetching the published files of a dataset: resumed where broken off, checked, whole or not at all."""

import hashlib
import http.client
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from fedloom.core.errors import DataError
from fedloom.data.files import File
from fedloom.data.formats import corrupt
from fedloom.data.registry import dataset

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all where the server says

_CHUNK = 1 << 20
_TIMEOUT = 60  # seconds without a byte


def fetch(
    name: str,
    root: str | Path,
    progress: Progress | None = None,
    opener: Callable[..., Any] = urllib.request.urlopen,
) -> list[Path]:
    """Download what a dataset lacks below the root and return where its files lie; archives are kept."""
    root = Path(root).expanduser()
    files = dataset(name).files
    wanted: dict[str, list[File]] = {}  # by what to download
    for file in files:
        if not file.at(root).is_file():
            wanted.setdefault(file.archive or file.path, []).append(file)
    for source, parts in wanted.items():
        target = root / source
        if not target.is_file():
            _download(parts[0], target, progress, opener)
        if parts[0].archive:
            _unpack(target, {PurePosixPath(part.path).name: root / part.path for part in parts})
    return [file.at(root) for file in files]


def _download(file: File, target: Path, progress: Progress | None, opener: Callable[..., Any]) -> None:
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _transfer(file.url, part, progress or (lambda *_: None), opener)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"Could not download {file.url} to {target} ({error}); fetch it again to go on where it broke "
            "off, or put the file there yourself."
        ) from error
    got = _md5(part)
    if got != file.md5:
        part.unlink()
        raise DataError(
            f"{file.url} gave a file with the md5 checksum {got}, expected {file.md5}; nothing was kept: "
            f"fetch it again, or put the published file at {target}."
        )
    part.replace(target)


def _transfer(url: str, part: Path, progress: Progress, opener: Callable[..., Any]) -> None:
    done = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "fedloom"}
    if done:
        headers["Range"] = f"bytes={done}-"
    try:
        response = opener(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if done and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()  # as long as the whole file or longer, so not the start of it
            _transfer(url, part, progress, opener)
            return
        raise
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            done = 0
        length = response.headers.get("Content-Length")
        total = None if length is None else done + int(length)
        with part.open("ab" if done else "wb") as out:
            progress(part.stem, done, total)
            while chunk := response.read(_CHUNK):
                out.write(chunk)
                done += len(chunk)
                progress(part.stem, done, total)
    if total is not None and done < total:
        raise ConnectionError(f"the connection closed after {done} of {total} bytes")


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _unpack(archive: Path, wanted: dict[str, Path]) -> None:
    """Write the members with the wanted names where they belong; no path from the archive is used."""
    left = dict(wanted)
    try:
        for name, member in _members(archive):
            if name in left:
                target = left.pop(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                part = target.with_name(target.name + ".part")
                with part.open("wb") as out:
                    shutil.copyfileobj(member, out, _CHUNK)
                part.replace(target)
    except (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile) as error:
        raise corrupt(archive, error) from error
    if left:
        raise corrupt(archive, f"it holds no file {', '.join(left)}")


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as content:
            for info in content.infolist():
                if not info.is_dir():
                    with content.open(info) as member:
                        yield PurePosixPath(info.filename).name, member
    else:
        with tarfile.open(archive) as tar:
            for entry in tar:
                extracted = tar.extractfile(entry) if entry.isfile() else None
                if extracted is not None:
                    with extracted:
                        yield PurePosixPath(entry.name).name, extracted
