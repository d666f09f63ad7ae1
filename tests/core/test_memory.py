# SPDX-License-Identifier: Apache-2.0
"""A full memory is known by any of the errors that say so, and by no other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.core.memory import is_full, total, why_full


def error_of(wanted: str) -> Exception:
    try:
        if wanted == "torch":
            torch.empty(1 << 50)
        elif wanted == "numpy":
            np.empty(1 << 50)
        else:
            torch.empty(1 << 62, 64)
    except Exception as error:
        return error
    raise AssertionError("this machine has a lot of memory")


@pytest.mark.parametrize("wanted", ["torch", "numpy", "overflow"])
def test_errors_of_a_full_memory(wanted: str) -> None:
    assert is_full(error_of(wanted))


def test_a_gpu_s_error_too() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has")
    assert is_full(error) and why_full(error) == "CUDA out of memory"


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes cannot be multiplied"), ValueError("memory"), KeyboardInterrupt()]
)
def test_other_errors_are_none(error: BaseException) -> None:
    assert not is_full(error)


def test_the_reason_is_short() -> None:
    assert why_full(error_of("torch")) == "4,503,599.6 GB are wanted at once"
    assert why_full(error_of("numpy")).startswith("Unable to allocate")
    assert why_full(MemoryError()) == "memory is full"


def test_this_machine_has_some_memory() -> None:
    assert 1 << 28 < total() < 1 << 50
