# SPDX-License-Identifier: Apache-2.0
"""A service, as those who join it see it: requests over one connection, and a list of all that was sent."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import fedloom
from fedloom.core.errors import ConfigError, NeedsError, RunError
from fedloom.serving.answers import BUNDLE, SAFETENSORS
from fedloom.serving.settings import is_loopback

PATIENCE = 60.0
"""Seconds that a request is tried again, where the service is busy or starts anew."""
FIRST_PATIENCE = 5.0
"""The same before the service has answered once: the address may be wrong."""
TIMEOUT = 120.0
LARGEST_CARD = 1 << 24
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass
class Exchange:
    """Requests of one kind, and what went either way in their bodies."""

    request: str
    fields: tuple[str, ...] = ()
    """Names and shapes of what was sent."""
    times: int = 0
    sent: int = 0
    received: int = 0


@dataclass
class Access:
    """How to come to a service: a token, or a certificate of one's own, and the authority of the service's."""

    token: str | None = None
    ca: Path | None = None
    cert: Path | None = None
    cert_key: Path | None = None


class Remote:
    """A service at an address."""

    def __init__(self, url: str, access: Access) -> None:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is no number, half of an IPv6 address
            usable = False
        if not usable or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"{url} is no address of a service; give one such as https://models.example.org:8470.")
        secret = access.token or access.cert
        if parts.scheme == "http" and secret and not is_loopback(parts.hostname):
            raise ConfigError(f"{url} is without TLS, so that others could read the token; use https.")
        if access.token and not (access.token.isascii() and access.token.isprintable() and " " not in access.token):
            raise ConfigError("The token has characters that no token has; give one as `fedloom token` printed it.")
        self.url, self._access = url.rstrip("/"), access
        self._host, self._port, self._tls = parts.hostname, parts.port, parts.scheme == "https"
        self._prefix = parts.path.rstrip("/")
        self._connection: http.client.HTTPConnection | None = None
        self._answers = False
        self.exchanges: list[Exchange] = []
        self.bundle = ""
        """The digest of the bundle that vectors are meant for."""

    def get(self, path: str, largest: int) -> bytes:
        """What lies at a path."""
        return self._asked("GET", path, b"", (), largest)

    def post(self, path: str, query: Mapping[str, str], body: bytes, fields: tuple[str, ...], largest: int) -> bytes:
        """The answer to a body; ``fields`` are the names of what is in it."""
        return self._asked("POST", f"{path}?{urlencode(query)}", body, fields, largest)

    def card(self) -> dict[str, Any]:
        """What the service says of itself."""
        data = self.get("/v1", LARGEST_CARD)
        try:
            card = json.loads(data)
            plain = _is_plain(card)
        except (ValueError, RecursionError) as error:
            raise RunError(
                f"{self.url} is no service of fedloom: its card cannot be read. Check the address."
            ) from error
        if not isinstance(card, dict) or "bundle" not in card:
            raise RunError(f"{self.url} is no service of fedloom: it has no card. Check the address.")
        if not plain:
            raise RunError(f"{self.url} has a card with control characters in it; do not use it.")
        return card

    def _asked(self, method: str, target: str, body: bytes, fields: tuple[str, ...], largest: int) -> bytes:
        headers = {"user-agent": f"fedloom/{fedloom.__version__}", "accept": "*/*"}
        headers |= {"content-type": SAFETENSORS} if body else {}
        headers |= {BUNDLE: self.bundle} if body and self.bundle else {}
        headers |= {"authorization": f"Bearer {self._access.token}"} if self._access.token else {}
        start, pause = time.monotonic(), 0.1
        while True:
            wait, fault = pause, ""
            try:
                answer = self._once(method, target, body, headers)
                data = answer.read(largest + 1)
                self._answers = True
                self._count(method, target, fields, len(body), len(data))
                if answer.status == 200 and len(data) <= largest:
                    return data
                if answer.status not in (408, 429, 502, 503, 504):
                    raise self._refused(answer.status, data, largest)
                wait = max(wait, _seconds(answer.headers.get("retry-after")))
                fault = f"it answers {answer.status}"
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, ssl.SSLCertVerificationError):
                    why = f"its certificate is not trusted ({error.verify_message})"
                    raise RunError(
                        f"{self.url} is not who it should be: {why}. Give its authority with --ca."
                    ) from error
                fault = str(error) or type(error).__name__
            self.close()
            if time.monotonic() + wait > start + (PATIENCE if self._answers else FIRST_PATIENCE):
                wants = " If it asks for certificates, give one of its authority: --cert and --cert-key."
                hint = wants if self._tls and not self._answers else ""
                raise RunError(f"{self.url} cannot be reached or is too busy: {fault}. Try again later.{hint}")
            time.sleep(wait)
            pause = min(2 * pause, 5.0)

    def _once(self, method: str, target: str, body: bytes, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection = (
                http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT, context=self._context())
                if self._tls
                else http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT)
            )
        path, _, query = target.partition("?")
        full = self._prefix + quote(path) + (f"?{query}" if query else "")
        self._connection.request(method, full, body or None, dict(headers))
        return self._connection.getresponse()

    def _context(self) -> ssl.SSLContext:
        ca, cert, key = self._access.ca, self._access.cert, self._access.cert_key
        try:
            context = ssl.create_default_context(cafile=str(ca) if ca else None)
            if cert:
                context.load_cert_chain(cert, key)
        except OSError as error:
            files = ", ".join(str(file) for file in (ca, cert, key) if file)
            raise ConfigError(f"TLS cannot be had from {files}: {error}; give certificates and keys as PEM.") from error
        return context

    def _refused(self, status: int, data: bytes, largest: int) -> NeedsError | RunError:
        if status == 200:
            return RunError(f"{self.url} sent more than the {largest:,} bytes that it announced; do not use it.")
        try:
            why = str(json.loads(data)["detail"])[:500]
        except (ValueError, KeyError, TypeError):
            why = f"it answers {status}."
        why = _CONTROL.sub(" ", why)
        kind = NeedsError if status in (400, 401, 403, 404) else RunError
        return kind(f"{self.url} refuses: {' '.join(why.split())}")

    def _count(self, method: str, target: str, fields: tuple[str, ...], sent: int, received: int) -> None:
        request = f"{method} {target.partition('?')[0]}"
        found = next((one for one in self.exchanges if (one.request, one.fields) == (request, fields)), None)
        if found is None:
            found = Exchange(request, fields)
            self.exchanges.append(found)
        found.times, found.sent, found.received = found.times + 1, found.sent + sent, found.received + received

    def close(self) -> None:
        """End the connection; the next request begins another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _seconds(wanted: str | None) -> float:
    """What Retry-After asks for in seconds; a date, or anything else, is left to our own pace."""
    return float(wanted) if wanted and wanted.isdecimal() else 0.0


def _is_plain(value: Any) -> bool:
    """Whether no text in a JSON value can do anything to a terminal."""
    if isinstance(value, Mapping):
        return all(_is_plain(name) and _is_plain(one) for name, one in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return not (isinstance(value, str) and _CONTROL.search(value))
