# SPDX-License-Identifier: Apache-2.0
"""Training on the server is a plain torch loop on the same batches, recorded or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from conftest import setup_of, small_federation
from fedloom.clients.batching import schedule
from fedloom.core.contract import Batch, Batches, Setup
from fedloom.core.optim import Optimiser
from fedloom.core.random import stream
from fedloom.core.training import LocalConfig
from fedloom.engines import graphs
from fedloom.engines.graphs import Replayer
from fedloom.models.model import Model
from fedloom.programs.server_steps import answers, last, server_steps
from tiny import Replayed


def setup_for(model: str = "mlp:hidden=5") -> tuple[Setup[Any], Model]:
    federation = small_federation((model,))
    return setup_of(federation, LocalConfig()), federation.roster["0"].model


def fit(model: Model) -> Callable[..., Any]:
    def objective(params: Any, buffers: Any, constants: Any, batch: Batch) -> Any:
        outputs, after = model.train(params, buffers, batch.x, batch.mask, batch.key)
        loss = batch.mean(torch.nn.functional.cross_entropy(outputs, batch.y, reduction="none"))
        return loss * constants["times"], (loss, after)

    return objective


def trained(setup: Setup[Any], model: Model, start: Any, **changes: Any) -> list[Any]:
    own = setup.server_data
    given = {"batches": Batches(size=4, epochs=3), "constants": {"times": torch.tensor(2.0).double()}, **changes}
    optimiser = Optimiser("sgd", 0.1, momentum=0.9)
    return list(server_steps(setup, "fit", fit(model), start, optimiser, (own.x, own.y), round=7, **given))


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("model", ["mlp:hidden=5", "testnets:Normed"])
def test_steps_are_those_of_plain_torch(model: str, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six samples in batches of 4 and 2: the padding of the second counts in neither loss nor statistics."""
    setup, network = setup_for(model)
    if recorded:
        monkeypatch.setattr(Replayer, "pays", lambda self, leaves: True)
        monkeypatch.setattr(graphs, "Recording", Replayed)
        replay = Replayer([])
        object.__setattr__(setup, "replay", replay)
    start = network.init(1), network.fresh_buffers()
    found = trained(setup, network, start)
    assert len(found) == 6 and (not recorded or len(replay._recordings.kept) == 1)
    module = network.module(*start).train()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    plan = schedule(np.arange(6), Batches(size=4, epochs=3), stream(0, 7, "fit", "server batches"))
    assert [len(rows) for rows in plan.rows] == [4, 2] * 3
    for rows, now in zip(plan.rows, found, strict=True):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(setup.server_data.x[rows]), setup.server_data.y[rows])
        (2 * loss).backward()
        optimiser.step()
        for name, value in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
            torch.testing.assert_close({**now.params, **now.buffers}[name], value.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_rate_that_falls_is_that_of_the_optimiser(name: Any) -> None:
    """The first step at half the rate, the second at none."""
    setup, network = setup_for()
    own, start = setup.server_data, (network.init(1), {})

    def steps(lr: float, **given: Any) -> list[Any]:
        batches, constants = Batches(size=6, steps=2, shuffle=False), {"times": torch.tensor(1.0).double()}
        optimiser = Optimiser(name, lr, weight_decay=0.1)
        return list(server_steps(setup, "fit", fit(network), start, optimiser, (own.x, own.y), batches, 1,
                                 constants=constants, **given))  # fmt: skip

    half, falling = steps(0.05), steps(0.1, rate=lambda step: 0.5 * (step == 0))
    for parameter, value in half[0].params.items():
        torch.testing.assert_close(falling[0].params[parameter], value, rtol=0, atol=1e-12)
        assert torch.equal(falling[1].params[parameter], falling[0].params[parameter])


def test_without_steps_there_is_the_start() -> None:
    setup, network = setup_for()
    start = network.init(1), {}
    assert trained(setup, network, start, batches=Batches(size=4)) == []
    assert last(iter(()), start) is start
    end = trained(setup, network, start)
    assert last(iter(end), start) == (end[-1].params, end[-1].buffers)


def test_models_answer_in_evaluation_mode_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.programs.server_steps.AT_ONCE", 4)
    _, network = setup_for("testnets:Normed")
    models = [network.init(seed) for seed in range(3)]
    buffers = [{n: v + seed for n, v in network.fresh_buffers().items()} for seed in range(3)]
    x = torch.randn(10, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    stacked = [{n: torch.stack([one[n] for one in trees]) for n in trees[0]} for trees in (models, buffers)]
    found = answers(network, *stacked, x)
    assert found.shape == (3, 10, 3) and not found.requires_grad
    for one, own, outputs in zip(models, buffers, found):
        torch.testing.assert_close(outputs, network(one, own, x), rtol=0, atol=1e-12)
