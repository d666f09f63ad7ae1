# SPDX-License-Identifier: Apache-2.0
"""Exported models, back as modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fedloom.core.errors import DataError
from fedloom.core.trees import Params, Tree, leaves, unflatten
from fedloom.models.spec import parse


def load_model(path: str | Path, model: str, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The network ``model`` with the parameters in ``path``, of the type they have there, in evaluation mode."""
    spec, tensors = parse(model, input_shape, num_outputs), safetensors.torch.load_file(path)
    module = spec.build()
    if "part" in tensors:
        shift = tensors["untuned.slope"], tensors["untuned.offset"]
        module = Mixed(Shifted(module, *shift), Shifted(spec.build(), *shift), tensors["part"])
    elif "offset" in tensors and "network." in "".join(tensors):
        module = Shifted(module, tensors["slope"], tensors["offset"])
    return fill(module, tensors, str(path)).eval()


class PredictorModule(nn.Module):
    """A predictor that is more than one network, as a module: its tensors are buffers, its outputs those of predict."""

    def __init__(self, predict: Callable[[Any, Tree, Tensor], Tensor], home: Any, deployed: Tree) -> None:
        super().__init__()
        self._predict, self._home = predict, home
        self._paths = {path: path.replace(".", "-").replace("/", "--") for path, _ in leaves(deployed)}
        for path, leaf in leaves(deployed):
            self.register_buffer(self._paths[path], leaf)

    @classmethod
    def of(cls, predict: Callable[[Any, Tree, Tensor], Tensor], home: Any, deployed: Tree) -> PredictorModule:
        """``Algorithm.module`` of a method with a ``predict`` of its own: ``partial(PredictorModule.of, predict)``."""
        return cls(predict, home, deployed)

    def forward(self, x: Tensor) -> Tensor:
        """The predictor's outputs."""
        flat = {path: self.get_buffer(name) for path, name in self._paths.items()}
        return self._predict(self._home, {"buffers": {}, **unflatten(flat)}, x)


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


class Mixed(nn.Module):
    """Two classifiers whose probabilities are averaged; ``part`` is what the tuned one counts."""

    part: Tensor

    def __init__(self, untuned: nn.Module, tuned: nn.Module, part: Tensor) -> None:
        super().__init__()
        self.untuned, self.tuned = untuned, tuned
        self.register_buffer("part", part)

    def forward(self, x: Tensor) -> Tensor:
        """Log probabilities."""
        return mixture(self.untuned(x), self.tuned(x), self.part)


def mixture(one: Tensor, other: Tensor, part: Tensor) -> Tensor:
    """The log of (1 - part) softmax(one) + part softmax(other)."""
    first, second = torch.log_softmax(one, -1), torch.log_softmax(other, -1)
    return torch.logaddexp(torch.log1p(-part) + first, torch.log(part) + second)


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
