# SPDX-License-Identifier: Apache-2.0
"""What a client may be asked: the programs of its method, made from its own config; all else is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from fedloom.core.contract import Algorithm, Model, Program
from fedloom.programs.evaluation import PLAIN, evaluation_program, noised
from fedloom.programs.local import local_training
from fedloom.programs.statistics import settling


def programs_of(algorithm: Algorithm, config: Any, model: Model, newcomer: bool) -> list[Program]:
    """The programs of a method that are not evaluation."""
    if algorithm.programs:
        own = list(algorithm.programs(config, model, newcomer))
    else:
        own = [local_training(config)] if not newcomer or algorithm.needs_labels(config) else []
    return [*own, settling()] if newcomer else own


def of_participants(train: Callable[[Any], Program]) -> Callable[[Any, Model, bool], list[Program]]:
    """``Algorithm.programs`` of a method whose participants run ``train(config)`` and whose newcomers do not train."""
    return partial(_of_participants, train)


def _of_participants(train: Callable[[Any], Program], config: Any, model: Model, newcomer: bool) -> list[Program]:
    return [] if newcomer else [train(config)]


class Evaluation(NamedTuple):
    """What a client tells of how models fare on its own data."""

    kind: Literal["none", "noised", "exact"] = "exact"
    noise: float = 1.0
    """Of noised sums: the deviation, in units of what one sample can change."""


EXACT = Evaluation()


def allowed(
    algorithm: Algorithm, config: Any, model: Model, newcomer: bool, evaluation: Evaluation = EXACT
) -> dict[str, Program]:
    """All that a client may be asked, by name: evaluations go over validation and test data, never over others."""
    splits = ("val", "test")
    tried = [evaluation_program(algorithm, split) for split in splits]
    if algorithm.base:
        tried += [evaluation_program(algorithm.base, split, name=PLAIN) for split in splits]
    if evaluation.kind == "noised":
        tried = [noised(program, evaluation.noise) for program in tried]
    elif evaluation.kind == "none":
        tried = []
    return {program.name: program for program in [*programs_of(algorithm, config, model, newcomer), *tried]}
