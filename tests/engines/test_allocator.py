# SPDX-License-Identifier: Apache-2.0
"""The allocator is asked, and answers; a second call changes nothing."""

import ctypes

import pytest

from fedloom.engines import allocator


def test_glibc_takes_the_settings_and_a_system_without_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        ctypes, "CDLL", lambda _: type("libc", (), {"mallopt": lambda self, *a: asked.append(a) or 1})()
    )
    allocator.keep_freed_memory.cache_clear()
    assert allocator.keep_freed_memory() and allocator.keep_freed_memory()
    assert asked == [(-3, 1 << 27), (-1, 1 << 30)]
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    allocator.keep_freed_memory.cache_clear()
    assert not allocator.keep_freed_memory()
    allocator.keep_freed_memory.cache_clear()
