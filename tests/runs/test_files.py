# SPDX-License-Identifier: Apache-2.0
"""Whole or not at all, also when the disk fails in the middle."""

import errno
import math
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.errors import RunError
from fedloom.runs import files
from fedloom.runs.lock import locked


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """The ``call``-th call of a function finds the disk full."""
    real, calls = getattr(owner, name), iter(range(1, 1000))

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **options)

    monkeypatch.setattr(owner, name, failing)


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """The operating system refuses to make files larger than ``limit`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    for data in (b"one", b"two"):
        files.write_file(tmp_path / "file", data)
        assert (tmp_path / "file").read_bytes() == data
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    files.write_file(tmp_path / "file", b"old")
    fail_at(monkeypatch, owner, name, 1)
    with pytest.raises(RunError, match="No space left"):
        files.write_file(tmp_path / "file", b"new")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


STEPS = [(os, "fsync", 1), (os, "fsync", 2), (os, "fsync", 3), (Path, "mkdir", 1), (Path, "rename", 1)]


@pytest.mark.parametrize(
    ("there", "owner", "name", "call"),
    [(there, *step) for there in (False, True) for step in STEPS] + [(True, Path, "rename", 2)],
)
def test_a_folder_is_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, owner: Any, name: str, call: int
) -> None:
    place, new = tmp_path / "folder", {"a": [b"new"], "b": [b"new"]}
    if there:
        files.write_folder(place, {"a": [b"old"]})
    fail_at(monkeypatch, owner, name, call)
    with pytest.raises(RunError, match="No space left"):
        files.write_folder(place, new)
    assert names(tmp_path) == (["folder"] if there else [])
    assert not there or names(place) == ["a"]


def test_a_failure_after_the_rename_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, os, "fsync", 4)
    with pytest.raises(RunError, match="No space left"):
        files.write_folder(tmp_path / "folder", {"a": [b"new"], "b": [b"new"]})
    assert names(tmp_path) == ["folder"] and names(tmp_path / "folder") == ["a", "b"]


def test_files_that_the_system_cuts_off_are_not_kept(tmp_path: Path) -> None:
    with small_files(1000), pytest.raises(RunError, match="File too large"):
        files.write_folder(tmp_path / "folder", {"a": [bytes(5000)]})
    with small_files(1000), pytest.raises(RunError, match="File too large"):
        files.write_file(tmp_path / "file", bytes(5000))
    assert names(tmp_path) == []


def test_a_line_that_does_not_fit_is_not_there_at_all(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    files.append(path, b"x" * 90 + b"\n")
    with small_files(100), pytest.raises(RunError, match="File too large"):
        files.append(path, b"y" * 90 + b"\n")
    assert path.read_bytes() == b"x" * 90 + b"\n"
    files.append(path, b"z\n")
    assert path.read_bytes().endswith(b"x\nz\n")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (errno.ENOSPC, "Cannot write PLACE: No space left on device; free some space and try again, "),
        (
            errno.EACCES,
            "Cannot write PLACE: Permission denied; make it writable or give another --out and try again, ",
        ),
    ],
)
def test_the_sentence_says_what_to_do(code: int, sentence: str) -> None:
    with pytest.raises(RunError) as caught, files.writing(Path("PLACE")):
        raise OSError(code, os.strerror(code))
    assert str(caught.value) == sentence + "what was saved before is intact."


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".tmp-file").write_bytes(b"half")
    (tmp_path / ".tmp-folder").mkdir()
    (tmp_path / ".tmp-folder" / "a").write_bytes(b"half")
    (tmp_path / ".old-replaced").mkdir()
    (tmp_path / "replaced").mkdir()
    (tmp_path / "mine").write_bytes(b"whole")
    files.sweep(tmp_path)
    assert names(tmp_path) == ["mine", "replaced"]


def test_a_folder_whose_successor_never_came_is_put_back(tmp_path: Path) -> None:
    (tmp_path / ".old-folder").mkdir()
    files.sweep(tmp_path)
    assert names(tmp_path) == ["folder"]


def test_nothing_to_sweep(tmp_path: Path) -> None:
    files.sweep(tmp_path / "missing")


def test_a_removed_folder_is_gone(tmp_path: Path) -> None:
    files.write_folder(tmp_path / "folder", {"a": []})
    (tmp_path / ".tmp-folder").mkdir()
    (tmp_path / ".tmp-folder" / "left").write_bytes(b"half")
    files.remove_folder(tmp_path / "folder")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b"a\n", b"a\n"), (b"a\n{b", b"a\n"), (b"{a", b""), (b"a\nb\n\x00", b"a\nb\n")],
)
def test_a_torn_line_is_cut(tmp_path: Path, before: bytes, after: bytes) -> None:
    (tmp_path / "lines").write_bytes(before)
    files.cut_torn_line(tmp_path / "lines")
    assert (tmp_path / "lines").read_bytes() == after


def test_what_a_link_leads_to_is_never_written(tmp_path: Path) -> None:
    """A folder by somebody else can have links with the names that are written to."""
    (tmp_path / "mine").write_bytes(b"mine\nno line")
    for name in (f"{files.TEMPORARY}page", "lines", "lock"):
        (tmp_path / name).symlink_to("mine")
    files.write_file(tmp_path / "page", b"page")
    with pytest.raises(RunError, match="lines: it is not a file"):
        files.append(tmp_path / "lines", b"more\n")
    with pytest.raises(OSError, match="it is not a file"):
        files.cut_torn_line(tmp_path / "lines")
    with pytest.raises(RunError, match="Cannot write"), locked(tmp_path):
        pass
    assert (tmp_path / "mine").read_bytes() == b"mine\nno line" and (tmp_path / "page").read_bytes() == b"page"


def test_syncing_what_is_not_there(tmp_path: Path) -> None:
    files.sync_file(tmp_path / "lines")
    files.cut_torn_line(tmp_path / "lines")
    assert names(tmp_path) == []


def test_json_has_plain_finite_numbers() -> None:
    value = {
        "nan": math.nan,
        "inf": [-math.inf, (1.5, True, None, "ü")],
        "numpy": np.float32(0.5),
        "torch": torch.tensor(3),
        "nan in torch": torch.tensor(math.nan),
        1: {"x": 0.1 + 0.2},
    }
    assert files.from_json(files.to_json(value)) == {
        "nan": None,
        "inf": [None, [1.5, True, None, "ü"]],
        "numpy": 0.5,
        "torch": 3,
        "nan in torch": None,
        "1": {"x": 0.1 + 0.2},
    }


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"3", b"\xff"])
def test_only_json_objects_are_read(data: bytes) -> None:
    with pytest.raises(ValueError):
        files.from_json(data)


def test_one_line_of_json_has_one_line_break() -> None:
    assert files.to_json({"text": "a\nb"}).count(b"\n") == 1


IDS = ["plain", "ward-3.a_b", "Zoë", "", ".", "..", ".hidden", "../../evil", "/abs/x", "a/b", "a\\b", "a b", "a\n",
       "a%2Fb", "%", "%2E", "x" * 64, "x" * 65, "é" * 400, "é" * 401, "\0", "\udc80", "C:", "~"]  # fmt: skip


def test_a_file_of_an_id_lies_in_its_folder_and_is_no_other_ids(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "down"
    folder.mkdir(parents=True)
    for id in IDS:
        assert (folder / files.file_name(id)).parent == folder
        (folder / f"{files.file_name(id)}.safetensors").write_text("one")
        (folder / files.file_name(id)).mkdir()
    assert len(names(folder)) == 2 * len(IDS)
    assert names(tmp_path) == ["deep"] and names(tmp_path / "deep") == ["down"]
    assert files.file_name("ward-3.a_b") == "ward-3.a_b"


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000])
def test_json_without_end_is_an_error_of_its_value(data: bytes) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        files.from_json(data)


def test_yaml_that_multiplies_itself_or_has_no_end_is_an_error_of_its_value() -> None:
    nine = ",".join(["*a"] * 9)
    rows = [f"- &a{row} [{nine.replace('a', f'a{row - 1}') if row else 'x'}]" for row in range(12)]
    with pytest.raises(ValueError, match="more than 100,000 values"):
        files.from_yaml("\n".join(rows).encode())
    with pytest.raises(ValueError, match="more than 100,000 values"):
        files.from_yaml(b"&a [*a]")
    with pytest.raises(ValueError, match="nested too deeply"):
        files.from_yaml(b"[" * 20_000)
    assert files.from_yaml(b"a: &one [1, 2]\nb: *one") == {"a": [1, 2], "b": [1, 2]}
