# SPDX-License-Identifier: Apache-2.0
"""The service as an ASGI application: what there is to ask, of whom it is answered, and within which limits.

Nothing that a client sends is executed, unpickled or written to disk. Logs have who asked what, how long it took and
how many bytes it was, and never a body.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from starlette.requests import ClientDisconnect, Request

from fedloom.core.errors import FedloomError, NeedsError
from fedloom.serving.answers import (
    BUNDLE,
    MARKDOWN,
    PLAIN,
    SAFETENSORS,
    Answer,
    Refusal,
    digest_of,
    json_answer,
    matches,
    part_of,
)
from fedloom.serving.bundle import LOOM, Bundle
from fedloom.serving.card import as_markdown
from fedloom.serving.counters import Counters, Limiter
from fedloom.serving.settings import Settings
from fedloom.serving.tokens import Identity, identity_of, read_key
from fedloom.serving.weaver import Weaver

log = logging.getLogger("fedloom.serving")

PIECE = 1 << 19
"""Bytes that are sent at a time: what a slow reader may take ``timeout`` seconds for."""
LINGER = 1 << 21
"""Bytes beyond the most that are read, and thrown away, so that who sends them hears why they are refused."""
WAITING = 1024
"""Requests that may wait to be computed; more are told to come later."""
HELD = 1 << 28
"""Bytes of bodies and of computed answers in a worker's memory at a time; one request alone may take more."""
FOREVER = "max-age=31536000, immutable"
SAFE = {"x-content-type-options": "nosniff", "content-security-policy": "default-src 'none'; frame-ancestors 'none'"}
NOWHERE = "none"
"""The route of requests for what is not there."""
_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")
Access = Literal["anybody", "newcomer", "client", "operator"]


@dataclass(frozen=True)
class Endpoint:
    """One thing that can be asked."""

    method: Literal["GET", "POST"]
    path: str
    access: Access
    summary: str
    gives: str
    """The media type of the answer."""
    respond: Callable[[Asked], Awaitable[Answer]]
    body: str = ""
    """What the body of a request has."""
    query: str = ""
    tagged: bool = False
    """Its answers have entity tags: what has not changed is not sent again."""

    @property
    def route(self) -> str:
        """Its name in metrics and logs."""
        return f"{self.method} {self.path}"

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """What a path must be; a client's name may be any text."""
        return re.compile(_PARAMETER.sub(_group, self.path.replace(".", r"\.")), re.DOTALL)


def _group(found: re.Match[str]) -> str:
    return f"(?P<{found[1]}>{'.+' if found[2] else '[^/]+'})"


class Asked:
    """A request: who asks, what, and its body as far as it is needed."""

    def __init__(self, request: Request, identity: Identity | None, service: Service) -> None:
        self.request, self.identity, self.service = request, identity, service
        self.received = self.held = 0

    def hold(self, size: int) -> None:
        """Keep so many bytes more until the answer is gone: who reads slowly, or sends slowly, must not fill memory."""
        others = self.service.held - self.held
        if others and others + self.held + size > HELD:
            raise Refusal(503, "Too much waits to be sent already; try again in a moment.", {"retry-after": "1"})
        self.held += size
        self.service.held += size

    async def body(self, largest: int) -> bytes:
        """The whole body, if it is not too large and comes in time."""
        length = self.request.headers.get("content-length")
        too_large = Refusal(413, f"The body has more than {largest:,} bytes, the most that makes sense here.")
        announced = int(length[:18]) if length and length.isdecimal() else 0
        kind = self.request.headers.get("content-type", SAFETENSORS)
        if kind not in (SAFETENSORS, "application/octet-stream"):
            raise Refusal(
                415, f"The body is said to be {kind[:100]}; send a safetensors file, as Content-Type: {SAFETENSORS}."
            )
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(self.service.settings.timeout):
                async for piece in self.request.stream():
                    self.received += len(piece)
                    if max(announced, self.received) <= largest:
                        self.hold(len(piece))
                        pieces.append(piece)
                    elif self.received > largest + LINGER:  # until then: who still sends hears no answer
                        break
        except TimeoutError:
            raise Refusal(408, "The body did not come in time; send it again.") from None
        except ClientDisconnect:
            raise Refusal(400, "The body ended before it was whole.") from None
        if max(announced, self.received) > largest:
            raise too_large
        return b"".join(pieces)


class Service:
    """The application."""

    def __init__(self, bundle: Bundle, settings: Settings) -> None:
        self.bundle, self.settings = bundle, settings
        self.weaver = Weaver(bundle)
        self.key = read_key(settings.key) if settings.key else None
        self.parts = bundle.public()
        if settings.keep_loom:
            if not self.weaver.weaves:
                raise NeedsError(
                    f"--keep-loom is for methods that weave newcomers' models from a vector; {bundle.manifest['name']} "
                    "hands out what newcomers need. Leave it out."
                )
            del self.parts[bundle.archive.sha256(LOOM)]
        self.endpoints = endpoints()
        self.counters = Counters([*(one.route for one in self.endpoints), NOWHERE], settings.workers)
        self.limiter = Limiter(settings.rate)
        self.held = 0
        self._executor: ThreadPoolExecutor | None = None
        self._waiting = 0

    def card(self) -> dict[str, Any]:
        """What a client must know to join."""
        manifest = self.bundle.manifest
        listed = {
            name: {**one, "url": f"/v1/parts/{one['sha256']}.safetensors"}
            for name, one in manifest["parts"].items()
            if one["sha256"] in self.parts
        }
        shown = ("format", "fedloom", "method", "name", "round", "options", "config", "form", "newcomer", "ways")
        public = {name: manifest[name] for name in shown}
        layout = {"newcomers": manifest["layout"].get("newcomers", [])}
        return {
            **public, "bundle": self.bundle.digest, "architectures": manifest["architectures"], "parts": listed,
            "layout": layout, "tokens": self.settings.closed,
        }  # fmt: skip

    def offered(self, endpoint: Endpoint) -> bool:
        """Whether the bundle has what is asked there."""
        return not endpoint.body or self.weaver.weaves

    def asks_who(self, endpoint: Endpoint) -> bool:
        """Whether only those are answered there who say who they are."""
        needed = {"anybody": False, "newcomer": self.settings.closed, "client": True, "operator": self.key is not None}
        return needed[endpoint.access]

    async def computed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(*arguments)`` on the one thread that computes, so that others are answered meanwhile."""
        if self._waiting >= WAITING:
            raise Refusal(503, "Too many wait already; try again in a moment.", {"retry-after": "1"})
        if self._executor is None:  # here, and not in the process that this one was forked from
            self._executor = ThreadPoolExecutor(1)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
        finally:
            self._waiting -= 1

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        start, number = time.perf_counter(), secrets.token_hex(6)
        request = Request(scope, receive)
        endpoint, identity, asked = None, None, None
        try:
            endpoint = self._found(scope)
            identity = self._identity(request)
            self._allowed(endpoint, identity, scope)
            asked = Asked(request, identity, self)
            answer = await endpoint.respond(asked)
            if request.method == "GET":  # for others Range means nothing
                answer = part_of(answer, request.headers.get("range"), request.headers.get("if-range"))
        except Refusal as refusal:
            answer = refusal.answer()
        except FedloomError as error:
            answer = Refusal(400, " ".join(str(error).split())).answer()
        except Exception as error:
            log.error("%s failed: %s", number, type(error).__name__, exc_info=log.isEnabledFor(logging.DEBUG))
            answer = Refusal(500, f"The service failed; its log says more of request {number}.").answer()
        try:
            sent = await self._send(scope, send, answer, number)
        finally:
            self.held -= asked.held if asked else 0
        seconds, received = time.perf_counter() - start, asked.received if asked else 0
        route = endpoint.route if endpoint else NOWHERE
        self.counters.add(route, answer.status, seconds, received, sent)
        who = f"{identity.role} {identity.name}" if identity else None
        facts = {"request": number, "route": route, "status": answer.status, "who": who, "in": received, "out": sent}
        log.info("%s", json.dumps({**facts, "ms": round(1000 * seconds, 2)}))

    def _found(self, scope: Any) -> Endpoint:
        """The endpoint that a request means."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        others = set()
        for endpoint in self.endpoints:
            match = endpoint.pattern.fullmatch(scope["path"])
            if match and endpoint.method == method:
                scope["path_params"] = match.groupdict()
                return endpoint
            others |= {endpoint.method} if match else set()
        if others:
            raise Refusal(
                405, f"This can only be asked by {' or '.join(sorted(others))}.", {"allow": ", ".join(others)}
            )
        raise Refusal(404, "There is nothing here; /openapi.json says what there is.")

    def _identity(self, request: Request) -> Identity | None:
        """Who asks: by a token, or by the certificate that the connection began with."""
        given = request.headers.get("authorization")
        if given is None:
            name = request.scope.get("fedloom.certificate")
            if name is None:
                return None
            return Identity("client" if name in self.bundle.registry else "newcomer", name)
        scheme, _, token = given.partition(" ")
        found = identity_of(self.key, token.strip()) if self.key and scheme.lower() == "bearer" else None
        if found is None:
            raise Refusal(401, "The token is not one of this service, or too old.", {"www-authenticate": "Bearer"})
        return found

    def _allowed(self, endpoint: Endpoint, identity: Identity | None, scope: Any) -> None:
        """Refuse who may not ask this, or asks too often."""
        if self.asks_who(endpoint) and identity is None:
            raise Refusal(
                401, "Say who you are: send a token (Authorization: Bearer ...), which the service's owner gives.",
                {"www-authenticate": "Bearer"},
            )  # fmt: skip
        if endpoint.access == "operator" and identity and identity.role != "operator":
            raise Refusal(403, "That is for the service's owner.")
        if endpoint.access != "anybody":
            address = (scope.get("client") or ("nowhere",))[0]
            wait = self.limiter.wait(f"{identity.role} {identity.name}" if identity else f"address {address}")
            if wait:
                raise Refusal(
                    429, f"More than {self.settings.rate} requests a minute; try again in a while.",
                    {"retry-after": str(int(wait) + 1)},
                )  # fmt: skip

    async def _send(self, scope: Any, send: Any, answer: Answer, number: str) -> int:
        """Send an answer, as fast as the client takes it but not slower than it must; how many bytes went out."""
        body = answer.body if scope["method"] != "HEAD" and answer.status != 304 else ()
        headers = {**SAFE, "x-request-id": number, **answer.headers}
        if answer.status != 304:
            headers["content-length"] = str(answer.size)
        if answer.status >= 400:
            headers["connection"] = "close"  # more of a body that nobody wants may be on its way
        encoded = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        sent = 0
        try:
            await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
            for piece in body:
                for at in range(0, len(piece), PIECE):
                    chunk = memoryview(piece)[at : at + PIECE]
                    async with asyncio.timeout(self.settings.timeout):
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    sent += len(chunk)
            await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            give_up = scope.get("fedloom.give_up")
            if give_up:
                give_up()
        return sent


async def healthz(asked: Asked) -> Answer:
    """Whether the service answers."""
    return json_answer({"status": "ok"}, **{"cache-control": "no-store"})


async def metrics(asked: Asked) -> Answer:
    """Counters of all workers."""
    return Answer(200, {"content-type": PLAIN, "cache-control": "no-store"}, [asked.service.counters.text().encode()])


async def openapi(asked: Asked) -> Answer:
    """This description."""
    from fedloom.serving.openapi import description

    return json_answer(description(asked.service))


async def service_card(asked: Asked) -> Answer:
    """Method, form of the samples, ways to join, parts to download."""
    return _tagged(
        asked, json_answer(asked.service.card()), asked.service.bundle.digest, str(asked.service.parts.keys())
    )


async def model_card(asked: Asked) -> Answer:
    """The model card, as JSON, or as Markdown where that is what is accepted."""
    bundle = asked.service.bundle
    if "text/markdown" in asked.request.headers.get("accept", ""):
        text = as_markdown(bundle.card, bundle.digest)
        answer = Answer(200, {"content-type": MARKDOWN, "vary": "accept"}, [text.encode()])
        return _tagged(asked, answer, bundle.digest, "markdown")
    return _tagged(asked, json_answer(bundle.card, vary="accept"), bundle.digest, "json")


async def list_architectures(asked: Asked) -> Answer:
    """The networks, by name."""
    service = asked.service
    listed = [
        {**one, "woven": one["name"] in service.weaver.architectures}
        for one in service.bundle.manifest["architectures"]
    ]
    return _tagged(asked, json_answer({"architectures": listed}), service.bundle.digest, "architectures")


async def part(asked: Asked) -> Answer:
    """A part of the bundle, which never changes."""
    digest = asked.request.path_params["digest"]
    found = asked.service.parts.get(digest)
    if found is None:
        raise Refusal(404, "The service hands out no such part; /v1 lists those that it does.")
    whose = "private" if asked.service.settings.closed else "public"  # caches in between ask nobody for a token
    headers = {
        "content-type": SAFETENSORS,
        "etag": f'"{digest}"',
        "cache-control": f"{whose}, {FOREVER}",
        "accept-ranges": "bytes",
    }
    if matches(asked.request.headers.get("if-none-match"), headers["etag"]):
        return Answer(304, headers)
    return Answer(200, headers, [found])


async def participant(asked: Asked) -> Answer:
    """A participant's own model."""
    name, identity, service = asked.request.path_params["client"], asked.identity, asked.service
    if identity != Identity("client", name):
        raise Refusal(403, "That is for the client itself: the token, or certificate, is another's.")
    if name not in service.bundle.registry:
        raise Refusal(404, "This client took no part in training, so that there is no model of its own here.")
    headers = {
        "content-type": SAFETENSORS,
        "etag": service.weaver.tag("client", name),
        "cache-control": "private, no-cache",
    }
    if matches(asked.request.headers.get("if-none-match"), headers["etag"]):
        return Answer(304, headers)
    body = [await service.computed(service.weaver.participant, name)]
    asked.hold(len(body[0]))
    return Answer(200, {**headers, "accept-ranges": "bytes", "content-digest": digest_of(body)}, body)


async def weave(asked: Asked) -> Answer:
    """A newcomer's model."""
    return await _of_body(asked, asked.service.weaver.weave)


async def pull_back(asked: Asked) -> Answer:
    """A gradient of the vector."""
    return await _of_body(asked, asked.service.weaver.pull_back)


async def _of_body(asked: Asked, function: Callable[[bytes, str], Any]) -> Answer:
    service = asked.service
    if not service.weaver.weaves:
        raise Refusal(404, f"{service.bundle.manifest['name']} weaves no newcomer's model from a vector; see /v1.")
    if asked.request.headers.get(BUNDLE) not in (None, service.bundle.digest):
        raise Refusal(409, "The service has another bundle by now, to which this vector means nothing; join again.")
    body = await asked.body(service.weaver.largest)
    found = await service.computed(function, body, asked.request.query_params.get("architecture", ""))
    pieces = [found] if isinstance(found, bytes) else found
    asked.hold(sum(map(len, pieces)))
    return Answer(200, {"content-type": SAFETENSORS, "cache-control": "no-store"}, pieces)


def _tagged(asked: Asked, answer: Answer, *parts: str) -> Answer:
    tag = asked.service.weaver.tag(str(asked.request.scope["path"]), *parts)
    headers = {**answer.headers, "etag": tag, "cache-control": "no-cache"}
    if matches(asked.request.headers.get("if-none-match"), tag):
        return Answer(304, headers)
    return answer._replace(headers=headers)


ARCHITECTURE = "The network's name; without it, the first one of /v1/architectures."


def endpoints() -> list[Endpoint]:
    """Everything that can be asked: routes, metrics and the OpenAPI description are made from this."""
    return [
        Endpoint("GET", "/healthz", "anybody", "Whether the service answers", "application/json", healthz),
        Endpoint("GET", "/metrics", "operator", "Counters, for Prometheus", "text/plain", metrics),
        Endpoint("GET", "/openapi.json", "anybody", "This description", "application/json", openapi),
        Endpoint("GET", "/v1", "anybody", "What is served, and how a newcomer joins", "application/json", service_card,
                 tagged=True),
        Endpoint("GET", "/v1/card", "anybody", "The model card; as Markdown, if Accept says so", "application/json",
                 model_card, tagged=True),
        Endpoint("GET", "/v1/architectures", "anybody", "The networks", "application/json", list_architectures,
                 tagged=True),
        Endpoint("GET", "/v1/parts/{digest}.safetensors", "newcomer", "A part of the bundle", SAFETENSORS, part,
                 tagged=True),
        Endpoint(
            "GET", "/v1/clients/{client:path}/model", "client", "A participant's own model", SAFETENSORS, participant,
            tagged=True,
        ),
        Endpoint(
            "POST", "/v1/models", "newcomer", "A newcomer's model, woven from its vector", SAFETENSORS, weave,
            body="vector: (size,), or (models, size) for several models in one file: 0/..., 1/...", query=ARCHITECTURE,
        ),
        Endpoint(
            "POST", "/v1/gradients", "newcomer", "A gradient of a woven model, pulled back to its vector", SAFETENSORS,
            pull_back, body="vector: (size,), gradient: (parameters,), in the order of the model's tensors",
            query=ARCHITECTURE,
        ),
    ]  # fmt: skip
