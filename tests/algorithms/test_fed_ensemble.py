# SPDX-License-Identifier: Apache-2.0
"""Fed-ensemble: two models on paper, whose turn it is, and what is predicted."""

from __future__ import annotations

import pytest
import torch

from conftest import play, setup_of, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fed_ensemble import ALGORITHM, turn_of
from fedloom.core.contract import Cohort
from fedloom.core.errors import ConfigError
from tiny import HAND, Ears, lines

ONE = torch.ones(1, 1, dtype=torch.float64)


def test_two_models_in_three_rounds_on_paper() -> None:
    """One client, from w = 1 for both models: the model of round 1 goes to 1.4, that of round 2 too.

    In round 3, a new age, one of them goes on to 1.72. At x = 1 the mean of both is 1.2, 1.4 and 1.56.
    """
    for rounds, models, mean in ((1, [1.0, 1.4], 1.2), (2, [1.4, 1.4], 1.4), (3, [1.4, 1.72], 1.56)):
        played = play(ALGORITHM, lines([[(1, 3)]]), rounds=rounds, ensemble_size=2, **HAND)
        assert sorted(played.state.params["line.weight"].flatten().tolist()) == pytest.approx(models, abs=1e-12)
        outputs = ALGORITHM.predict(played.home("0"), played.deployed("0"), ONE)
        assert float(outputs) == pytest.approx(mean, abs=1e-12)


def test_a_model_is_the_weighted_mean_of_those_who_have_it() -> None:
    """Gradients -4 and 2. Where both have one model it goes to 0.95, as in FedAvg; else they go to 1.4 and 0.8."""
    federation = lines()
    setup = setup_of(federation, ALGORITHM.config(ensemble_size=2))
    for number in range(1, 9):
        together = turn_of(setup, "0", number) == turn_of(setup, "1", number)
        played = play(ALGORITHM, federation, rounds=0, ensemble_size=2, **HAND)
        everybody = Cohort(number, federation.participants)
        state, _ = ALGORITHM.round(played.setup, played.state, everybody, played.session(number).ask)
        found = sorted(state.params["line.weight"].flatten().tolist())
        assert found == pytest.approx([0.95, 1.0] if together else [0.8, 1.4], abs=1e-12)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_in_an_age_every_client_has_every_model_once(size: int) -> None:
    setup = setup_of(small_federation(), ALGORITHM.config(ensemble_size=size))
    ages = [
        [[turn_of(setup, client, age * size + r) for r in range(1, size + 1)] for client in setup.clients]
        for age in range(4)
    ]
    assert all(sorted(order) == list(range(size)) for age in ages for order in age)
    assert size == 1 or len({str(age) for age in ages}) > 1  # orders are drawn anew
    assert size == 1 or len({str(order) for order in ages[0]}) > 1  # and for each client


@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed"])
def test_a_single_model_is_fedavgs_with_averaged_statistics(model: str) -> None:
    federation = small_federation((model,))
    one = play(ALGORITHM, federation, rounds=3, ensemble_size=1)
    other = play(fedavg.ALGORITHM, federation, rounds=3, batchnorm="averaged")
    for branch in ("params", "buffers"):
        for name, value in getattr(other.state, branch).items():
            torch.testing.assert_close(getattr(one.state, branch)[name][0], value, rtol=0, atol=1e-12)
    x = federation.x[:4]
    outputs = ALGORITHM.predict(one.home("0"), one.deployed("0"), x)
    plain = fedavg.ALGORITHM.predict(other.home("0"), other.deployed("0"), x)
    torch.testing.assert_close(outputs, plain.log_softmax(-1), rtol=0, atol=1e-12)


def test_models_start_apart_and_probabilities_are_averaged() -> None:
    federation = small_federation(("testnets:Normed",))
    played = play(ALGORITHM, federation, rounds=1, ensemble_size=3)
    start, x, model = ALGORITHM.init(played.setup), federation.x[:4], federation.roster["0"].model
    assert not torch.equal(*start.params["out.weight"][:2])
    deployed = played.deployed("0")
    each = [
        model({n: v[k] for n, v in deployed["params"].items()}, {n: v[k] for n, v in deployed["buffers"].items()}, x)
        for k in range(3)
    ]
    mean = torch.stack([scores.softmax(-1) for scores in each]).mean(0)
    home = played.home("0")
    torch.testing.assert_close(ALGORITHM.predict(home, deployed, x).exp(), mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(ALGORITHM.module(home, deployed)(x).exp(), mean, rtol=0, atol=1e-12)


def test_one_model_travels_in_training_and_a_client_keeps_nothing() -> None:
    federation, ears = small_federation(("testnets:Normed",)), Ears()
    played = play(ALGORITHM, federation, rounds=1, wrap=ears)
    model = federation.roster["0"].model
    names, statistics = set(model.shapes), set(model.fresh_buffers())
    assert ears.down == {f"params/{n}" for n in names} | {f"buffers/{n}" for n in statistics}
    assert ears.up == {f"delta/{n}" for n in names} | {f"buffers/{n}" for n in statistics} | {"num_samples", "loss"}
    assert ears.replies[0]["0"]["delta"]["out.weight"].shape == model.shapes["out.weight"]
    assert played.memory["0"]["buffers"]["norm.num_batches_tracked"] == 0


def test_a_newcomer_gets_all_models_without_being_asked() -> None:
    ears = Ears()
    played = play(ALGORITHM, small_federation(("testnets:Normed",), unseen=1), rounds=1)
    ALGORITHM.admit(played.setup, played.state, Cohort(1, ("4",)), ears(played.session("admission").ask))
    assert ears.asked == []
    deployed = played.admit().deployed("4")
    assert deployed["params"] == played.state.params and deployed["buffers"] == played.state.buffers


def test_the_state_of_an_optimiser_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match="trains another model in every round"):
        ALGORITHM.config(keep_optimiser=True)
