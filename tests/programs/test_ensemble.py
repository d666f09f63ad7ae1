# SPDX-License-Identifier: Apache-2.0
"""The divergence from an ensemble, on paper, and its mean over a batch."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.core.contract import Batch
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.programs.ensemble import distilling, divergence


def test_the_divergence_on_paper() -> None:
    """KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 log(3/2) + 1/4 log(1/2); of what is alike 0; a probability of 0 counts 0."""
    target = torch.tensor([[0.75, 0.25], [0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    found = divergence(target, torch.zeros(3, 2, dtype=torch.float64))
    wanted = [0.75 * math.log(1.5) + 0.25 * math.log(0.5), 0, math.log(2)]
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)


def test_padding_does_not_count_and_a_mean_over_classes_is_smaller_by_their_number() -> None:
    model = Model(parse("tiny:BodyAndHead", (1,), 2), dtype=torch.float64)  # as likely for any x
    target = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]], dtype=torch.float64)
    zero = torch.tensor(0)
    batch = Batch(torch.ones(3, 1).double(), target, torch.tensor([True, True, False]), zero, zero, zero)
    for per_class, share in ((False, 1.0), (True, 0.5)):
        value, (loss, _) = distilling(model, per_class=per_class)(model.init(0), {}, {}, batch)
        assert float(loss) == pytest.approx(math.log(2) / 2, abs=1e-12)
        assert float(value) == pytest.approx(share * math.log(2) / 2, abs=1e-12)
