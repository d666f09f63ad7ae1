# SPDX-License-Identifier: Apache-2.0
"""PeFLL's encoder: labels as planes, a descriptor and its pull-back on paper."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedloom.core.contract import Batch, Batches
from fedloom.looms.encoder import Encoder
from fedloom.looms.labelled_encoder import describe_labelled, describing, learning, with_labels

DTYPE = torch.float64


def test_a_label_is_a_plane_of_ones() -> None:
    x, y = torch.randn(2, 3, 4, 5), torch.tensor([1, 0])
    wide = with_labels(x, y, 2)
    assert wide.shape == (2, 5, 4, 5) and torch.equal(wide[:, :3], x)
    assert wide[0, 3:].mean((1, 2)).tolist() == [0, 1] and wide[1, 3:].mean((1, 2)).tolist() == [1, 0]
    assert with_labels(torch.ones(2, 7), y, 2)[0].tolist() == [1] * 7 + [0, 1]


def test_a_descriptor_and_the_encoders_gradient_on_paper() -> None:
    """Samples x = 2 of class 1 and x = 1 of class 0, with labels (2, 0, 1) and (1, 1, 0). Units 1, 5, 3: 5 and 6.

    Read-out 2 u + 1: 11 and 13, the descriptor is 12. Slope 0.5: read-out weight 0.5 (5 + 6) / 2 = 2.75, bias 0.5;
    units 0.5 * 2 ((2, 0, 1) + (1, 1, 0)) / 2 = (1.5, 0.5, 0.5), bias 1. A third sample is padding.
    """
    encoder = {
        "units.weight": torch.tensor([[1.0, 5.0, 3.0]], dtype=DTYPE),
        "units.bias": torch.zeros(1, dtype=DTYPE),
        "psi.0.weight": torch.tensor([[2.0]], dtype=DTYPE),
        "psi.0.bias": torch.ones(1, dtype=DTYPE),
    }
    home = SimpleNamespace(model=SimpleNamespace(num_outputs=2), num_samples=torch.tensor(2.0, dtype=DTYPE))
    x, y = torch.tensor([[2.0], [1.0], [9.0]], dtype=DTYPE), torch.tensor([1, 0, 0])
    zero = torch.zeros((), dtype=torch.int64)
    batch = Batch(x, y, torch.tensor([True, True, False]), zero, zero, zero)
    shared, replies = {"encoder": encoder}, {}
    for program in (describing(Batches()), learning(Batches())):
        carry = program.init(home, shared, {"slope": torch.tensor([0.5], dtype=DTYPE)}, {})
        reply, _ = program.final(home, shared, program.step(home, shared, carry, batch), {})
        assert reply.keys() == program.expects(shared, {}).keys()
        replies |= reply
    assert replies["descriptor"].tolist() == [12.0]
    found = {name: value.flatten().tolist() for name, value in replies["gradient"].items()}
    assert found == {
        "units.weight": pytest.approx([1.5, 0.5, 0.5]),
        "units.bias": [1.0],
        "psi.0.weight": [2.75],
        "psi.0.bias": [0.5],
    }


@pytest.mark.parametrize("shape", [(1, 6, 6), (3, 32, 32), (2, 9), (12,)], ids=str)
def test_every_shape_of_samples_has_an_encoder(shape: tuple[int, ...]) -> None:
    channels, *sides = shape
    params = Encoder((channels + 4, *sides), 5, widths=(120, 84)).init(0, torch.device("cpu"), DTYPE)
    assert params["units.bias"].shape == (120,) and params["psi.0.bias"].shape == (84,) and "psi.2.bias" not in params
    assert describe_labelled(params, torch.randn(3, *shape, dtype=DTYPE), torch.arange(3), 4).shape == (3, 5)
