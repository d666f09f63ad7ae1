# SPDX-License-Identifier: Apache-2.0
"""Training of one part: a step on paper, and a frozen part that nothing moves."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedper
from fedloom.core.trees import PerClient
from fedloom.programs.part import training_of_own, training_of_sent
from tiny import HAND, lines

DRIVEN = {"momentum": 0.9, "weight_decay": 0.1, "keep_optimiser": True}


def asked(played, program):
    """The reply of client 0 to a program, and its memory afterwards."""
    session = played.session("part")
    replies = session.ask(program, {"params": played.state.body}, PerClient.empty(("0",)))
    return replies["0"], session.memory["0"]


def test_one_step_of_each_part_on_paper() -> None:
    """y = h b x at b = 1, h = 2, on x = 1, y = 3: residual -1, slopes -4 for b and -2 for h."""
    played = play(fedper.ALGORITHM, lines([[(1, 3)]], "tiny:BodyAndHead"), rounds=0, **HAND)
    reply, memory = asked(played, training_of_sent(played.setup.config))
    assert float(reply["delta"]["body.weight"]) == pytest.approx(0.4, abs=1e-12)
    assert list(reply["delta"]) == ["body.weight"] and float(memory["own"]["top.weight"]) == 2.0
    reply, memory = asked(played, training_of_own(played.setup.config))
    assert set(reply) == {"num_samples", "loss"} and float(reply["loss"]) == 1.0
    assert float(memory["own"]["top.weight"]) == pytest.approx(2.2, abs=1e-12)


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_neither_decay_nor_momentum_moves_the_frozen_part(optimiser: str) -> None:
    federation = small_federation(("testnets:Normed",))
    played = play(fedper.ALGORITHM, federation, rounds=0, optimiser=optimiser, **DRIVEN)
    before = played.recall("0")
    reply, memory = asked(played, training_of_sent(played.setup.config))
    assert all(torch.equal(value, before["own"][name]) for name, value in memory["own"].items())
    assert reply["delta"].keys() == played.state.body.keys()
    assert all(bool(change.any()) for change in reply["delta"].values())
    reply, memory = asked(played, training_of_own(played.setup.config))
    assert memory["own"].keys() == before["own"].keys() and "optimiser" not in memory
    assert not any(torch.equal(value, before["own"][name]) for name, value in memory["own"].items())
    assert int(memory["buffers"]["norm.num_batches_tracked"]) == 2 * 3
