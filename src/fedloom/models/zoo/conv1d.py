# SPDX-License-Identifier: Apache-2.0
"""A convolutional network for windows of signals (channels, length).

Three convolutions over time, each with ReLU; the first two with a max-pool that halves the length; then the mean over
time and the output layer. Its number of parameters does not depend on the length: 32,710 for 9 channels and 6 classes,
few enough for a loom. No paper's: our choice, of the kind that is usual for people's sensors.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.core.errors import ConfigError
from fedloom.models.zoo._shapes import check_not_empty, check_widths


class Conv1d(nn.Module):
    """Convolutions over the time of a window, their mean, and an output layer."""

    name: ClassVar[str] = "conv1d"
    head: ClassVar[str] = "output"
    least: ClassVar[int] = 4

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        channels: tuple[int, int, int] = (32, 64, 64),
        kernel: int = 5,
    ) -> None:
        super().__init__()
        check_not_empty(self.name, input_shape)
        first, second, third = check_widths(self.name, "channels", channels, count=3)
        (kernel,) = check_widths(self.name, "kernel", kernel, count=1)
        if len(input_shape) != 2 or input_shape[1] < self.least or kernel % 2 == 0:
            raise ConfigError(
                f"conv1d needs windows (channels, length) of at least {self.least} steps, and an odd kernel; got "
                f"{input_shape} and {kernel}. Use --model {'lenet' if len(input_shape) == 3 else 'mlp'}."
            )
        self.conv1 = nn.Conv1d(input_shape[0], first, kernel, padding=kernel // 2)
        self.conv2 = nn.Conv1d(first, second, kernel, padding=kernel // 2)
        self.conv3 = nn.Conv1d(second, third, kernel, padding=kernel // 2)
        self.output = nn.Linear(third, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool1d(F.relu(self.conv1(x)), 2)
        x = F.max_pool1d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.conv3(x)).mean(-1)  # (B, channels)
        logits: Tensor = self.output(x)
        return logits
