# SPDX-License-Identifier: Apache-2.0
"""FedAMP: weights, cloud models and the step near them on paper; the pull has a gradient."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest
import torch

from conftest import play, setup_of, small_federation
from fedloom.algorithms import local
from fedloom.algorithms.fedamp import ALGORITHM, attention, squared_distances
from tiny import HAND, POINTS, Ears, lines

PAPER = {**HAND, "server_lr": 0.1, "pull": 0.1, "likeness": 1.0}
"""alpha = 0.1, sigma = 1, lambda / alpha = 1."""


def models(played) -> list[float]:
    return played.state.models["line.weight"].flatten().tolist()


def test_two_rounds_on_paper() -> None:
    """All start at 1, and so does the cloud: round 1 is plain descent, to 1.4 and 0.8.

    Round 2: 0.36 apart, squared, the weight of the other is 0.1 exp(-0.36) = 0.069768. The clouds are 1.4 - 0.6 *
    0.069768 = 1.358139 and 0.841861. First client: -3.2 + (1.4 - 1.358139) = -3.158139 leads from 1.4 to 1.715814.
    Second: 1.2 + (0.8 - 0.841861) = 1.158139 leads from 0.8 to 0.684186.
    """
    assert models(play(ALGORITHM, lines(), rounds=1, **PAPER)) == pytest.approx([1.4, 0.8], abs=1e-12)
    played = play(ALGORITHM, lines(), rounds=2, **PAPER)
    assert models(played) == pytest.approx([1.715814, 0.684186], abs=1e-6)
    assert float(played.diagnostics[1]["own_weight"]) == pytest.approx(1 - 0.1 * exp(-0.36), abs=1e-12)
    assert float(played.deployed("0")["params"]["line.weight"]) == models(played)[0]


def test_weights_that_sum_to_more_than_one_are_divided_by_their_sum() -> None:
    """Three models at 0, 0 and 1; alpha 2, sigma 1. First row: 2 and 2 / e sum to 2 + 2 / e: 0, 1 / (1 + 1 / e), ...

    Last row: 2 / e twice, 4 / e > 1: a half each. With alpha 0.5 the last row is 0.5 / e twice and 1 - 1 / e.
    """
    setup = setup_of(lines((*POINTS, ((1, 1),))), ALGORITHM.config(server_lr=2.0))
    table = {"w": torch.tensor([[0.0], [0.0], [1.0]], dtype=torch.float64)}
    found = attention(setup, table, ["0", "2"]).tolist()
    assert found[0] == pytest.approx([0, 1 / (1 + exp(-1)), exp(-1) / (1 + exp(-1))], abs=1e-12)
    assert found[1] == pytest.approx([0.5, 0.5, 0], abs=1e-12)
    gentle = replace(setup, config=ALGORITHM.config(server_lr=0.5))
    assert attention(gentle, table, ["2"]).tolist()[0] == pytest.approx(
        [0.5 * exp(-1), 0.5 * exp(-1), 1 - exp(-1)], abs=1e-12
    )


def test_no_weight_is_negative_though_sums_of_1_are_rounded() -> None:
    """Models that are alike: the others' weights are divided by their sum, and nothing is left for the own one."""
    federation = small_federation(sizes=(3,) * 14, dtype=torch.float32)
    setup = setup_of(federation, ALGORITHM.config())
    table = {"w": torch.linspace(0, 1, 14)[:, None]}
    weights = attention(setup, table, setup.clients)
    assert float(weights.min()) >= 0
    torch.testing.assert_close(weights.sum(1), torch.ones(14))


def test_distances_are_over_all_tensors_together() -> None:
    tables = {"a": torch.randn(4, 3, 2, dtype=torch.float64), "b": torch.randn(4, 5, dtype=torch.float64) + 1e3}
    flat = torch.cat([table.flatten(1) for table in tables.values()], 1)
    found = squared_distances(tables, torch.tensor([1, 3]))
    torch.testing.assert_close(found, (flat[[1, 3], None] - flat[None]).square().sum(-1), rtol=0, atol=1e-10)


def test_models_that_are_alike_draw_near_and_others_do_not() -> None:
    """Two pairs with the optima 0 and 6: sigma 1 sees the near neighbour only."""
    federation = lines([[(1, 0)], [(1, 0.4)], [(1, 6)], [(1, 6.4)]])
    held, free = (
        models(play(ALGORITHM, federation, rounds=30, **{**HAND, "server_lr": 0.5, "pull": pull, "likeness": 1.0}))
        for pull in (2.0, 0.0)
    )
    assert abs(held[0] - held[1]) < 0.75 * abs(free[0] - free[1])
    assert held[2] - held[1] > 0.95 * (free[2] - free[1])


@pytest.mark.parametrize("keep_optimiser", [False, True])
def test_without_the_pull_it_is_local_training_from_one_start(keep_optimiser: bool) -> None:
    federation = small_federation(("testnets:Normed",))
    common = lambda model, config, seeds: {"own": model.init(seeds.common)}  # noqa: E731
    cohorts = [["0", "1", "4"], ["1", "2"], ["0", "4"]]
    one = play(ALGORITHM, federation, rounds=3, cohorts=cohorts, pull=0.0, keep_optimiser=keep_optimiser)
    alone = replace(local.ALGORITHM, first_memory=common)
    other = play(alone, federation, rounds=3, cohorts=cohorts, keep_optimiser=keep_optimiser)
    for client in federation.participants:
        a, b = one.deployed(client), other.deployed(client)
        assert all(torch.equal(a[part][name], value) for part in b for name, value in b[part].items())


def test_server_and_client_have_the_same_model() -> None:
    played = play(ALGORITHM, small_federation(), rounds=3, cohorts=[["0", "1"], ["1", "2"], ["0"]])
    for row, client in enumerate(played.setup.clients):
        own = played.recall(client)["model"]
        assert all(torch.equal(played.state.models[name][row], value) for name, value in own.items())


def test_the_cloud_goes_down_and_the_model_up() -> None:
    ears = Ears()
    played = play(ALGORITHM, small_federation(), wrap=ears)
    names = set(played.state.models)
    assert ears.down == {f"cloud/{name}" for name in names}
    assert ears.up == {f"params/{name}" for name in names} | {"num_samples", "loss"}
    sent = ALGORITHM.send(played.setup, played.state, ["0"])
    assert sent.shared == {} and sent.mine["0"] == {}


def test_a_newcomer_gets_the_mean_of_all_models() -> None:
    played = play(ALGORITHM, lines((*POINTS, POINTS[0]), unseen=1), rounds=1, **PAPER).admit()
    assert float(played.deployed("2")["params"]["line.weight"]) == pytest.approx(1.1, abs=1e-12)
    assert not ALGORITHM.needs_labels(played.setup.config)
