# SPDX-License-Identifier: Apache-2.0
"""Differential privacy for single samples: which client programs ``--sample-dp-noise`` hides samples in.

Local training takes one gradient a step, which is noised (``core.noised``). The guarantee is for all that a client
keeps and says, if its program learns of samples in no other way. That is tried out, not declared: with gradients that
are 0 whatever the samples are, a program must do the same on two sets of samples that have nothing in common.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedloom.core.contract import Batch, Home, Program
from fedloom.core.errors import FedloomError, NeedsError
from fedloom.core.noised import without_data
from fedloom.core.random import fold, normal
from fedloom.core.trees import Tree

log = logging.getLogger(__name__)

SAMPLES, STEPS = 3, 2
"""Of a trial."""


def check(method: str, program: Program, home: Home, shared: Tree, mine: Tree, memory: Tree, like: Batch) -> None:
    """Refuse a program that ``--sample-dp-noise`` does not hide samples in. ``like`` has samples as clients have them.

    ``home.key`` must be a key of no client, as what is drawn here is drawn again in training.
    """
    batches, model = program.batches, home.model
    assert batches is not None
    if model.fresh_buffers():
        raise NeedsError(
            f"{model.spec} keeps running statistics of its samples (BatchNorm), which --sample-dp-noise does not hide. "
            "Choose a --model without, such as lenet, or leave the option out."
        )
    why = ""
    try:
        with without_data() as calls:
            one, other = (_after(program, home, shared, mine, memory, batch) for batch in _two(like, home))
    except FedloomError:
        raise
    except Exception as error:  # whatever is in a user's method
        # not in the sentence, which a node tells its server: it may have something of the client's memory in it
        log.warning(f"{program.name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        raise NeedsError(
            f"{method} asks clients for {program.name}, which raised {type(error).__name__} when it was tried with "
            "--sample-dp-noise: its gradient is then taken sample by sample, under vmap. Mend it, or leave the option "
            "out."
        ) from error
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*map(pytree.tree_leaves, (one, other)))):
        why = "computes more from a client's samples than the gradient of each step"
    elif not calls:
        return
    elif len(calls) != 2 * STEPS:
        why = f"takes {len(calls) / (2 * STEPS):g} gradients of each batch, and one is accounted for"
    elif batches.name:
        why = "goes through the same batches in several asks, which are accounted for as drawn anew"
    elif batches.size != home.config.batch_size:
        why = f"has batches of {batches.size} samples beside those of --batch-size {home.config.batch_size}"
    if why:
        raise NeedsError(
            f"{method} asks clients for {program.name}, which {why}: --sample-dp-noise would promise too much. Choose "
            "a method with plain local training, such as fedavg or pfedhn, or leave the option out."
        )


def _after(program: Program, home: Home, shared: Tree, mine: Tree, memory: Tree, batch: Batch) -> Any:
    """The carry after some steps on the same samples."""
    carry = program.init(home, shared, mine, memory)
    for step in range(STEPS):
        number = torch.full_like(batch.step, step)
        assert isinstance(home.key, Tensor)
        carry = program.step(home, shared, carry, batch._replace(step=number, key=fold(home.key, number)))
    return carry


def _two(like: Batch, home: Home) -> tuple[Batch, Batch]:
    """Two batches of one shape with other values, labels and numbers of samples."""
    outputs = max(home.model.num_outputs, 2)
    assert isinstance(home.key, Tensor)
    if like.x.is_floating_point():
        first = normal(fold(home.key, 1), (SAMPLES, *like.x.shape[1:]), like.x.dtype)
        second = 3 - 2 * first
    else:
        first = torch.zeros((SAMPLES, *like.x.shape[1:]), dtype=like.x.dtype, device=like.x.device)
        second = torch.full_like(first, home.model.tokens.vocabulary - 1 if home.model.tokens else 1)
    number = torch.arange(SAMPLES, device=like.y.device).reshape(-1, *[1] * (like.y.dim() - 1))
    labels = (number % outputs).expand(SAMPLES, *like.y.shape[1:]).to(like.y.dtype).contiguous()
    mask = torch.ones(SAMPLES, dtype=torch.bool, device=like.x.device)
    fewer = mask & (torch.arange(SAMPLES, device=like.x.device) < SAMPLES - 1)
    return like._replace(x=first, y=labels, mask=mask), like._replace(x=second, y=torch.zeros_like(labels), mask=fewer)
