# SPDX-License-Identifier: Apache-2.0
"""pFedLA: one round on paper, the sign of the looms' step, and its two ends: training alone and the plain mean."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.pfedla import ALGORITHM, State, init
from tiny import HAND, lines

SMALL = {"embed_dim": 1, "hidden": 1, "layers": 1, "server_lr": 1.0}


def by_hand(setup) -> State:
    """theta is 1 and 2. Looms: v = 1, a hidden unit of 1, heads of 3 and 1 for the first client, 0 for the second."""
    state = init(setup)
    heads = torch.tensor([[[3.0], [1.0]], [[0.0], [0.0]]], dtype=torch.float64)
    looms = {name: torch.zeros_like(value) for name, value in state.looms.items()}
    looms |= {"embedding": looms["embedding"] + 1, "trunk.0.weight": looms["trunk.0.weight"] + 1, "head.weight": heads}
    return State({"line.weight": torch.tensor([[[1.0]], [[2.0]]], dtype=torch.float64)}, looms)


def test_one_round_on_paper() -> None:
    """First client: shares 3/4 and 1/4, mix 1.25; slope 2 (1.25 - 3) = -3.5, change 0.35, its model 1.6.

    Pseudo-gradient -0.35; of the shares, times the models 1 and 2: -0.35 and -0.7, their mean by shares -0.4375. Of the
    scores, with the sum 4: (-0.35 + 0.4375) / 4 = 0.021875 and (-0.7 + 0.4375) / 4 = -0.065625. At rate 1 the head goes
    from 3 and 1 to 2.978125 and 1.065625, towards the model that is on the way; the hidden unit gets 3 * 0.021875 -
    0.065625 = 0. Second client: no scores, so its own model, 2: slope 4 * 2 - 2 = 6, change -0.6, 1.4.
    """
    played = play(dataclasses.replace(ALGORITHM, init=by_hand), lines(), rounds=1, **SMALL, **HAND)
    state = played.state
    assert state.models["line.weight"].flatten().tolist() == pytest.approx([1.6, 1.4], abs=1e-12)
    expected = [2.978125, 1.065625, 0.0, 0.0]
    assert state.looms["head.weight"].flatten().tolist() == pytest.approx(expected, abs=1e-12)
    assert state.looms["head.bias"].flatten().tolist() == pytest.approx([-0.021875, 0.065625, 0.0, 0.0], abs=1e-12)
    for name in ("embedding", "trunk.0.weight"):
        assert state.looms[name].flatten().tolist() == pytest.approx([1.0, 1.0], abs=1e-12)
    assert float(played.diagnostics[0]["own_share"]) == pytest.approx((0.75 + 1) / 2, abs=1e-12)


def test_a_negative_rate_goes_along_the_change_itself() -> None:
    """As the formula is printed: the head goes from 3 and 1 to 3.021875 and 0.934375. Models are the same."""
    played = play(
        dataclasses.replace(ALGORITHM, init=by_hand), lines(), rounds=1, **{**SMALL, "server_lr": -1.0}, **HAND
    )
    assert played.state.models["line.weight"].flatten().tolist() == pytest.approx([1.6, 1.4], abs=1e-12)
    heads = played.state.looms["head.weight"].flatten().tolist()
    assert heads == pytest.approx([3.021875, 0.934375, 0.0, 0.0], abs=1e-12)


def with_heads(value: float):
    """The method, its looms' heads all of one value."""

    def start(setup) -> State:
        state = init(setup)
        return state._replace(looms={**state.looms, "head.weight": torch.full_like(state.looms["head.weight"], value)})

    return dataclasses.replace(ALGORITHM, init=start)


def test_without_scores_everybody_trains_alone() -> None:
    federation = small_federation(("testnets:Normed",))
    played = play(with_heads(0.0), federation, rounds=3)
    for row, client in enumerate(federation.participants):
        alone = play(fedavg.ALGORITHM, federation, rounds=3, cohorts=[[client]] * 3)
        for name, value in alone.state.params.items():
            torch.testing.assert_close(played.state.models[name][row], value, rtol=0, atol=1e-12)


def test_with_equal_scores_everybody_gets_the_mean_of_the_last_models() -> None:
    """Those of clients that were not asked are from before; a newcomer gets the same."""
    federation = small_federation(unseen=1)
    played = play(with_heads(1.0), federation, rounds=2, cohorts=[["0", "1"], ["2"]], server_lr=0.0).admit()
    first = federation.roster["3"].model.init(played.setup.common_seed)
    for name, models in played.state.models.items():
        assert torch.equal(models[3], first[name]) and not torch.equal(models[0], models[1])
        for client in ("0", "3", "4"):
            used = played.deployed(client)["params"][name]
            torch.testing.assert_close(used, models.mean(0), rtol=0, atol=1e-12)


def test_looms_of_clients_that_are_not_asked_rest() -> None:
    federation = small_federation()
    played = play(ALGORITHM, federation, rounds=2, cohorts=[["0", "1", "2", "3", "4"], ["1", "3"]], server_lr=0.1)
    before = play(ALGORITHM, federation, rounds=1, server_lr=0.1).state
    for branch in ("models", "looms"):
        one, other = getattr(before, branch), getattr(played.state, branch)
        for row, asked in enumerate((False, True, False, True, False)):
            assert all(torch.equal(one[name][row], other[name][row]) for name in one) == (not asked), (branch, row)


def test_a_layers_weight_and_bias_are_mixed_alike() -> None:
    federation = small_federation(("lenet:kernels=2",))
    played = play(ALGORITHM, federation, rounds=0, hidden=ALGORITHM.config().hidden)
    assert played.state.looms["head.weight"].shape == (5, 5 * 5, 100)  # clients, layers x clients, hidden
    assert len(federation.roster["0"].model.shapes) == 10
