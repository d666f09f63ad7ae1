# SPDX-License-Identifier: Apache-2.0
"""Runs in a browser while they go on: a server on this machine alone, with a token, which only reads.

It answers GET for two addresses, the page and its content as JSON; whatever else is asked for, or without the token, or
under another host's name, is refused. It keeps no state but what it has read.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from fedloom.core.errors import ConfigError, RunError
from fedloom.reports import live
from fedloom.reports.compare import find_runs
from fedloom.reports.facts import readable
from fedloom.reports.follow import Follower
from fedloom.reports.page import embedded, html

HOST = "127.0.0.1"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is nobody's fault; all else is shown."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Watch:
    """A server of the page of some runs; use it in a ``with``."""

    def __init__(self, paths: Sequence[Path | str], port: int = 0) -> None:
        self._runs = [Follower(run.path) for run in find_runs(paths)]
        self._token = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        try:
            self._server = _Server((HOST, port), type("Handler", (_Handler,), {"watch": self}))
        except OSError as error:
            raise ConfigError(
                f"Cannot listen on port {port}: {error.strerror or error}; give another --port."
            ) from error

    @property
    def port(self) -> int:
        """The one that is listened on."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The address to open, with the token."""
        return f"http://{HOST}:{self.port}/?token={self._token}"

    def serve(self) -> None:
        """Answer until ``close``, or Ctrl-C."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop, from another thread than the one that serves."""
        self._server.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.server_close()

    def knows(self, token: str) -> bool:
        """Whether it is the token, in a time that tells nothing of it."""
        return hmac.compare_digest(token.encode(), self._token.encode())

    def page(self) -> bytes:
        """The page, with what is known now."""
        with self._lock, readable():
            self._look()
            return html(live.page_of(self._runs), live=True).encode()

    def model(self) -> bytes:
        """The same, for a page that is there."""
        with self._lock, readable():
            self._look()
            return embedded({**live.page_of(self._runs).as_json(), "live": True}).encode()

    def _look(self) -> None:
        for run in self._runs:
            run.look()


class _Handler(BaseHTTPRequestHandler):
    watch: Watch
    server_version, sys_version = "fedloom", ""

    def do_GET(self) -> None:
        try:
            asked = urlsplit(self.path)
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "this is no address")
            return
        tokens = parse_qs(asked.query).get("token", [""])
        hosts = {f"{name}:{self.watch.port}" for name in (HOST, "localhost")}
        if self.headers.get("Host", "") not in hosts:  # another name that leads here is somebody else's page
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server answers to 127.0.0.1 only")
        elif not self.watch.knows(tokens[0]):
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that `fedloom watch` printed, with its token")
        elif asked.path == "/":
            self._answer(self.watch.page, "text/html; charset=utf-8")
        elif asked.path == "/model":
            self._answer(self.watch.model, "application/json")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")

    def _answer(self, made: Callable[[], bytes], kind: str) -> None:
        try:
            content = made()
        except RunError as error:  # the records were damaged or removed; they may come back
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error).rstrip("."))
            return
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.end_headers()
            return
        self._send(HTTPStatus.OK, content, kind, tag)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, f"fedloom: {why}.\n".encode(), "text/plain; charset=utf-8", "")

    def _send(self, status: HTTPStatus, content: bytes, kind: str, tag: str) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind, "Content-Length": str(len(content)), "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
            **({"ETag": tag} if tag else {}),
        }  # fmt: skip
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the token would stand in the log."""
