# SPDX-License-Identifier: Apache-2.0
"""The two networks in plain PyTorch, as a user of any framework would write them, and the data of ``peers.py``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """784-100-10."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(784, 100), nn.Linear(100, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


class LeNet(nn.Module):
    """pFedHN's LeNet for 28 x 28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(1, 16, 5), nn.Conv2d(16, 32, 5), nn.MaxPool2d(2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(512, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.pool(self.conv1(x)))
        x = torch.relu(self.pool(self.conv2(x)))
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x.flatten(1))))))


NETWORKS: dict[str, type[nn.Module]] = {"mlp": MLP, "lenet": LeNet}


def options() -> argparse.Namespace:
    """What ``peers.py`` tells each contender."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", choices=NETWORKS, required=True)
    parser.add_argument("--data", type=Path, required=True)
    for name in ("clients", "steps", "batch", "rounds", "workers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("rate", "momentum"):
        parser.add_argument(f"--{name}", type=float, required=True)
    return parser.parse_args()


def client_data(path: Path, clients: int) -> list[tuple[Tensor, Tensor]]:
    """The samples of each client, in memory."""
    stored = torch.load(path, weights_only=True)
    return list(zip(stored["x"].chunk(clients), stored["y"].chunk(clients)))


def tell(stamps: list[float], network: Callable[[Tensor], Tensor], chosen: argparse.Namespace) -> None:
    """The seconds of each round but the first, which warms up, and the loss of the trained network on all data."""
    seconds = [after - before for before, after in pairwise(stamps)][1:]
    stored = torch.load(chosen.data, weights_only=True)
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(network(stored["x"]), stored["y"]))
    print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)
