# SPDX-License-Identifier: Apache-2.0
"""What clients remember behaves as a dictionary, and a copy as a copy, however much is shared."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.engines import memories
from fedloom.engines.memories import Memories

STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abcde"), st.booleans()), max_size=40)


@pytest.mark.parametrize("recent", [0, 2, 100])
@given(steps=STEPS)
def test_copies_share_what_is_the_same_and_nothing_else(recent: int, steps: list[tuple[int, str, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memories, "RECENT", recent)
        first = {"a": {"n": torch.zeros(())}}
        ours, plain = [Memories(first)], [dict(first)]
        for number, (which, client, copied) in enumerate(steps):
            at, tree = which % len(ours), {"n": torch.tensor(number)}
            if copied:
                ours.append(ours[at].copy())
                plain.append(dict(plain[at]))
            ours[at][client] = plain[at][client] = tree
            ours[-1].update([("f", tree)])
            plain[-1]["f"] = tree
        for one, other in zip(ours, plain):
            assert one == other and len(one) == len(other) and set(one) == set(other)
            assert "z" not in one and all(client in one and one[client] is tree for client, tree in other.items())
