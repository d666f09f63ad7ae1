# SPDX-License-Identifier: Apache-2.0
"""SqueezeNet 1.0 and 1.1 (Iandola et al. 2016, arXiv:1602.07360), which MH-pFedHN has among its clients.

A strided convolution, eight Fire modules with three 3x3 max-pools of stride 2 among them, then one 1x1 convolution to
the classes whose ReLU is averaged over the image. A Fire module squeezes to few channels by a 1x1 convolution and
expands by a 1x1 and a 3x3 one, side by side. Parameters on CIFAR-100, the counts in the authors' configuration:

    squeezenet1_0    7x7 convolution of 96, pools after it and after the Fire modules 3 and 7    786,724
    squeezenet1_1    3x3 convolution of 64, pools after it and after the Fire modules 2 and 4    773,796

Layers have torchvision's names and initial values, so that its weights fit. Dropout is 0.5 before the last
convolution. Decision of ours: images from 21x21 (1.0) and 17x17 (1.1) up, the smallest that the pools leave a pixel of.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.models.zoo._shapes import check_dropout, check_grid

_WIDTHS = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
"""Channels of each Fire module: squeezed, and of each of the two expansions."""


class _Fire(nn.Module):
    """A 1x1 convolution to few channels, then 1x1 and 3x3 ones side by side."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.expand1x1(x)), F.relu(self.expand3x3(x))], dim=1)


class _SqueezeNet(nn.Module):
    """The network of both; a subclass says where it begins and where it pools."""

    name: ClassVar[str]
    head: ClassVar[str] = "classifier.1"
    first: ClassVar[tuple[int, int]]  # channels and kernel of the first convolution
    pools: ClassVar[tuple[int, int]]  # a pool comes after this many Fire modules
    at_least: ClassVar[int]

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int, dropout: float = 0.5) -> None:
        super().__init__()
        check_grid(self.name, input_shape, at_least=self.at_least)
        check_dropout(self.name, dropout, below=1)
        channels, kernel = self.first
        self.features = nn.Sequential(nn.Conv2d(input_shape[0], channels, kernel, stride=2), nn.ReLU(), _pool())
        for number, (squeezed, expanded) in enumerate(_WIDTHS, start=1):
            self.features.append(_Fire(channels, squeezed, expanded))
            channels = 2 * expanded
            if number in self.pools:
                self.features.append(_pool())
        last = nn.Conv2d(channels, num_outputs, 1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), last, nn.ReLU())
        for name, value in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(value)
            elif value is last.weight:
                nn.init.normal_(value, std=0.01)
            else:
                nn.init.kaiming_uniform_(value)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)  # (B, 512, H/16, W/16), about
        logits: Tensor = self.classifier(x).mean(dim=(2, 3))  # (B, num_outputs)
        return logits


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)


class SqueezeNet10(_SqueezeNet):
    """SqueezeNet 1.0: eight Fire modules after a 7x7 convolution, dropout."""

    name: ClassVar[str] = "squeezenet1_0"
    first: ClassVar[tuple[int, int]] = (96, 7)
    pools: ClassVar[tuple[int, int]] = (3, 7)
    at_least: ClassVar[int] = 21


class SqueezeNet11(_SqueezeNet):
    """SqueezeNet 1.1: eight Fire modules after a 3x3 convolution, pooled earlier, dropout."""

    name: ClassVar[str] = "squeezenet1_1"
    first: ClassVar[tuple[int, int]] = (64, 3)
    pools: ClassVar[tuple[int, int]] = (2, 4)
    at_least: ClassVar[int] = 17
