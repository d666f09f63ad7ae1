# SPDX-License-Identifier: Apache-2.0
"""Rules that combine replies of which some may be lies, in the place of their mean. Each client counts once.

They take the clients' changes as rows of a matrix, and give one change, with the share of each row that went into it.
A rule is written with its number: ``krum:2`` is made for two liars.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.core.errors import ConfigError, unknown
from fedloom.core.random import Key, uniform

WEISZFELD_STEPS = 30
SKETCH = 10_000
"""Numbers of a change that ``dnc`` looks at."""


class Combined(NamedTuple):
    """What a rule made of the changes."""

    change: Tensor  # (numbers,)
    kept: Tensor  # (clients,), from 0 to 1: how much of each counts, as a share of its numbers or of an equal weight


Rule = Callable[[Tensor, int, Key], Combined]
"""(changes, how many may be lies, a key for what is drawn) -> what is made of them."""


def mean(changes: Tensor, liars: int, draw: Key) -> Combined:
    """The mean, each client counted once."""
    return Combined(changes.mean(0), torch.ones_like(changes[:, 0]))


def median(changes: Tensor, liars: int, draw: Key) -> Combined:
    """The median of each number (Yin, Chen, Ramchandran, Bartlett 2018). Of two in the middle, their mean."""
    low, high = (len(changes) - 1) // 2, len(changes) // 2
    ordered, whose = changes.sort(0)
    return Combined((ordered[high] + ordered[low]) / 2, _shares(changes, whose[low : high + 1]))


def trimmed(changes: Tensor, liars: int, draw: Key) -> Combined:
    """The mean of each number without its largest and smallest values, as many as may be lies (Yin et al. 2018)."""
    liars = min(liars, (len(changes) - 1) // 2)
    inner = slice(liars, len(changes) - liars)
    ordered, whose = changes.sort(0)
    return Combined(ordered[inner].mean(0), _shares(changes, whose[inner]))


def krum(changes: Tensor, liars: int, draw: Key) -> Combined:
    """The change whose n - f - 2 nearest others are nearest to it (Blanchard, El Mhamdi, Guerraoui, Stainer 2017)."""
    number = len(changes)
    near = max(1, min(number - liars - 2, number - 1))
    apart = torch.cdist(changes[None], changes[None], compute_mode="donot_use_mm_for_euclid_dist")[0].square()
    apart.fill_diagonal_(torch.inf)
    scores = apart.sort(1).values[:, :near].sum(1) if number > 1 else changes.new_zeros(1)
    kept = torch.zeros_like(scores)
    kept[scores.argmin()] = 1
    return Combined(changes[scores.argmin()], kept)


def geomedian(changes: Tensor, liars: int, draw: Key) -> Combined:
    """The point with the least sum of distances to all (Pillutla, Kakade, Harchaoui 2022), by Weiszfeld's steps."""
    point = median(changes, liars, draw).change
    for _ in range(WEISZFELD_STEPS):
        weights = 1 / (changes - point).norm(dim=1).clamp(min=1e-6)
        point = (weights[:, None] * changes).sum(0) / weights.sum()
    return Combined(point, (len(changes) * weights / weights.sum()).clamp(max=1))


def dnc(changes: Tensor, liars: int, draw: Key) -> Combined:
    """The mean without those that stick out most along the direction of most spread (Shejwalkar, Houmansadr 2021).

    The direction is that of a random part of the numbers, which liars must not know beforehand; half as many again as
    may be lies are left out.
    """
    out = min(-(-3 * liars // 2), len(changes) - 1)
    drawn = uniform(draw, (changes.shape[1],)).argsort()[:SKETCH].to(changes.device)
    part = changes[:, drawn].double()
    centred = part - part.mean(0)
    # the first right singular vector, by the small matrix of the clients
    _, vectors = torch.linalg.eigh(centred @ centred.T)
    scores = vectors[:, -1].square()
    kept = torch.ones_like(changes[:, 0])
    if out:
        kept[scores.topk(out).indices] = 0
    return Combined(changes[kept > 0].mean(0), kept)


def _shares(changes: Tensor, whose: Tensor) -> Tensor:
    """The share of each client's numbers that it is named for in ``whose`` (places, numbers)."""
    return torch.bincount(whose.flatten(), minlength=len(changes)).to(changes.dtype) / changes.shape[1]


RULES: dict[str, Rule] = {rule.__name__: rule for rule in (mean, median, trimmed, krum, geomedian, dnc)}
NUMBERED = ("trimmed", "krum", "dnc")
"""Rules that are told how many may be lies."""


def parse(text: str) -> tuple[Rule, int]:
    """``krum:2`` as the rule and its number."""
    name, colon, number = text.partition(":")
    if name not in RULES:
        raise unknown("rule of --aggregate", name, list(RULES))
    if (name in NUMBERED) != bool(colon) or (colon and not (number.isascii() and number.isdigit() and int(number) > 0)):
        wanted = f"{name}:2, with how many clients of a round may lie" if name in NUMBERED else name
        raise ConfigError(f"--aggregate is {text!r}; write {wanted}.")
    return RULES[name], int(number or 0)


def check_cohort(text: str, clients: float) -> None:
    """Refuse a rule that is made for as many liars as no rule can hold out against."""
    _, liars = parse(text)
    if 2 * liars >= clients:
        raise ConfigError(
            f"--aggregate {text} is made for {liars} that lie of the {clients:g} clients of a round; no rule holds out "
            "unless fewer than half lie. Give a smaller number, or a larger --cohort."
        )
