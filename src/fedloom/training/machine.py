# SPDX-License-Identifier: Apache-2.0
"""Devices, threads and tasks by the names that options give them."""

from __future__ import annotations

import torch

from fedloom.core.errors import ConfigError, unknown
from fedloom.core.task import TASKS, Task
from fedloom.core.trust import import_path


def device_of(name: str) -> torch.device:
    """The device that ``name`` stands for, checked to be there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        here = f"cpu and cuda ({str(error).splitlines()[0]})" if torch.cuda.is_available() else "cpu only"
        raise ConfigError(
            f"--device {name} is not available; this machine has {here}. Leave it out for auto."
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"--device {name} is not one that fedloom runs on; expected cpu or cuda. Leave it out for auto."
        )
    return device


class Threads:
    """The threads of an operator: those that the user's process has, and those that a run has set in their place."""

    def __init__(self) -> None:
        self._usual = self._set = 0

    def usual(self) -> int:
        """Those of the process. What one run is given must not depend on the run before it."""
        if torch.get_num_threads() != self._set:  # not by a run
            self._usual = torch.get_num_threads()
        return self._usual

    def set(self, number: int) -> None:
        """Have operators run with so many."""
        self.usual()
        torch.set_num_threads(number)
        self._set = number


THREADS = Threads()


def task_named(name: str) -> Task:
    """The task of that name or import path."""
    if name not in TASKS and ":" not in name:
        raise unknown("task", name, ["auto", *TASKS, "package.module:TASK"])
    task = TASKS[name] if name in TASKS else import_path(name, "--task")
    if not isinstance(task, Task):
        raise ConfigError(f"--task {name} is a {type(task).__name__}; expected a fedloom.core.task.Task object.")
    return task
