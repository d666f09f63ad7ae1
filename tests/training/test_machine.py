# SPDX-License-Identifier: Apache-2.0
"""Devices and threads by the names that options give them; tasks are tested in ``test_simulation``."""

from __future__ import annotations

import pytest
import torch

from fedloom.core.errors import ConfigError
from fedloom.training.machine import Threads, device_of


def test_a_device_by_name() -> None:
    assert device_of("cpu") == torch.device("cpu")
    assert device_of("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "", "xla"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        device_of(name)
    here = "cpu and cuda" if torch.cuda.is_available() else "cpu only"
    told = str(caught.value)
    assert told.startswith(f"--device {name} is not available; this machine has {here}")
    assert told.endswith(". Leave it out for auto.")


def test_a_device_that_fedloom_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.tensor([0.0]))  # as if there were one
    with pytest.raises(ConfigError, match="--device mps is not one that fedloom runs on; expected cpu or cuda"):
        device_of("mps")


def test_a_process_that_begins_with_a_run_with_threads_of_its_own_knows_its_usual_ones() -> None:
    usual, threads = torch.get_num_threads(), Threads()
    try:
        threads.set(usual)  # as a run that is loaded does, which has its number of threads in its config
        assert threads.usual() == usual
        threads.set(usual + 1)
        assert threads.usual() == usual
    finally:
        torch.set_num_threads(usual)
