# SPDX-License-Identifier: Apache-2.0
"""What an admission found out about a newcomer, as numbers, as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from scipy import stats
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
    """What a sample without a label counted, from 0 to 1."""
    decision: Literal["corrected", "shrunk", "plain"]
    sentence: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        tests = {name: test and test._asdict() for name, test in (("shift", self.shift), ("fit", self.fit))}
        return {**asdict(self), **tests, "level": LEVEL, "shares": [share._asdict() for share in self.shares]}

    def __str__(self) -> str:
        ranked = sorted(self.shares, key=lambda share: -share.share)
        width = max(len(share.name) for share in ranked[:SHOWN])
        lines = [self.sentence, f"Label shares, with {LEVEL:.0%} credible intervals:"]
        lines += [f"  {s.name:{width}}  {s.share:6.1%}  ({s.low:.1%} to {s.high:.1%})" for s in ranked[:SHOWN]]
        if len(ranked) > SHOWN:
            rest = sum(s.share for s in ranked[SHOWN:])
            lines.append(f"  {len(ranked) - SHOWN} other classes: {rest:.1%} together")
        return "\n".join(lines)


def report(memory: Tree, alpha: Tensor, reference: Tree, samples: int, names: Sequence[str]) -> Report:
    """The report on a newcomer from what it kept of its admission (``prior._estimate_final``)."""
    found: Tree = memory["admission"]
    posterior = Estimate(memory["label_counts"].cpu(), alpha.cpu(), found["evidence"].cpu())
    bounds = torch.stack([posterior.shares.double(), *posterior.interval(LEVEL)]).T.tolist()
    shares = tuple(Share(name, *row) for name, row in zip(names, bounds))
    degrees = len(alpha) - 1
    ratio = max(0.0, float(found["ratio"]))
    shift = Test(ratio, degrees, float(stats.chi2.sf(ratio, degrees)))
    misfit, weight, labelled = float(found["misfit"]), float(found["weight"]), round(float(found["labelled"]))
    known = float(reference["samples"]) > 0
    fit = Test(misfit, STATISTICS, float(stats.chi2.sf(misfit, STATISTICS))) if known else None
    shrunk = weight < 1 and labelled < samples  # labels count in full
    decision: Any = "plain" if bool(memory["keep_plain"]) else "shrunk" if shrunk else "corrected"
    sentence = _sentence(samples, labelled, shift, fit, weight, decision)
    return Report(samples, labelled, shares, shift, fit, weight, decision, sentence)


def _sentence(samples: int, labelled: int, shift: Test, fit: Test | None, weight: float, decision: str) -> str:
    unlabelled = samples - labelled
    kinds = [f"{n} {kind}" for n, kind in ((labelled, "labelled"), (unlabelled, "unlabelled")) if n]
    source = f"{' and '.join(kinds)} sample{'' if samples == 1 else 's'}"
    if decision == "corrected" or fit is None:
        differ = "differ" if shift.p < RARE else "do not visibly differ"
        fits = "and whether the scores fit them could not be checked, for want of participants' validation data"
        if fit is not None:
            fits = f"{'and the scores fit' if weight == 1 else 'though the scores do not fit'} them ({_in_words(fit)})"
        return (
            f"Corrected with the label shares found in {source}, which {differ} from the federation's "
            f"({_in_words(shift)}), {fits}."
        )
    why = f"the scores of {source} fit no mixture of the federation's classes ({_in_words(fit)})"
    doubt = "perhaps they were taken under other conditions or show an unknown class"
    if decision == "plain":
        return f"The plain predictor is kept: {why}; {doubt}."
    left = unlabelled * weight
    worth = f"{left:.{0 if left >= 10 else 1}f} of {unlabelled}"
    return f"Corrected with caution, as if from {worth} unlabelled samples: {why}; {doubt}."


def _in_words(test: Test) -> str:
    return f"chi-square({test.degrees}) = {test.statistic:.3g}, p = {test.p:.2g}"
