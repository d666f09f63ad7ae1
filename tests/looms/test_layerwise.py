# SPDX-License-Identifier: Apache-2.0
"""pFedLHN's loom: what it has in common with pFedHN's, and what each coefficient reaches."""

from __future__ import annotations

import torch

from fedloom.looms.layerwise import LayerwiseLoom
from fedloom.looms.per_tensor import PerTensorLoom

TARGETS = {"large": {"a": (2, 3), "b": (3,), "c": (1,)}, "small": {"d": (4,)}}
DEVICE, DTYPE = torch.device("cpu"), torch.float64


def looms() -> tuple[LayerwiseLoom, dict[str, torch.Tensor]]:
    loom = LayerwiseLoom(15, TARGETS, basis=5, width=5, hidden=7)
    return loom, loom.init(0, DEVICE, DTYPE)


def test_with_equal_coefficients_over_the_unit_vectors_it_is_pfedhns_with_a_linear_trunk() -> None:
    loom, params = looms()
    plain = PerTensorLoom(5, TARGETS, hidden=7, layers=0)
    same = {name.replace("trunk", "trunk.0"): value for name, value in params.items() if name != "basis"}
    assert same.keys() == plain.init(0, DEVICE, DTYPE).keys()
    rows = torch.randn(2, 5, dtype=DTYPE)
    for target in TARGETS:
        woven = loom({**params, "basis": torch.eye(5, dtype=DTYPE)}, rows.repeat(1, 3), target)
        torch.testing.assert_close(woven, plain(same, rows, target), rtol=0, atol=1e-14)


def test_coefficients_of_zero_leave_the_biases() -> None:
    loom, params = looms()
    params = {**params, "trunk.bias": torch.zeros(7, dtype=DTYPE)}
    woven = loom(params, torch.zeros(2, 15, dtype=DTYPE), "large")
    assert torch.equal(woven, params["head.large.bias"].repeat(2, 1))


def test_a_coefficient_moves_its_own_tensor_and_no_other() -> None:
    loom, params = looms()
    rows = torch.randn(1, 15, dtype=DTYPE)
    moved = rows.clone()
    moved[0, 7] += 1  # the third of the second tensor's five
    before, after = (loom.unflatten(loom(params, one, "large"), "large") for one in (rows, moved))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"b"}
    assert torch.equal(loom(params, rows, "small"), loom(params, moved, "small"))
    assert list(params["basis"].shape) == [5, 5] and {n: list(v.shape[1:]) for n, v in before.items()} == {
        "a": [2, 3], "b": [3], "c": [1]
    }  # fmt: skip
