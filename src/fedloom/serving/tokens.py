# SPDX-License-Identifier: Apache-2.0
"""Tokens: a name and a date, signed. A service needs the key alone, however many clients there are.

``fl1.NAME.SIGNATURE``, where NAME is base64 of JSON such as ``{"client": "3", "until": 1800000000}`` and SIGNATURE is
HMAC-SHA256 of what stands before it. A token cannot be taken back before its date, other than by a new key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import secrets
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fedloom.core.errors import ConfigError
from fedloom.deploy.store import write_private

VERSION = "fl1"
LONGEST = 1024
DAYS = 365
Role = Literal["client", "newcomer", "operator"]


class Identity(NamedTuple):
    """Who somebody has proven to be."""

    role: Role
    name: str


def make_key(path: Path) -> None:
    """A new key, for this user alone, unless there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, secrets.token_hex(32).encode())


def read_key(path: Path) -> bytes:
    """The key in a file."""
    try:
        key = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError):
        key = b""
    if len(key) < 32:
        raise ConfigError(f"{path} holds no key of 32 bytes or more in hexadecimal digits; `fedloom token` makes one.")
    return key


def make_token(key: bytes, identity: Identity, days: float = DAYS, now: float | None = None) -> str:
    """A token for somebody, good for so many days."""
    if not math.isfinite(days):
        raise ConfigError(f"--days is {days}; give a number of days.")
    until = int((time.time() if now is None else now) + days * 86400)
    body = json.dumps({identity.role: identity.name, "until": until}).encode()
    signed = f"{VERSION}.{_text(body)}"
    if len(signed) > LONGEST - 50:
        raise ConfigError("The name is too long for a token; give one of at most 500 bytes.")
    return f"{signed}.{_text(_mac(key, signed))}"


def identity_of(key: bytes, token: str, now: float | None = None) -> Identity | None:
    """Whose token this is; None for one that is forged, damaged or too old."""
    signed, _, mac = token.rpartition(".")
    if len(token) > LONGEST or not token.isascii():
        return None
    if not hmac.compare_digest(_text(_mac(key, signed)), mac):
        return None
    version, _, body = signed.partition(".")
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    if version != VERSION or found["until"] < (time.time() if now is None else now):
        return None
    return next((Identity(role, found[role]) for role in get_args(Role) if role in found), None)


def _mac(key: bytes, signed: str) -> bytes:
    return hmac.new(key, signed.encode(), hashlib.sha256).digest()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
