# SPDX-License-Identifier: Apache-2.0
"""Small networks of a user's own, named by import path in tests: ``testnets:Normed``."""

import math

import torch.nn.functional as F
from torch import Tensor, nn


class Normed(nn.Module):
    """Convolution, BatchNorm, output layer."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.out = nn.Linear(2 * (input_shape[1] - 2) * (input_shape[2] - 2), num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.norm(self.conv(x))).flatten(1))


class DenseNormed(nn.Module):
    """Dense layer, BatchNorm, rectifier, output layer."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(math.prod(input_shape), 16)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.norm(self.dense(x.flatten(1)))))


class Endless(nn.Module):
    """As many layers as its client wants."""

    def __init__(self, num_outputs: int, layers: int) -> None:
        super().__init__()
        for number in range(layers):
            self.add_module(str(number), nn.Linear(1, num_outputs))


class Dropping(nn.Module):
    """Dropout as a layer, over channels, and as a function call."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 3, 3)
        self.channels, self.units = nn.Dropout2d(0.3), nn.Dropout(0.5)
        self.out = nn.Linear(3 * (input_shape[1] - 2) * (input_shape[2] - 2), num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.units(self.channels(F.relu(self.conv(x))).flatten(1))
        return self.out(F.dropout(x, 0.1, self.training))


class Explosive(nn.Module):
    """Refuses the sizes of batch in ``fuses``: a client whose program raises."""

    fuses: tuple[int, ...] = ()

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.out = nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) in self.fuses:
            raise ValueError("boom")
        return self.out(x.flatten(1))


class Recurrent(nn.Module):
    """An LSTM over the rows of an image: an operation that cannot run for many clients at once."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_shape[-1], 4, batch_first=True)
        self.out = nn.Linear(4, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x.flatten(1, -2))[0][:, -1])


class Hidden(nn.Module):
    """A layer outside of the module tree, whose parameters are constants."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(math.prod(input_shape), num_outputs)
        self.hidden = [nn.Linear(num_outputs, num_outputs)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x.flatten(1))
        return self.hidden[0](x.relu()).relu() + x


class TwiceHeaded(nn.Module):
    """Its output layer is called twice, so that there is no one place to cut it."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.out = nn.Linear(math.prod(input_shape), num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1)) + self.out(-x.flatten(1))


class Pooled(nn.Module):
    """A convolution as its output layer, and a mean over places after it."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 2, 3)
        self.out = nn.Conv2d(2, num_outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.conv(x))).mean((2, 3))


class WithLayer(nn.Module):
    """FedSR's network where the representation is not random: features, a dense layer of the same size, the head."""

    head = "out"

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(math.prod(input_shape), 4)
        self.mean = nn.Linear(4, 4)
        self.out = nn.Linear(4, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mean(F.relu(self.dense(x.flatten(1)))))


class WithoutLayer(nn.Module):
    """The same without the layer."""

    head = "out"

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(math.prod(input_shape), 4)
        self.out = nn.Linear(4, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.dense(x.flatten(1))))
