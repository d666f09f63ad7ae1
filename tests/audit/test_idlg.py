# SPDX-License-Identifier: Apache-2.0
"""A sample from its gradient: found where it must be, not by the other class, and not where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import small_federation, token_federation
from fedloom.audit.idlg import attack, sought
from fedloom.audit.replies import one_step
from fedloom.core.errors import NeedsError


def test_one_step_on_one_sample_gives_the_sample_and_its_label() -> None:
    federation = small_federation(("mlp:hidden=16",), dtype=torch.float32)
    model, x, y = federation.roster["0"].model, federation.x[:4], federation.y[:4]
    params = model.init(0)
    changes = [one_step(model, federation.task, params, x[i : i + 1], y[i : i + 1]) for i in range(4)]
    ends = float(x.min()), float(x.max())
    found = sought(model, federation.task, [params] * 4, changes, ends, 0)
    assert torch.equal(found.labels, y)
    assert (found.x - x).square().mean() < 1e-3 * x.var()
    mirrored = [{name: -tensor for name, tensor in change.items()} for change in changes]
    assert (sought(model, federation.task, [params] * 4, mirrored, ends, 0).x - x).square().mean() > 0.1 * x.var()


@pytest.mark.slow
def test_a_run(runs: Any) -> None:
    simulation = runs("fedavg").simulation
    before = simulation.server.now
    found = attack(simulation)
    image, label = found.measures
    assert image.control.beats and label.control.value == 1
    assert image.control.value > image.control.chance + 20
    assert image.run.value < image.control.value - 10, "three steps of whole batches blur"
    assert found.picture.startswith(b"\x89PNG")
    assert simulation.server.now is before


def test_a_run_of_one_step_on_one_sample_is_found_out(runs: Any) -> None:
    found = attack(runs("fedavg", local_steps=1, batch_size=1, momentum=0.0, rounds=1).simulation)
    assert found.measures[0].run.beats
    assert found.measures[0].run.value > 30
    assert found.verdict.startswith("The attack succeeded")


def test_replies_without_the_output_layer_are_refused(runs: Any) -> None:
    with pytest.raises(NeedsError, match="whole network"):
        attack(runs("fedper").simulation)


def test_running_statistics_are_refused(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = runs("fedavg").simulation
    model = simulation.server.setup.models["0"]
    monkeypatch.setattr(model, "fresh_buffers", lambda: {"mean": torch.zeros(1)}, raising=False)
    with pytest.raises(NeedsError, match="BatchNorm"):
        attack(simulation)


def test_tokens_are_refused(runs: Any) -> None:
    simulation = runs("fedavg").simulation
    simulation.engine.federation = token_federation()
    with pytest.raises(NeedsError, match="tokens"):
        attack(simulation)
