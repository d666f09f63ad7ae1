# SPDX-License-Identifier: Apache-2.0
"""Label shares from a reply: exact where they must be, no better than a guess where nothing was learned, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from conftest import small_federation
from fedloom.audit.labels import attack, onto_shares, shares
from fedloom.audit.replies import RATE, one_step, replies_of
from fedloom.core.errors import NeedsError


def test_shares_stay_and_others_go_to_the_nearest() -> None:
    own = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    assert torch.allclose(onto_shares(own), own)
    assert torch.allclose(onto_shares(own + 1), own)
    found = onto_shares(torch.tensor([1.4, 0.4, -3.0], dtype=torch.float64))
    assert torch.allclose(found, torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    rng = np.random.default_rng(0)
    for numbers in torch.from_numpy(rng.normal(0, 2, (50, 5))):
        found = onto_shares(numbers)
        others = torch.from_numpy(rng.dirichlet(np.ones(5), 200))
        assert found.min() >= 0 and float(found.sum()) == pytest.approx(1)
        assert (numbers - found).norm() <= (numbers - others).norm(dim=1).min() + 1e-9


@pytest.mark.parametrize("name", ["mlp:hidden=16", "lenet:kernels=2"])
def test_one_step_of_one_batch_tells_its_shares(name: str) -> None:
    federation = small_federation((name,), sizes=(40,))
    model = federation.roster["0"].model
    rows = torch.cat([(federation.y == label).nonzero()[:number, 0] for label, number in ((0, 12), (1, 4))])
    params = model.init(0)
    change = one_step(model, federation.task, params, federation.x[rows], federation.y[rows])
    true = torch.bincount(federation.y[rows], minlength=3) / 16
    read = shares(model, params, change, RATE, 1)
    assert float((read - true).abs().sum() / 2) < 0.1
    other_way = {name: -tensor for name, tensor in change.items()}
    assert float((shares(model, params, other_way, RATE, 1) - true).abs().sum() / 2) > 0.2


def test_a_reply_of_several_steps_with_momentum_tells_too(runs: Any) -> None:
    found = attack(runs("fedavg", partition="classes:2").simulation)
    error, _ = found.measures
    assert error.control.beats and error.run.beats
    assert error.run.value < 0.05 < error.run.chance
    assert found.verdict.startswith("The attack succeeded")


def test_clients_that_are_alike_have_nothing_to_tell(runs: Any) -> None:
    """Where all clients have the federation's shares a guess is right, and no attack is better."""
    error, _ = attack(runs("fedavg", clients=3, partition="iid").simulation).measures
    assert error.run.chance < 0.1
    assert error.run.value < 0.1


def test_the_rate_is_what_steps_with_momentum_add_up_to(runs: Any) -> None:
    simulation = runs("fedavg", local_lr=0.5, momentum=0.5).simulation
    (reply,) = replies_of(simulation, simulation.server.setup.clients[:1])
    assert reply.steps == 3
    assert reply.rate == pytest.approx(0.5 * (1 + 1.5 + 1.75))


def test_an_attack_changes_nothing(runs: Any) -> None:
    simulation = runs("fedavg").simulation
    before = simulation.server.now
    attack(simulation)
    assert simulation.server.now is before


def test_private_runs_tell_their_server(runs: Any) -> None:
    """Noise is added by the server, which sees each reply before."""
    error, _ = attack(runs("fedavg", dp_noise=1.0, dp_clip=0.5, partition="classes:2").simulation).measures
    assert error.run.beats


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("fedper", {}, "do not reply with the change of the output layer"),
        ("local", {}, "do not reply with the change of the output layer"),
        ("hyperfedzero", {}, "do not reply with the change of the output layer"),
        ("fedavg", {"optimiser": "adam"}, "plain steps"),
    ],
)
def test_runs_for_which_it_means_nothing(runs: Any, method: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(NeedsError, match=why):
        attack(runs(method, **options).simulation)


def test_targets_have_no_classes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    options = {"clients": 2, "rounds": 1, "local_steps": 1, "model": "mlp:hidden=4", "progress": "quiet"}
    run = fedloom.run("fedavg", dataset=(x, x[:, :1]), partition="iid", out=tmp_path / "run", **options)
    with pytest.raises(NeedsError, match="no classes"):
        attack(run.simulation)
