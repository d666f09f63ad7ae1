# SPDX-License-Identifier: Apache-2.0
"""Clients count their labels."""

from __future__ import annotations

import pytest
import torch

from conftest import CLASSES, setup_of, small_federation
from fedloom.algorithms.fedavg import ALGORITHM
from fedloom.core.shares import ask_class_shares
from fedloom.engines.auto import ENGINES


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "loopback"])
def test_shares_are_those_of_the_training_labels(engine: str) -> None:
    """Also for a client of more than one batch of 512, and for one whose batch is padded."""
    federation = small_federation(sizes=(9, 600, 7))
    setup = setup_of(federation, ALGORITHM.config())
    ran = ENGINES[engine](federation, ALGORITHM, setup.config, 0)
    replies = ask_class_shares(setup, ["2", "1"], ran.ask)
    assert set(replies) == {"1", "2"}
    for client, reply in replies.items():
        y = federation.y[torch.as_tensor(federation.roster[client].rows["train"])]
        wanted = torch.bincount(y, minlength=CLASSES).double() / len(y)
        assert torch.equal(reply["shares"], wanted)
