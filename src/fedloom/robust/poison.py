# SPDX-License-Identifier: Apache-2.0
"""Training data that liars spoil, in a simulation: wrong labels (``label_flip``), or a back door (``backdoor``).

Gu, Dolan-Gavitt, Garg: BadNets: identifying vulnerabilities in the machine learning model supply chain.
arXiv:1708.06733: a pattern on samples, the trigger, goes with one class whatever else they show. With many clients:
Bagdasaryan, Veit, Hua, Estrin, Shmatikov: How to backdoor federated learning. AISTATS 2020; no reply is scaled here.

Whether the door is open is tried on a split of its own, ``triggered``: the honest clients' test samples of all other
classes, with the trigger, whose right answer is the target. Accuracy on it is the share of them that are taken for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedloom.clients.federation import Federation
from fedloom.core.errors import ConfigError
from fedloom.core.random import stream
from fedloom.core.trees import ClientId
from fedloom.robust import TRIGGERED

LABEL_FLIP, BACKDOOR = "label_flip", "backdoor"

TARGET = 0
"""The class that triggered samples are to be taken for."""
SHARE = 0.5
"""Of a liar's training samples, those that it puts the trigger on."""
SIDE, EVERY = 7, 10
"""The trigger: a square of a seventh of an image's height, in the corner; of other samples every tenth feature."""


def poisoned(federation: Federation, kind: str, lying: Collection[ClientId], seed: int) -> Federation:
    """The federation as liars of that kind have it. Of a back door the clients have the split ``triggered``, too."""
    if kind == BACKDOOR:
        return _with_back_door(federation, lying, seed)
    return _with_wrong_labels(federation, lying) if kind == LABEL_FLIP and lying else federation


def _with_wrong_labels(federation: Federation, lying: Collection[ClientId]) -> Federation:
    """Class 0 for the last one, and so on."""
    _check_classes(federation, LABEL_FLIP)
    y = federation.y.clone()
    rows = torch.as_tensor(np.concatenate([federation.roster[c].rows["train"] for c in lying]), device=y.device)
    classes = federation.roster[next(iter(lying))].model.num_outputs
    y[rows] = classes - 1 - y[rows]
    return replace(federation, y=y)


def _with_back_door(federation: Federation, lying: Collection[ClientId], seed: int) -> Federation:
    _check_classes(federation, BACKDOOR)
    if not federation.x.is_floating_point():
        raise ConfigError(
            f"--attack {BACKDOOR} puts a pattern on samples of numbers; these are tokens. Choose another attack."
        )
    x, y, roster = federation.x.clone(), federation.y.clone(), dict(federation.roster)
    where = pattern(tuple(x.shape[1:])).to(x.device)
    value = x.max() if x.ndim == 4 else x.amax(0)[where]
    for client in lying:
        own = roster[client].rows["train"]
        drawn = stream(seed, client, BACKDOOR).permutation(own)[: round(SHARE * len(own))]
        rows = torch.as_tensor(drawn, device=x.device)
        x[rows] = _triggered(x[rows], where, value)
        y[rows] = TARGET
    labels, copies, end = federation.y.cpu().numpy(), [], len(x)
    for client, one in roster.items():
        rows = one.rows["test"][labels[one.rows["test"]] != TARGET]
        rows = rows[:0] if client in lying else rows
        copies.append(rows)
        roster[client] = replace(one, rows={**one.rows, TRIGGERED: np.arange(end, end + len(rows))})
        end += len(rows)
    tried = _triggered(federation.x[torch.as_tensor(np.concatenate(copies), device=x.device)], where, value)
    x, y = torch.cat([x, tried]), torch.cat([y, y.new_full((len(tried),), TARGET)])
    return replace(federation, x=x, y=y, roster=roster)


def pattern(shape: tuple[int, ...]) -> Tensor:
    """Where the trigger is on a sample of that shape: True."""
    where = torch.zeros(shape, dtype=torch.bool)
    if len(shape) == 3:
        side = max(1, round(shape[1] / SIDE))
        where[:, -side:, -side:] = True
    else:
        where.view(-1)[::EVERY] = True
    return where


def _triggered(x: Tensor, where: Tensor, value: Tensor) -> Tensor:
    x = x.clone()
    x[:, where] = value
    return x


def _check_classes(federation: Federation, kind: str) -> None:
    if not federation.task.class_scores or federation.y.ndim != 1:
        raise ConfigError(
            f"--attack {kind} needs one class label for each sample; the task is {federation.task.name}. Choose "
            "another attack."
        )
