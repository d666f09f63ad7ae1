# SPDX-License-Identifier: Apache-2.0
"""Parameters as one vector and back."""

import torch

from fedloom.core.vectors import from_vector, to_vector


def test_a_vector_holds_all_parameters_in_order_and_gives_them_back() -> None:
    params = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0), "none": torch.zeros(0, 2)}
    vector = to_vector(params)
    assert vector.tolist() == [0, 1, 2, 3, 4, 5, 7]
    back = from_vector(vector, {name: tuple(value.shape) for name, value in params.items()})
    assert all(torch.equal(back[name], value) for name, value in params.items())


def test_it_runs_for_a_stack_of_clients() -> None:
    stacked = {"w": torch.randn(4, 2, 3), "b": torch.randn(4, 2)}
    vectors = torch.func.vmap(to_vector)(stacked)
    back = torch.func.vmap(lambda v: from_vector(v, {"w": (2, 3), "b": (2,)}))(vectors)
    assert vectors.shape == (4, 8) and all(torch.equal(back[name], stacked[name]) for name in stacked)
