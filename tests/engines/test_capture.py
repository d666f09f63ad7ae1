# SPDX-License-Identifier: Apache-2.0
"""Captured steps give what plain steps give. Without a GPU the same code runs unrecorded; with one, as a graph."""

import pytest
import torch

from conftest import models_for, play, small_federation
from fedloom import algorithms
from fedloom.core.trees import flatten
from fedloom.engines import vectorised
from fedloom.engines.capture import CapturedSteps


@pytest.mark.parametrize("method", algorithms.names())
@pytest.mark.parametrize("model", ["mlp:hidden=5", "testnets:Normed", "testnets:Dropping"])
def test_steps_through_fixed_places_give_the_same(method: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = algorithms.get(method)
    federation = small_federation(models_for(algorithm, model))
    plain = play(algorithm, federation, "vectorised", rounds=3)
    kinds: dict[str, CapturedSteps] = {}

    def through_places(self, program, plan, step, shared, facts, carry):
        kind = f"{program.name}{len(facts[0])}"
        if kind not in kinds:
            data = (self.federation.x, self.federation.y)
            kinds[kind] = CapturedSteps(step, shared, facts, carry, data, width=6, capacity=16)
        return kinds[kind].run(plan, shared, facts, carry)

    monkeypatch.setattr(vectorised.Vectorised, "_all_steps", through_places)
    places = play(algorithm, federation, "vectorised", rounds=3)
    one, other = flatten(plain.state._asdict()), flatten(places.state._asdict())
    for path in one:
        torch.testing.assert_close(other[path], one[path], rtol=0, atol=1e-10)
