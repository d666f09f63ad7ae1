# SPDX-License-Identifier: Apache-2.0
"""Flower's ``flower-superexec`` with its processes' tokens out of sight: arguments are everybody's to read.

It hands each process that it starts a token by ``--token``. Here that becomes ``--token-file``, and the file lies in
memory and is open in that process alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

NAME = "flower-superexec"

SCRIPT = f"""\
#!{sys.executable}
from fedloom.deploy.superexec import main

main()
"""


class Discreet(subprocess.Popen[Any]):
    """A process that gets the value of ``--token`` by a file, where the system has files in memory."""

    def __init__(self, args: Sequence[str] | str, **options: Any) -> None:
        if isinstance(args, str) or "--token" not in args or sys.platform != "linux":
            super().__init__(args, **options)
            return
        at = args.index("--token")
        file = os.memfd_create("token")
        try:
            os.write(file, args[at + 1].encode())
            hidden = [*args[:at], "--token-file", f"/dev/fd/{file}", *args[at + 2 :]]
            super().__init__(hidden, **{**options, "pass_fds": (*options.get("pass_fds", ()), file)})
        finally:
            os.close(file)


def install(folder: Path) -> None:
    """Put the command into a folder, which is to come first in the PATH of Flower's processes."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    script = folder / NAME
    script.write_text(SCRIPT)
    script.chmod(0o700)


def main() -> None:
    """Run Flower's own command."""
    subprocess.Popen = Discreet  # type: ignore[misc, assignment]
    (flower,) = entry_points(group="console_scripts", name=NAME)
    flower.load()()
