# SPDX-License-Identifier: Apache-2.0
"""APFL: two rounds of the mix on paper, and its two ends: FedAvg and training alone."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.apfl import ALGORITHM
from fedloom.core.trees import flatten
from tiny import HAND, Ears, lines


def same(one, other) -> bool:
    a, b = flatten(one), flatten(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def numbers(played) -> list[float]:
    """w, then v, alpha and the deployed mix of each client."""
    found = [played.state.params["line.weight"]]
    for client in ("0", "1"):
        memory = played.recall(client)
        found += [memory["personal"]["params"]["line.weight"], memory["alpha"]]
        found.append(played.deployed(client)["params"]["line.weight"])
    return [float(value) for value in found]


def test_two_rounds_on_paper() -> None:
    """Round 1, all at 1: slopes -4 and 2 move v by half of them, to 1.2 and 0.9; v - w is 0, alpha stays; w = 0.95.

    The mixes with w are 1.075 and 0.925. Round 2. First client: slope at the mix 2 (1.075 - 3) = -3.85, v = 1.2 + 0.1 *
    0.5 * 3.85 = 1.3925, alpha = 0.5 + 0.1 * 0.25 * 3.85 = 0.59625; w_i = 1.36. Second: 4 * 0.925 - 2 = 1.7, v = 0.9 -
    0.085 = 0.815, alpha = 0.5 + 0.1 * 0.05 * 1.7 = 0.5085; w_i = 0.77. So w = 0.95 + 0.41 / 4 - 0.18 * 3 / 4 = 0.9175;
    the mixes are 0.59625 * 1.3925 + 0.40375 * 0.9175 and 0.5085 * 0.815 + 0.4915 * 0.9175.
    """
    one, two = (play(ALGORITHM, lines(), rounds=n, **HAND) for n in (1, 2))
    assert numbers(one) == pytest.approx([0.95, 1.2, 0.5, 1.075, 0.9, 0.5, 0.925], abs=1e-12)
    expected = [0.9175, 1.3925, 0.59625, 1.20071875, 0.815, 0.5085, 0.86537875]
    assert numbers(two) == pytest.approx(expected, abs=1e-12)


def test_alpha_stays_between_0_and_1() -> None:
    """At a rate of 5: v is 11 and -4, w = 1 + 20 / 4 - 10 * 3 / 4 = -1.5, the mixes 4.75 and -2.75, slopes 3.5 and -13.

    Along alpha they are 12.5 * 3.5 and -2.5 * -13: both weights end at 0.
    """
    played = play(ALGORITHM, lines(), rounds=2, **{**HAND, "local_lr": 5.0})
    assert [float(played.recall(client)["alpha"]) for client in ("0", "1")] == [0.0, 0.0]


@pytest.mark.parametrize("batchnorm", ["local", "averaged"])
def test_the_global_model_is_fedavgs_for_any_alpha(batchnorm: str) -> None:
    federation = small_federation(("testnets:Normed",))
    options = {"batchnorm": batchnorm, "momentum": 0.9, "keep_optimiser": True}
    avg = play(fedavg.ALGORITHM, federation, rounds=3, **options)
    played = play(ALGORITHM, federation, rounds=3, **options)
    assert same(played.state._asdict(), avg.state._asdict())


def test_without_a_part_of_its_own_a_client_uses_fedavgs_model() -> None:
    federation = small_federation(("testnets:Normed",))
    played, avg = (
        play(method, federation, rounds=2, **options)
        for method, options in ((ALGORITHM, {"alpha": 0.0, "learn_alpha": False}), (fedavg.ALGORITHM, {}))
    )
    assert all(same(played.deployed(client), avg.deployed(client)) for client in federation.participants)


def test_with_nothing_of_the_others_a_client_trains_alone() -> None:
    """With all of its own model it is where FedAvg is whose cohorts are this client."""
    federation = small_federation(("testnets:Normed",))
    options = {"momentum": 0.9, "weight_decay": 0.1, "keep_optimiser": True}
    played = play(ALGORITHM, federation, rounds=3, alpha=1.0, learn_alpha=False, **options)
    for client in federation.participants:
        alone = play(fedavg.ALGORITHM, federation, rounds=3, cohorts=[[client]] * 3, **options)
        own, expected = flatten(played.deployed(client)), flatten(alone.deployed(client))
        for name, value in expected.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=1e-12)


def test_whoever_has_no_model_of_its_own_yet_uses_the_global_one() -> None:
    federation = small_federation(("testnets:Normed",), unseen=1)
    played = play(ALGORITHM, federation, rounds=1, cohorts=[["0"]]).admit()
    assert all(same(played.deployed(client)["params"], played.state.params) for client in ("1", "4"))
    assert not same(played.deployed("0")["params"], played.state.params)
    assert int(played.deployed("4")["buffers"]["norm.num_batches_tracked"]) > 0


def test_nothing_of_the_own_model_travels() -> None:
    federation, ears = small_federation(), Ears()
    play(ALGORITHM, federation, wrap=ears)
    names = set(federation.roster["0"].model.shapes)
    assert ears.up == {f"delta/{name}" for name in names} | {"num_samples", "loss"}
    assert ears.down == {f"params/{name}" for name in names}
