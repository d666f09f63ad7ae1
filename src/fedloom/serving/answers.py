# SPDX-License-Identifier: Apache-2.0
"""Answers of the service: bytes with a tag, parts of them, and problems in a sentence (RFC 9457)."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

SAFETENSORS, JSON, PROBLEM, MARKDOWN = (
    "application/vnd.safetensors", "application/json", "application/problem+json", "text/markdown; charset=utf-8",
)  # fmt: skip
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
BUNDLE = "fedloom-bundle"
"""The header with the digest of the bundle that a request is meant for."""
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class Answer(NamedTuple):
    """What goes back: a status, headers, and the pieces of a body."""

    status: int
    headers: dict[str, str]
    body: Sequence[bytes | memoryview] = ()

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return sum(map(len, self.body))


class Refusal(Exception):
    """A request that is not served, and why, in a sentence."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, dict(headers or {})

    def answer(self) -> Answer:
        """As the service says it."""
        about = {"type": "about:blank", "title": HTTPStatus(self.status).phrase, "status": self.status}
        body = json.dumps({**about, "detail": self.sentence}).encode()
        return Answer(self.status, {"content-type": PROBLEM, "cache-control": "no-store", **self.headers}, [body])


def json_answer(value: Any, **headers: str) -> Answer:
    """A JSON object."""
    return Answer(200, {"content-type": JSON, **headers}, [json.dumps(value).encode()])


def digest_of(body: Sequence[bytes | memoryview]) -> str:
    """The header Content-Digest (RFC 9530)."""
    found = hashlib.sha256()
    for piece in body:
        found.update(piece)
    return f"sha-256=:{base64.b64encode(found.digest()).decode()}:"


def matches(wanted: str | None, tag: str) -> bool:
    """Whether If-None-Match names the tag."""
    given = [one.strip().removeprefix("W/") for one in (wanted or "").split(",")]
    return tag in given or "*" in given


def part_of(answer: Answer, wanted: str | None, condition: str | None) -> Answer:
    """The piece that Range asks for, if it asks for one; several at once are answered with the whole."""
    found = _RANGE.fullmatch(wanted or "")
    if answer.status != 200 or not found or (condition and condition != answer.headers.get("etag")):
        return answer
    first, last = found.groups()
    size = answer.size
    start = int(first) if first else max(0, size - int(last or 0))
    end = min(int(last) + 1 if first and last else size, size)
    if start >= end:
        raise Refusal(416, f"There are {size} bytes; ask for some of them.", {"content-range": f"bytes */{size}"})
    headers = {**answer.headers, "content-range": f"bytes {start}-{end - 1}/{size}"}
    headers.pop("content-digest", None)  # which is that of the whole
    pieces, at = [], 0
    for piece in answer.body:
        low, high = max(start - at, 0), min(end - at, len(piece))
        if low < high:
            pieces.append(memoryview(piece)[low:high])
        at += len(piece)
    return Answer(206, headers, pieces)
