# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP, with what it lacks: a time and a size for the head of a request, no patience with those who do not
read, and the name in a client's certificate."""

from __future__ import annotations

import asyncio
from typing import Any

LARGEST_HEAD = 1 << 16
"""Bytes of a request's line and headers."""


def protocol(timeout: float) -> type[Any]:
    """The protocol; ``timeout`` is the seconds in which the head of a request must have come."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Base
    except ImportError:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Base  # type: ignore[assignment]

    class Guarded(Base):
        """A connection."""

        _deadline: asyncio.TimerHandle | None = None
        _head = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            inner, name = self.app, _name_in(transport.get_extra_info("peercert"))

            async def app(scope: Any, receive: Any, send: Any) -> None:
                scope["fedloom.give_up"] = transport.abort
                if name is not None:
                    scope["fedloom.certificate"] = name
                await inner(scope, receive, send)

            self.app = app
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.transport.is_closing():
                return
            if self.cycle is None or self.cycle.response_complete:
                self._head += len(data)
                if self._head > LARGEST_HEAD:
                    self.transport.abort()
                self._expect_head()
            else:
                self._head = 0
                self._expect_nothing()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._head = 0

        def timeout_keep_alive_handler(self) -> None:
            if self.transport.get_write_buffer_size():
                self.transport.abort()  # closing would wait for the buffer to be read
            super().timeout_keep_alive_handler()

        def connection_lost(self, error: Exception | None) -> None:
            self._expect_nothing()
            super().connection_lost(error)

        def _expect_head(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(timeout, self.transport.abort)

        def _expect_nothing(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Guarded


def _name_in(certificate: Any) -> str | None:
    """The common name of a verified certificate."""
    names = [value for part in (certificate or {}).get("subject", ()) for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else None
