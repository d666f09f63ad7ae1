# SPDX-License-Identifier: Apache-2.0
"""Tuning before use: a client trains the final common model a little on its own data, and deploys the result.

Participants tune when a state settles, newcomers when they are admitted. Training never reads what was tuned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedloom.core.config import option
from fedloom.core.contract import Ask, Batch, Batches, Home, Program, Sent, Setup, composed
from fedloom.core.optim import Optimiser
from fedloom.core.training import LocalConfig, Training, begin, like_report, report, train_step
from fedloom.core.trees import Tree
from fedloom.programs.personal import keep


@dataclass(frozen=True, kw_only=True)
class TuningConfig(LocalConfig):
    """How a client tunes: with neither steps nor passes, it does not."""

    tune_steps: int = option(
        50, "Steps by which a client tunes the final model before use (HyperFedZero, sec. 5: a round's).", low=0
    )
    tune_epochs: int = option(
        0, "Passes over the client's data for it instead of a number of steps; 0: use steps.", low=0
    )
    tune_newcomers: bool = option(True, "Newcomers tune too, for which they need labels.")

    @property
    def tunes(self) -> bool:
        """Whether participants tune at all."""
        return bool(self.tune_steps or self.tune_epochs)

    def tuner(self) -> Optimiser:
        """The optimiser that tunes."""
        return self.local_optimiser()


def needs_labels(config: TuningConfig) -> bool:
    """Whether newcomers tune."""
    return config.tunes and config.tune_newcomers


def tune(setup: Setup[Any], sent: Sent, ask: Ask) -> Sent:
    """Have clients tune the model ``sent`` to them."""
    ask(tuning(setup.config), *sent)
    return sent


def tuning(config: TuningConfig) -> Program:
    """Train the model that was sent, with an optimiser that starts afresh; keep it as the personal one."""
    steps = 0 if config.tune_epochs else config.tune_steps
    batches = Batches("train", config.batch_size, steps=steps, epochs=config.tune_epochs)
    return Program("tune", _init, _step, _final, batches, _expects)


def _init(home: Home, shared: Tree, mine: Tree, memory: Tree) -> Training:
    model = composed(home, shared, mine, memory)
    return begin(home, model["params"], {"buffers": model["buffers"]}, home.config.tuner())


def _step(home: Home, shared: Tree, carry: Training, batch: Batch) -> Training:
    return train_step(home, carry, batch, optimiser=home.config.tuner())


def _final(home: Home, shared: Tree, carry: Training, memory: Tree) -> tuple[Tree, Tree]:
    return report(home, carry), {**memory, "personal": keep(carry, memory["personal"])}


def _expects(shared: Tree, mine: Tree) -> Tree:
    return like_report()
