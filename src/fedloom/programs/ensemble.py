# SPDX-License-Identifier: Apache-2.0
"""Distillation on the server: one model learns to answer as an ensemble of others does, on samples without labels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fedloom.core.contract import Batch, Model
from fedloom.core.trees import Params, Tree
from fedloom.programs.server_steps import Objective


def divergence(target: Tensor, outputs: Tensor) -> Tensor:
    """KL(target || softmax(outputs)) of each sample; ``target`` has probabilities."""
    return F.kl_div(F.log_softmax(outputs, dim=-1), target, reduction="none").sum(-1)


def distilling(student: Model, *, per_class: bool = False) -> Objective:
    """The mean divergence from the targets (``batch.y``) of a student in training mode; ``per_class``: over classes."""
    share = 1 / student.num_outputs if per_class else 1.0

    def objective(params: Params, buffers: Tree, constants: Tree, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tree]]:
        outputs, after = student.train(params, buffers, batch.x, batch.mask, batch.key)
        loss = batch.mean(divergence(batch.y, outputs))
        return share * loss, (loss, after)

    return objective
