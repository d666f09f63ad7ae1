# SPDX-License-Identifier: Apache-2.0
"""What a run ran on: for whoever wants to repeat it, or to know why a repetition differs."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def environment(seed: int, device: str) -> dict[str, Any]:
    """Versions, machine, seed, time and command; ``device`` is the name of the device that computes."""
    return {
        "command": shlex.join(sys.argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "device": device,
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in ("fedloom", "torch", "numpy")},
        },
    }


def _version(package: str) -> str | None:
    """None for what is not installed: fedloom itself, when it runs from its source folder."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
