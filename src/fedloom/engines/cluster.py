# SPDX-License-Identifier: Apache-2.0
"""Ray, for the engine of that name: started on this machine or joined at an address, and its actors.

What is started here is this process's own: it listens on the loopback interface, takes nobody without its token, tells
nobody of its use, and ends with the last engine that uses it, or with this process, however that ends.
"""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

from fedloom.core.errors import ConfigError, NeedsError, RoundError
from fedloom.engines import sweep

READY_SECONDS = 120
"""An actor that has not answered by then has no place."""

_LOCAL = "local"
_CLUSTERS: weakref.WeakValueDictionary[str, Cluster] = weakref.WeakValueDictionary()


class Actor(NamedTuple):
    """A process of Ray's, seen from here."""

    handle: Any
    process: int
    node: str


class Cluster:
    """The machines that Ray has for this process. ``at`` gives the one that is in use already, if it is the same."""

    def __init__(self, address: str | None, workers: int, gpus: int) -> None:
        self.ray = _ray(not address)
        self.local = False
        self._actors: dict[tuple[str, int, float], list[Actor]] = {}
        if self.ray.is_initialized():  # by others, who end it
            weakref.finalize(self, _dismiss, self.ray, self._actors, os.getpid())
            return
        watched = None if address else _watched_folder()
        end = weakref.finalize(self, _stop, self.ray, watched, os.getpid())
        atexit.register(end)  # before what Ray has registered, in which this could come again
        try:
            with _signals_kept(), _leaks_unsaid():
                if address:
                    self._join(address)
                elif watched:
                    self._start(watched.folder, workers, gpus)
        except BaseException:
            end()
            raise

    @classmethod
    def at(cls, address: str | None, workers: int, gpus: int) -> Cluster:
        """The cluster at an address; None: on this machine, started for so many processes and GPUs."""
        name = address or _LOCAL
        found = _CLUSTERS.get(name)
        if found is None:
            if len(_CLUSTERS):
                raise ConfigError(
                    f"This process is connected to Ray at {next(iter(_CLUSTERS))} and cannot be at {name} too. Finish "
                    "that run first, or start another process."
                )
            found = _CLUSTERS[name] = cls(address, workers, gpus)
        return found

    def number(self, resource: str) -> int:
        """How many cores (``CPU``) or GPUs (``GPU``) there are."""
        return int(self.ray.cluster_resources().get(resource, 0))

    def actors(self, work: type, device: str, number: int, gpus: float) -> list[Actor]:
        """``number`` actors that do ``work`` on a device, with so many GPUs each; the same ones each time."""
        key = (device, number, gpus)
        if key not in self._actors:
            self._actors[key] = self.begun(work, [device] * number, gpus)
        return self._actors[key]

    def begun(self, work: type, devices: Sequence[str], gpus: float) -> list[Actor]:
        """Actors that do ``work``, one on each of ``devices``; they are the caller's own, who ends them."""
        handles = [self._begin(work, device, gpus) for device in devices]
        try:
            return [self._greeted(handle) for handle in handles]
        except BaseException:
            for handle in handles:
                self.ray.kill(handle)
            raise

    def replace(self, actors: list[Actor], actor: Actor, work: type, device: str, gpus: float) -> bool:
        """Another actor in the place of one that died; whether there is room for one. Without any left, raise."""
        at = actors.index(actor)
        actors.remove(actor)
        self.ray.kill(actor.handle)  # it may only be out of reach
        handle = self._begin(work, device, gpus)
        try:
            actors.insert(at, self._greeted(handle))
        except NeedsError as error:
            self.ray.kill(handle)
            if not actors:
                raise RoundError(f"{error} The last checkpoint is intact: the run can be resumed.") from error
            return False
        return True

    def dismiss(self, actors: list[Actor]) -> None:
        """End actors, whatever they are at."""
        for key in [key for key, found in self._actors.items() if found is actors]:
            del self._actors[key]
        for actor in actors:
            self.ray.kill(actor.handle)

    def _begin(self, work: type, device: str, gpus: float) -> Any:
        # on this machine it is fedloom that says how many there are; elsewhere Ray, for all that use the cluster
        cores = 0 if self.local or gpus else 1
        return self.ray.remote(work).options(num_cpus=cores, num_gpus=gpus, max_restarts=0).remote(sys.path, device)

    def _greeted(self, handle: Any) -> Actor:
        """The actor, when it can work."""
        answer = handle.greet.remote()
        if not self.ray.wait([answer], timeout=READY_SECONDS)[0]:
            raise NeedsError(
                f"Ray has started no process for clients within {READY_SECONDS} seconds; it has "
                f"{self.number('CPU')} cores and {self.number('GPU')} GPUs in all. Give fewer --workers or --gpus, or "
                "wait until others need less."
            )
        try:
            process, node, fault = self.ray.get(answer)
        except self.ray.exceptions.RayError as error:
            raise NeedsError(
                f"A process of Ray's cannot work: {first_line(error)}. Is the same fedloom installed on each machine?"
            ) from error
        if fault:
            raise NeedsError(f"A process of Ray's cannot work: {fault}.")
        return Actor(handle, process, node)

    def _start(self, folder: Path, workers: int, gpus: int) -> None:
        self.local = True
        try:
            self.ray.init(
                "local", num_cpus=workers, num_gpus=gpus, include_dashboard=False, configure_logging=False,
                log_to_driver=False, _temp_dir=str(folder / "ray"),
            )  # fmt: skip
        except Exception as error:  # Ray has many kinds
            raise NeedsError(f"Ray does not start on this machine: {first_line(error)}.") from error
        where = self.ray.util.get_node_ip_address()
        if where not in ("127.0.0.1", "::1"):
            raise NeedsError(
                f"Ray would listen at {where}: it was imported before fedloom could tell it not to. Set "
                f"{_PRIVATE[0]}=0 before Python starts, or import ray later."
            )

    def _join(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if address != "auto" and not (host and "/" not in host and port.isdecimal()):
            raise ConfigError(f"--ray-address is {address}; give HOST:PORT, or auto for the cluster of this machine.")
        try:
            if host:  # Ray would try for minutes
                socket.create_connection((host, int(port)), timeout=10).close()
            self.ray.init(address, configure_logging=False, log_to_driver=False)
        except Exception as error:  # Ray has many kinds, and ports may be too large
            raise NeedsError(
                f"There is no Ray for us at {address}: {first_line(error)}. Start it with `ray start`, on this machine "
                "too, and give the address that it says; auto is the one on this machine."
            ) from error


_PRIVATE = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
"""0: listen on the loopback interface; tell nobody; and leave actors without a GPU their environment."""


def _ray(local: bool) -> Any:
    """The module, imported now that it is needed, with what it reads from the environment when it is imported."""
    if "ray" not in sys.modules:
        os.environ |= dict.fromkeys(_PRIVATE if local else _PRIVATE[1:], "0")
        if local and "RAY_AUTH_MODE" not in os.environ:
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise NeedsError(
            f"--engine ray needs Ray, which is not installed ({error}); pip install 'fedloom[ray]'."
        ) from error
    return ray


@contextmanager
def _signals_kept() -> Iterator[None]:
    """What this process does when it is told to end stays as it is: Ray would take it over."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _leaks_unsaid() -> Iterator[None]:
    """Without Python's warnings of files that Ray leaves open, and processes that it does not wait for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        finally:
            gc.collect()


class _Watched(NamedTuple):
    """A folder for Ray's files, and a process that ends all who use it if this one is killed."""

    folder: Path
    watch: subprocess.Popen[bytes]


def _watched_folder() -> _Watched:
    # not in TMPDIR: the names of Ray's sockets could be too long for the system. Ray opens its own folder to everybody,
    # but not the one around it
    folder = Path(mkdtemp(prefix="fedloom-", dir="/tmp"))
    command = [sys.executable, "-I", "-S", sweep.__file__, str(folder), str(os.getpid())]
    return _Watched(folder, subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))


def _stop(ray: Any, watched: _Watched | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked worker has a copy, and must leave its parent's alone
        return
    try:
        with _leaks_unsaid():
            ray.shutdown()
    finally:
        if watched:
            watched.watch.communicate(b"\n")
            shutil.rmtree(watched.folder, ignore_errors=True)


def _dismiss(ray: Any, kinds: Mapping[Any, list[Actor]], owner: int) -> None:
    if os.getpid() == owner and ray.is_initialized():
        for actor in (actor for actors in kinds.values() for actor in actors):
            ray.kill(actor.handle)


def first_line(error: BaseException) -> str:
    """What an error of Ray's says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".:") if lines else type(error).__name__
