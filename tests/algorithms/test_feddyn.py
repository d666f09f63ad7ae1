# SPDX-License-Identifier: Apache-2.0
"""FedDyn: two rounds of Algorithm 1 on paper, and what always holds for what client and server remember."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedprox
from fedloom.algorithms.feddyn import ALGORITHM
from tiny import HAND, Ears, lines


def numbers(played) -> list[float]:
    """w, drift, g_0 and g_1 of the line."""
    own = [played.memory[client]["gradient"]["line.weight"] for client in ("0", "1")]
    return [float(v) for v in (played.state.params["line.weight"], played.state.drift["line.weight"], *own)]


def test_two_rounds_on_paper() -> None:
    """alpha = 2. Round 1: slopes -4 and 2, changes 0.4 and -0.2, their mean 0.1, drift 0.2 / 2 = 0.1, w = 1.2; g = -0.8
    and 0.4.

    Round 2. First client: 2 (1.2 - 3) + 0.8 = -2.8, change 0.28. Second: 4 * 1.2 - 2 - 0.4 = 2.4, change -0.24. Mean
    0.02, drift 0.1 + 0.02 = 0.12, w = 1.2 + 0.02 + 0.12 = 1.34; g = -0.8 - 0.56 = -1.36 and 0.4 + 0.48 = 0.88.
    """
    one, two = (play(ALGORITHM, lines(), rounds=n, alpha=2.0, **HAND) for n in (1, 2))
    assert numbers(one) == pytest.approx([1.2, 0.1, -0.8, 0.4], abs=1e-12)
    assert numbers(two) == pytest.approx([1.34, 0.12, -1.36, 0.88], abs=1e-12)


def test_the_second_step_is_held_back() -> None:
    """First client, alpha = 2: to 1.4; then 2 (1.4 - 3) + 2 * 0.4 = -2.4, to 1.64. Alone of two: the drift is half of
    0.64, w = 1 + 0.64 + 0.32 = 1.96, g_0 = -1.28.
    """
    played = play(ALGORITHM, lines(), rounds=1, cohorts=[["0"]], alpha=2.0, **{**HAND, "local_epochs": 2})
    assert float(played.state.params["line.weight"]) == pytest.approx(1.96, abs=1e-12)
    assert float(played.memory["0"]["gradient"]["line.weight"]) == pytest.approx(-1.28, abs=1e-12)


def test_in_the_first_round_clients_are_those_of_fedprox() -> None:
    federation, ears, others = small_federation(("testnets:Normed",)), Ears(), Ears()
    play(ALGORITHM, federation, rounds=1, wrap=ears, alpha=0.3)
    play(fedprox.ALGORITHM, federation, rounds=1, wrap=others, mu=0.3)
    for client, reply in others.replies[0].items():
        for name, value in reply["delta"].items():
            torch.testing.assert_close(ears.replies[0][client]["delta"][name], value, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "cohorts",
    [[["0", "1", "2", "3", "4"]] * 3, [["0", "3"], ["1", "3", "4"], ["0"]]],
    ids=["everybody", "some"],
)
def test_the_servers_drift_is_the_mean_of_the_clients_gradients(cohorts: list[list[str]]) -> None:
    """h = mean of g_i, both being sums of -alpha times the changes: drift = -h / alpha."""
    federation = small_federation(("lenet:kernels=2",))
    played = play(ALGORITHM, federation, rounds=3, cohorts=cohorts, alpha=0.5)
    for name, value in played.state.drift.items():
        own = [played.recall(client)["gradient"][name] for client in federation.participants]
        torch.testing.assert_close(torch.stack(own).mean(0) / -0.5, value, rtol=0, atol=1e-12)
        assert value.abs().max() > 1e-4
