# SPDX-License-Identifier: Apache-2.0
"""ZenkeNet: the CIFAR network of Zenke, Poole and Ganguli (2017), which HyperFedZero uses on SVHN.

Two blocks of two 3x3 convolutions (32, 32; 64, 64), each block closed by a 2x2 max-pool and dropout of 0.25,
then a fully connected layer of 512 with dropout of 0.5, and the outputs. The first convolution of a block is
padded, the second is not, so a 32x32 image leaves 64x6x6 = 2,304 features: 1,250,858 parameters with 3x32x32
inputs and 10 outputs.

HyperFedZero cites the network and gives no sizes. Decisions of ours: the padding is that of the common
reimplementations (2,304 features); dropout is by element, not by channel; ``dropout`` is the rate in the
blocks and the fully connected layer gets twice that, with ``dropout=0`` for none; the image size is free from
10x10 up.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.models.zoo._shapes import check_dropout, check_grid


class ZenkeNet(nn.Module):
    """Zenke et al.'s CIFAR network: four 3x3 convolutions, a hidden layer of 512, dropout."""

    name: ClassVar[str] = "zenkenet"
    head: ClassVar[str] = "fc2"

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int, dropout: float = 0.25) -> None:
        super().__init__()
        check_grid(self.name, input_shape, at_least=10)
        check_dropout(self.name, dropout, below=0.5)  # the hidden layer drops twice that
        channels, height, width = input_shape
        self.conv1 = nn.Conv2d(channels, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 32, 3)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv4 = nn.Conv2d(64, 64, 3)
        # A block takes 2 off each side (its unpadded convolution) and halves the rest.
        left_height = ((height - 2) // 2 - 2) // 2
        left_width = ((width - 2) // 2 - 2) // 2
        self.fc1 = nn.Linear(64 * left_height * left_width, 512)
        self.fc2 = nn.Linear(512, num_outputs)
        self.pool = nn.MaxPool2d(2)
        self.drop_conv = nn.Dropout(dropout)
        self.drop_fc = nn.Dropout(2 * dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        # ReLU after the pool, not before: equal values and gradients for a quarter of the work
        x = self.drop_conv(F.relu(self.pool(self.conv2(x))))  # (B, 32, (H-2)/2, (W-2)/2)
        x = F.relu(self.conv3(x))
        x = self.drop_conv(F.relu(self.pool(self.conv4(x))))
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(self.drop_fc(x))  # (B, num_outputs)
        return logits
