# SPDX-License-Identifier: Apache-2.0
"""Gradients that hide each sample: the step of DP-SGD, and a way to see that a client uses nothing else of its data.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: Deep learning with differential privacy. CCS 2016
(arXiv:1607.00133). Each sample's gradient is shortened to norm C at most, they are added up, Gaussian noise of
deviation z C is added, and the sum is divided by the number of samples that a batch has on average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fedloom.core.random import Key, fold, normal
from fedloom.core.trees import Params, leaves, tree_map

_calls: ContextVar[list[int] | None] = ContextVar("calls", default=None)
_planting: ContextVar[Callable[[Callable[..., Params]], Callable[..., Params]] | None] = ContextVar(
    "planting", default=None
)


@contextmanager
def without_data() -> Iterator[list[int]]:
    """Within, gradients are 0 whatever the samples are: what then still differs by samples is not hidden.

    The list gets one entry for each gradient that is taken.
    """
    calls: list[int] = []
    token = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


@contextmanager
def with_gradients(planting: Callable[[Callable[..., Params]], Callable[..., Params]]) -> Iterator[None]:
    """Within, the gradient of a sample is that of ``planting(of_sample)``: to see what noise leaves of one."""
    token = _planting.set(planting)
    try:
        yield
    finally:
        _planting.reset(token)


def hides_samples(config: Any) -> bool:
    """Whether local training with this config hides each sample."""
    return bool(getattr(config, "sample_dp_noise", 0.0))


def clipped_sum(of_sample: Callable[..., Params], samples: tuple[Tensor, ...], mask: Tensor, clip: float) -> Params:
    """The sum of ``of_sample`` over those samples that the mask leaves, none longer than ``clip``.

    A sample whose gradient is not finite adds nothing: a sum that is not finite would give it away.
    """
    planting = _planting.get()
    gradient = planting(of_sample) if planting else of_sample

    def shortened(counts: Tensor, *sample: Tensor) -> Params:
        found = gradient(*sample)
        norm = torch.stack([leaf.square().sum() for _, leaf in leaves(found)]).sum().sqrt()
        scale = (clip / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1.0)
        counts = counts & norm.isfinite()
        shorter: Params = tree_map(lambda leaf: torch.where(counts, scale * leaf, 0.0), found)
        return shorter

    total: Params = tree_map(lambda leaf: leaf.sum(0), torch.vmap(shortened)(mask, *samples))
    calls = _calls.get()
    if calls is None:
        return total
    calls.append(1)
    nothing: Params = tree_map(torch.zeros_like, total)
    return nothing


def noised(total: Params, clip: float, noise: float, expected: Tensor, key: Key) -> dict[str, Tensor]:
    """A sum with noise on each of its numbers, divided by how many there are on average."""
    found = {}
    for number, (name, leaf) in enumerate(total.items()):
        drawn = normal(fold(key, number), tuple(leaf.shape), leaf.dtype)
        found[name] = torch.add(leaf, drawn, alpha=noise * clip) / expected
    return found
