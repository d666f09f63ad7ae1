# SPDX-License-Identifier: Apache-2.0
"""Exported models, back as modules."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
from torch import nn

from fedloom.models.spec import parse


def load_model(path: str | Path, model: str, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The network ``model`` with the parameters in ``path``, in evaluation mode."""
    module = parse(model, input_shape, num_outputs).build()
    module.load_state_dict(safetensors.torch.load_file(path))
    return module.eval()
