# SPDX-License-Identifier: Apache-2.0
"""VGG8: the simplified VGG of MH-pFedHN (its Table 24).

Three blocks of two padded 3x3 convolutions (16, 16; 32, 32; 64, 64), each closed by a 2x2 max-pool, then
fully connected layers of 180 and 64, and the outputs; ReLU throughout, every layer with a bias. 274,664
parameters on CIFAR-100, which is the 1.048 M of the paper's Table 26 read as MiB of float32.

The table is silent on dropout; the authors' code has 0.5 after each of the two hidden layers, and so have we
(``dropout=0`` for none). Decision of ours: the first fully connected layer takes whatever the pools leave, so
the image size is free from 8x8 up.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.models.zoo._shapes import check_dropout, check_grid


class VGG8(nn.Module):
    """MH-pFedHN's small VGG: six 3x3 convolutions and fully connected layers of 180 and 64, dropout."""

    name: ClassVar[str] = "vgg8"
    head: ClassVar[str] = "fc3"

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int, dropout: float = 0.5) -> None:
        super().__init__()
        check_grid(self.name, input_shape, at_least=8)
        check_dropout(self.name, dropout, below=1)
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.conv3 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv4 = nn.Conv2d(32, 32, 3, padding=1)
        self.conv5 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv6 = nn.Conv2d(64, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * (height // 8) * (width // 8), 180)
        self.fc2 = nn.Linear(180, 64)
        self.fc3 = nn.Linear(64, num_outputs)
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        # ReLU after the pool, not before: equal values and gradients for a quarter of the work
        x = F.relu(self.pool(self.conv2(F.relu(self.conv1(x)))))  # (B, 16, H/2, W/2)
        x = F.relu(self.pool(self.conv4(F.relu(self.conv3(x)))))  # (B, 32, H/4, W/4)
        x = F.relu(self.pool(self.conv6(F.relu(self.conv5(x)))))  # (B, 64, H/8, W/8)
        x = self.drop(F.relu(self.fc1(x.flatten(1))))
        x = self.drop(F.relu(self.fc2(x)))
        logits: Tensor = self.fc3(x)  # (B, num_outputs)
        return logits
