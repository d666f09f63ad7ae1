# SPDX-License-Identifier: Apache-2.0
"""Trees come back from files bit for bit, in order, whatever the clients are called."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.core.trees import PerClient
from fedloom.runs.checkpoint import pack, unpack

STATE = {
    "params": {
        "w.weight": torch.tensor([[1.0, math.nan], [math.inf, -0.0]]),
        "b": torch.tensor(1 / 3, dtype=torch.float64),
        "a": torch.arange(3),
    },
    "flags": {"used": torch.tensor([True, False]), "half": torch.tensor([1 / 3, 3e38], dtype=torch.bfloat16)},
    "nothing": {},
    "no rows": torch.zeros(0, 3),
}


def there_and_back(state: Any, memory: Any) -> tuple[Any, Any]:
    files, facts = pack(state, memory)
    whole = {name: b"".join(content) for name, content in files.items()}
    return unpack(whole, json.loads(json.dumps(facts))["layout"])


def assert_same(one: Any, other: Any) -> None:
    """Bit for bit, branch for branch in the same order."""
    if isinstance(one, Mapping):
        assert list(one) == list(other)
        for name in one:
            assert_same(one[name], other[name])
    else:
        assert isinstance(one, Tensor) and one.dtype == other.dtype and one.shape == other.shape
        assert bits(one) == bits(other)


def bits(leaf: Tensor) -> bytes:
    return leaf.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_state_comes_back_bit_for_bit_and_in_order() -> None:
    state, memory = there_and_back(STATE, {})
    assert_same(state, STATE)
    assert memory == {}


@pytest.mark.parametrize(
    "tree", [{}, {"buffers": {}}, STATE, {"b": torch.tensor(1.0), "a": {"z": {}, "y": torch.ones(2)}}]
)
def test_memory_comes_back(tree: Any) -> None:
    memory = {"x": tree, "y": tree}
    assert_same(there_and_back({}, memory)[1], memory)


def test_memories_of_several_kinds_keep_the_order_of_clients() -> None:
    memory: dict[str, Any] = {
        "1": {"a": torch.ones(2)},
        "2": {"a": torch.ones(3)},
        "3": {"a": torch.zeros(2)},
        "4": {"a": torch.ones(2, dtype=torch.float64)},
        "5": {"b": torch.ones(2), "a": torch.ones(2)},
        "6": {"a": torch.ones(2), "b": torch.ones(2)},
        "7": {"buffers": {}},
        "8": {},
        "9": {"a": {"b": torch.tensor(1)}},
    }
    assert_same(there_and_back({}, memory)[1], memory)


@given(st.lists(st.text(), unique=True, max_size=8))
def test_clients_may_be_called_anything(clients: list[str]) -> None:
    memory = {client: {"buffers": {}, "n": torch.tensor(row)} for row, client in enumerate(clients)}
    assert_same(there_and_back({}, memory)[1], memory)


def test_awkward_client_names() -> None:
    memory = {name: {"n": torch.tensor(1)} for name in ("a/b", "a", "", "/", "Zoë", "\udc80", "\0", "__metadata__")}
    assert_same(there_and_back({}, memory)[1], memory)


def test_stacks_are_a_mapping_like_any_other() -> None:
    memory = PerClient([(("a", "b"), {"n": torch.arange(4).view(2, 2), "buffers": {}})])
    assert_same(there_and_back({}, memory)[1], dict(memory))


def test_many_clients_are_few_tensors() -> None:
    files, _ = pack({}, {str(n): {"w": torch.ones(1)} for n in range(1000)})
    assert len(b"".join(files["memory.safetensors"])) < 4200


def test_loaded_tensors_are_free_of_each_other() -> None:
    state, memory = there_and_back({"w": torch.ones(2), "v": torch.ones(3)}, {c: {"w": torch.ones(3)} for c in "ab"})
    leaves = [state["w"], state["v"], memory["a"]["w"], memory["b"]["w"]]
    assert [leaf.untyped_storage().nbytes() for leaf in leaves] == [8, 12, 12, 12]


def test_tensors_of_any_layout_and_with_gradients_are_saved() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
    state, memory = there_and_back({"w": weight, "same": weight}, {"a": {"w": weight}})
    assert_same(state, {"w": weight.detach(), "same": weight.detach()})
    assert_same(memory, {"a": {"w": weight.detach()}})


@pytest.mark.parametrize("wrong", [{"a": 3}, {"a/b": torch.ones(1)}, {"a": [torch.ones(1)]}])
def test_only_trees_are_saved(wrong: Any) -> None:
    with pytest.raises(TypeError, match="only trees of tensors"):
        pack(wrong, {})
    with pytest.raises(TypeError, match="only trees of tensors are saved; memory"):
        pack({}, {"client": wrong})
