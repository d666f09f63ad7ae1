# SPDX-License-Identifier: Apache-2.0
"""The fast path on a GPU gives what the plain loop on the CPU gives, for every method."""

import pytest
import torch

from conftest import models_for, play, small_federation
from fedloom import algorithms
from fedloom.core.trees import flatten
from fedloom.engines import capture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("method", algorithms.names())
@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed", "testnets:Dropping"])
def test_captured_steps_on_a_gpu_give_what_the_plain_loop_gives(
    method: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "MIN_RECORDED_STEPS", 1)
    algorithm = algorithms.get(method)
    models = models_for(algorithm, model, "mlp:hidden=5")
    plain = play(algorithm, small_federation(models), "sequential", rounds=3)
    fast = play(algorithm, small_federation(models, device="cuda"), "vectorised", rounds=3)
    assert fast.engine.notes == []
    assert fast.engine._recordings.kept
    assert all(captured.graphs for captured in fast.engine._recordings.kept.values())
    one, other = flatten(plain.state._asdict()), flatten(fast.state._asdict())
    for path in one:
        torch.testing.assert_close(other[path].cpu(), one[path], rtol=0, atol=1e-8)
