# SPDX-License-Identifier: Apache-2.0
"""Who means ill, is slow, or comes with a thousand others: no traceback, no leak, and nobody gets another's model.

All of it goes to loopback and ends by itself. The slow test asks 10^5 times, the fast one 3,000 times.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import random
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import fedloom
from fedloom.core.tensors import read_tensors, write_tensors
from fedloom.core.trees import flatten
from fedloom.serving.app import Service
from fedloom.serving.bundle import Bundle
from fedloom.serving.counters import STATUSES
from fedloom.serving.settings import Settings
from fedloom.serving.tokens import Identity, make_key, make_token, read_key
from serving_process import process

METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "get", "", "\x00")
PIECES = (
    "v1", "models", "gradients", "clients", "parts", "card", "model", "..", ".", "%2e%2e", "a" * 300, "\x00", "\n", "ü",
    "0", "1", "healthz", "metrics", "openapi.json", "*", "{client:path}", "' OR 1=1", "<script>",
)  # fmt: skip
HEADERS = ("range", "if-range", "if-none-match", "authorization", "content-type", "content-length", "accept", "host",
           "transfer-encoding", "x-forwarded-for", "cookie", "expect")  # fmt: skip
VALUES = ("bytes=0-", "bytes=-1", "bytes=5-1", "bytes=99999999999999999999-", '"x"', "*", "W/", "Bearer", "Bearer x",
          "Bearer fl1.e30.e30", "Basic Zm9v", "text/markdown", "application/json", "-1", "1e9", "99999999999999", "",
          "\xff\xfe", "chunked", "a" * 5000, "100-continue")  # fmt: skip


class Fuzz:
    """Requests that are valid in part."""

    def __init__(self, service: Service, seed: int) -> None:
        self.draw = random.Random(seed)
        size = service.weaver.size
        good = write_tensors({"vector": torch.zeros(size)})
        pair = write_tensors({"vector": torch.zeros(size), "gradient": torch.zeros(610)})
        self.seeds = [good, pair, b"", b"{}", bytes(8), b"\x80\x04N.", (1 << 40).to_bytes(8, "little") + good]
        self.paths = [endpoint.path for endpoint in service.endpoints]
        self.paths += [f"/v1/parts/{digest}.safetensors" for digest in service.parts]

    def request(self) -> tuple[str, str, list[tuple[bytes, bytes]], bytes]:
        """Method, path, headers, body."""
        draw = self.draw
        method = draw.choice(METHODS) if draw.random() < 0.3 else draw.choice(("GET", "POST"))
        if draw.random() < 0.6:
            path = draw.choice(self.paths)
        else:
            path = "/" + "/".join(draw.choice(PIECES) for _ in range(draw.randrange(5)))
        headers = [
            (draw.choice(HEADERS).encode(), draw.choice(VALUES).encode("latin-1")) for _ in range(draw.randrange(4))
        ]
        return method, path, headers, self.mutated(draw.choice(self.seeds))

    def mutated(self, body: bytes) -> bytes:
        """A body with bytes changed, cut, repeated or put in."""
        changed = bytearray(body)
        for _ in range(self.draw.randrange(4)):
            at, kind = self.draw.randrange(len(changed) + 1), self.draw.randrange(4)
            if kind == 0 and at < len(changed):
                changed[at] = self.draw.randrange(256)
            elif kind == 1:
                del changed[at : at + self.draw.randrange(20)]
            elif kind == 2:
                changed[at:at] = self.draw.randbytes(self.draw.randrange(20))
            else:
                changed += changed[: self.draw.randrange(200)]
        return bytes(changed)


async def asked(service: Service, method: str, path: str, headers: Any, body: bytes, query: bytes = b"") -> Any:
    """One request to the application, without a socket: its status and its body."""
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query,
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1), "scheme": "http",
    }  # fmt: skip
    pieces = [body[: len(body) // 2], body[len(body) // 2 :]]
    sent: list[Any] = []

    async def receive() -> Any:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await service(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fuzzed(path: Path, key: Path, number: int) -> None:
    service = Service(Bundle(path), Settings(key=key, rate=0))
    fuzz = Fuzz(service, seed=number)
    secrets = [service.weaver.participant(client)[-200:] for client in service.bundle.registry]
    token = make_token(read_key(key), Identity("newcomer", "x")).encode()
    good = write_tensors({"vector": torch.ones(service.weaver.size)})

    async def run() -> None:
        who = [(b"authorization", b"Bearer " + token)]
        before = await asked(service, "POST", "/v1/models", who, good)
        assert before[0] == 200
        grown = 0
        for turn in range(number):
            method, where, headers, body = fuzz.request()
            if turn % 2:
                headers = [*who, *(one for one in headers if one[0] != b"authorization")]
            status, answer = await asked(service, method, where, headers, body, b"architecture=" + fuzz.mutated(b"mlp"))
            assert status in STATUSES and status != 500, (method, where, headers, body)
            if status >= 400 and answer:
                assert json.loads(answer)["status"] == status and b"Traceback" not in answer
            assert not any(secret in answer for secret in secrets)
            if turn == number // 4:
                grown = resident()
        assert await asked(service, "POST", "/v1/models", who, good) == before
        assert resident() - grown < 64 << 20

    asyncio.run(run())
    assert service._executor is not None
    service._executor.shutdown()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key(tmp_path / "key")
    return tmp_path / "key"


def test_requests_that_are_wrong_in_every_way(made, key, caplog) -> None:
    _, path = made("pfedhn")
    caplog.set_level(logging.WARNING, "fedloom.serving")
    fuzzed(path, key, 3000)
    assert not caplog.records  # no failure within


@pytest.mark.slow
def test_a_hundred_thousand_requests_that_are_wrong(made, key, caplog) -> None:
    _, path = made("pfedhn")
    caplog.set_level(logging.WARNING, "fedloom.serving")
    fuzzed(path, key, 100_000)
    assert not caplog.records


def connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def healthy(url: str) -> bool:
    parts = urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)) as connection:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200


def test_bytes_that_are_no_requests(made, serve) -> None:
    _, path = made("pfedhn")
    at, draw = serve(path, timeout=2.0), random.Random(0)
    starts = (
        b"",
        b"GET ",
        b"GET / HTTP/1.1\r\n",
        b"POST /v1/models HTTP/1.1\r\nhost: x\r\n",
        b"\x16\x03\x01",
        b"PRI * HTTP/2.0",
    )
    for turn in range(300):
        with connected(at.url) as connection, contextlib.suppress(OSError):
            connection.sendall(draw.choice(starts) + draw.randbytes(draw.randrange(200)) + b"\r\n\r\n" * (turn % 2))
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65536)
            assert b"Traceback" not in answer and b" 500 " not in answer[:20]
    smuggled = (
        b"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        b"GET /v1/clients/0/model HTTP/1.1\r\nhost: x\r\n\r\n"
    )
    with connected(at.url) as connection:
        connection.sendall(smuggled)
        assert b"200 OK" not in connection.recv(65536)
    assert healthy(at.url)


def test_slow_clients_are_let_go_and_hold_up_nobody(made, serve) -> None:
    _, path = made("pfedhn")
    at = serve(path, timeout=1.0)
    heads = [b"", b"GET /v1 HT", b"GET /v1 HTTP/1.1\r\nhost: x\r\n"]
    body = b"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nxx"
    slow = []
    for turn in range(200):
        connection = connected(at.url)
        connection.sendall(body if turn % 2 else heads[turn // 2 % 3])
        slow.append(connection)
    start = time.monotonic()
    assert healthy(at.url) and time.monotonic() - start < 1
    answers = []
    for connection in slow:
        answers.append(b"")
        with connection, contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(4096):
                answers[-1] += piece
    assert time.monotonic() - start < 10
    assert any(answers) and all(b" 408 " in answer[:20] for answer in answers if answer)
    dripping = connected(at.url)
    with dripping, contextlib.suppress(OSError):
        for _ in range(40):  # a byte now and then does not help
            dripping.sendall(b"x")
            time.sleep(0.1)
        raise AssertionError("still connected")


def test_who_hangs_up_in_the_middle_is_no_failure_of_the_service(made, serve, caplog) -> None:
    _, path = made("pfedhn")
    at = serve(path)
    with connected(at.url) as connection:
        connection.sendall(b"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nxx")
    for _ in range(100):
        if 'route="POST /v1/models",status' in at.service.counters.text():
            break
        time.sleep(0.02)
    assert 'requests_total{route="POST /v1/models",status="400"} 1' in at.service.counters.text()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_answers_that_nobody_takes_do_not_fill_the_memory(made, monkeypatch) -> None:
    """Of three that want 64 models and do not read, with room for two, one is told to come later."""
    _, path = made("pfedhn")
    service = Service(Bundle(path), Settings(rate=0))
    body = write_tensors({"vector": torch.zeros(64, service.weaver.size)})
    size = sum(map(len, service.weaver.weave(body, "")))
    monkeypatch.setattr("fedloom.serving.app.HELD", 2 * size + 4 * len(body))
    taken, found = asyncio.Event(), []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])
        elif found[-1] == 200:
            await taken.wait()

    async def ask() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/models", "query_string": b"", "headers": []}
        pieces = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            return pieces.pop()

        await service(scope, receive, send)

    async def run() -> None:
        waiting = [asyncio.create_task(ask()) for _ in range(3)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert found.count(503) == 1 and service.held > 2 * size
        taken.set()
        await asyncio.gather(*waiting)
        await ask()

    asyncio.run(run())
    assert found.count(200) == 3 and service.held == 0


@pytest.mark.slow
def test_who_does_not_read_is_let_go(made, serve) -> None:
    """The loom is larger than what the sockets between hold; the service stops waiting for its reader."""
    _, path = made("pfedhn", model="lenet", hidden=200)
    at = serve(path, timeout=1.0)
    (part,) = [one for name, one in at.service.card()["parts"].items() if name.startswith("loom")]
    assert part["bytes"] > 8 << 20
    with connected(at.url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(f"GET {part['url']} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        time.sleep(4)
        text = at.service.counters.text()  # it counts what it is done with
    assert 'fedloom_requests_total{route="GET /v1/parts/{digest}.safetensors",status="200"} 1' in text
    (sent,) = re.findall(r'sent_bytes_total{route="GET /v1/parts/.*} (\d+)', text)
    assert int(sent) < part["bytes"]
    assert healthy(at.url)


def test_heads_and_bodies_without_end(made, serve) -> None:
    _, path = made("pfedhn")
    at, before = serve(path, timeout=5.0), resident()
    with connected(at.url) as connection:
        connection.sendall(b"POST /v1/models HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(1000):
                connection.sendall(b"10000\r\n" + bytes(65536) + b"\r\n")
            raise AssertionError("64 MiB were taken")
    for head in (b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * 60000, b"GET /" + b"a" * 60000):
        with connected(at.url) as connection, contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(head)
            for turn in range(3000):
                connection.sendall(b"\r\nx%d: " % turn + b"y" * 10000)
            raise AssertionError("30 MB of headers were taken")
    announced = b"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n"
    with connected(at.url) as connection:
        connection.sendall(announced)
        connection.shutdown(socket.SHUT_WR)
        assert b" 200 " not in connection.recv(4096)[:20]
    assert healthy(at.url) and resident() - before < 64 << 20


async def exchange(url: str, target: str, body: bytes) -> bytes:
    """One request on a connection of its own; tried again when the service is too busy."""
    parts = urlsplit(url)
    for _ in range(100):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = f"POST {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()
        writer.close()
        first, _, rest = answer.partition(b"\r\n\r\n")
        if b" 200 " in first[:16]:
            return rest
        assert b" 503 " in first[:16], first
        await asyncio.sleep(0.2)
    raise AssertionError("never served")


@pytest.mark.slow
def test_a_thousand_admissions_at_once(made, serve) -> None:
    """Each has a vector of its own, takes two steps on it, and must get what it would have got alone."""
    _, path = made("pfedhn")
    at = serve(path)
    weaver = at.service.weaver
    draw = torch.Generator().manual_seed(0)
    vectors = torch.randn(1000, weaver.size, generator=draw)
    changes = torch.randn(1000, 610, generator=draw)

    async def admission(row: int) -> bool:
        vector = vectors[row]
        for _ in range(2):
            model = await exchange(at.url, "/v1/models", write_tensors({"vector": vector}))
            if model != b"".join(map(bytes, weaver.weave(write_tensors({"vector": vector}), ""))):
                return False
            body = write_tensors({"vector": vector, "gradient": changes[row]})
            answer = await exchange(at.url, "/v1/gradients", body)
            if answer != weaver.pull_back(body, ""):
                return False
            vector = vector - 0.1 * read_tensors(answer)["gradient"]
        return True

    async def everybody() -> list[bool]:
        return await asyncio.gather(*(admission(row) for row in range(1000)))

    assert all(asyncio.run(everybody()))


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.slow
def test_workers_that_are_killed_during_admissions(made, newcomer, tmp_path) -> None:
    run, path = made("pfedhn", admit_rounds=30)
    x, y = newcomer
    expected = flatten(run.admit(x, y).parameters)
    done, kills = threading.Event(), []

    def kill(pid: int) -> None:
        while len(kills) < 12 and not done.wait(0.3):
            for worker in children(pid):
                os.kill(worker, signal.SIGKILL)
                kills.append(worker)

    with process(path, "--workers", "2") as (running, url):
        killer = threading.Thread(target=kill, args=(running.pid,))
        killer.start()
        try:
            for number in range(3):
                ours = fedloom.join(url, x, y, way="service", cache=tmp_path / str(number))
                found = flatten(ours.parameters)
                assert all(torch.equal(found[name], expected[name]) for name in expected)
        finally:
            done.set()
            killer.join()
    assert len(kills) >= 2
