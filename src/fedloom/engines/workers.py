# SPDX-License-Identifier: Apache-2.0
"""Processes that work side by side, each with one operator thread; trees pass through memory that both sides map.

They are forked, so that they have the data, the models and the programs of their parent without a copy. None outlives
its parent, however that ends; one that dies or stands still is replaced, and what it was at is reported as lost.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import signal
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from fedloom.core.trees import Tree
from fedloom.engines import packed
from fedloom.engines.packed import Place

STILL_SECONDS = 60
"""A worker that uses no CPU time for so long is stuck."""

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl.h

Work = Callable[[Any, Tree], tuple[Any, Tree]]
"""(note, tree) -> (note, tree); notes are small and pickled, trees go through shared memory."""


def possible() -> bool:
    """Whether this system can have workers: fork is safe on Linux only."""
    return sys.platform == "linux"


def cores() -> int:
    """The cores that this process may use: those it is bound to, and no more than its control group's quota."""
    if not possible():
        return os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return bound if quota == "max" else min(bound, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return bound


class Lost(NamedTuple):
    """A job whose worker did not finish it."""

    why: str


class Workers:
    """``number`` processes that each do ``work``. Raises ``OSError`` where there cannot be so many.

    They are of use to the thread that makes them, with which they end.
    """

    def __init__(self, number: int, work: Work) -> None:
        self._work, self._thread = work, threading.current_thread()
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _dismiss, self._workers, os.getpid())
        try:
            for _ in range(number):
                self._workers.append(self._fork())
        except BaseException:
            self.close()
            raise

    def run(self, jobs: Iterable[Any], prepare: Callable[[Any], tuple[Any, Tree]]) -> Iterator[tuple[Any, Any]]:
        """Do all ``jobs``, which ``prepare`` turns into what is sent; give each as it ends with its result or ``Lost``.

        If the caller stops in between, by whatever exception, the workers end too.
        """
        waiting = deque(jobs)
        try:
            while waiting or any(worker.job is not None for worker in self._workers):
                for worker in self._workers:
                    if worker.job is None and waiting:
                        worker.begin(waiting.popleft(), prepare)
                busy = [worker for worker in self._workers if worker.job is not None]
                ready = wait([worker.connection for worker in busy], timeout=1.0)
                for worker in busy:
                    if worker.connection in ready or (not ready and worker.stuck()):
                        job, result = worker.end()
                        if isinstance(result, Lost):
                            self._workers.remove(worker)
                            self._workers.append(self._fork())
                        else:
                            if waiting:  # before this result is read, so that nobody is idle meanwhile
                                worker.begin(waiting.popleft(), prepare)
                            note, read = result
                            result = note, read()
                        yield job, result
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all workers."""
        self._end()

    @property
    def closed(self) -> bool:
        """Whether they have been ended, or will be with another thread than this."""
        return not self._end.alive or self._thread is not threading.current_thread()

    def _fork(self) -> _Worker:
        """A new worker: a copy of this process as it is now, which has said that it can work.

        It has an inbox for the trees that it gets, and two outboxes, so that it need not wait until one is read.
        """
        here, there = Pipe()
        inbox, outboxes = _Region(), (_Region(), _Region())
        # a child that Ctrl-C meets before it can ignore it would go on as its parent's double
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with warnings.catch_warnings():
                # of threads in this process, which a worker does without: it runs torch with one, and prints nothing
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if process == 0:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends its workers
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        if process == 0:
            for other in self._workers:
                other.connection.close()
            here.close()
            _serve(there, inbox, outboxes, self._work)
        there.close()
        worker = _Worker(process, here, inbox, outboxes)
        try:
            worker.greet()
        except BaseException:
            worker.dismiss()
            raise
        return worker


class _Worker:
    """A worker, seen by its parent; ``job`` is what it is at, None if nothing."""

    def __init__(self, process: int, connection: Connection, inbox: _Region, outboxes: Sequence[_Region]) -> None:
        self.process, self.connection, self.inbox = process, connection, inbox
        self._outboxes = cycle(outboxes)
        self.job: Any = None
        self._used, self._still = -1, 0

    def greet(self) -> None:
        """Have it say that it can differentiate: torch refuses after a fork where a GPU's threads were running."""
        try:
            why = self.connection.recv() if self.connection.poll(STILL_SECONDS) else "it does not answer"
        except EOFError:
            why = "it ended at once"
        if why:
            raise OSError(f"a forked process cannot work: {why}")

    def begin(self, job: Any, prepare: Callable[[Any], tuple[Any, Tree]]) -> None:
        """Give it a job. The inbox is free, since it has read what was there before it answered the last one."""
        note, tree = prepare(job)
        self.job, self._used, self._still = job, -1, 0
        with suppress(OSError):  # it is dead: ``end`` will say so
            self.connection.send((note, self.inbox.write(tree)))

    def end(self) -> tuple[Any, Any]:
        """The job and its result, a note and how to read the tree; a worker that is ``Lost`` is no more."""
        job, self.job = self.job, None
        if self._still >= STILL_SECONDS:
            self.dismiss()
            return job, Lost(f"its process stood still for {STILL_SECONDS} seconds")
        try:
            note, places = self.connection.recv()
        except (EOFError, OSError):
            status = self.dismiss(kill=False)
            return job, Lost(f"its process was ended by signal {-status}" if status < 0 else "its process ended")
        return job, (note, partial(next(self._outboxes).read, places))

    def stuck(self) -> bool:
        """Whether it has stood still. Counted in calls, one a second: clocks also run while everything is suspended."""
        used = cpu_time(self.process)
        self._still = self._still + 1 if used == self._used else 0
        self._used = used
        return self._still >= STILL_SECONDS

    def dismiss(self, kill: bool = True) -> int:
        """Wait for its end, or bring that about; the status as ``subprocess`` gives it."""
        self.connection.close()
        with suppress(ProcessLookupError, ChildProcessError):
            if kill:
                os.kill(self.process, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        return 0


def _dismiss(workers: list[_Worker], owner: int) -> None:
    """End all workers, in the process that made them."""
    if os.getpid() == owner:  # a worker has a copy of this list, and must leave its siblings alone
        for worker in workers:
            worker.dismiss()
        workers.clear()


def cpu_time(process: int, *, main_thread: bool = False) -> int:
    """Clock ticks that a process of this machine has run, or its first thread alone."""
    try:
        fields = (
            Path(f"/proc/{process}/task/{process}/stat" if main_thread else f"/proc/{process}/stat")
            .read_text()
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return -1
    return int(fields[11]) + int(fields[12])


def _serve(connection: Connection, inbox: _Region, outboxes: Sequence[_Region], work: Work) -> NoReturn:
    """A worker's life; it ends with its parent's end of the connection, and never returns into its parent's code.

    Results go into two outboxes by turns: one is read while the next result is made.
    """
    status = 1
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        gc.freeze()  # what the parent made is not ours to collect, and looking at it would copy its pages
        torch.set_num_threads(1)
        connection.send(_ailment())
        for outbox in cycle(outboxes):
            note, places = connection.recv()
            note, tree = work(note, inbox.read(places))
            connection.send((note, outbox.write(tree)))
    except (EOFError, OSError):
        status = 0
    finally:
        os._exit(status)


def _ailment() -> str | None:
    """What keeps this process from training."""
    try:
        one = torch.ones((), requires_grad=True)
        torch.autograd.grad(one * one, one)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


class _Region:
    """Memory for trees that two processes map; it grows, and each tree overwrites the one before."""

    def __init__(self) -> None:
        self._file = os.memfd_create("fedloom")
        self._end = weakref.finalize(self, os.close, self._file)
        self._size, self._bytes = 0, torch.empty(0, dtype=torch.uint8)

    def write(self, tree: Tree) -> list[Place]:
        """Put a tree there; where its leaves are."""
        where, size = packed.places(tree)
        if size > self._size:
            os.ftruncate(self._file, size)
        self._map(size)
        packed.put(tree, where, self._bytes)
        return where

    def read(self, where: Sequence[Place]) -> dict[str, Any]:
        """A copy of the tree that was put there."""
        self._map(packed.end(where))
        return packed.taken(where, self._bytes)

    def _map(self, size: int) -> None:
        if size > self._size:
            self._size = os.fstat(self._file).st_size
            self._bytes = torch.frombuffer(mmap.mmap(self._file, self._size), dtype=torch.uint8)
