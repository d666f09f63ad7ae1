# SPDX-License-Identifier: Apache-2.0
"""Class means over several batches, by each engine, of any kind of features."""

from __future__ import annotations

import pytest
import torch

from conftest import CLASSES, setup_of, small_federation
from fedloom.algorithms.local import ALGORITHM
from fedloom.engines.auto import ENGINES
from fedloom.engines.memories import Memories
from fedloom.programs.class_means import ask_class_means, class_means, feature_size


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "loopback"])
@pytest.mark.parametrize("model", ["mlp:hidden=5", "testnets:Normed", "testnets:Pooled"])
def test_means_are_over_the_samples_of_a_class(model: str, engine: str) -> None:
    """More samples than a batch of 256 has; a padded batch; a client without a class."""
    federation = small_federation((model,), sizes=(9, 600, 7))
    federation.y[torch.as_tensor(federation.roster["2"].rows["train"])] = 1
    setup = setup_of(federation, ALGORITHM.config())
    session = ENGINES[engine](federation, ALGORITHM, setup.config, 0).session(1, Memories())
    means, counts = ask_class_means(setup, ["2", "1"], session.ask)
    network = federation.roster["0"].model
    assert means.shape == (2, CLASSES, feature_size(network))
    for row, client in enumerate(("1", "2")):  # in the roster's order
        rows, memory = torch.as_tensor(federation.roster[client].rows["train"]), session.recall(client)
        z = network.features(memory["own"], memory["buffers"], federation.x[rows]).flatten(1)
        for label in range(CLASSES):
            own = z[federation.y[rows] == label]
            assert int(counts[row, label]) == len(own)
            wanted = own.mean(0) if len(own) else torch.zeros_like(z[0])
            torch.testing.assert_close(means[row, label], wanted, rtol=0, atol=1e-12)


def test_programs_for_equal_networks_are_equal() -> None:
    one, other = (small_federation(("mlp:hidden=5",)).roster["0"].model for _ in range(2))
    assert class_means(one) == class_means(other)
    assert class_means(one) != class_means(small_federation(("mlp:hidden=6",)).roster["0"].model)
