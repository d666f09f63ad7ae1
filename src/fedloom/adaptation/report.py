# SPDX-License-Identifier: Apache-2.0
"""What an admission found out about a newcomer, as numbers, as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedloom.adaptation.checks import STATISTICS
from fedloom.adaptation.dirichlet import Estimate
from fedloom.core.trees import Tree

LEVEL = 0.9
"""Of the credible intervals."""
RARE = 0.05
"""A test is spoken of as positive below this."""
SHOWN = 10
"""Classes in the text; all are in the JSON."""


class Share(NamedTuple):
    """The estimated share of a class, with the bounds of its credible interval."""

    name: str
    share: float
    low: float
    high: float


class Test(NamedTuple):
    """A chi-square test."""

    statistic: float
    degrees: int
    p: float


class Gain(NamedTuple):
    """What the correction was worth to participants that stood in as newcomers, in accuracy."""

    mean: float
    low: float
    """Bounds of what a newcomer like them may expect."""
    high: float
    participants: int


@dataclass(frozen=True)
class Report:
    """What was found out about a newcomer, and what was done about it."""

    samples: int
    labelled: int
    shares: tuple[Share, ...]
    shift: Test
    """Do the shares differ from the federation's?"""
    fit: Test | None
    """Do the scores look like a mixture of the federation's classes? None: participants told too little to say."""
    weight: float
    """What a sample without a label counted, from 0 to 1: less where it fits badly, or where fewer were tried."""
    trust: float
    """The part of the correction that is used, from 0 to 1."""
    gain: Gain | None
    """None: too few participants have tried it."""
    decision: Literal["corrected", "shrunk", "plain"]
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        tests = {name: test and test._asdict() for name, test in (("shift", self.shift), ("fit", self.fit))}
        gain = self.gain and self.gain._asdict()
        named = {"gain": gain, "shares": [share._asdict() for share in self.shares]}
        return {**asdict(self), **tests, "level": LEVEL, **named}

    def __str__(self) -> str:
        ranked = sorted(self.shares, key=lambda share: -share.share)
        width = max(len(share.name) for share in ranked[:SHOWN])
        lines = [self.sentence, f"Label shares, with {LEVEL:.0%} credible intervals:"]
        lines += [f"  {s.name:{width}}  {s.share:6.1%}  ({s.low:.1%} to {s.high:.1%})" for s in ranked[:SHOWN]]
        if len(ranked) > SHOWN:
            rest = sum(s.share for s in ranked[SHOWN:])
            lines.append(f"  {len(ranked) - SHOWN} other classes: {rest:.1%} together")
        return "\n".join(lines)


def report_of(state: Any, memory: Tree, samples: int, names: Sequence[str]) -> Report | None:
    """The report on a newcomer, from the server's state and what the newcomer kept; None if it estimated nothing."""
    return report(memory, state.alpha, state.reference, samples, names) if "admission" in memory else None


def report(memory: Tree, alpha: Tensor, reference: Tree, samples: int, names: Sequence[str]) -> Report:
    """The report on a newcomer from what it kept of its admission (``prior._estimate_final``)."""
    from scipy.special import chdtrc  # the tail of chi-squared; slow to import

    found: Tree = memory["admission"]
    posterior = Estimate(memory["label_counts"].cpu(), alpha.cpu(), found["evidence"].cpu())
    bounds = torch.stack([posterior.shares.double(), *posterior.interval(LEVEL)]).T.tolist()
    shares = tuple(Share(name, *row) for name, row in zip(names, bounds))
    degrees = len(alpha) - 1
    ratio = max(0.0, float(found["ratio"]))
    shift = Test(ratio, degrees, float(chdtrc(degrees, ratio)))
    misfit, weight, labelled = float(found["misfit"]), float(found["weight"]), round(float(found["labelled"]))
    known = float(reference["samples"]) > 0
    fit = Test(misfit, STATISTICS, float(chdtrc(STATISTICS, misfit))) if known else None
    trust, gain = float(memory["trust"]), _gain(found)
    most = float(found["most"])
    fitting, cautious = weight / most if most else 1.0, weight < most or trust < 1
    shrunk = cautious and labelled < samples  # labels count in full
    decision: Any = "plain" if trust == 0 else "shrunk" if shrunk else "corrected"
    sentence = _sentence(samples, labelled, shift, fit, fitting, most, trust, gain, decision)
    return Report(samples, labelled, shares, shift, fit, weight, trust, gain, decision, sentence)


def _gain(found: Tree) -> Gain | None:
    """A prediction interval for one more client: Student's t over participants."""
    from scipy.special import stdtrit

    number = round(float(found["clients"]))
    if number < 2:
        return None
    mean, spread = float(found["gain"]), float(found["spread"])
    reach = float(stdtrit(number - 1, (1 + LEVEL) / 2)) * spread * (1 + 1 / number) ** 0.5
    return Gain(mean, mean - reach, mean + reach, number)


def _sentence(
    samples: int,
    labelled: int,
    shift: Test,
    fit: Test | None,
    fitting: float,
    most: float,
    trust: float,
    gain: Gain | None,
    decision: str,
) -> str:
    unlabelled = samples - labelled
    kinds = [f"{n} {kind}" for n, kind in ((labelled, "labelled"), (unlabelled, "unlabelled")) if n]
    source = f"{' and '.join(kinds)} sample{'' if samples == 1 else 's'}"
    misfit = fit is not None and fitting < 1 and unlabelled > 0
    why = f"the scores of {source} fit no mixture of the federation's classes ({_in_words(fit)})" if fit else ""
    doubt = "perhaps they were taken under other conditions or show an unknown class"
    if decision == "plain" and misfit and (gain is None or gain.mean > 0):
        return f"The plain predictor is kept: {why}; {doubt}."
    if decision == "plain":
        tried = (
            f"it is not clear that a correction gains anything: {_of(gain)}"
            if gain
            else ("too few participants have validation data to try a correction on")
        )
        return f"The plain predictor is kept: {tried}."
    expected = f" {_expected(gain)}" if gain and unlabelled else ""
    if misfit:
        left = unlabelled * fitting * most
        worth = f"{left:.{0 if left >= 10 else 1}f} of {unlabelled}"
        return f"Corrected with caution, as if from {worth} unlabelled samples: {why}; {doubt}.{expected}"
    differ = "differ" if shift.p < RARE else "do not visibly differ"
    fits = "and whether the scores fit them could not be checked, for want of participants' validation data"
    if fit is not None:
        fits = f"{'and the scores fit' if fitting == 1 else 'though the scores do not fit'} them ({_in_words(fit)})"
    part = f" by {trust:.0%}" if decision == "shrunk" else ""
    if unlabelled and most < 1:
        kept = f"{unlabelled * most:.0f} sample{'' if unlabelled * most < 1.5 else 's'}"
        expected = f" They count as {kept}, as many as participants could try it with.{expected}"
    return (
        f"Corrected{part} with the label shares found in {source}, which {differ} from the federation's "
        f"({_in_words(shift)}), {fits}.{expected}"
    )


def _of(gain: Gain) -> str:
    return (
        f"for {gain.participants} participants that stood in as newcomers it was {gain.mean:+.1%} on average, and "
        f"{gain.low:+.1%} to {gain.high:+.1%} is to be expected for one more"
    )


def _expected(gain: Gain) -> str:
    return (
        f"For {gain.participants} participants that stood in as newcomers this changed the accuracy by "
        f"{gain.mean:+.1%} on average; expect {gain.low:+.1%} to {gain.high:+.1%}."
    )


def _in_words(test: Test) -> str:
    return f"chi-square({test.degrees}) = {test.statistic:.3g}, p = {test.p:.2g}"
