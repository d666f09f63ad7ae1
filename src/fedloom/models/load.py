# SPDX-License-Identifier: Apache-2.0
"""Exported models, back as modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fedloom.core.errors import DataError
from fedloom.core.tokens import Tokens
from fedloom.core.trees import Params, Tree, leaves, unflatten
from fedloom.data.preparation import Preparation
from fedloom.models.spec import parse


def load_model(
    path: str | Path,
    model: str,
    input_shape: tuple[int, ...],
    num_outputs: int,
    tokens: tuple[int, bool] | None = None,
) -> nn.Module:
    """The network ``model`` with the parameters in ``path``, of the type they have there, in evaluation mode."""
    known = Tokens(*tokens) if tokens else None
    spec, tensors = parse(model, input_shape, num_outputs, known), safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    form, preparation = metadata.get(PREDICTOR), metadata.get("preparation")
    if form is not None and form not in PREDICTORS:
        raise DataError(f"{path} has a predictor {form!r}, which this version of fedloom does not know; update it.")
    module = spec.build() if form is None else PREDICTORS[form].around(spec.build, num_outputs)
    module = fill(module, tensors, str(path)).eval()
    return with_preparation(module, Preparation.of_text(preparation)) if preparation else module


def with_preparation(module: nn.Module, preparation: Preparation | None) -> nn.Module:
    """A network that takes raw samples, where there is a preparation for them."""
    return module if preparation is None else Prepared(module, preparation).eval()


class Prepared(nn.Module):
    """A network behind the preparation of its samples: of images of bytes, or of a table's columns as numbers."""

    network: nn.Module
    column: Tensor
    fill: Tensor
    mean: Tensor
    scale: Tensor
    is_category: Tensor

    def __init__(self, network: nn.Module, preparation: Preparation) -> None:
        super().__init__()
        self.network, self.preparation = network, preparation
        tensors = [*network.parameters(), *network.buffers()]
        like = next((one for one in tensors if one.is_floating_point()), torch.zeros(()))
        self.dtype = like.dtype
        for name, values in preparation.expanded()._asdict().items():
            # in float64, as when the network was trained: numbers can be large and near each other
            self.register_buffer(name, torch.as_tensor(values, device=like.device))

    def forward(self, x: Tensor) -> Tensor:
        """The network's outputs."""
        if self.preparation.kind == "images":
            mean, scale = (one.to(self.dtype)[:, None, None] for one in (self.mean, self.scale))
            found: Tensor = self.network((x.to(self.dtype) - mean) / scale)
            return found
        values = x.to(torch.float64)[:, self.column]
        values = torch.where(torch.isnan(values), self.fill, values)
        is_it = (values == self.mean).to(torch.float64)
        features = torch.where(self.is_category, is_it, (values - self.mean) / self.scale)
        outputs: Tensor = self.network(features.to(self.dtype))
        return outputs


def form_of(module: nn.Module) -> dict[str, str]:
    """What a file of the module's tensors says of it, for ``load_model``: nothing of a network alone."""
    names = [name for name, kind in PREDICTORS.items() if type(module) is kind]
    return {PREDICTOR: names[0]} if names else {}


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


def is_one_network(module: nn.Module) -> bool:
    """Whether a client's predictor is its network, perhaps with its scores on a line, and nothing else."""
    return not any(isinstance(part, PredictorModule) for part in module.modules())


Build = Callable[[], nn.Module]
"""Gives a new network of a client's architecture."""


class Shifted(nn.Module):
    """A network whose class scores are put on a line: ``slope * scores + offset``, e.g. with a client's log prior."""

    slope: Tensor
    offset: Tensor

    def __init__(self, network: nn.Module, slope: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.network = network
        # copies: a file has each tensor of a module once, and the two of a ``Mixed`` have one line
        self.register_buffer("slope", slope.clone())
        self.register_buffer("offset", offset.clone())

    @classmethod
    def around(cls, build: Build, num_outputs: int) -> Shifted:
        """One to be filled."""
        return cls(build(), torch.ones(()), torch.zeros(num_outputs))

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

    @classmethod
    def around(cls, build: Build, num_outputs: int) -> Mixed:
        """One to be filled."""
        untuned, tuned = (Shifted.around(build, num_outputs) for _ in range(2))
        return cls(untuned, tuned, torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Log probabilities."""
        return mixture(self.untuned(x), self.tuned(x), self.part)


PREDICTOR = "predictor"
"""The word for it in a file's metadata."""

PREDICTORS: dict[str, type[Shifted | Mixed]] = {"shifted": Shifted, "mixed": Mixed}
"""Predictors that are more than a network, by what their files say."""


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
