# SPDX-License-Identifier: Apache-2.0
"""LG-FedAvg: both phases on paper, what travels in each, and its three ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import play, setup_of, small_federation
from fedloom.algorithms import fedavg, fedper, local
from fedloom.algorithms.lg_fedavg import ALGORITHM
from fedloom.core.contract import Cohort
from fedloom.core.trees import flatten, leaves
from tiny import HAND, Ears, lines

TWO = (((1, 3),), ((1, 0), (1, 1), (1, 2)))


def numbers(played, client: str) -> list[float]:
    """b and h of what a client deploys."""
    params = played.deployed(client)["params"]
    return [float(params[name]) for name in ("body.weight", "top.weight")]


def test_two_rounds_on_paper() -> None:
    """y = h b x from b = 1, h = 2. FedAvg's round: slopes -4 and -2, and 4 and 2 for the second client.

    It has 3 of 4 samples: b = 1 + 0.1 - 0.3 = 0.8 and h = 2 + 0.05 - 0.15 = 1.9.

    Then bodies go apart. First client: 1.52 - 3 = -1.48, slopes -2.96 * 1.9 = -5.624 and -2.96 * 0.8 = -2.368: b =
    1.3624, h = 2.1368. Second: the mean residual is 0.52, slopes 1.976 and 0.832: b = 0.6024, h = 1.8168. The common
    head is the equal mean, 1.9768.
    """
    played = play(ALGORITHM, lines(TWO, "tiny:BodyAndHead"), rounds=1, **HAND)
    assert numbers(played, "0") == numbers(played, "1") == pytest.approx([0.8, 1.9], abs=1e-12)
    played = play(ALGORITHM, lines(TWO, "tiny:BodyAndHead"), rounds=2, **HAND)
    assert numbers(played, "0") == pytest.approx([1.3624, 1.9768], abs=1e-12)
    assert numbers(played, "1") == pytest.approx([0.6024, 1.9768], abs=1e-12)


@pytest.mark.parametrize(("rounds", "noted"), [(0, False), (3, True), (4, False)])
def test_a_run_that_never_comes_to_its_second_phase_says_so(rounds: int, noted: bool) -> None:
    setup = setup_of(small_federation(), ALGORITHM.config(pretrain_rounds=3), rounds=rounds)
    assert bool(ALGORITHM.notes(setup)) == noted


def test_the_next_round_puts_the_common_head_on_the_kept_body() -> None:
    """First client alone: 1.3624 * 1.9768 - 3 = -0.30680768, slopes -1.2129948... and -0.8359896...

    b = 1.3624 + 0.0613615 * 1.9768 = 1.483700, h = 1.9768 + 0.0613615 * 1.3624 = 2.060399. The other client's body
    stays, under the new head.
    """
    federation = lines(TWO, "tiny:BodyAndHead")
    played = play(ALGORITHM, federation, rounds=3, cohorts=[["0", "1"], ["0", "1"], ["0"]], **HAND)
    assert numbers(played, "0") == pytest.approx([1.483700, 2.060399], abs=1e-6)
    assert numbers(played, "1") == pytest.approx([0.6024, 2.060399], abs=1e-6)


def test_a_client_that_comes_late_starts_from_fedavgs_body() -> None:
    """b = 0.8 and the head after the first client's round 2, 2.1368."""
    played = play(ALGORITHM, lines(TWO, "tiny:BodyAndHead"), rounds=2, cohorts=[["0", "1"], ["0"]], **HAND)
    assert numbers(played, "1") == pytest.approx([0.8, 2.1368], abs=1e-12)
    sent = ALGORITHM.send(played.setup, played.state, ["0", "1"])
    assert set(flatten(sent.shared)) == {"params/top.weight"}
    assert sent.mine["0"] == {} and set(flatten(sent.mine["1"])) == {"params/body.weight"}


def test_who_does_not_answer_has_no_body_for_the_server() -> None:
    def deaf(ask):
        def some(program, shared, mine):
            replies = ask(program, shared, mine)
            return type(replies).of({c: replies[c] for c in replies if c != "1"})

        return some

    played = play(ALGORITHM, lines(TWO, "tiny:BodyAndHead"), rounds=2, wrap=deaf, **HAND)
    assert played.state.started.tolist() == [True, False]
    assert set(flatten(ALGORITHM.send(played.setup, played.state, ["1"]).shared)) == {
        "params/body.weight", "params/top.weight"
    }  # fmt: skip


def test_only_the_head_travels_when_bodies_have_gone_apart() -> None:
    federation, before, after = small_federation(("lenet:kernels=2",)), Ears(), Ears()
    played = play(ALGORITHM, federation, rounds=2, wrap=before)
    model = federation.roster["0"].model
    assert before.programs == ["train", "lg_fedavg.train"]
    assert before.down == {f"params/{name}" for name in model.shapes}
    assert {name for name, _ in leaves(before.replies[1]["0"]["delta"])} == model.head
    ALGORITHM.round(played.setup, played.state, Cohort(3, played.setup.clients), after(played.session(3).ask))
    assert after.down == {f"params/{name}" for name in model.head}
    assert after.up == {f"delta/{name}" for name in model.head} | {"num_samples", "loss"}


def test_if_everything_is_the_head_it_is_fedavg_with_equal_weights() -> None:
    federation = small_federation(sizes=(6, 6, 6))
    model = federation.roster["0"].model
    model.head = frozenset(model.shapes)
    one = play(ALGORITHM, federation, rounds=3, pretrain_rounds=0)
    other = play(fedavg.ALGORITHM, federation, rounds=3)
    for name, value in other.state.params.items():
        torch.testing.assert_close(one.state.head[name], value, rtol=0, atol=1e-12)


def test_if_nothing_is_the_head_it_is_local_training() -> None:
    federation = small_federation()
    federation.roster["0"].model.head = frozenset()
    one = play(ALGORITHM, federation, rounds=3, pretrain_rounds=0)
    common = lambda model, config, seeds: {"own": model.init(seeds.common)}  # noqa: E731
    other = play(replace(local.ALGORITHM, first_memory=common), federation, rounds=3, keep_optimiser=False)
    for client in federation.participants:
        deployed = other.deployed(client)["params"]
        assert all(torch.equal(value, deployed[name]) for name, value in one.deployed(client)["params"].items())


def test_with_body_and_head_exchanged_it_is_fedper_with_equal_weights() -> None:
    federation, turned = small_federation(sizes=(6, 6, 6)), small_federation(sizes=(6, 6, 6))
    model = turned.roster["0"].model
    model.head = frozenset(model.shapes) - model.head
    common = lambda model, config, seeds: {  # noqa: E731
        "own": {name: value for name, value in model.init(seeds.common).items() if name in model.head}
    }
    one = play(ALGORITHM, federation, rounds=3, pretrain_rounds=0)
    other = play(replace(fedper.ALGORITHM, first_memory=common), turned, rounds=3)
    for client in federation.participants:
        for name, value in other.deployed(client)["params"].items():
            torch.testing.assert_close(one.deployed(client)["params"][name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("rounds", "end"),
    [(0, [0.8, 1.9]), (1, [1.360842, 1.9768]), (2, [1.483359, 1.9768])],
    ids=["without labels", "one round", "two rounds"],
)
def test_a_newcomer_trains_a_body_under_the_common_head_or_gets_fedavgs_model(rounds: int, end: list[float]) -> None:
    """With the sample (1, 3), from b = 0.8 and h = 1.9768: 1.58144 - 3 = -1.41856, slope -2.83712 * 1.9768 = -5.60842.

    b = 1.360842; the head that was trained with it is left behind. The second round goes on from there: 2.690112 - 3 =
    -0.309888, slope -0.619776 * 1.9768 = -1.22517, b = 1.483359.
    """
    federation = lines((*TWO, TWO[0]), "tiny:BodyAndHead", unseen=1)
    played = play(ALGORITHM, federation, rounds=2, admit_rounds=rounds, **HAND).admit()
    assert numbers(played, "2") == pytest.approx(end, abs=1e-6)
    assert ALGORITHM.needs_labels(played.setup.config) == bool(rounds)
