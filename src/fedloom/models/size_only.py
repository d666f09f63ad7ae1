# SPDX-License-Identifier: Apache-2.0
"""A client's model of which the server is told the number of parameters, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedloom.core.errors import NeedsError
from fedloom.core.tokens import Tokens
from fedloom.core.trees import Params, Tree


class SizeSpec(NamedTuple):
    """All that a server is told of a model by clients of a method such as MH-pFedHN."""

    size: int
    input_shape: tuple[int, ...]
    num_outputs: int
    tokens: Tokens | None = None

    def __str__(self) -> str:
        return f"{self.size} parameters"


@dataclass(frozen=True)
class SizeOnly:
    """A client's model of which only the number of parameters is known; whatever else is asked of it is refused."""

    spec: SizeSpec
    device: torch.device
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.spec.size

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.spec.input_shape

    @property
    def num_outputs(self) -> int:
        return self.spec.num_outputs

    @property
    def tokens(self) -> Tokens | None:
        return self.spec.tokens

    @property
    def input_dtype(self) -> torch.dtype:
        return torch.int64 if self.tokens else self.dtype

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        raise self._unknown("the shapes")

    @property
    def head(self) -> frozenset[str]:
        raise self._unknown("the output layer")

    @property
    def norm(self) -> frozenset[str]:
        raise self._unknown("the layers")

    @property
    def feature_shape(self) -> tuple[int, ...] | None:
        raise self._unknown("the features")

    @property
    def has_linear_head(self) -> bool:
        raise self._unknown("the output layer")

    def features(self, params: Params, buffers: Tree, x: Tensor) -> Tensor:
        raise self._unknown("the layers")

    def train_features(
        self, params: Params, buffers: Tree, x: Tensor, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        raise self._unknown("the layers")

    def classify(self, params: Params, z: Tensor) -> Tensor:
        raise self._unknown("the output layer")

    def init(self, seed: int) -> dict[str, Tensor]:
        raise self._unknown("the first values")

    def fresh_buffers(self) -> dict[str, Tensor]:
        raise self._unknown("the statistics")

    def train(
        self, params: Params, buffers: Tree, x: Tensor, mask: Tensor, key: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        raise self._unknown("the layers")

    def __call__(self, params: Params, buffers: Tree, x: Tensor) -> Tensor:
        raise self._unknown("the layers")

    def module(self, params: Params, buffers: Tree) -> nn.Module:
        raise self._unknown("the layers")

    def _unknown(self, what: str) -> NeedsError:
        return NeedsError(
            f"The server is told only how many parameters a client's model has, and these options need {what} of it. "
            "Leave out the options that name layers."
        )
