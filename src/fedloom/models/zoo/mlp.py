# SPDX-License-Identifier: Apache-2.0
"""The multi-layer perceptron.

By default MH-pFedHN's (its Table 23): inputs-128-64-outputs with ReLU, 408,100 parameters on CIFAR-100
(3x32x32, 100 classes). HyperFedZero names an MLP and gives no widths; 784-200-10 on MNIST, which is
``hidden=200``, is our choice for it: 159,010 parameters. ``hidden=()`` is multinomial logistic regression.

Decisions of ours: it takes an input of any shape and flattens it; the output layer is called ``output``
whatever the depth, so that ``head`` is one name.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.models.zoo._shapes import check_not_empty, check_widths


class MLP(nn.Module):
    """Fully connected network with ReLU; takes any input shape."""

    name: ClassVar[str] = "mlp"
    head: ClassVar[str] = "output"

    def __init__(
        self, input_shape: tuple[int, ...], num_outputs: int, hidden: int | tuple[int, ...] = (128, 64)
    ) -> None:
        super().__init__()
        check_not_empty(self.name, input_shape)
        widths = check_widths(self.name, "hidden", hidden)
        width = 1
        for length in input_shape:
            width *= length
        self.hidden = nn.ModuleList()
        for next_width in widths:
            self.hidden.append(nn.Linear(width, next_width))
            width = next_width
        self.output = nn.Linear(width, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)  # (B, F)
        for layer in self.hidden:
            x = F.relu(layer(x))
        logits: Tensor = self.output(x)  # (B, num_outputs)
        return logits
