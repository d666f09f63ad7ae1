# SPDX-License-Identifier: Apache-2.0
"""FedBE: draws and sharpening on paper, the mean of students, and FedAvg without passes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conftest import play, setup_of, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedbe import ALGORITHM, Config, distilled, drawn_from, gaussian, sharpened, teaching
from fedloom.clients.batching import schedule
from fedloom.core.contract import Batches
from fedloom.core.random import stream


def test_a_gaussian_draw_on_paper() -> None:
    """Clients (0, 0) and (6, 8), w = (3, 4): both 5 away, directions -(0.6, 0.8) and (0.6, 0.8), m = 0.

    v = (0.36, 0.64); a draw with noise (1, -1) and s = 0.1 is (3, 4) + 0.1 (0.6, -0.8) 5 = (3.3, 3.6).
    """
    clients = torch.tensor([[0.0, 0.0], [6.0, 8.0]], dtype=torch.float64)
    drawn = gaussian(Config(draw_scale=0.1), clients, clients.mean(0), torch.tensor([[1.0, -1.0]]).double())
    assert drawn[0].tolist() == pytest.approx([3.3, 3.6], abs=1e-12)


def test_a_direction_that_all_share_moves_the_mean_of_the_draws() -> None:
    """w = 1 by weights, clients at 2 and 4: directions 1 and 1, m = 1, v at its least; draws are at 1 + 1 * 2 = 3."""
    clients, w = torch.tensor([[2.0], [4.0]], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    assert gaussian(Config(draw_scale=0.0), clients, w, torch.ones(3, 1).double()).tolist() == [[3.0]] * 3


def test_one_client_is_its_own_draw_and_frozen_tensors_stay() -> None:
    alone = torch.tensor([[2.0, 3.0]], dtype=torch.float64)
    assert torch.equal(gaussian(Config(), alone, alone[0], torch.ones(2, 2).double()), alone.expand(2, 2))


def test_dirichlet_draws_are_mixtures_of_the_clients() -> None:
    federation = small_federation()
    setup = setup_of(federation, Config(distribution="dirichlet", draws=50))
    clients = {"w": torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=torch.float64)}
    drawn = drawn_from(setup, clients, {"w": clients["w"].mean(0)}, 1)["w"]
    assert drawn.shape == (50, 2) and torch.allclose(drawn[:, 1], 2 * drawn[:, 0])
    assert float(drawn[:, 0].min()) > 0 and float(drawn[:, 0].max()) < 1
    assert not torch.equal(drawn, drawn_from(setup, clients, {"w": clients["w"].mean(0)}, 2)["w"])


def test_sharpening_on_paper() -> None:
    """At T = 0.5 probabilities are squared: 0.64 and 0.04 of 0.68; 0 stays 0. At T = 1 nothing changes."""
    p = torch.tensor([[0.8, 0.2], [1.0, 0.0]], dtype=torch.float64)
    assert sharpened(p, 0.5)[0].tolist() == pytest.approx([16 / 17, 1 / 17], abs=1e-12)
    assert sharpened(p, 0.5)[1].tolist() == [1.0, 0.0]
    torch.testing.assert_close(sharpened(p, 1.0), p, rtol=0, atol=1e-12)


def test_the_teachers_are_the_average_the_clients_and_the_draws() -> None:
    federation = small_federation()
    setup = setup_of(federation, Config(draws=2))
    model = federation.roster["0"].model
    models = [model.init(seed) for seed in range(6)]
    stacked = [{n: torch.stack([one[n] for one in part]) for n in model.shapes} for part in (models[1:4], models[4:])]
    x = setup.server_data.x
    found = teaching(setup, fedavg.State(models[0], {}), stacked[0], {}, stacked[1], x)
    wanted = torch.stack([model(one, {}, x).softmax(-1) for one in models]).mean(0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    setup = setup_of(federation, Config(draws=0))
    none = {name: value[:0] for name, value in stacked[1].items()}
    found = teaching(setup, fedavg.State(models[0], {}), stacked[0], {}, none, x)
    wanted = torch.stack([model(one, {}, x).softmax(-1) for one in models[:4]]).mean(0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("average_from", [2, 99])
def test_what_goes_out_is_the_mean_of_students_or_the_last_one(average_from: int) -> None:
    """Five steps by plain torch; of the steps from 2 on every second is averaged: 2 and 4."""
    federation = small_federation()
    config = Config(server_epochs=5, average_from=average_from, average_every=2, server_lr=0.5)
    setup, model = setup_of(federation, config), federation.roster["0"].model
    x, start = setup.server_data.x, model.init(1)
    target = model(model.init(2), {}, x).softmax(-1)
    after = distilled(setup, fedavg.State(start, {}), x, target, 1)
    module = model.module(start, {}).train()
    optimiser, students = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-5), []
    name = f"distil {model.spec}"
    plan = schedule(np.arange(6), Batches(size=128, epochs=5), stream(0, 1, name, "server batches"))
    for rows in plan.rows:
        optimiser.zero_grad()
        log_q = module(x[rows]).log_softmax(-1)
        (target[rows] * (target[rows].log() - log_q)).mean().backward()  # over samples and classes
        optimiser.step()
        students.append({n: p.detach().clone() for n, p in module.named_parameters()})
    chosen = [students[1], students[3]] if average_from == 2 else [students[-1]]
    for name, value in after.params.items():
        wanted = torch.stack([one[name] for one in chosen]).mean(0)
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed"])
def test_without_passes_it_is_fedavg_with_averaged_statistics(model: str) -> None:
    federation = small_federation((model,))
    ours = play(ALGORITHM, federation, server_epochs=0).state
    avg = play(fedavg.ALGORITHM, federation, batchnorm="averaged").state
    for branch in ("params", "buffers"):
        assert all(torch.equal(getattr(ours, branch)[name], value) for name, value in getattr(avg, branch).items())
