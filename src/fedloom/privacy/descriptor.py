# SPDX-License-Identifier: Apache-2.0
"""A client's descriptor with differential privacy: the encoder's program, ending in the Gaussian mechanism."""

from __future__ import annotations

from dataclasses import replace

from fedloom.core.contract import Home, Program
from fedloom.core.trees import Tree
from fedloom.hypernets.encoder import Described
from fedloom.privacy.gaussian import perturb


def described_privately(describe: Program) -> Program:
    """The program of ``encoder.describe_program``, for an encoder of the private form, with noise on the reply."""
    return replace(describe, name="encoder.describe_privately", final=private_final)


def private_final(home: Home, shared: Tree, carry: Described, memory: Tree) -> tuple[Tree, Tree]:
    """Reply with the mean and noise. IT-PFL-HN, lemma 7.1: its sensitivity is 2 L B / |D|, here with L = B = 1."""
    epsilon, chance = home.config.descriptor_epsilon, home.config.descriptor_delta
    clean, sensitivity = carry.total / carry.weight, 2 / carry.weight
    return {"descriptor": perturb(clean, epsilon, chance, sensitivity, home.key)}, memory
