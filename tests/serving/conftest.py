# SPDX-License-Identifier: Apache-2.0
"""Tiny runs and their bundles."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import fedloom
from fedloom.data.registry import load as load_data
from fedloom.serving.bundle import Bundle, make_bundle
from fedloom.serving.settings import Settings

TINY = {"clients": 4, "unseen": 1, "rounds": 2, "local_steps": 2, "dataset": "digits", "progress": "quiet"}

Made = Callable[..., tuple[fedloom.Run, Path]]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """``made("pfedhn", model="lenet")``: a finished run and its bundle, each made once. Not to be changed."""
    kept: dict[Any, tuple[fedloom.Run, Path]] = {}

    def make(method: str, *, adapt: str | None = None, **options: Any) -> tuple[fedloom.Run, Path]:
        key = (method, adapt, *sorted(options.items()))
        if key not in kept:
            out = tmp_path_factory.mktemp("serving") / "run"
            run = fedloom.run(method, out=out, **{**TINY, "model": "mlp:hidden=8", **options})
            run = fedloom.load(run.path, adapt=adapt, trust=True)
            kept[key] = run, make_bundle(run, out.parent / "bundle.fedloom")
        return kept[key]

    return make


@pytest.fixture(scope="session")
def newcomer() -> tuple[np.ndarray, np.ndarray]:
    """Samples and labels of a newcomer: threes and eights."""
    arrays = load_data("digits")
    mine = np.flatnonzero((arrays.y == 3) | (arrays.y == 8))[:30]
    return arrays.x[mine], arrays.y[mine]


class Running(NamedTuple):
    """A service in a thread of this process."""

    url: str
    service: Any


Serve = Callable[..., Running]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve(bundle, rate=0)``: a service on loopback, stopped in the end."""
    from fedloom.serving.app import Service
    from fedloom.serving.run import listening, server_of

    running: list[Any] = []

    def start(path: Path, *, trust: bool = False, **options: Any) -> Running:
        settings = Settings(**{"port": 0, "rate": 0, **options})
        service = Service(Bundle(path, trust=trust), settings)
        listener, server = listening(settings), server_of(service)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        running.append((server, thread, listener, service))
        while not server.started:
            time.sleep(0.01)
        scheme = "https" if settings.tls_cert else "http"
        return Running(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", service)

    yield start
    for server, thread, listener, service in running:
        server.should_exit = server.force_exit = True
        thread.join(10)
        listener.close()
        if service._executor:
            service._executor.shutdown()
