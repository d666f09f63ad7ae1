# SPDX-License-Identifier: Apache-2.0
"""Several samples from one reply: found where they must be, by looms' replies too, and not where they cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import small_federation
from fedloom.audit import invert
from fedloom.audit.invert import attack, counted, sought, variation
from fedloom.audit.replies import RATE, one_step, replies_of
from fedloom.audit.samples import likeness, matched
from fedloom.core.errors import NeedsError


def test_labels_by_largest_remainders() -> None:
    """Of five, 0.5, 0.3 and 0.2 are 2.5, 1.5 and 1: the first of the equal halves gets the one that is left."""
    assert counted(torch.tensor([0.5, 0.3, 0.2]), 5).tolist() == [0, 0, 0, 1, 2]
    assert counted(torch.tensor([0.0, 1.0]), 1).tolist() == [1]


def test_samples_are_taken_for_one_each() -> None:
    """Both are nearest to 0; one of them is taken for 4, which costs less of the one at 1."""
    found, true = torch.tensor([[1.0], [0.5]]), torch.tensor([[4.0], [0.0]])
    assert matched(found, true).tolist() == [0, 1]
    assert likeness(torch.tensor([[0.1]]), torch.tensor([[0.2]]), 1.0) == pytest.approx(20, abs=1e-3)
    assert likeness(torch.tensor([[1.0]]), torch.tensor([[2.0]]), 10.0) == pytest.approx(20, abs=1e-3)


def test_total_variation_is_of_images() -> None:
    assert float(variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))) == 1
    assert float(variation(torch.ones(2, 5))) == 0


def test_one_step_on_four_samples_gives_them() -> None:
    federation = small_federation(("mlp:hidden=32",), dtype=torch.float32)
    model, x, y = federation.roster["0"].model, federation.x[:4], federation.y[:4].sort().values
    params, ends = model.init(0), (float(x.min()), float(x.max()))
    change = one_step(model, federation.task, params, x, y)
    found = sought(model, federation.task, params, change, y, ends, 0)
    assert likeness(found, x, ends[1] - ends[0]) > 30
    mirrored = {name: -tensor for name, tensor in change.items()}
    assert likeness(sought(model, federation.task, params, mirrored, y, ends, 0), x, ends[1] - ends[0]) < 15


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("pfedhn", {"local_steps": 1, "batch_size": 2}),
        pytest.param("mh_pfedhn", {"local_epochs": 0, "local_steps": 1, "batch_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_looms_server_finds_samples_of_one_step(
    method: str, options: dict[str, Any], runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invert, "STEPS", 100)
    simulation = runs(method, momentum=0.0, clients=4, **{**options, "rounds": 1}).simulation
    before = simulation.server.now
    found = attack(simulation)
    whole, batch = found.measures
    assert whole.control.beats and batch.control.beats, "batch 1 and one step must succeed"
    assert whole.run.beats and whole.run.value > whole.run.chance + 3
    assert found.verdict.startswith("The attack succeeded")
    assert found.picture.startswith(b"\x89PNG") and len(found.picture) < 100_000
    assert simulation.server.now is before


def test_it_is_known_what_a_reply_was_made_from(runs: Any) -> None:
    """One plain step on just these samples gives the reply."""
    plain = {"momentum": 0.0, "weight_decay": 0.0, "local_steps": 1, "batch_size": 4, "local_lr": 0.05}
    simulation = runs("pfedhn", rounds=1, clients=4, **plain).simulation
    for reply in replies_of(simulation, ["0", "2"], whole=True):
        assert reply.steps == 1 and len(reply.seen) == 4
        data, model = simulation.federation, simulation.server.setup.models[reply.client]
        again = one_step(model, data.task, reply.sent, data.x[reply.seen], data.y[reply.seen])
        for name, change in again.items():
            assert torch.allclose(reply.delta[name] / 0.05, change / RATE, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"top_share": 0.5}, {"keep_local": ("head",)}])
def test_vectors_are_read_as_parameters(options: dict[str, Any], runs: Any) -> None:
    """MH-pFedHN sends vectors; its replies say the same of the network as those by name do."""
    simulation = runs("mh_pfedhn", rounds=1, clients=4, **options).simulation
    if "keep_local" in options:
        with pytest.raises(NeedsError, match="change of the whole network"):
            replies_of(simulation, ["0"], whole=True)
        return
    (reply,) = replies_of(simulation, ["0"], whole=True)
    shapes = simulation.server.setup.models["0"].shapes
    assert all(reply.sent[name].shape == shapes[name] == reply.delta[name].shape for name in shapes)
    _, mine = simulation.server.send(["0"])
    assert torch.equal(torch.cat([reply.sent[name].flatten() for name in shapes]).sort().values,
                       mine["0"]["vector"].sort().values)  # fmt: skip
    moved = torch.cat([reply.delta[name].flatten() for name in shapes])
    assert float((moved != 0).double().mean()) == pytest.approx(options.get("top_share", 1.0), abs=0.35)


def test_large_networks_are_refused(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invert, "WORK", 1e6)
    with pytest.raises(NeedsError, match="would take hours"):
        attack(runs("fedavg").simulation)


def test_what_does_not_travel_cannot_be_inverted(runs: Any) -> None:
    with pytest.raises(NeedsError, match="whole network"):
        attack(runs("fedper").simulation)
