# SPDX-License-Identifier: Apache-2.0
"""FedLAW: one step on weights and factor on paper, FedAvg without passes, one client, statistics of the server."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedlaw import ALGORITHM, first_weights, together
from fedloom.core.contract import ServerData
from tiny import HAND, lines

POINT = ServerData(torch.tensor([[1.0]]).double(), torch.tensor([[2.0]]).double())


def test_one_step_on_paper() -> None:
    """Clients at 1.4 and 0.8 weigh 1/4 and 3/4: w = 0.95. The server has (1, 2), so that w should grow.

    The slopes by v, u_A and u_B are 2 (w - 2) times w, 1/4 (1.4 - w) and 3/4 (0.8 - w): the first two are negative, the
    last one positive. Adam's first step is its rate, 0.1: gamma = e^0.1, lambda_A = e^0.1 / (e^0.1 + 3 e^-0.1).
    """
    played = play(ALGORITHM, lines(), rounds=1, server=POINT, server_epochs=1, server_lr=0.1, **HAND)
    first = math.exp(0.1) / (math.exp(0.1) + 3 * math.exp(-0.1))
    wanted = math.exp(0.1) * (0.8 + 0.6 * first)
    assert float(played.state.params["line.weight"]) == pytest.approx(wanted, abs=1e-6)
    assert float(played.diagnostics[0]["factor"]) == pytest.approx(math.exp(0.1), abs=1e-7)


def test_weights_are_learned_anew_in_every_round() -> None:
    """Round 2 begins at the shares and at factor 1, whatever round 1 came to: one step moves the factor to e^0.1."""
    played = play(ALGORITHM, lines(), rounds=2, server=POINT, server_epochs=1, server_lr=0.1, **HAND)
    assert float(played.diagnostics[1]["factor"]) == pytest.approx(math.exp(0.1), abs=1e-6)


def test_the_first_weights_are_the_shares_of_samples() -> None:
    weights = first_weights(torch.tensor([1.0, 3.0, 0.0]).double())
    models = {"w": torch.tensor([[4.0], [8.0], [100.0]]).double()}
    assert together(weights, models)["w"].tolist() == pytest.approx([7.0], abs=1e-6)


def test_with_one_client_only_the_factor_moves() -> None:
    """The client is at 1.4: w = e^0.1 1.4."""
    played = play(ALGORITHM, lines(), rounds=1, cohorts=[["0"]], server=POINT, server_epochs=1, server_lr=0.1, **HAND)
    assert float(played.state.params["line.weight"]) == pytest.approx(1.4 * math.exp(0.1), abs=1e-6)


@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed"])
def test_without_passes_it_is_fedavg_with_averaged_statistics(model: str) -> None:
    federation = small_federation((model,))
    ours = play(ALGORITHM, federation, server_epochs=0).state
    avg = play(fedavg.ALGORITHM, federation, batchnorm="averaged").state
    for branch in ("params", "buffers"):
        for name, value in getattr(avg, branch).items():
            torch.testing.assert_close(getattr(ours, branch)[name], value, rtol=0, atol=1e-12)


def test_running_statistics_are_those_on_the_servers_samples() -> None:
    """With clients that stay where they are, a pass over the server's samples takes a tenth of their statistics."""
    federation = small_federation(("testnets:Normed",))
    played = play(ALGORITHM, federation, rounds=1, server_epochs=1, server_lr=0.0, local_lr=0.0)
    before = play(ALGORITHM, federation, rounds=1, server_epochs=0, local_lr=0.0).state
    x, model = played.setup.server_data.x, federation.roster["0"].model
    mask, key = torch.ones(len(x), dtype=torch.bool), torch.zeros((), dtype=torch.int64)
    _, wanted = model.train(before.params, before.buffers, x, mask, key)
    for name, value in wanted.items():
        torch.testing.assert_close(played.state.buffers[name], value, rtol=0, atol=1e-12)
