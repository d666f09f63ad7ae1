# SPDX-License-Identifier: Apache-2.0
"""pFedHN on arrays and a network of one's own: every client turns the same points by another angle."""

import numpy as np
from torch import Tensor, nn

import fedloom
from fedloom.data import from_arrays

CLIENTS, SAMPLES = 8, 60


class Net(nn.Module):
    """Two layers; ``head`` names the output layer."""

    head = "out"

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int, width: int = 16) -> None:
        super().__init__()
        self.hidden = nn.Linear(input_shape[0], width)
        self.out = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).relu())


def turned_points() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, y and the client of every sample; y says on which side of the client's own line the point lies."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(CLIENTS), SAMPLES)
    angle = 2 * np.pi * client / CLIENTS
    x = rng.standard_normal((len(client), 2))
    y = x[:, 0] * np.cos(angle) + x[:, 1] * np.sin(angle) > 0
    return x, y.astype(int), client


x, y, client = turned_points()
data = from_arrays(x, y, client=client, name="turned")
for method, cohort, rounds in (("pfedhn", 1, 400), ("fedavg", 8, 50)):
    run = fedloom.run(
        method,
        dataset=data,
        model=Net,
        partition="group:client",
        clients=CLIENTS,
        cohort=cohort,
        rounds=rounds,
        local_steps=20,
        local_lr=0.05,
        progress="quiet",
    )
    print(method, run.summary["best"]["deployed/participants/test/accuracy"])
