# SPDX-License-Identifier: Apache-2.0
"""FedAvg in pfl-research's simulation: SimulatedBackend, one process with one thread per worker (torchrun)."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import torch
from networks import NETWORKS, client_data, options, tell
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Stamp(TrainingProcessCallback):
    """When each round ended."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        self.stamps.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    chosen = options()
    torch.set_num_threads(1)

    class Network(NETWORKS[chosen.network]):  # type: ignore[misc]
        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self(x), y)

        def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(x, y).detach()) * len(y), len(y))}

    clients = client_data(chosen.data, chosen.clients)
    user = cache(lambda client: PyTorchTensorDataset(clients[client], user_id=client))
    data = FederatedDataset(user, get_user_sampler("minimize_reuse", list(range(chosen.clients))))
    network = Network()
    model = PyTorchModel(
        network,
        lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=chosen.momentum),
        torch.optim.SGD(network.parameters(), 1.0),
    )
    stamp = Stamp()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=chosen.rounds,
            evaluation_frequency=10**9,  # the first round only, which is not counted
            train_cohort_size=chosen.clients,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(data, data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=None,
            local_num_steps=chosen.steps,
            local_learning_rate=chosen.rate,
            local_batch_size=chosen.batch,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[stamp],
    )
    if pytorch_ops.distributed.global_rank == 0:
        tell(stamp.stamps, network, chosen)


if __name__ == "__main__":
    main()
