# SPDX-License-Identifier: Apache-2.0
"""A bundle's file: a zip archive, nothing in it compressed, of JSON and safetensors; nothing in it can run code.

``manifest.json`` has the SHA-256 of every other member, so that the manifest's own SHA-256 stands for the bundle. Any
program that opens zip archives shows what is in one. Members begin at multiples of 64 bytes, so that large tables can
be used where they lie in the file, by several processes at once.
"""

from __future__ import annotations

import io
import json
import mmap
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fedloom.core.errors import DataError
from fedloom.runs.checkpoint import digest
from fedloom.runs.files import TEMPORARY, fresh, to_json, writing

MANIFEST, CARD = "manifest.json", "card.json"
SUFFIXES = (".json", ".safetensors")
FORMAT = 1
LARGEST = 1 << 24
"""Bytes that a manifest or a card may have."""
PADDING = 0xFED1
"""The kind of extra field that fills up to the next multiple of 64."""
LOCAL_HEADER = 30
"""Bytes before a member's name."""
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The date of all members: equal runs make equal bundles."""


class Part(NamedTuple):
    """A member of the archive."""

    offset: int
    size: int
    crc: int
    """CRC-32, which the archive has of each: all that is known of the manifest, which has the others' digests."""


def write_archive(path: Path, manifest: Mapping[str, Any], parts: Mapping[str, bytes]) -> str:
    """Write a bundle; the manifest gets the parts' sizes and digests. Gives the digest of the bundle."""
    listed = {name: {"bytes": len(data), "sha256": digest(data)} for name, data in parts.items()}
    head = to_json({"format": FORMAT, **manifest, "parts": listed}, indent=1)
    temporary = path.with_name(TEMPORARY + path.name)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with fresh(temporary) as file:
                _write(file, {MANIFEST: head, **parts})
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return digest(head)


def _write(file: BinaryIO, members: Mapping[str, bytes | memoryview]) -> None:
    """The archive with these members: the same bytes wherever it is written."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name, EPOCH)
            info.create_system = 3  # on any system
            start = file.tell() + LOCAL_HEADER + len(name.encode()) + 4
            info.extra = struct.pack("<HH", PADDING, -start % 64) + bytes(-start % 64)
            archive.writestr(info, data)


class _Pieces(io.RawIOBase):
    """A file that is not there: what would stand where in it. What is written twice counts as it was last."""

    def __init__(self) -> None:
        self.pieces: dict[int, bytes | memoryview] = {}
        self._at = 0

    def write(self, data: Any) -> int:
        self.pieces[self._at] = data
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = 0) -> int:
        self._at = to
        return to

    def seekable(self) -> bool:
        return True


class Archive:
    """A bundle's file, opened and checked against its own digests."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise DataError(f"There is no file {path}; give a bundle, which `fedloom bundle RUN` makes.")
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                self._parts = _members(file, self._map)
            if zlib.crc32(self._small(MANIFEST)) != self._parts[MANIFEST].crc:
                raise self._damaged(f"{MANIFEST} is not what the archive says (CRC-32)")
            self.digest = digest(self._small(MANIFEST))
            self.manifest = json.loads(self._small(MANIFEST))
            self._check()
        except DataError:
            raise
        except Exception as error:  # whatever is wrong with it, the file is at fault
            raise self._damaged("it is not a whole archive of a bundle") from error

    def view(self, name: str) -> memoryview:
        """The bytes of a part where they lie in the file."""
        part = self._parts[name]
        return memoryview(self._map)[part.offset : part.offset + part.size]

    def sha256(self, name: str) -> str:
        """The digest of a part, which was checked."""
        return str(self.manifest["parts"][name]["sha256"])

    def json(self, name: str) -> dict[str, Any]:
        """A part that is a JSON object."""
        found = json.loads(self._small(name))
        if not isinstance(found, dict):
            raise self._damaged(f"{name} is no JSON object")
        return found

    @property
    def names(self) -> list[str]:
        """The parts besides the manifest."""
        return [name for name in self._parts if name != MANIFEST]

    def check_rest(self) -> None:
        """Refuse a file in which anything between, before or behind the parts is not as it was written."""
        file = _Pieces()
        _write(file, {name: self.view(name) for name in self._parts})  # type: ignore[arg-type]
        end = file.tell()
        content = memoryview(self._map)
        same = all(content[at : at + len(piece)] == piece for at, piece in file.pieces.items())
        if not same or end != len(self._map):
            raise self._damaged("there is something besides its parts, or around them")

    def _small(self, name: str) -> bytes:
        if self._parts[name].size > LARGEST:
            raise self._damaged(f"{name} has {self._parts[name].size:,} bytes, more than a bundle's can have")
        return bytes(self.view(name))

    def _check(self) -> None:
        if self.manifest["format"] != FORMAT:
            raise DataError(
                f"{self.path} has format {self.manifest['format']!r} where this fedloom knows {FORMAT}; "
                f"it was written by fedloom {self.manifest.get('fedloom')}."
            )
        listed = self.manifest["parts"]
        if set(listed) != set(self.names):
            odd = sorted(set(listed) ^ set(self.names))[0]
            raise self._damaged(f"{odd!r} is not both in the archive and in {MANIFEST}")
        for name, wanted in listed.items():
            if self._parts[name].size != wanted["bytes"] or digest(self.view(name)) != wanted["sha256"]:  # type: ignore[arg-type]
                raise self._damaged(f"{name} is not what {MANIFEST} says (SHA-256)")

    def _damaged(self, why: str) -> DataError:
        return DataError(f"{self.path} is not a bundle, or damaged: {why}. Make it anew with `fedloom bundle RUN`.")


def _members(file: Any, content: mmap.mmap) -> dict[str, Part]:
    """Where the members lie; refuses compressed ones, names twice, and names that are not a bundle's."""
    found: dict[str, Part] = {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            name, start = info.filename, info.header_offset
            plain = name.replace(".", "").replace("-", "").isalnum() and name.endswith(SUFFIXES)
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or not plain:
                raise ValueError(f"the member {name!r}")
            lengths = struct.unpack("<HH", content[start + 26 : start + 30])
            part = Part(start + LOCAL_HEADER + sum(lengths), info.file_size, info.CRC)
            if name in found or part.offset + part.size > len(content):
                raise ValueError(f"the member {name!r}")
            found[name] = part
    return found
