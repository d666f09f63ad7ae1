# SPDX-License-Identifier: Apache-2.0
"""Trees of tensors, and the same for many clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.trees import (
    PerClient,
    chosen,
    faults,
    flatten,
    leaves,
    num_bytes,
    only,
    signature,
    squared_norm,
    stack,
    tree_map,
    unflatten,
)

NAMES = st.text(st.characters(blacklist_characters="/", blacklist_categories=("Cs",)), min_size=1, max_size=5)
SHAPES = st.lists(st.integers(0, 3), max_size=3)
TREES: Any = st.recursive(
    st.builds(lambda shape: torch.arange(float(torch.Size(shape).numel())).reshape(shape), SHAPES),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
BRANCHES = st.dictionaries(NAMES, TREES, max_size=4)
PROPERTIES = settings(max_examples=60, deadline=None)


def same(one: Any, other: Any) -> bool:
    """Equal structure, order of keys and leaves."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)


@PROPERTIES
@given(BRANCHES)
def test_unflatten_is_the_inverse_of_flatten(tree: dict[str, Any]) -> None:
    assert same(unflatten(flatten(tree)), tree)


def test_flatten_names_leaves_by_path_and_keeps_empty_branches() -> None:
    tree = {"a": {"b": torch.ones(2), "c": {}}, "d": torch.ones(())}
    assert list(flatten(tree)) == ["a/b", "a/c/", "d"]
    assert [path for path, _ in leaves(tree)] == ["a/b", "d"]


def test_tree_map_takes_several_trees() -> None:
    one = {"a": torch.tensor(1), "b": {"c": torch.tensor(2)}}
    assert same(tree_map(torch.add, one, one), {"a": torch.tensor(2), "b": {"c": torch.tensor(4)}})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (3, "tree is a int, not a tensor or a dict of tensors"),
        ({"a": [torch.ones(1)]}, "tree/a is a list, not a tensor or a dict of tensors"),
        ({"a": {"b": None}}, "tree/a/b is a NoneType, not a tensor or a dict of tensors"),
        ({"a/b": torch.ones(1)}, "tree has the key 'a/b'"),
        ({"": torch.ones(1)}, "tree has the key ''"),
        ({"a": {1: torch.ones(1)}}, "tree/a has the key 1"),
    ],
)
def test_faults_say_where_a_tree_is_none(tree: Any, message: str) -> None:
    assert faults(tree) == [message]


@PROPERTIES
@given(BRANCHES)
def test_a_tree_has_no_faults(tree: dict[str, Any]) -> None:
    assert faults(tree) == []


def test_num_bytes_counts_every_element_in_its_type() -> None:
    """3 float32 + 1 float64 + 5 bool + 2 bfloat16 + 0 = 12 + 8 + 5 + 4 bytes."""
    tree = {
        "a": torch.zeros(3),
        "b": {"c": torch.zeros((), dtype=torch.float64), "d": torch.zeros(5, dtype=torch.bool), "e": {}},
        "f": torch.zeros(2, dtype=torch.bfloat16),
        "g": torch.zeros(0, 7),
    }
    assert num_bytes(tree) == 29


def test_signatures_differ_by_path_shape_and_empty_branches() -> None:
    tree = {"a": torch.zeros(2), "b": {}}
    others = [{"a": torch.zeros(2)}, {"a": torch.zeros(2, 1), "b": {}}, {"c": torch.zeros(2), "b": {}}]
    assert signature(tree) == signature({"a": torch.ones(2), "b": {}}) == (("a", (2,)), ("b/", (0,)))
    assert len({signature(t) for t in [tree, *others]}) == 4


def test_squared_norm_by_hand_over_all_leaves() -> None:
    """1 + 4 + 9 = 14."""
    assert squared_norm({"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor(3.0)}}) == 14


MIXED = {
    "a": {"x": torch.tensor([1.0, 2.0]), "n": {"y": torch.tensor(1)}},
    "b": {"x": torch.tensor([1.0, 2.0, 3.0]), "n": {"y": torch.tensor(2)}},
    "c": {"x": torch.tensor([3.0, 4.0]), "n": {"y": torch.tensor(3)}},
}


def test_per_client_stacks_trees_of_one_shape() -> None:
    made = PerClient.of(MIXED)
    assert [clients for clients, _ in made.groups] == [("a", "c"), ("b",)]
    assert same(made.groups[0][1], {"x": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "n": {"y": torch.tensor([1, 3])}})


def test_per_client_is_a_mapping_of_the_trees_it_was_made_of() -> None:
    made = PerClient.of(MIXED)
    assert set(made) == set(MIXED)
    assert len(made) == 3
    assert all(same(made[client], MIXED[client]) for client in MIXED)
    assert "z" not in made
    with pytest.raises(KeyError):
        made["z"]


def test_per_client_of_a_per_client_is_itself() -> None:
    made = PerClient.of(MIXED)
    assert PerClient.of(made) is made


def test_trees_with_and_without_an_empty_branch_are_of_two_groups() -> None:
    made = PerClient.of({"a": {"o": {}, "x": torch.ones(1)}, "b": {"x": torch.ones(1)}})
    assert [clients for clients, _ in made.groups] == [("a",), ("b",)]
    assert list(made["a"]) == ["o", "x"]
    assert list(made["b"]) == ["x"]


def test_picking_a_whole_group_in_order_copies_nothing() -> None:
    made = PerClient.of(MIXED)
    assert made.pick(["a", "c"]) is made.groups[0][1]
    assert made.pick(("b",)) is made.groups[1][1]


def test_picking_follows_the_order_asked_for() -> None:
    made = PerClient.of(MIXED)
    assert same(made.pick(["c", "a"]), stack([MIXED["c"], MIXED["a"]]))
    assert same(made.pick(["c"]), stack([MIXED["c"]]))


def test_picking_from_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="different shapes"):
        PerClient.of(MIXED).pick(["a", "b"])


def test_nothing_for_each_client_is_one_group_of_empty_trees() -> None:
    made = PerClient.empty(iter(["a", "b"]))
    assert made.groups == ((("a", "b"), {}),)
    assert dict(made) == {"a": {}, "b": {}}
    assert PerClient.empty([]).groups == ()


def test_only_those_of_the_names_that_are_there() -> None:
    params = {"a": torch.tensor(1), "b": torch.tensor(2), "c": torch.tensor(3)}
    assert only(params, ["c", "a", "z"]) == {"c": params["c"], "a": params["a"]}


@pytest.mark.parametrize("flag", [True, False])
def test_one_of_two_trees_is_chosen_to_the_bit(flag: bool) -> None:
    one, other = (
        {"a": torch.randn(50) * scale, "b": {"count": torch.tensor(number)}} for scale, number in ((1e-30, 7), (9, 3))
    )
    found, wanted = chosen(torch.tensor(flag), one, other), one if flag else other
    assert torch.equal(found["a"], wanted["a"]) and torch.equal(found["b"]["count"], wanted["b"]["count"])


def test_each_of_a_stack_chooses_for_itself() -> None:
    one, other = torch.ones(3, 2, 2), torch.zeros(3, 2, 2)
    flags = torch.tensor([True, False, True])
    found = torch.vmap(lambda flag, a, b: chosen(flag, {"w": a}, {"w": b}))(flags, one, other)["w"]
    assert found.flatten(1).sum(1).tolist() == [4.0, 0.0, 4.0]
