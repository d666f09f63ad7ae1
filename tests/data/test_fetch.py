# SPDX-License-Identifier: Apache-2.0
"""Fetching, against a server on this machine: broken off and resumed, damaged, unreachable, archived."""

import hashlib
import io
import re
import socket
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedloom.core.errors import DataError
from fedloom.data import fetch as module
from fedloom.data.fetch import fetch
from fedloom.data.files import Dataset, File

CONTENT = bytes(range(256)) * 20_000  # several chunks


class Server(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = {"/file": CONTENT}
        self.requests: list[tuple[str, str | None]] = []
        self.break_after: int | None = None
        self.ranges = True

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.server.requests.append((self.path, wanted))
        body = self.server.content.get(self.path)
        if body is None:
            self.send_error(404)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and self.server.ranges else 0
        if start and start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        end = len(body) if self.server.break_after is None else start + self.server.break_after
        self.wfile.write(body[start:end])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


@pytest.fixture
def publish(monkeypatch):
    def put(*files: File) -> None:
        toy = Dataset("toy", "a toy", "CC0", files, read=None)
        monkeypatch.setattr(module, "dataset", lambda name: toy)

    return put


def md5(raw: bytes) -> str:
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


def names(root) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_file_is_fetched_once_with_progress(server, publish, tmp_path):
    publish(File("toy/raw/file", server.url("/file"), md5(CONTENT)))
    steps = []
    assert fetch("toy", tmp_path, lambda *step: steps.append(step)) == [tmp_path / "toy/raw/file"]
    assert (tmp_path / "toy/raw/file").read_bytes() == CONTENT
    assert names(tmp_path) == ["toy/raw/file"]
    assert steps[0] == ("file", 0, len(CONTENT))
    assert steps[-1] == ("file", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in steps] == sorted({done for _, done, _ in steps})
    fetch("toy", str(tmp_path))
    assert len(server.requests) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_is_resumed_or_begun_anew(server, publish, tmp_path, ranges):
    publish(File("file", server.url("/file"), md5(CONTENT)))
    server.break_after = 3_000_000
    with pytest.raises(DataError, match=r"Could not download .*/file .*; fetch it again to go on") as caught:
        fetch("toy", tmp_path)
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["file.part"]
    kept = (tmp_path / "file.part").stat().st_size
    assert 0 < kept <= server.break_after
    server.break_after, server.ranges = None, ranges
    fetch("toy", tmp_path)
    assert server.requests == [("/file", None), ("/file", f"bytes={kept}-")]
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_part_that_is_too_long_is_dropped(server, publish, tmp_path):
    publish(File("file", server.url("/file"), md5(CONTENT)))
    (tmp_path / "file.part").write_bytes(CONTENT)
    fetch("toy", tmp_path)
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert names(tmp_path) == ["file"]


def test_of_a_wrong_file_nothing_is_kept(server, publish, tmp_path):
    publish(File("file", server.url("/file"), "0" * 32))
    with pytest.raises(DataError, match=f"md5 checksum {md5(CONTENT)}, expected {'0' * 32}; nothing was kept"):
        fetch("toy", tmp_path)
    assert names(tmp_path) == []


def test_an_unreachable_server_is_one_sentence(publish, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    publish(File("file", f"http://127.0.0.1:{port}/file", "0" * 32))
    with pytest.raises(DataError, match=rf"Could not download http://127\.0\.0\.1:{port}/file to .*refused"):
        fetch("toy", tmp_path)
    assert names(tmp_path) == []


def test_a_file_that_is_gone_is_one_sentence(server, publish, tmp_path):
    publish(File("file", server.url("/nowhere"), "0" * 32))
    with pytest.raises(DataError, match=r"Could not download .*/nowhere .*404"):
        fetch("toy", tmp_path)


def test_a_root_that_cannot_be_written_is_one_sentence(server, publish, tmp_path):
    (tmp_path / "taken").touch()
    publish(File("file", server.url("/file"), md5(CONTENT)))
    with pytest.raises(DataError, match=r"Could not download .*/file to .*taken"):
        fetch("toy", tmp_path / "taken")


def tar(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, raw in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
        link = tarfile.TarInfo("toy/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return out.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("toy/", "")
        for name, raw in members.items():
            archive.writestr(name, raw)
    return out.getvalue()


@pytest.mark.parametrize("pack", [tar, zipped])
def test_wanted_members_of_an_archive_are_unpacked_and_no_others(server, publish, tmp_path, pack):
    root = tmp_path / "root"
    raw = pack({"toy/a": b"A", "toy/b": b"B", "toy/c": b"C", "../evil": b"!", "/toy/evil": b"!"})
    server.content["/toy.archive"] = raw
    files = [File(f"toy/{n}", server.url("/toy.archive"), md5(raw), "toy.archive") for n in ("a", "b")]
    publish(*files)
    assert fetch("toy", root) == [root / "toy/a", root / "toy/b"]
    assert names(tmp_path) == ["root/toy.archive", "root/toy/a", "root/toy/b"]
    assert (root / "toy/b").read_bytes() == b"B"

    (root / "toy/a").unlink()  # the archive is at hand: nothing to download
    fetch("toy", root)
    assert (root / "toy/a").read_bytes() == b"A"
    (root / "toy.archive").unlink()  # the files are at hand: no archive needed
    fetch("toy", root)
    assert len(server.requests) == 1


@pytest.mark.parametrize("member", ["toy/link", "toy/nowhere"])
def test_a_member_that_is_not_there_is_named(server, publish, tmp_path, member):
    raw = tar({"toy/a": b"A"})
    server.content["/toy.tar.gz"] = raw
    publish(File(member, server.url("/toy.tar.gz"), md5(raw), "toy.tar.gz"))
    with pytest.raises(DataError, match=r"toy\.tar\.gz is damaged .*it holds no file (link|nowhere)\)"):
        fetch("toy", tmp_path)


@pytest.mark.parametrize("pack", [tar, zipped])
def test_a_damaged_archive_is_named(publish, tmp_path, pack):
    publish(File("toy/a", "http://127.0.0.1/toy", "0" * 32, "toy.archive"))
    raw = pack({"toy/a": CONTENT})
    (tmp_path / "toy.archive").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(DataError, match=r"toy\.archive is damaged .*; delete it and fetch it again"):
        fetch("toy", tmp_path)
    assert not (tmp_path / "toy/a").exists()


def test_embedded_data_has_nothing_to_fetch(tmp_path):
    assert fetch("digits", tmp_path) == []
