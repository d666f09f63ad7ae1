# SPDX-License-Identifier: Apache-2.0
"""FedProx: the proximal term on paper, and its two ends."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedprox import ALGORITHM
from tiny import HAND, lines


def test_one_round_of_two_steps_on_paper() -> None:
    """mu = 1, rate 0.1; the first step is FedAvg's, to 1.4 and 0.8, as the term has no slope at the start.

    First client: 2 (1.4 - 3) + (1.4 - 1) = -2.8 leads to 1.68. Second: the mean of -0.4, 1.6 and 2.4 is 1.2, plus
    (0.8 - 1) is 1.0, leads to 0.7. Together 1 + 0.68 / 4 - 0.3 * 3 / 4 = 0.945.
    """
    played = play(ALGORITHM, lines(), rounds=1, mu=1.0, **{**HAND, "local_epochs": 2})
    assert float(played.state.params["line.weight"]) == pytest.approx(0.945, abs=1e-12)


def test_the_loss_that_is_reported_has_no_proximal_term() -> None:
    """First client alone: (1 - 3)^2 = 4 and (1.4 - 3)^2 = 2.56; their mean is 3.28, without (1 / 2) 0.4^2."""
    played = play(ALGORITHM, lines(), rounds=1, cohorts=[["0"]], mu=1.0, **{**HAND, "local_epochs": 2})
    assert played.diagnostics[0]["local_loss"] == pytest.approx(3.28, abs=1e-12)


@pytest.mark.parametrize("batchnorm", ["local", "averaged"])
@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed", "testnets:Dropping"])
def test_without_the_term_it_is_fedavg_bit_for_bit(model: str, batchnorm: str) -> None:
    federation = small_federation((model,))
    ends = [
        play(method, federation, batchnorm=batchnorm, **extra).state
        for method, extra in ((ALGORITHM, {"mu": 0.0}), (fedavg.ALGORITHM, {}))
    ]
    for branch in ("params", "buffers"):
        one, other = (getattr(state, branch) for state in ends)
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_large_term_keeps_clients_near_the_start() -> None:
    """At rate 1e-3 and mu = 1000 a step is w <- start - 1e-3 g(w): clients never get further than one gradient step.

    First client: g(1) = -4: 1.004; g(1.004) = -3.992: 1.003992, and so on. The fixed point w = 1 - 2e-3 (w - 3) is
    1.006 / 1.002. FedAvg goes on: after 200 steps it is at 3 - 2 * 0.998^200 = 1.66.
    """
    settings = {**HAND, "local_epochs": 200, "local_lr": 1e-3}
    held = play(ALGORITHM, lines(), rounds=1, cohorts=[["0"]], mu=1000.0, **settings).state.params["line.weight"]
    free = play(fedavg.ALGORITHM, lines(), rounds=1, cohorts=[["0"]], **settings).state.params["line.weight"]
    assert float(held) == pytest.approx(1.006 / 1.002, abs=1e-12)
    assert float(free) == pytest.approx(3 - 2 * 0.998**200, abs=1e-12)


def test_every_round_is_held_near_its_own_start() -> None:
    """mu = 1 and two steps for the first client: 1 to 1.68, then from 1.68: 1.944, then -2.112 + 0.264: 2.1288."""
    settings = {**HAND, "local_epochs": 2}
    played = play(ALGORITHM, lines(), rounds=2, cohorts=[["0"]] * 2, mu=1.0, **settings)
    assert float(played.state.params["line.weight"]) == pytest.approx(2.1288, abs=1e-12)
