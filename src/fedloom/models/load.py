# SPDX-License-Identifier: Apache-2.0
"""Exported models, back as modules."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from fedloom.core.errors import DataError
from fedloom.core.trees import Params
from fedloom.models.spec import parse


def load_model(path: str | Path, model: str, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The network ``model`` with the parameters in ``path``, of the type they have there, in evaluation mode."""
    module, tensors = parse(model, input_shape, num_outputs).build(), safetensors.torch.load_file(path)
    if "offset" in tensors and "network." in "".join(tensors):
        module = Shifted(module, tensors["slope"], tensors["offset"])
    return fill(module, tensors, str(path)).eval()


class Shifted(nn.Module):
    """A network whose class scores are put on a line: ``slope * scores + offset``, e.g. with a client's log prior."""

    slope: Tensor
    offset: Tensor

    def __init__(self, network: nn.Module, slope: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("slope", slope)
        self.register_buffer("offset", offset)

    def forward(self, x: Tensor) -> Tensor:
        """Scores, adapted."""
        scores: Tensor = self.slope * self.network(x) + self.offset
        return scores


def fill(module: nn.Module, tensors: Params, where: str) -> nn.Module:
    """``module`` with these parameters and buffers, by name.

    Not by ``load_state_dict``, which leaves out buffers that are not persistent and names tied parameters twice.
    """
    for tensor in tensors.values():
        if tensor.is_floating_point():
            module.to(tensor.dtype)
            break
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name in [*own, *tensors]:
        want, got = (tuple(t[name].shape) if name in t else None for t in (own, tensors))
        if want != got:
            raise DataError(
                f"{where} has {name} of shape {got}; {type(module).__name__} has it of shape {want}. "
                "Name the model and the shapes that the file was written for."
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    return module
