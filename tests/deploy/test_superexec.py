# SPDX-License-Identifier: Apache-2.0
"""What Flower's processes are told in secret does not stand in their arguments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedloom[flower]'")

from fedloom.deploy.superexec import Discreet, install

READS = """
import argparse, sys
from pathlib import Path
from flwr.common.args import add_args_flwr_app_common, try_obtain_flwr_app_token
parser = argparse.ArgumentParser()
add_args_flwr_app_common(parser)
print(try_obtain_flwr_app_token(parser.parse_args()))
print(Path("/proc/self/cmdline").read_bytes().decode().replace(chr(0), " "))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create")
def test_a_token_is_handed_on_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(READS)
    command = [sys.executable, str(tmp_path / "app.py"), "--token", "5ec2e7", "--insecure"]
    with Discreet(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        token, shown = process.stdout.read().splitlines()
    assert token == "5ec2e7"
    assert "--token-file" in shown and "--insecure" in shown and "5ec2e7" not in shown
    with Discreet([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.read() == "1\n"  # others are as they are


def test_the_command_is_flower_s_own(tmp_path: Path) -> None:
    install(tmp_path / "bin")
    found = subprocess.run(
        [tmp_path / "bin" / "flower-superexec", "--help"], capture_output=True, text=True, check=True
    )
    assert "--runtime-api-address" in found.stdout or "usage: flower-superexec" in found.stdout
