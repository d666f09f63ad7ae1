# SPDX-License-Identifier: Apache-2.0
"""A client's mean of the gate, over all batches and without padding."""

from __future__ import annotations

import pytest
import torch

from conftest import setup_of, small_federation
from fedloom.algorithms.fedavg import ALGORITHM
from fedloom.core.trees import PerClient
from fedloom.engines.auto import ENGINES
from fedloom.engines.memories import Memories
from fedloom.looms.chunked import dense_init
from fedloom.looms.gate import gate_scores, routing


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "loopback"])
def test_a_client_tells_the_mean_of_the_gates_softmax(engine: str) -> None:
    federation = small_federation(("lenet:kernels=2",), sizes=(9, 300, 7))
    setup, model = setup_of(federation, ALGORITHM.config()), federation.roster["0"].model
    common, gate = model.init(1), dense_init((84, 6, 4), 2, torch.device("cpu"), torch.float64)
    session = ENGINES[engine](federation, ALGORITHM, setup.config, 0).session(1, Memories())
    replies = session.ask(routing(), {"common": common, "gate": gate}, PerClient.empty(["1", "2"]))
    for client, reply in replies.items():
        x = federation.x[torch.as_tensor(federation.roster[client].rows["train"])]
        hidden = (model.features(common, {}, x) @ gate["0.weight"].T + gate["0.bias"]).relu()
        scores = hidden @ gate["1.weight"].T + gate["1.bias"]
        torch.testing.assert_close(gate_scores(model, common, {}, gate, x), scores, rtol=0, atol=1e-12)
        torch.testing.assert_close(reply["shares"], scores.softmax(1).mean(0), rtol=0, atol=1e-12)
