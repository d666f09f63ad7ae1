# SPDX-License-Identifier: Apache-2.0
"""pFedMe: theta, the copies and the global model on paper, and who is served with which."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.pfedme import ALGORITHM
from fedloom.core.errors import RoundError
from fedloom.core.trees import flatten
from tiny import HAND, POINTS, Ears, lines

PAPER = {**HAND, "personal_lr": 0.1, "pull": 2.0}
"""lambda = 2, both rates 0.1: a copy goes a fifth of the way to theta."""


def thetas(played, *clients: str) -> list[float]:
    return [float(played.deployed(client)["params"]["line.weight"]) for client in clients]


@pytest.mark.parametrize(
    ("inner_steps", "theta", "mean"), [(1, [1.4, 0.8], 1.02), (2, [1.64, 0.72], 1.036)], ids=["K=1", "K=2"]
)
def test_one_batch_on_paper(inner_steps: int, theta: list[float], mean: float) -> None:
    """At theta = w there is no pull: 1.4 and 0.8. The copies go to 1.08 and 0.96; their equal mean is 1.02.

    A second step. First client: 2 (1.4 - 3) + 2 (1.4 - 1) = -2.4 leads to 1.64. Second: 1.2 + 2 (0.8 - 1) = 0.8 leads
    to 0.72. The copies go to 1.128 and 0.944, their mean is 1.036.
    """
    played = play(ALGORITHM, lines(), rounds=1, inner_steps=inner_steps, **PAPER)
    assert thetas(played, "0", "1") == pytest.approx(theta, abs=1e-12)
    assert float(played.state.params["line.weight"]) == pytest.approx(mean, abs=1e-12)


def test_two_batches_on_paper() -> None:
    """K = 1, R = 2, first client: theta 1.4 and copy 1.08; then -3.2 + 2 (1.4 - 1.08) = -2.56 leads to 1.656.

    The copy goes to 1.08 + 0.2 * 0.576 = 1.1952. Alone and with beta = 2 the server goes to 1 + 2 * 0.1952 = 1.3904.
    """
    options = {**PAPER, "local_epochs": 2, "inner_steps": 1, "server_lr": 2.0}
    played = play(ALGORITHM, lines(), rounds=1, cohorts=[["0"]], **options)
    assert thetas(played, "0", "1") == pytest.approx([1.656, 1.3904], abs=1e-12)  # the other was never asked


def test_the_copies_can_be_deployed_as_the_authors_code_scores_them() -> None:
    """K = 2: theta is 1.64 and 0.72, the copies 1.128 and 0.944; a newcomer's is w + 0.2 of its way, 1.036 + ...

    From w = 1.036 with the sample (1, 3): slope -3.928, theta 1.4288; then -3.1424 + 2 * 0.3928 = -2.3568, 1.66448. The
    copy goes a fifth of 0.62848 to 1.161696. The global model is the same as ever.
    """
    federation = lines((*POINTS, POINTS[0]), unseen=1)
    played = play(ALGORITHM, federation, rounds=1, inner_steps=2, deployed="copy", **PAPER).admit()
    assert thetas(played, "0", "1", "2") == pytest.approx([1.128, 0.944, 1.161696], abs=1e-12)
    assert float(played.state.params["line.weight"]) == pytest.approx(1.036, abs=1e-12)


def test_every_round_starts_from_the_global_model() -> None:
    """K = 1: w = 1.02 after round 1; the first client's theta is 1.02 - 0.2 (1.02 - 3) = 1.416, not on from 1.4."""
    played = play(ALGORITHM, lines(), rounds=2, inner_steps=1, **PAPER)
    assert thetas(played, "0") == pytest.approx([1.416], abs=1e-12)


def test_a_copy_that_goes_all_the_way_is_theta() -> None:
    played = play(ALGORITHM, lines(), rounds=1, cohorts=[["0"]], **{**PAPER, "local_lr": 0.5})
    assert float(played.state.params["line.weight"]) == pytest.approx(thetas(played, "0")[0], abs=1e-12)


def test_with_hardly_any_pull_and_one_batch_it_is_fedavg_with_equal_weights() -> None:
    federation = small_federation(("testnets:Dropping",), sizes=(6, 6, 6))
    plain = {"batch_size": 99, "momentum": 0.0, "weight_decay": 0.01}
    loose = {"local_epochs": 1, "inner_steps": 1, "personal_lr": 0.05, "pull": 1e-9, "local_lr": 1e9}
    one = play(ALGORITHM, federation, **plain, **loose)
    other = play(fedavg.ALGORITHM, federation, local_epochs=1, local_lr=0.05, **plain)
    for name, value in other.state.params.items():
        torch.testing.assert_close(one.state.params[name], value, rtol=0, atol=1e-8)


def test_everybody_may_train_though_the_cohort_alone_is_averaged() -> None:
    federation, ears = small_federation(), Ears()
    some, all_ = (
        play(ALGORITHM, federation, rounds=1, cohorts=[["0", "3"]], everybody_trains=everybody, wrap=ears)
        for everybody in (False, True)
    )
    assert ears.asked == [["0", "3"], ["0", "3"], ["1", "2", "4"]]
    assert all(torch.equal(some.state.params[name], value) for name, value in all_.state.params.items())
    assert float(some.recall("1")["personal"]["trained"]) == 0 and float(all_.recall("1")["personal"]["trained"]) == 1


def test_what_others_than_the_cohort_reply_is_not_used_and_may_be_missing() -> None:
    def deaf(ask):
        def some(program, shared, mine):
            if "0" not in mine:
                raise RoundError("Nobody gave a usable reply.")
            return ask(program, shared, mine)

        return some

    federation = small_federation()
    one, other = (
        play(ALGORITHM, federation, rounds=1, cohorts=[["0"]], everybody_trains=everybody, wrap=deaf).state.params
        for everybody in (True, False)
    )
    assert all(torch.equal(one[name], value) for name, value in other.items())


def test_theta_does_not_travel() -> None:
    ears = Ears()
    played = play(ALGORITHM, small_federation(("testnets:Normed",)), rounds=2, wrap=ears)
    assert ears.up == {f"delta/{name}" for name in played.state.params} | {"num_samples", "loss"}
    deployed = flatten(played.deployed("0"))
    assert torch.equal(deployed["buffers/norm.running_mean"], played.recall("0")["buffers"]["norm.running_mean"])
    assert not torch.equal(deployed["params/out.weight"], played.state.params["out.weight"])


@pytest.mark.parametrize(("trains", "end"), [(True, 1.416), (False, 1.02)])
def test_a_newcomer_takes_some_steps_of_theta_or_the_global_model(trains: bool, end: float) -> None:
    """K = 1, with the first client's sample: from w = 1.02 to 1.02 - 0.2 (1.02 - 3) = 1.416."""
    federation = lines((*POINTS, POINTS[0]), unseen=1)
    played = play(ALGORITHM, federation, rounds=1, inner_steps=1, train_newcomers=trains, **PAPER).admit()
    assert thetas(played, "2") == pytest.approx([end], abs=1e-12)
    assert ALGORITHM.needs_labels(played.setup.config) == trains
