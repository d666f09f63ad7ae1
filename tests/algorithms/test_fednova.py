# SPDX-License-Identifier: Apache-2.0
"""FedNova: clients with one and with two steps, on paper."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fednova import ALGORITHM
from fedloom.core.config import build
from fedloom.core.errors import ConfigError
from tiny import HAND, lines

UNEVEN = (((1, 3),), ((1, 0), (1, 0)))
"""With batches of one sample the first client takes a step in a pass, the second two, which are alike."""


def test_one_round_on_paper() -> None:
    """First: slope -4, change 0.4 in 1 step. Second: slopes 2 and 1.6, 1 to 0.8 to 0.64: -0.36, -0.18 a step.

    Shares 1/3 and 2/3: mean per step 0.4 / 3 - 0.36 / 3 = 0.04 / 3, mean number of steps 5/3: w = 1 + 0.2 / 9. FedAvg
    is drawn to the second, w = 1 + 0.4 / 3 - 0.72 / 3.
    """
    hand = {**HAND, "batch_size": 1}
    nova, avg = (play(method, lines(UNEVEN), rounds=1, **hand) for method in (ALGORITHM, fedavg.ALGORITHM))
    assert float(nova.state.params["line.weight"]) == pytest.approx(1 + 0.2 / 9, abs=1e-12)
    assert float(avg.state.params["line.weight"]) == pytest.approx(1 - 0.32 / 3, abs=1e-12)
    assert float(nova.diagnostics[0]["effective_steps"]) == pytest.approx(5 / 3, abs=1e-12)


def test_momentum_makes_steps_count_for_more() -> None:
    """At 0.5. Second: velocities 2 and 1 + 1.6 = 2.6, 1 to 0.8 to 0.54: -0.46. Its gradients count 1.5 and 1: 2.5.

    Mean per step 0.4 / 3 - 2 * 0.184 / 3 = 0.032 / 3, mean number 1 / 3 + 5 / 3 = 2: w = 1 + 0.064 / 3.
    """
    played = play(ALGORITHM, lines(UNEVEN), rounds=1, **{**HAND, "batch_size": 1, "momentum": 0.5})
    assert float(played.state.params["line.weight"]) == pytest.approx(1 + 0.064 / 3, abs=1e-12)


@pytest.mark.parametrize("batchnorm", ["local", "averaged"])
def test_with_as_many_steps_for_everybody_it_is_fedavg(batchnorm: str) -> None:
    federation = small_federation(("testnets:Normed",))
    options = {"rounds": 2, "local_epochs": 0, "local_steps": 5, "momentum": 0.9, "batchnorm": batchnorm}
    nova, avg = (play(method, federation, **options) for method in (ALGORITHM, fedavg.ALGORITHM))
    for branch in ("params", "buffers"):
        for name, value in getattr(avg.state, branch).items():
            torch.testing.assert_close(getattr(nova.state, branch)[name], value, rtol=0, atol=1e-12)
    assert "this is FedAvg" in ALGORITHM.notes(nova.setup)[0]
    assert not ALGORITHM.notes(play(ALGORITHM, federation, rounds=0, local_epochs=2).setup)


def test_passes_are_the_default_and_steps_are_taken_if_they_are_given() -> None:
    assert ALGORITHM.config().batches().epochs == 2
    assert build(ALGORITHM.config, {"local_steps": 7}).batches().steps == 7


@pytest.mark.parametrize("options", [{"optimiser": "adam"}, {"keep_optimiser": True}])
def test_optimisers_whose_weights_are_not_known_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="FedNova counts"):
        ALGORITHM.config(**options)
