# SPDX-License-Identifier: Apache-2.0
"""FedAvg-FT: one round and one step of tuning on paper; training does not know of it."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedavg_ft import ALGORITHM
from fedloom.core.contract import Cohort
from fedloom.core.trees import flatten
from fedloom.programs.allowed import programs_of
from tiny import HAND, POINTS, Ears, lines

TUNED = {"tune_epochs": 1}


def same(one, other) -> bool:
    a, b = flatten(one), flatten(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_one_round_and_one_step_of_tuning_on_paper() -> None:
    """FedAvg's round ends at 0.95. First client: 2 (0.95 - 3) = -4.1 leads to 1.36.

    Second: residuals -0.05, 0.95, 0.9 times 2 x are -0.1, 1.9, 3.6, their mean 1.8 leads to 0.77. A newcomer with the
    first client's sample also ends at 1.36. The common model stays at 0.95.
    """
    played = play(ALGORITHM, lines((*POINTS, POINTS[0]), unseen=1), rounds=1, **HAND, **TUNED)
    played.settle()
    played.admit()
    ends = [float(played.deployed(client)["params"]["line.weight"]) for client in ("0", "1", "2")]
    assert ends == pytest.approx([1.36, 0.77, 1.36], abs=1e-12)
    assert float(played.state.params["line.weight"]) == pytest.approx(0.95, abs=1e-12)


@pytest.mark.parametrize("batchnorm", ["local", "averaged"])
@pytest.mark.parametrize("keep_optimiser", [False, True])
def test_training_goes_on_from_the_global_model_as_if_nothing_had_been_tuned(
    batchnorm: str, keep_optimiser: bool
) -> None:
    federation = small_federation(("testnets:Normed",))
    options = {"batchnorm": batchnorm, "keep_optimiser": keep_optimiser}
    plain = play(fedavg.ALGORITHM, federation, rounds=2, **options)
    half = play(ALGORITHM, federation, rounds=1, tune_steps=3, **options)
    half.settle()
    session = half.session(2)
    state, _ = ALGORITHM.round(half.setup, half.state, Cohort(2, federation.participants), session.ask)
    assert same(state._asdict(), plain.state._asdict())
    for client in federation.participants:
        assert same(session.memory[client]["buffers"], plain.memory[client]["buffers"])
        assert not same(session.memory[client]["personal"]["params"], state.params)


def test_a_participant_that_was_never_asked_tunes_too_and_with_statistics_of_its_own() -> None:
    federation = small_federation(("testnets:Normed",))
    played = play(ALGORITHM, federation, rounds=1, cohorts=[["0"]], tune_steps=3)
    before = played.deployed("1")
    assert same(before["params"], played.state.params)
    played.settle()
    after, counted = played.deployed("1"), "norm.num_batches_tracked"
    assert not same(after["params"], played.state.params)
    assert int(after["buffers"][counted]) == 3 and int(played.recall("1")["buffers"][counted]) == 0


def test_without_tuning_it_is_fedavg() -> None:
    federation, ears = small_federation(unseen=1), Ears()
    played = play(ALGORITHM, federation, rounds=2, wrap=ears, tune_steps=0)
    plain = play(fedavg.ALGORITHM, federation, rounds=2)
    played.settle()
    played.admit()
    assert same(played.state._asdict(), plain.state._asdict())
    assert all(same(played.deployed(client)["params"], plain.state.params) for client in federation.roster)
    assert not ALGORITHM.needs_labels(played.setup.config)


def test_newcomers_can_be_served_without_labels() -> None:
    federation = small_federation(unseen=1)
    played = play(ALGORITHM, federation, rounds=1, tune_newcomers=False).admit()
    assert same(played.deployed("4")["params"], played.state.params)
    assert not ALGORITHM.needs_labels(played.setup.config) and ALGORITHM.needs_labels(ALGORITHM.config())


def test_tuning_sends_back_no_parameter_and_is_what_a_client_may_be_asked() -> None:
    federation, ears = small_federation(unseen=1), Ears()
    played = play(ALGORITHM, federation, rounds=1, tune_steps=3)
    for stage in ("settling", "admission"):
        session = played.session(stage)
        heard = ears(session.ask)
        if stage == "settling":
            ALGORITHM.settle(played.setup, played.state, heard)
        else:
            setup = played.setup.joined_by(federation.models)
            ALGORITHM.admit(setup, played.state, Cohort(1, federation.unseen), heard)
    assert ears.asked == [list(federation.participants), ["4"]]
    assert ears.up == {"num_samples", "loss"}
    model, config = federation.roster["0"].model, played.setup.config
    for newcomer in (False, True):
        assert "tune" in [program.name for program in programs_of(ALGORITHM, config, model, newcomer)]
