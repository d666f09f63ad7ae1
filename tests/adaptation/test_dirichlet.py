# SPDX-License-Identifier: Apache-2.0
"""Label shares: the Dirichlet of a federation and a newcomer's estimate."""

import numpy as np
import pytest
import torch
from scipy import stats

from fedloom.adaptation.dirichlet import Estimate, Stream, estimate, fit_dirichlet, shares


def sharp(labels: torch.Tensor, classes: int, sure: float = 50.0) -> torch.Tensor:
    """Log-likelihoods that leave no doubt about the labels."""
    return sure * torch.nn.functional.one_hot(labels, classes).double()


def test_one_step_of_em_by_hand() -> None:
    """Two classes, alpha = (1, 1), one sample with likelihoods 3 : 1.

    First weights are the mean, 1/2 each: responsibilities 3/4 and 1/4; a = (1.75, 1.25), shares 7/12 and 5/12.
    """
    found = estimate(torch.log(torch.tensor([[3.0, 1.0]])), torch.ones(2), steps=1)
    torch.testing.assert_close(found.counts, torch.tensor([0.75, 0.25]))
    torch.testing.assert_close(found.shares, torch.tensor([7 / 12, 5 / 12]))


def test_known_classes_are_counted_and_smoothed() -> None:
    labels = torch.tensor([0, 0, 2])
    found = estimate(torch.zeros(3, 3), torch.full((3,), 0.5), labels)
    torch.testing.assert_close(found.shares, torch.tensor([2.5, 0.5, 1.5]) / 4.5)


def test_labelled_and_unlabelled_samples_make_one_estimate() -> None:
    truth = torch.tensor([0, 1, 1, 2])
    some = torch.tensor([0, -1, 1, -1])
    found = estimate(sharp(truth, 3), torch.full((3,), 0.1).double(), some)
    torch.testing.assert_close(found.counts, torch.tensor([1.0, 2.0, 1.0]).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("prior", [[0.7, 0.2, 0.1], [1.0, 0.0, 0.0], [1 / 3] * 3])
def test_the_shares_are_recovered_as_samples_grow(prior: list[float]) -> None:
    """Likelihoods are known: three normals one apart, variance 1/4."""
    rng = np.random.default_rng(0)
    errors = []
    for number in (30, 3000):
        labels = rng.choice(3, number, p=prior)
        x = labels + 0.5 * rng.standard_normal(number)
        likelihood = torch.as_tensor(-2.0 * (x[:, None] - np.arange(3)) ** 2)
        found = estimate(likelihood, torch.full((3,), 0.5).double()).shares
        errors.append(float((found - torch.tensor(prior).double()).abs().max()))
    assert errors[1] < 0.03 and errors[1] <= errors[0] + 0.01


def test_a_federation_of_like_clients_shrinks_and_one_of_unlike_clients_does_not() -> None:
    rng = np.random.default_rng(0)
    alike = np.stack([rng.multinomial(100, [0.25] * 4) for _ in range(30)])
    unlike = np.stack([rng.multinomial(100, rng.dirichlet([0.1] * 4)) for _ in range(30)])
    one_sample = sharp(torch.tensor([2]), 4)
    pulled, free = (
        estimate(one_sample, torch.as_tensor(fit_dirichlet(counts))).shares[2] for counts in (alike, unlike)
    )
    assert 0.24 < pulled < 0.3 and free > 0.6


def test_the_dirichlet_is_recovered() -> None:
    rng = np.random.default_rng(1)
    alpha = np.array([0.3, 1.0, 4.0])
    counts = np.stack([rng.multinomial(400, rng.dirichlet(alpha)) for _ in range(2000)])
    np.testing.assert_allclose(fit_dirichlet(counts), alpha, rtol=0.1)


def test_a_class_that_no_participant_has_stays_possible() -> None:
    counts = np.array([[10, 0, 5], [3, 0, 9]])
    alpha = fit_dirichlet(counts)
    assert (alpha > 0).all() and np.isfinite(alpha).all()
    found = estimate(sharp(torch.tensor([1] * 20), 3), torch.as_tensor(alpha))
    assert found.shares.argmax() == 1


def test_no_samples_give_the_federations_mean() -> None:
    alpha = torch.tensor([1.0, 3.0])
    torch.testing.assert_close(estimate(torch.zeros(0, 2), alpha).shares, torch.tensor([0.25, 0.75]))


def test_a_constant_added_to_a_row_changes_nothing() -> None:
    torch.manual_seed(0)
    likelihood, alpha = torch.randn(7, 4), torch.full((4,), 0.3)
    one, other = (estimate(likelihood + shift, alpha).shares for shift in (0.0, 100 * torch.randn(7, 1)))
    torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_a_thousand_classes_in_single_precision_stay_finite() -> None:
    torch.manual_seed(0)
    likelihood = 30 * torch.randn(64, 1000)
    for alpha in (1e-3, 1.0, 1e4):
        found = estimate(likelihood, torch.full((1000,), alpha)).shares
        assert found.isfinite().all() and abs(float(found.sum()) - 1) < 1e-4


def test_the_credible_interval_covers_the_mean_and_narrows() -> None:
    alpha = torch.ones(2).double()
    wide, narrow = (estimate(sharp(torch.tensor([0] + [1] * 2).repeat(n), 2), alpha) for n in (1, 100))
    for found in (wide, narrow):
        low, high = found.interval(0.9)
        assert bool(((low < found.shares) & (found.shares < high)).all())
    assert float((narrow.interval()[1] - narrow.interval()[0]).max()) < float(
        (wide.interval()[1] - wide.interval()[0]).max()
    )


def test_the_credible_interval_of_known_labels_is_the_beta_of_the_counts() -> None:
    found = estimate(torch.zeros(4, 2).double(), torch.ones(2).double(), torch.tensor([0, 0, 0, 1]))
    expected = stats.beta.ppf([0.05, 0.95], 4, 2)
    torch.testing.assert_close(torch.stack(found.interval())[:, 0], torch.as_tensor(expected))


def test_the_credible_interval_holds_what_it_promises_when_classes_are_hard_to_tell_apart() -> None:
    """Two normals 1.5 apart: half of a label's variance is explained; as if labels were sure it would be too narrow."""
    rng, alpha = np.random.default_rng(0), torch.ones(2).double()
    truth = rng.dirichlet([1, 1], 400)[:, 0]
    second = rng.random((400, 100)) > truth[:, None]
    x = 1.5 * second + rng.standard_normal((400, 100))
    found = estimate(torch.as_tensor(-0.5 * (x[..., None] - np.array([0, 1.5])) ** 2), alpha)
    low, high = (bound[:, 0].numpy() for bound in found.interval(0.9))
    assert 0.85 < ((low < truth) & (truth < high)).mean() < 0.97
    sure = Estimate(found.counts, alpha, torch.full_like(found.counts, 100.0)).interval(0.9)
    assert ((sure[0][:, 0].numpy() < truth) & (truth < sure[1][:, 0].numpy())).mean() < 0.8


@pytest.mark.parametrize("distance", [2.0, 4.0])
def test_the_credible_interval_holds_what_it_promises_where_clients_are_unlike(distance: float) -> None:
    """Ten classes, of which a client has few: many shares are almost none, and samples say so."""
    rng, alpha = np.random.default_rng(0), torch.full((10,), 0.1).double()
    truth = rng.dirichlet(alpha.numpy(), 200)
    labels = np.stack([rng.choice(10, 30, p=shares) for shares in truth])
    x = rng.standard_normal((200, 30, 10)) + distance * np.eye(10)[labels]
    low, high = (bound.numpy() for bound in estimate(torch.as_tensor(distance * x), alpha).interval(0.9))
    assert 0.87 < ((low <= truth) & (truth <= high)).mean() < 0.96


def test_the_credible_interval_of_a_class_without_samples_is_that_of_labels() -> None:
    """Scores that leave no doubt are labels, for the classes that nobody voted for too; and none at all is possible."""
    alpha, labels = torch.tensor([0.02, 0.02, 0.3]).double(), torch.zeros(50, dtype=torch.int64)
    seen = estimate(1e3 * torch.eye(3).double()[labels], alpha).interval()
    known = estimate(torch.zeros(50, 3).double(), alpha, labels).interval()
    torch.testing.assert_close(torch.stack(seen), torch.stack(known))
    assert seen[0][1] == 0 and seen[0][0] < 0.99 * seen[1][0]


def test_the_credible_interval_of_very_many_samples_of_one_class_is_of_numbers() -> None:
    alpha = torch.tensor([1e-3, 1e-3])
    found = Estimate(torch.tensor([1e5, 0.0]), alpha, torch.tensor([1e5, 1e5])).interval()
    assert torch.stack(found).isfinite().all()


def test_a_stream_of_one_batch_is_the_estimate_and_forgetting_follows_a_drift() -> None:
    alpha = torch.full((3,), 0.2).double()
    first, second = sharp(torch.tensor([0] * 30), 3), sharp(torch.tensor([2] * 30), 3)
    once = Stream(alpha).update(first, steps=100)
    torch.testing.assert_close(once.shares, estimate(first, alpha).shares)
    steady, fading = Stream(alpha), Stream(alpha, forget=0.1)
    for stream in (steady, fading):
        stream.update(first)
        stream.update(second)
    assert abs(float(steady.estimate.shares[2]) - 0.5) < 0.02 and float(fading.estimate.shares[2]) > 0.85


def test_shares_of_a_stack_of_clients() -> None:
    counts = torch.tensor([[3.0, 1.0], [0.0, 0.0]])
    torch.testing.assert_close(shares(counts, torch.ones(2)), torch.tensor([[4 / 6, 2 / 6], [0.5, 0.5]]))
