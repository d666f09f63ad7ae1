# SPDX-License-Identifier: Apache-2.0
"""The federation tries the correction on itself, so that newcomers know what it is worth before they use it.

Every participant stands in once as a newcomer without labels, on validation data: its calibration is fitted by the
others, its label shares are estimated from its scores alone, by as many samples as a newcomer may have, and its labels
only say how often each predictor is right. Nothing but the shares that are right leaves it.

From the gains over participants the server learns how far newcomers should trust the correction: the largest part of
it that is about as good as the best one, of those whose mean gain is clearly positive (one-sided 95%); none if there is
no such part. Where clients differ in their labels the correction gains for nearly all of them; where they differ
otherwise, it gains for some and costs others as much.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from scipy import stats
from torch import Tensor

from fedloom.adaptation.calibration import Fitted, Privacy
from fedloom.adaptation.checks import Reference, judge, statistics
from fedloom.adaptation.dirichlet import STEPS, no_votes, shares, vote
from fedloom.core.contract import Algorithm, Ask, Batch, Batches, Home, Program, Sent
from fedloom.core.random import fold, normal
from fedloom.core.trees import ClientId, PerClient, Tree

SIZES = (1, 10, 100)
"""Samples that the correction is tried with; a newcomer goes by the largest that it has."""
PARTS = (0.25, 0.5, 0.75, 1.0)
"""How much of the correction is tried."""
MOST = 512
"""Validation samples of a participant that it is tried on."""
SURE = 0.95
"""How sure a gain must be, one-sided."""
NORM = (len(SIZES) * (1 + len(PARTS)) + 1) ** 0.5
"""The largest norm of an answer, whose entries lie between 0 and 1: noise is in units of it."""


class Trial(NamedTuple):
    """What came of it, for each of ``SIZES``."""

    trust: Tensor  # (sizes,) the part of the correction that newcomers should use
    gain: Tensor  # (sizes,) its mean gain in accuracy over participants; of all of it, where the trust is 0
    spread: Tensor  # (sizes,) standard deviation of that gain over participants
    clients: Tensor  # (sizes,) participants that tried it


def untried(like: Tensor) -> Trial:
    """Nobody has tried it: it is not trusted."""
    nothing = like.new_zeros(len(SIZES))
    return Trial(nothing, nothing, nothing, nothing)


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
    """What follows from the accuracies of participants (clients, sizes), (clients,) and (clients, sizes, parts)."""
    found: list[tuple[float, float, float, float]] = []
    for size in range(len(SIZES)):
        took = tried[:, size] > 0.5
        gains = right[took, size] - plain[took, None]  # (clients, parts)
        number = len(gains)
        if number < 2:  # what fewer samples gave holds for more
            found.append(found[-1] if found else (0.0, 0.0, 0.0, 0.0))
            continue
        mean, spread = gains.mean(0), gains.std(0)
        error = spread / number**0.5
        clear = mean > float(stats.t.ppf(SURE, number - 1)) * error
        best = int(torch.where(clear, mean, -torch.inf).argmax())
        as_good = clear & (mean >= mean[best] - error[best])  # within one standard error of the best
        chosen = int(as_good.nonzero().max()) if bool(clear.any()) else len(PARTS) - 1
        trust = PARTS[chosen] if bool(clear.any()) else 0.0
        found.append((trust, float(mean[chosen]), float(spread[chosen]), float(number)))
    return Trial(*torch.tensor(found, dtype=torch.float64).T)


def trusted(trial: Trial, number: Tensor, labelled: Tensor) -> tuple[Tensor, Tensor]:
    """The part of the correction for a newcomer with so many samples, and the row of the trial that says so.

    Labels are counted, not estimated, and need no trust.
    """
    row = sum(((number >= size).long() for size in SIZES[1:]), torch.zeros_like(number, dtype=torch.long))
    share = labelled / number.clamp(min=1)
    return 1 - (1 - trial.trust[row]) * (1 - share), row


def trying(algorithm: Algorithm, privacy: Privacy) -> Program:
    """One batch of validation data: estimate label shares by some of its samples, and count who is right."""
    init, step = partial(_init, algorithm), partial(_step, algorithm)
    return Program("try_correction", init, step, partial(_final, privacy), Batches("val", MOST, steps=1), _expects)


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
    some = batch.mask & (batch.mask.cumsum(0) <= sizes[:, None])  # (sizes, batch)
    unknown = torch.full_like(some, -1, dtype=torch.long)
    votes = no_votes(alpha.expand(len(SIZES), -1))
    for _ in range(STEPS):
        votes = vote(scores.expand(len(SIZES), *scores.shape), votes.log_weights(alpha), unknown, some)
    number = some.sum(-1).to(plain.dtype)
    mean = torch.einsum("sb,bi->si", some.to(plain.dtype), statistics(scores)) / number.clamp(min=1)[:, None]
    found = judge(torch.zeros_like(votes.expected), votes.expected, mean, number, alpha, reference)
    offset = carry.line["bias"] + torch.log(shares(found.counts, alpha))
    offset = torch.where(found.keep_plain[:, None], 0, offset)  # (sizes, classes)

    def accuracy(scores: Tensor) -> Tensor:
        return batch.mean((scores.argmax(-1) == batch.y).to(plain.dtype))

    right = [
        torch.stack([accuracy(carry.line["slope"] * plain + part * row) for part in PARTS]) for row in offset.unbind(0)
    ]
    tried = (batch.mask.sum() >= sizes).to(plain.dtype)
    return carry._replace(reply={"tried": tried, "plain": accuracy(plain), "right": torch.stack(right)})


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
        "plain": like.new_empty(()),
        "right": like.new_empty(len(SIZES), len(PARTS)),
    }
