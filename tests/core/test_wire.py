# SPDX-License-Identifier: Apache-2.0
"""Trees as bytes and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.trees import flatten
from fedloom.core.wire import decode, encode

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Everything that a tensor is, NaN payloads included."""
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.data())
def test_any_bits_of_any_type_and_shape_come_back(dtype: torch.dtype, shape: list[int], data: st.DataObject) -> None:
    width = torch.empty((), dtype=dtype).element_size()
    size = torch.Size(shape).numel()
    top = 1 if dtype is torch.bool else 255
    raw = data.draw(st.lists(st.integers(0, top), min_size=size * width, max_size=size * width))
    leaf = torch.tensor(raw, dtype=torch.uint8).view(dtype).reshape(shape)
    assert bits(decode(encode({"a": {"b": leaf}}))["a"]["b"]) == bits(leaf)


def test_views_transposes_and_shared_storage_come_back() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tree = {
        "base": base,
        "transposed": base.T,
        "strided": base[:, ::2],
        "row": base[1],
        "element": base[2, 3],
        "expanded": torch.ones(1).expand(5),
        "same": base,
        "tracked": torch.ones(2, requires_grad=True),
    }
    back = decode(encode(tree))
    assert set(back) == set(tree)
    assert all(torch.equal(back[name], leaf) for name, leaf in tree.items())
    assert not back["tracked"].requires_grad


def test_what_arrives_can_be_written_to_and_shares_nothing() -> None:
    base = torch.zeros(3)
    back = decode(encode({"a": base, "b": base}))
    back["a"] += 1
    assert torch.equal(back["b"], torch.zeros(3))
    assert torch.equal(base, torch.zeros(3))


@pytest.mark.parametrize("tree", [{}, {"a": {}}, {"a": {"b": {}, "c": torch.ones(1)}, "d": {}}])
def test_empty_trees_and_branches_come_back(tree: dict[str, Any]) -> None:
    back = decode(encode(tree))
    assert {k: v.tolist() for k, v in flatten(back).items()} == {k: v.tolist() for k, v in flatten(tree).items()}


def test_branches_and_leaves_arrive_in_the_order_in_which_they_were_sent() -> None:
    """Sums over leaves, as in clipping, then have the same bits on both sides."""
    back = decode(encode({"b": torch.ones(1), "a": {"2": torch.ones(1), "z": {}, "10": torch.ones(1)}}))
    assert list(back) == ["b", "a"]
    assert list(back["a"]) == ["2", "z", "10"]


@pytest.mark.parametrize("tree", [{"a": 1.0}, {"a": [torch.ones(1)]}, {"a/b": torch.ones(1)}, {1: torch.ones(1)}, 3])
def test_what_is_not_a_tree_of_tensors_is_refused(tree: Any) -> None:
    with pytest.raises(TypeError, match="only trees of tensors travel; tree"):
        encode(tree)


def test_what_has_no_name_in_a_file_is_refused_in_a_sentence() -> None:
    with pytest.raises(TypeError, match=r"only numbers of .* travel; a has torch.float8_e4m3fn"):
        encode({"a": torch.zeros(2).to(torch.float8_e4m3fn)})
