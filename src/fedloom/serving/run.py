# SPDX-License-Identifier: Apache-2.0
"""Starting a service: one process, or several that are forked once the bundle is there and share it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fedloom.core.errors import ConfigError, NeedsError
from fedloom.serving.settings import Settings

MOST_CONNECTIONS = 8192
IDLE = 30
"""Seconds that a connection without a request is kept."""
STOPS = (signal.SIGTERM, signal.SIGINT)


def serve(path: Path, settings: Settings, *, trust: bool = False, ready: Callable[[str], None] = print) -> None:
    """Serve a bundle until the process is told to stop; ``ready`` is told the address."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise NeedsError(
            f"Serving needs {error.name}, which is not installed; pip install 'fedloom[serve]'."
        ) from error
    from fedloom.serving.app import Service
    from fedloom.serving.bundle import Bundle

    torch.set_num_threads(1)  # a model is small, and workers are for more cores
    bundle = Bundle(path, trust=trust)
    bundle.check()
    service = Service(bundle, settings)
    server_of(service)  # certificates that cannot be used are found now, and not by each worker
    _more_files()
    with listening(settings) as listener:
        host, port = listener.getsockname()[:2]
        scheme = "https" if settings.tls_cert else "http"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        if settings.workers == 1:
            ready(address)
            _run(service, listener)
        else:
            _supervise(service, listener, settings.workers, lambda: ready(address))


def _run(service: Any, listener: socket.socket) -> None:
    """One worker, until it is told to stop."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    server_of(service).run(sockets=[listener])


def server_of(service: Any) -> Any:
    """uvicorn's server of the application."""
    import uvicorn

    from fedloom.serving.protocol import protocol

    settings: Settings = service.settings
    config = uvicorn.Config(
        service,
        http=protocol(settings.timeout),
        loop="asyncio" if settings.tls_cert else "auto",  # see startup
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=5,
        limit_concurrency=MOST_CONNECTIONS,
        ssl_certfile=settings.tls_cert and str(settings.tls_cert),
        ssl_keyfile=settings.tls_key and str(settings.tls_key),
        ssl_ca_certs=str(settings.client_ca) if settings.client_ca else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.client_ca else ssl.CERT_NONE,
    )
    if settings.tls_cert:
        try:
            config.load()
        except OSError as error:
            files = ", ".join(str(file) for file in (settings.tls_cert, settings.tls_key, settings.client_ca) if file)
            raise ConfigError(
                f"TLS cannot be had from {files}: {error}; give certificates and their private key as PEM."
            ) from error
        assert config.ssl is not None
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2

    class Server(uvicorn.Server):
        """With a time for the TLS handshake, for which asyncio waits a minute."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            loop = asyncio.get_running_loop()
            if settings.tls_cert:
                listen = partial(loop.create_server, ssl_handshake_timeout=settings.timeout)
                loop.create_server = listen  # type: ignore[method-assign]
            await super().startup(sockets)

    return Server(config)


def _supervise(service: Any, listener: socket.socket, workers: int, ready: Callable[[], None]) -> None:
    """Fork workers, and another one for each that dies."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        raise ConfigError("--workers takes a system that can fork safely (Linux); start several services instead.")
    places: dict[int, int] = {}
    stopping = False
    parent_lives, held = os.pipe()  # the end that is held closes when this process ends, however it does

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        for pid in places:
            with suppress(ProcessLookupError):  # one that was waited for a moment ago
                os.kill(pid, signal.SIGTERM)

    def start(place: int) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # until both know what a signal means to them
        if stopping:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return
        pid = os.fork()
        if pid:
            places[pid] = place
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return
        code = 1
        try:
            for one in STOPS:
                signal.signal(one, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(held)
            threading.Thread(target=_end_with, args=(parent_lives,), daemon=True).start()
            service.counters.worker = place
            _run(service, listener)
            code = 0
        finally:
            os._exit(code)

    for one in STOPS:
        signal.signal(one, stop)
    for place in range(workers):
        start(place)
    ready()
    while places:
        pid, _ = os.wait()
        place = places.pop(pid)
        if not stopping:
            logging.getLogger("fedloom.serving").warning("worker %d died; another one starts", place)
            start(place)


def _end_with(parent_lives: int) -> None:
    """Stop this worker when the process that forked it is gone: its workers would keep the address."""
    os.read(parent_lives, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def listening(settings: Settings) -> socket.socket:
    """The socket, which workers share."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host.strip("[]"), settings.port))
    except OSError as error:
        listener.close()
        why = error.strerror or str(error)
        raise ConfigError(
            f"Cannot listen on {settings.host} port {settings.port}: {why}; give another --host or --port."
        ) from error
    listener.listen(2048)
    return listener


def _more_files() -> None:
    """As many open connections as the system lets this user have."""
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 2 * MOST_CONNECTIONS if most == resource.RLIM_INFINITY else min(most, 2 * MOST_CONNECTIONS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
