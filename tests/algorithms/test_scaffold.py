# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD: Algorithm 1 with option II on paper, and what always holds for control variates."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.scaffold import ALGORITHM
from tiny import HAND, lines


def numbers(played) -> list[float]:
    """x, c, c_0, c_1 of the line."""
    own = [played.memory[client]["control"]["line.weight"] for client in ("0", "1")]
    return [float(v) for v in (played.state.params["line.weight"], played.state.control["line.weight"], *own)]


def test_two_rounds_on_paper() -> None:
    """Round 1: gradients -4 and 2, changes 0.4 and -0.2, equal weights: x = 1.1. (x - y) / (K eta_l) is -4 and 2, c -1.

    Round 2. First client: g = 2 (1.1 - 3) = -3.8; g - c_0 + c = -3.8 + 4 - 1 = -0.8, change 0.08, c_0 = -4 + 1 - 0.8 =
    -3.8. Second: residuals 0.1, 1.1, 1.2 times 2 x are 0.2, 2.2, 4.8, g = 2.4; 2.4 - 2 - 1 = -0.6, change 0.06, c_1 =
    2 + 1 - 0.6 = 2.4. So x = 1.1 + 0.07 = 1.17 and c = (-3.8 + 2.4) / 2 = -0.7.
    """
    one, two = (play(ALGORITHM, lines(), rounds=n, **HAND) for n in (1, 2))
    assert numbers(one) == pytest.approx([1.1, -1.0, -4.0, 2.0], abs=1e-12)
    assert numbers(two) == pytest.approx([1.17, -0.7, -3.8, 2.4], abs=1e-12)


def test_several_steps_give_the_mean_gradient_of_the_way() -> None:
    """First client: -4 at 1, -3.2 at 1.4: -3.6, x = 1.72. Second: 2 at 1, 1.2 at 0.8: 1.6, x = 0.68.

    x = (1.72 + 0.68) / 2 = 1.2 and c = -1.
    """
    played = play(ALGORITHM, lines(), rounds=1, **{**HAND, "local_epochs": 2})
    assert numbers(played) == pytest.approx([1.2, -1.0, -3.6, 1.6], abs=1e-12)


def test_the_servers_rate_scales_the_model_and_not_the_control_variate() -> None:
    """eta_g = 0.5: x = 1 + 0.5 * 0.1 = 1.05; c = -1 all the same."""
    played = play(ALGORITHM, lines(), rounds=1, server_lr=0.5, **HAND)
    assert numbers(played) == pytest.approx([1.05, -1.0, -4.0, 2.0], abs=1e-12)


def test_a_part_of_the_clients_moves_the_control_variate_by_its_part() -> None:
    """The first client of two: x moves by its whole change, 1.4; c = 0 + (1 / 2) (-4) = -2. Then the second.

    It goes along 2 (1.4 x - y) x: residuals 0.4, 1.4, 1.8 give 0.8, 2.8, 7.2, g = 3.6; g - 0 - 2 = 1.6, change
    -0.16: x = 1.24; c_1 = 0 + 2 + 1.6 = 3.6; c = -2 + 3.6 / 2 = -0.2, which is (-4 + 3.6) / 2.
    """
    played = play(ALGORITHM, lines(), rounds=2, cohorts=[["0"], ["1"]], **HAND)
    assert numbers(played) == pytest.approx([1.24, -0.2, -4.0, 3.6], abs=1e-12)


def test_the_first_round_is_fedavg_with_equal_weights() -> None:
    federation = small_federation(("testnets:Normed",), sizes=(6, 6, 6))
    extra = {"momentum": 0.0, "weight_decay": 0.01, "rounds": 1}
    one, avg = (play(method, federation, **extra) for method in (ALGORITHM, fedavg.ALGORITHM))
    for name, value in avg.state.params.items():
        torch.testing.assert_close(one.state.params[name], value, rtol=0, atol=1e-14)
    two, avg = (play(method, federation, **{**extra, "rounds": 2}) for method in (ALGORITHM, fedavg.ALGORITHM))
    assert max(float((two.state.params[n] - v).abs().max()) for n, v in avg.state.params.items()) > 1e-4


@pytest.mark.parametrize(
    "cohorts",
    [[["0", "1", "2", "3", "4"]] * 3, [["0", "3"], ["1", "3", "4"], ["0"]]],
    ids=["everybody", "some"],
)
def test_the_servers_control_variate_is_the_mean_of_the_clients(cohorts: list[list[str]]) -> None:
    federation = small_federation(("lenet:kernels=2",))
    played = play(ALGORITHM, federation, rounds=3, cohorts=cohorts)
    for name, value in played.state.control.items():
        own = [played.recall(client)["control"][name] for client in federation.participants]
        torch.testing.assert_close(torch.stack(own).mean(0), value, rtol=0, atol=1e-12)
        assert value.abs().max() > 1e-3
