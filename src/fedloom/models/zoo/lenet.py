# SPDX-License-Identifier: Apache-2.0
"""Three LeNet-style networks: two convolutions, each with ReLU and a max-pool, then fully connected layers.

``lenet``, of pFedHN (Shamsian et al., 2021; layers checked against the authors' code, and they have the same
names): 5x5 convolutions of 16 and 32 channels without padding, then 120, 84 and the outputs. 121,182
parameters on CIFAR-10. The paper's S/M/L budgets are ``kernels`` = 8/16/32.

``lenet_s``, of HyperFedZero, whose text says only that LeNet-S is "a smaller version of LeNet, with reduced
hidden layer dimensions". Our reading: the small MNIST LeNet common in hypernetwork code (hypnettorch's
``mnist_small``): 5x5 convolutions of 10 and 20 channels, then 50 and the outputs; 21,840 parameters on MNIST.
The same source's large one, our reading of the paper's plain LeNet on MNIST, is ``channels=(20, 50),
hidden=500``: 431,080.

``mh_lenet``, of MH-pFedHN (its Table 22): 3x3 convolutions of 16 and 32 channels with padding 1, then 108, 64
and the outputs, every layer with a bias. 239,856 parameters on CIFAR-100, which is the 0.915 M of its Table
26 read as MiB of float32.

Decisions of ours, in all three: the first fully connected layer takes whatever the pools leave, so the image
size is free; where a side is shorter than 16 (after which an unpadded 5x5 pair leaves nothing) the
convolutions are padded so that they keep the size, which lets 8x8 digits in; a time window (C, L) gets the
one-dimensional layers of the same sizes.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.models.zoo._shapes import check_grid, check_widths


class _TwoConvs(nn.Module):
    """The shared first half: conv, pool, ReLU, twice, then flatten."""

    name: ClassVar[str]
    kernel_size: ClassVar[int] = 5
    keep_size: ClassVar[bool] = False  # pad the convolutions whatever the input size

    def __init__(self, input_shape: tuple[int, ...], channels: tuple[int, int]) -> None:
        super().__init__()
        check_grid(self.name, input_shape, at_least=4, windows=True)
        sizes = input_shape[1:]  # (H, W) or (L,)
        padding = self.kernel_size // 2 if self.keep_size or min(sizes) < 16 else 0
        images = len(sizes) == 2
        conv: type[nn.Conv1d] | type[nn.Conv2d] = nn.Conv2d if images else nn.Conv1d
        self.conv1 = conv(input_shape[0], channels[0], self.kernel_size, padding=padding)
        self.conv2 = conv(channels[0], channels[1], self.kernel_size, padding=padding)
        self.pool = nn.MaxPool2d(2) if images else nn.MaxPool1d(2)
        lost = self.kernel_size - 1 - 2 * padding  # what a convolution takes off each side's length
        self.num_features = channels[1]
        for size in sizes:
            self.num_features *= ((size - lost) // 2 - lost) // 2

    def features(self, x: Tensor) -> Tensor:
        # papers have ReLU before the pool: equal values and gradients, since it keeps the order, for more work
        x = F.relu(self.pool(self.conv1(x)))
        x = F.relu(self.pool(self.conv2(x)))
        return x.flatten(1)  # (B, num_features)


class LeNet(_TwoConvs):
    """pFedHN's LeNet: two 5x5 convolutions and fully connected layers of 120 and 84."""

    name: ClassVar[str] = "lenet"
    head: ClassVar[str] = "fc3"
    widths: ClassVar[tuple[int, int]] = (120, 84)

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int, kernels: int = 16) -> None:
        (kernels,) = check_widths(self.name, "kernels", kernels, count=1)
        super().__init__(input_shape, (kernels, 2 * kernels))
        self.fc1 = nn.Linear(self.num_features, self.widths[0])
        self.fc2 = nn.Linear(self.widths[0], self.widths[1])
        self.fc3 = nn.Linear(self.widths[1], num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        logits: Tensor = self.fc3(x)  # (B, num_outputs)
        return logits


class MHLeNet(LeNet):
    """MH-pFedHN's LeNet: two padded 3x3 convolutions and fully connected layers of 108 and 64."""

    name: ClassVar[str] = "mh_lenet"
    kernel_size: ClassVar[int] = 3
    keep_size: ClassVar[bool] = True
    widths: ClassVar[tuple[int, int]] = (108, 64)


class LeNetS(_TwoConvs):
    """HyperFedZero's small LeNet: two 5x5 convolutions of 10 and 20 channels and one hidden layer of 50."""

    name: ClassVar[str] = "lenet_s"
    head: ClassVar[str] = "fc2"

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        channels: tuple[int, int] = (10, 20),
        hidden: int = 50,
    ) -> None:
        check_widths(self.name, "channels", channels, count=2)
        (hidden,) = check_widths(self.name, "hidden", hidden, count=1)
        super().__init__(input_shape, channels)
        self.fc1 = nn.Linear(self.num_features, hidden)
        self.fc2 = nn.Linear(hidden, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(self.features(x)))
        logits: Tensor = self.fc2(x)  # (B, num_outputs)
        return logits
