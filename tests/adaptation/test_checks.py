# SPDX-License-Identifier: Apache-2.0
"""The checks: what participants tell, what a newcomer makes of it, and the goals on data whose truth is known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedloom.adaptation.checks import (
    CRITICAL,
    Reference,
    chi_square,
    combine,
    judge,
    log_ratio,
    no_reference,
    statistics,
)
from fedloom.adaptation.dirichlet import estimate, fit_dirichlet, shares

CLASSES, DIMENSIONS, WIDTH = 10, 8, 1.3


class World(NamedTuple):
    """Ten normal classes of equal width, whose log-likelihoods are the scores: about 70% accuracy with even shares."""

    centres: np.ndarray
    alpha: Tensor
    reference: Reference

    def draw(self, rng: np.random.Generator, priors: np.ndarray, samples: int, push: float = 0.0):
        """Scores and labels (newcomers, samples) of newcomers with these priors; ``push`` moves all features."""
        labels = np.stack([rng.choice(CLASSES, samples, p=prior) for prior in priors])
        x = self.centres[labels] + WIDTH * rng.standard_normal((*labels.shape, DIMENSIONS)) + push
        far = ((x[..., None, :] - self.centres) ** 2).sum(-1)
        return torch.as_tensor(-far / (2 * WIDTH**2)), torch.as_tensor(labels)


def world(rng: np.random.Generator, priors: np.ndarray) -> World:
    """The Dirichlet and the reference of participants with these priors."""
    made = World(rng.standard_normal((CLASSES, DIMENSIONS)), torch.ones(CLASSES), no_reference(torch.ones(CLASSES)))
    scores, labels = made.draw(rng, priors, 100)
    counts = np.stack([np.bincount(row, minlength=CLASSES) for row in labels.numpy()])
    of = torch.nn.functional.one_hot(labels, CLASSES).double()
    found = statistics(scores)
    second = torch.einsum("cnk,cni,cnj->ckij", of, found, found)
    reference = combine(of.sum(1), torch.einsum("cnk,cni->cki", of, found), second)
    return made._replace(alpha=torch.as_tensor(fit_dirichlet(counts)), reference=reference)


def priors_of(rng: np.random.Generator, kind: str, number: int) -> np.ndarray:
    if kind != "two classes":
        return rng.dirichlet([float(kind)] * CLASSES, number)
    made = np.zeros((number, CLASSES))
    for row in made:
        share = rng.uniform(0.4, 0.6)
        row[rng.choice(CLASSES, 2, replace=False)] = share, 1 - share
    return made


def plain_em(scores: Tensor, steps: int = 200) -> Tensor:
    prior = torch.full_like(scores[:, 0], 1 / CLASSES)
    for _ in range(steps):
        prior = torch.softmax(scores + torch.log(prior)[:, None], -1).mean(1).clamp(min=1e-12)
    return prior


class Accuracies(NamedTuple):
    raw: float
    em: float
    unchecked: float
    checked: float
    flagged: float


def accuracies(kind: str, samples: int, push: float = 0.0, newcomers: int = 200) -> Accuracies:
    rng = np.random.default_rng(0)
    made = world(rng, priors_of(rng, kind, 60))
    scores, labels = made.draw(rng, priors_of(rng, kind, newcomers), samples + 200, push)
    given, tested, truth = scores[:, :samples], scores[:, samples:], labels[:, samples:]

    def accuracy(outputs: Tensor) -> float:
        return 100 * float((outputs.argmax(-1) == truth).double().mean())

    def told(prior: Tensor) -> Tensor:
        return tested + torch.log(prior)[:, None]

    expected = estimate(given, made.alpha).counts
    mean, number = statistics(given).mean(1), torch.full((newcomers,), float(samples))
    verdict = judge(torch.zeros_like(expected), expected, mean, number, made.alpha, made.reference)
    checked = torch.where(verdict.keep_plain[:, None, None], tested, told(shares(verdict.counts, made.alpha)))
    return Accuracies(
        accuracy(tested),
        accuracy(told(plain_em(given))),
        accuracy(told(shares(expected, made.alpha))),
        accuracy(checked),
        float((verdict.weight < 1).double().mean()),
    )


@pytest.mark.parametrize("samples", [1, 5, 10, 30])
def test_like_clients_lose_nothing_by_few_samples(samples: int) -> None:
    found = accuracies("10", samples)
    assert found.checked > found.raw - 0.5 and found.em < found.raw - 3


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("kind", ["0.1", "two classes"])
def test_unlike_clients_lose_nothing_by_few_samples(kind: str, samples: int) -> None:
    found = accuracies(kind, samples)
    assert found.checked > found.raw - 0.5


@pytest.mark.parametrize("samples", [10, 30, 100])
@pytest.mark.parametrize("kind", ["0.1", "two classes"])
def test_unlike_clients_gain_at_least_what_plain_em_gains(kind: str, samples: int) -> None:
    found = accuracies(kind, samples)
    assert found.checked >= found.em - 0.1 and found.checked > found.raw + 10


@pytest.mark.parametrize("kind", ["10", "0.5", "two classes"])
def test_false_alarms_are_rare_and_cost_nothing(kind: str) -> None:
    found = accuracies(kind, 100)
    assert found.flagged < 0.1 and abs(found.checked - found.unchecked) < 0.2


def test_a_feature_shift_is_noticed_and_does_not_do_the_harm_that_it_would() -> None:
    found = accuracies("10", 300, push=1.0)
    assert found.flagged > 0.95
    assert found.unchecked < found.raw - 2 and found.checked > found.raw - 1


def test_unlike_clients_keep_most_of_their_gain_under_a_feature_shift() -> None:
    found = accuracies("two classes", 100, push=0.5)
    assert found.flagged > 0.5 and found.checked > found.raw + 0.7 * (found.unchecked - found.raw) > found.raw + 5


def test_a_class_that_nobody_has_is_noticed() -> None:
    rng = np.random.default_rng(1)
    made = world(rng, priors_of(rng, "10", 60))
    made.centres[:] += 4 * rng.standard_normal((1, DIMENSIONS))  # samples from elsewhere, old centres in the scores
    elsewhere, _ = made.draw(rng, np.eye(CLASSES)[:1], 60)
    x = made.centres[0] + 6 + WIDTH * rng.standard_normal((60, DIMENSIONS))
    strange = torch.as_tensor(-((x[:, None] - made.centres) ** 2).sum(-1) / (2 * WIDTH**2))[None]
    for scores, fits in ((elsewhere, True), (strange, False)):
        expected = estimate(scores, made.alpha).counts
        mean, number = statistics(scores).mean(1), torch.tensor([60.0])
        verdict = judge(torch.zeros_like(expected), expected, mean, number, made.alpha, made.reference)
        assert bool(verdict.misfit < 20) is fits and bool(verdict.keep_plain) is not fits


def test_the_distance_by_hand() -> None:
    """One class, mean (1, 2), variances 4 and 9, 100 samples at (1.4, 2), 400 samples behind the mean.

    The spread of the mean is 4/100 + 4/400 = 0.05, so that the distance is 0.16 / 0.05 = 3.2.
    """
    spread = torch.diag(torch.tensor([4.0, 9.0]))[None]
    one = Reference(torch.tensor([[1.0, 2.0]]), spread, spread / 400, torch.zeros(2, 2), torch.tensor(400.0))
    found = chi_square(torch.tensor([1.4, 2.0]), torch.tensor(100.0), torch.ones(1), one)
    assert abs(float(found) - 3.2) < 1e-2
    between = one._replace(between=torch.diag(torch.tensor([0.05, 0.0])))
    assert abs(float(chi_square(torch.tensor([1.4, 2.0]), torch.tensor(100.0), torch.ones(1), between)) - 1.6) < 1e-2


def test_the_distance_is_chi_square_where_the_mixture_is_right() -> None:
    rng = np.random.default_rng(3)
    prior = np.array([priors_of(rng, "10", 1)[0]] * 2000)
    made = world(rng, priors_of(rng, "10", 400))
    scores, _ = made.draw(rng, prior, 40)
    found = chi_square(statistics(scores).mean(1), torch.tensor(40.0), torch.as_tensor(prior), made.reference)
    assert stats.kstest(found.numpy(), "chi2", args=(2,)).statistic < 0.06


def test_what_a_sample_counts() -> None:
    one = no_reference(torch.ones(3))._replace(
        covariance=torch.eye(2).repeat(3, 1, 1), between=torch.zeros(2, 2), unsure=torch.zeros(3, 2, 2)
    )
    votes, alpha = torch.tensor([10.0, 0, 0]), torch.ones(3)
    near, far = (judge(0 * votes, votes, torch.tensor([off, 0.0]), torch.tensor(10.0), alpha, one) for off in (0.1, 2))
    assert float(near.weight) == 1 and torch.equal(near.counts, votes) and not near.keep_plain
    expected = (CRITICAL / 40) ** 2
    assert abs(float(far.weight) - expected) < 1e-3 * expected + 1e-5
    torch.testing.assert_close(far.counts, far.weight * votes)
    labelled = judge(votes, 0 * votes, torch.tensor([2.0, 0.0]), torch.tensor(10.0), alpha, one)
    assert torch.equal(labelled.counts, votes) and not labelled.keep_plain  # labels are trusted whatever the features


def test_scores_that_are_no_numbers_fit_nothing() -> None:
    votes = torch.ones(2)
    nan = torch.tensor([torch.nan, 0.0])
    found = judge(0 * votes, votes, nan, torch.tensor(2.0), votes, no_reference(votes))
    assert found.misfit.isfinite() and bool(found.keep_plain)


def test_without_validation_data_everything_fits() -> None:
    reference = combine(torch.zeros(4, 3), torch.zeros(4, 3, 2), torch.zeros(4, 3, 2, 2))
    found = chi_square(torch.tensor([50.0, 1.0]), torch.tensor(10.0), torch.ones(3) / 3, reference)
    assert float(found) < 1e-3


def test_clients_that_differ_by_more_than_chance_are_allowed_for() -> None:
    rng = np.random.default_rng(0)
    alike = torch.as_tensor(rng.standard_normal((50, 40, 2)))
    unlike = alike + torch.as_tensor(rng.standard_normal((50, 1, 2)))
    for samples, low, high in ((alike, 0.0, 0.05), (unlike, 0.5, 1.5)):
        second = torch.einsum("cni,cnj->cij", samples, samples)[:, None]
        found = combine(torch.full((50, 1), 40.0).double(), samples.sum(1)[:, None], second)
        assert low <= float(found.between[0, 0]) < high


def test_the_ratio_is_zero_for_the_federations_shares_and_grows_with_the_shift() -> None:
    scores, common = torch.log(torch.tensor([[0.9, 0.1], [0.8, 0.2]])), torch.tensor([0.5, 0.5])
    assert torch.equal(log_ratio(scores, common, common), torch.zeros(2))
    expected = torch.log(torch.tensor([0.9 * 0.9 + 0.1 * 0.1, 0.9 * 0.8 + 0.1 * 0.2]) / 0.5)
    torch.testing.assert_close(log_ratio(scores, torch.tensor([0.9, 0.1]), common), expected)


def test_noise_on_what_participants_tell_raises_no_alarm() -> None:
    """With as much noise as leaves a reference, newcomers that fit are still rarely told that they do not."""
    rng = np.random.default_rng(0)
    made = world(rng, priors_of(rng, "10", 60))
    scores, labels = made.draw(rng, priors_of(rng, "10", 60), 100)
    of, found = torch.nn.functional.one_hot(labels, CLASSES).double(), statistics(scores)
    sums = (
        of.sum(1),
        torch.einsum("cnk,cni->cki", of, found),
        torch.einsum("cnk,cni,cnj->ckij", of, found, found),
    )
    given, _ = made.draw(rng, priors_of(rng, "10", 300), 100)
    counts = estimate(given, made.alpha).counts
    for noise in (1.0, 10.0, 100.0):
        noisy = [told + noise * torch.as_tensor(rng.standard_normal(told.shape)) for told in sums]
        reference = combine(*noisy, noise)
        verdict = judge(0 * counts, counts, statistics(given).mean(1), torch.tensor(100.0), made.alpha, reference)
        assert float((verdict.weight < 1).double().mean()) < 0.1
        assert (float(reference.samples) > 0) == (noise < 100)
