# SPDX-License-Identifier: Apache-2.0
"""FedU: the server's step on paper, over complete and given graphs, and its two ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg, local
from fedloom.algorithms.fedu import ALGORITHM, weights_in
from fedloom.core.errors import ConfigError
from tiny import HAND, POINTS, Ears, lines

THREE = (*POINTS, ((1, 1),))
"""A third client, whose gradient at w = 1 is 0."""


def models(played) -> list[float]:
    return played.state.models["line.weight"].flatten().tolist()


@pytest.mark.parametrize(("coupling", "ends"), [(0.05, [1.37, 0.83]), (0.5, [1.1, 1.1])])
def test_one_round_on_paper(coupling: float, ends: list[float]) -> None:
    """Trained to 1.4 and 0.8, 0.6 apart: each goes 0.05 * 0.6 = 0.03 of it, or half of the way."""
    played = play(ALGORITHM, lines(), rounds=1, coupling=coupling, **HAND)
    assert models(played) == pytest.approx(ends, abs=1e-12)
    assert float(played.deployed("1")["params"]["line.weight"]) == pytest.approx(ends[1], abs=1e-12)


def test_only_those_who_took_part_are_neighbours() -> None:
    """The first client goes to 1.4 and the second to 0.8; the third, at 1, neither moves nor is moved to."""
    played = play(ALGORITHM, lines(THREE), rounds=1, cohorts=[["0", "1"]], coupling=0.05, **HAND)
    assert models(played) == pytest.approx([1.37, 0.83, 1.0], abs=1e-12)


def test_a_graph_says_who_is_pulled_to_whom(tmp_path: Path) -> None:
    """Weights 2 between the first and the third client, at 1.4 and 1: 0.1 * 2 * 0.4 = 0.08. The second is alone."""
    path = tmp_path / "graph.npy"
    np.save(path, np.array([[5, 0, 2], [0, 5, 0], [2, 0, 5]]))
    played = play(ALGORITHM, lines(THREE), rounds=1, coupling=0.1, graph=str(path), **HAND)
    assert models(played) == pytest.approx([1.32, 0.8, 1.08], abs=1e-12)
    part = play(ALGORITHM, lines(THREE), rounds=1, cohorts=[["1", "2"]], coupling=0.1, graph=str(path), **HAND)
    assert models(part) == pytest.approx([1.0, 0.8, 1.0], abs=1e-12)


@pytest.mark.parametrize(
    ("matrix", "what"),
    [
        (np.ones((2, 3)), r"float64 \(2, 3\); expected numbers of shape \(2, 2\)"),
        (np.array([["a", "b"], ["b", "a"]]), "expected numbers"),
        (np.array([[0, 1.0], [2.0, 0]]), "must be a symmetric matrix"),
        (np.array([[0, -1.0], [-1.0, 0]]), "must be a symmetric matrix"),
        (np.array([[0, np.nan], [np.nan, 0]]), "must be a symmetric matrix"),
    ],
    ids=["shape", "text", "not symmetric", "negative", "not a number"],
)
def test_another_matrix_is_refused(matrix: np.ndarray, what: str, tmp_path: Path) -> None:
    np.save(tmp_path / "graph.npy", matrix)
    with pytest.raises(ConfigError, match=what):
        weights_in(str(tmp_path / "graph.npy"), 2)


def test_a_file_that_is_no_matrix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot read --graph"):
        weights_in(str(tmp_path / "none.npy"), 2)
    np.save(tmp_path / "objects.npy", np.array([{}, {}]), allow_pickle=True)
    with pytest.raises(ConfigError, match="Cannot read --graph"):
        weights_in(str(tmp_path / "objects.npy"), 2)
    np.savez(tmp_path / "two.npz", a=np.ones(2))
    with pytest.raises(ConfigError, match="has several arrays"):
        weights_in(str(tmp_path / "two.npz"), 2)


def test_without_coupling_it_is_local_training_from_one_start() -> None:
    federation = small_federation(("testnets:Normed",))
    common = lambda model, config, seeds: {"own": model.init(seeds.common)}  # noqa: E731
    cohorts = [["0", "1", "4"], ["1", "2"], ["0", "4"]]
    one = play(ALGORITHM, federation, rounds=3, cohorts=cohorts, coupling=0.0)
    alone = replace(local.ALGORITHM, first_memory=common)
    other = play(alone, federation, rounds=3, cohorts=cohorts, keep_optimiser=False)
    for client in federation.participants:
        for name, value in other.deployed(client)["params"].items():
            torch.testing.assert_close(one.deployed(client)["params"][name], value, rtol=0, atol=1e-12)


def test_with_all_the_way_to_everybody_it_is_fedavg_with_equal_weights() -> None:
    federation = small_federation(sizes=(6, 6, 6, 6))
    one, other = play(ALGORITHM, federation, rounds=3, coupling=0.25), play(fedavg.ALGORITHM, federation, rounds=3)
    for name, value in other.state.params.items():
        torch.testing.assert_close(one.state.models[name], value.expand(4, *value.shape), rtol=0, atol=1e-12)


def test_the_servers_step_keeps_the_mean_of_all_models() -> None:
    federation, ears = small_federation(), Ears()
    played = play(ALGORITHM, federation, rounds=1, cohorts=[["0", "2", "3"]], wrap=ears, coupling=0.1)
    for name, start in ALGORITHM.init(played.setup).models.items():
        trained = start.sum(0) + sum(reply["delta"][name] for reply in ears.replies[0].values())
        torch.testing.assert_close(played.state.models[name].sum(0), trained, rtol=0, atol=1e-12)


def test_a_newcomer_gets_the_mean_of_all_models() -> None:
    played = play(ALGORITHM, lines((*POINTS, POINTS[0]), unseen=1), rounds=1, coupling=0.05, **HAND).admit()
    assert float(played.deployed("2")["params"]["line.weight"]) == pytest.approx(1.1, abs=1e-12)
    assert not ALGORITHM.needs_labels(played.setup.config)
