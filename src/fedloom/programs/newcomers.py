# SPDX-License-Identifier: Apache-2.0
"""Newcomers of methods whose clients keep their models: they train one at home, with what the server has to offer."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.core.config import option
from fedloom.core.contract import Ask, Program, Sent
from fedloom.core.training import LocalConfig


@dataclass(frozen=True, kw_only=True)
class TrainsNewcomers(LocalConfig):
    """The options of local training, and how long a newcomer trains."""

    admit_rounds: int = option(20, "How often a newcomer trains, each time as long as in a round (ours).", low=1)


def train_newcomers(program: Program, sent: Sent, rounds: int, ask: Ask) -> Sent:
    """Have newcomers run ``program`` so many times with what is ``sent``, which is also what they deploy."""
    for _ in range(rounds):
        ask(program, *sent)
    return sent
