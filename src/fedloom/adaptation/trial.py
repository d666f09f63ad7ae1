# SPDX-License-Identifier: Apache-2.0
"""The federation tries the correction on itself, so that newcomers know what it is worth before they use it.

Every participant stands in once as a newcomer without labels, on validation data: its calibration is fitted by the
others, its label shares are estimated from the scores of some samples, as many as a newcomer may have, and the labels
of its other samples say how often each predictor is right. Which samples are which rotates, so that each is tested.
Nothing but the shares that are right leaves the participant.

From the gains over participants the server learns how far newcomers should trust the correction: the largest part of
it that is about as good as the best one, of those whose mean gain is clearly positive (its 95% interval lies above 0);
none if there is no such part. Where clients differ in their labels the correction gains for nearly all of them; where
they differ otherwise, it gains for some and costs others as much, and the more the more samples it believes. So samples
beyond the number that participants could try it with make a newcomer's estimate more precise, but no bolder.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedloom.adaptation.calibration import Fitted, Privacy
from fedloom.adaptation.checks import Reference, judge, statistics
from fedloom.adaptation.dirichlet import STEPS, no_votes, shares, vote
from fedloom.core.contract import Algorithm, Ask, Batch, Batches, Home, Program, Sent
from fedloom.core.random import fold, normal
from fedloom.core.trees import ClientId, PerClient, Tree

SIZES = (1, 5, 20, 80, 320)
"""Samples that the correction is tried with; a newcomer goes by those next to the number that it has."""
ROTATIONS = 4
"""Divisions of a participant's samples into those to estimate from and those to test on.

At most three quarters are estimated from, so that every sample is tested."""
PARTS = (0.25, 0.5, 0.75, 1.0)
"""How much of the correction is tried."""
MOST = 512
"""Validation samples of a participant that it is tried on."""
SURE = 0.975
"""How sure a gain must be: that of a 95% interval's lower end."""
NORM = (len(SIZES) * (2 + len(PARTS))) ** 0.5
"""The largest norm of an answer, whose entries lie between 0 and 1: noise is in units of it."""


class Trial(NamedTuple):
    """What came of it, for each of ``SIZES``."""

    trust: Tensor  # (sizes,) the part of the correction that newcomers should use
    gain: Tensor  # (sizes,) its mean gain in accuracy over participants; of all of it, where the trust is 0
    spread: Tensor  # (sizes,) standard deviation of that gain over participants
    clients: Tensor  # (sizes,) participants that tried it
    samples: Tensor  # (sizes,) samples that they tried it with: the size, or the next smaller one that was tried


def untried(like: Tensor) -> Trial:
    """Nobody has tried it: it is not trusted."""
    nothing = like.new_zeros(len(SIZES))
    return Trial(nothing, nothing, nothing, nothing, nothing)


def try_out(
    algorithm: Algorithm, base: Sent, alpha: Tensor, fitted: Fitted, reference: Reference, ask: Ask, privacy: Privacy
) -> Trial:
    """Ask all participants to try it; each gets the calibration that the others would have fitted."""
    lines = fitted.left_out(noisy=bool(privacy.noise))
    mine = PerClient(
        (clients, {"base": tree, **{name: value.to(alpha) for name, value in lines.pick(clients).items()}})
        for clients, tree in ((some, base.mine.pick(some)) for some in by_group(base.mine, lines))
    )
    shared = {"base": base.shared, "alpha": alpha, "reference": reference._asdict()}
    replies = ask(trying(algorithm, privacy), shared, mine)
    tried, plain, right = (
        torch.cat([tree[name].double().clamp(0, 1) for _, tree in replies.groups])
        for name in ("tried", "plain", "right")
    )
    return Trial(*(value.to(alpha) for value in judged(tried, plain, right)))


def by_group(mine: PerClient, others: PerClient) -> list[list[ClientId]]:
    """The clients of ``others`` by their group in ``mine``."""
    return [some for some in ([c for c in clients if c in others] for clients, _ in mine.groups) if some]


def judged(tried: Tensor, plain: Tensor, right: Tensor) -> Trial:
    """What follows from the accuracies of participants (clients, sizes), twice, and (clients, sizes, parts)."""
    from scipy.special import stdtrit  # quantiles of Student's t; slow to import, and clients need none

    found: list[tuple[float, float, float, float, float]] = []
    for row, size in enumerate(SIZES):
        took = tried[:, row] > 0.5
        gains = right[took, row] - plain[took, row, None]  # (clients, parts)
        number = len(gains)
        if number < 2:  # what fewer samples gave holds for as many
            found.append(found[-1] if found else (0.0, 0.0, 0.0, 0.0, 0.0))
            continue
        mean, spread = gains.mean(0), gains.std(0)
        error = spread / number**0.5
        clear = mean > float(stdtrit(number - 1, SURE)) * error
        best = int(torch.where(clear, mean, -torch.inf).argmax())
        as_good = clear & (mean >= mean[best] - error[best])  # within one standard error of the best
        chosen = int(as_good.nonzero().max()) if bool(clear.any()) else len(PARTS) - 1
        trust = PARTS[chosen] if bool(clear.any()) else 0.0
        found.append((trust, float(mean[chosen]), float(spread[chosen]), float(number), float(size)))
    return Trial(*torch.tensor(found, dtype=torch.float64).T)


class Trusted(NamedTuple):
    """How a newcomer uses the correction."""

    part: Tensor  # () from 0 to 1
    weight: Tensor  # () what a sample without a label counts at most
    row: Tensor  # () of the trial that says so


def trusted(trial: Trial, number: Tensor, labelled: Tensor) -> Trusted:
    """By the sizes next to a newcomer's ``number`` of samples: the lesser trust, and no more samples than were tried.

    Labels are counted, not estimated, and need no trust.
    """
    none = torch.zeros_like(number, dtype=torch.long)
    below = sum(((number >= size).long() for size in SIZES[1:]), none)
    above = sum(((number > size).long() for size in SIZES[:-1]), none)
    row = torch.where(trial.trust[above] < trial.trust[below], above, below)
    share = labelled / number.clamp(min=1)
    weight = (trial.samples[above] / (number - labelled).clamp(min=1)).clamp(max=1)
    return Trusted(1 - (1 - trial.trust[row]) * (1 - share), weight, row)


def trying(algorithm: Algorithm, privacy: Privacy) -> Program:
    """One batch of validation data: estimate label shares by some of its samples, and count who is right on others."""
    init, step = partial(_init, algorithm), partial(_step, algorithm)
    final, batches = partial(_final, privacy), Batches("val", MOST, steps=1)
    return Program("try_correction", init, step, final, batches, _expects, noise=privacy.declared)


class _Carry(NamedTuple):
    deployed: Tree
    line: Tree  # the calibration that the others have fitted
    reply: Tree


def _init(algorithm: Algorithm, home: Home, shared: Tree, mine: Tree, memory: Tree) -> _Carry:
    deployed = algorithm.client_deploy(home, shared["base"], mine["base"], memory)
    line = {name: mine[name] for name in ("slope", "bias")}
    return _Carry(deployed, line, {n: torch.zeros_like(v) for n, v in _expects(shared, mine).items()})


def _step(algorithm: Algorithm, home: Home, shared: Tree, carry: _Carry, batch: Batch) -> _Carry:
    alpha, reference = shared["alpha"], Reference(**shared["reference"])
    plain = algorithm.predict(home, carry.deployed, batch.x)  # (batch, classes)
    scores = carry.line["slope"] * plain + carry.line["bias"]
    sizes = torch.tensor(SIZES, device=plain.device)
    unknown = torch.full((len(SIZES), *batch.mask.shape), -1, dtype=torch.long, device=plain.device)
    held, place = batch.mask.sum(), batch.mask.cumsum(0) - 1
    parts = torch.tensor((0.0, *PARTS), dtype=plain.dtype, device=plain.device)[:, None]
    correct, tests = plain.new_zeros(len(SIZES), len(parts)), plain.new_zeros(len(SIZES))
    for rotation in range(ROTATIONS):
        turned = (place - rotation * held // ROTATIONS) % held.clamp(min=1)
        some = batch.mask & (turned < sizes[:, None])  # (sizes, batch)
        votes = no_votes(alpha.expand(len(SIZES), -1))
        for _ in range(STEPS):
            votes = vote(scores.expand(len(SIZES), *scores.shape), votes.log_weights(alpha), unknown, some)
        number = some.sum(-1).to(plain.dtype)
        mean = torch.einsum("sb,bi->si", some.to(plain.dtype), statistics(scores)) / number.clamp(min=1)[:, None]
        found = judge(torch.zeros_like(votes.expected), votes.expected, mean, number, alpha, reference)
        offset = carry.line["bias"] + torch.log(shares(found.counts, alpha))
        offset = torch.where(found.keep_plain[:, None], 0, offset)  # (sizes, classes)
        right, others = [], (batch.mask & ~some).to(plain.dtype)
        for part in range(len(parts)):  # one after the other, for the memory
            guesses = carry.line["slope"] * plain + (parts[part] * offset)[:, None]  # (sizes, batch, classes)
            right.append(((guesses.argmax(-1) == batch.y).to(plain.dtype) * others).sum(-1))
        correct = correct + torch.stack(right, -1)
        tests = tests + others.sum(-1)
    share = correct / tests.clamp(min=1)[:, None]
    tried = (ROTATIONS * sizes <= (ROTATIONS - 1) * held).to(plain.dtype)
    return carry._replace(reply={"tried": tried, "plain": share[:, 0], "right": share[:, 1:]})


def _final(privacy: Privacy, home: Home, shared: Tree, carry: _Carry, memory: Tree) -> tuple[Tree, Tree]:
    spread = NORM * privacy.noise
    noised = {
        name: value + spread * normal(fold(home.key, i), tuple(value.shape), value.dtype)
        for i, (name, value) in enumerate(carry.reply.items())
    }
    return noised if privacy.noise else carry.reply, memory


def _expects(shared: Tree, mine: Tree) -> Tree:
    like = shared["alpha"]
    return {
        "tried": like.new_empty(len(SIZES)),
        "plain": like.new_empty(len(SIZES)),
        "right": like.new_empty(len(SIZES), len(PARTS)),
    }
