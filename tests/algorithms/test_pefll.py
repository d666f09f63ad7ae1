# SPDX-License-Identifier: Apache-2.0
"""PeFLL: three exchanges give the gradients of one chain; what encoder and loom are for, and when."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms.pefll import ALGORITHM, inputs, loom_of, standardised
from fedloom.core.contract import Cohort
from fedloom.core.trees import PerClient
from fedloom.looms.labelled_encoder import describe_labelled
from tiny import Ears


def mean_descriptor(federation, encoder, rows) -> torch.Tensor:
    index = torch.as_tensor(rows)
    return describe_labelled(encoder, federation.x[index], federation.y[index], 3).mean(0)


def test_the_first_descriptor_standardises_all_that_come() -> None:
    """1 and 3 have the mean 2 and, over 2 - 1, the deviation sqrt 2; later ones change nothing."""
    state = play(ALGORITHM, small_federation(), rounds=0).state
    first = standardised(state, torch.tensor([1.0, 3.0], dtype=torch.float64))
    assert float(first.centre) == 2.0 and float(first.scale) == pytest.approx(2**0.5, abs=1e-12)
    assert inputs(first, torch.tensor([4.0, 2.0], dtype=torch.float64)).tolist() == pytest.approx([2**0.5, 0.0])
    again = standardised(first, torch.tensor([7.0, 9.0], dtype=torch.float64))
    assert torch.equal(again.centre, first.centre) and torch.equal(again.scale, first.scale)
    alike = standardised(state, torch.ones(2, dtype=torch.float64))
    assert float(alike.centre) == 1.0 and float(alike.scale) == 1.0


@pytest.mark.parametrize("clip", [50.0, 1e-3], ids=["wide", "tight"])
def test_three_exchanges_give_the_gradients_of_one_chain(clip: float) -> None:
    """Adam's first two steps along the gradient of the mean of <h(v_i), -D_i>, all of it in one place."""
    federation, ears = small_federation(("lenet:kernels=2",), sizes=(9, 5, 13)), Ears()
    options = {"server_lr": 0.01, "server_clip": clip, "descriptor_batches": 2}
    played = play(ALGORITHM, federation, rounds=2, wrap=ears, **options)
    state, spec = play(ALGORITHM, federation, rounds=0, **options).state, str(federation.roster["0"].model.spec)
    loom = loom_of(played.setup)
    leaves = {name: value.clone().requires_grad_() for name, value in {**state.loom, **state.encoder}.items()}
    outer = torch.optim.Adam(leaves.values(), lr=0.01)
    for number in (0, 3):
        told = []
        for client in federation.participants:
            rows = [row for batch in ears.plans[number][client].rows for row in batch]
            assert len(rows) in (5, 8)  # two batches of 4, or what there is
            told.append(mean_descriptor(federation, leaves, rows))
        state = standardised(state, told[0].detach())
        woven = loom(leaves, inputs(state, torch.stack(told)), spec)
        deltas = [
            loom.flatten({n: v[None] for n, v in ears.replies[number + 1][c]["delta"].items()}, spec) for c in "012"
        ]
        outer.zero_grad()
        (-(woven * torch.cat(deltas)).sum() / 3).backward()
        torch.nn.utils.clip_grad_norm_(leaves.values(), clip)
        outer.step()
    moved = 0.0
    for name, value in {**played.state.loom, **played.state.encoder}.items():
        torch.testing.assert_close(value, leaves[name].detach(), rtol=0, atol=1e-9)
    for name, value in play(ALGORITHM, federation, rounds=0).state.encoder.items():
        moved = max(moved, float((played.state.encoder[name] - value).abs().max()))
    assert moved > 1e-3


def test_the_gradient_is_taken_on_the_batches_that_the_descriptor_was_read_off() -> None:
    federation, ears = small_federation(), Ears()
    play(ALGORITHM, federation, rounds=2, wrap=ears)
    assert ears.programs == ["pefll.describe", "train", "pefll.learn"] * 2
    for first in (0, 3):
        for client in federation.participants:
            one, other = (ears.plans[number][client].rows for number in (first, first + 2))
            assert [list(rows) for rows in one] == [list(rows) for rows in other]
    assert [list(rows) for rows in ears.plans[0]["2"].rows] != [list(rows) for rows in ears.plans[3]["2"].rows]


def test_a_client_that_is_lost_after_training_leaves_the_encoders_gradient_a_mean() -> None:
    """Of the others; the loom has heard of it."""
    federation = small_federation(sizes=(9, 9, 9))

    def silent(ask):
        def some(program, shared, mine):
            replies = ask(program, shared, mine)
            return PerClient.of({c: replies[c] for c in replies if program.name != "pefll.learn" or c != "2"})

        return some

    heard, without = (play(ALGORITHM, federation, rounds=1, wrap=wrap, server_clip=0.0) for wrap in (silent, None))
    two = play(ALGORITHM, federation, rounds=1, cohorts=[["0", "1"]], server_clip=0.0)
    for name, value in heard.state.optimiser["mean"].items():
        same = two if name in heard.state.encoder else without
        torch.testing.assert_close(value, same.state.optimiser["mean"][name], rtol=0, atol=1e-12)


def test_models_for_use_come_from_all_training_data() -> None:
    federation = small_federation(("testnets:Normed",), unseen=1)
    played = play(ALGORITHM, federation, rounds=1, server_lr=0.01)
    played.settle()
    played.admit()
    loom, spec = loom_of(played.setup), str(federation.roster["0"].model.spec)
    for client in ("0", "3", "4"):
        told = mean_descriptor(federation, played.state.encoder, federation.roster[client].rows["train"])
        woven = loom.unflatten(loom(played.state.loom, inputs(played.state, told[None]), spec), spec)
        for name, value in played.deployed(client)["params"].items():
            torch.testing.assert_close(value, woven[name][0], rtol=0, atol=1e-12)
    assert int(played.deployed("4")["buffers"]["norm.num_batches_tracked"]) > 0


def test_newcomers_send_their_descriptor_and_nothing_else() -> None:
    federation, ears = small_federation(unseen=2), Ears()
    played = play(ALGORITHM, federation, rounds=1)
    setup = played.setup.joined_by(federation.models)
    ALGORITHM.admit(setup, played.state, Cohort(1, federation.unseen), ears(played.session("admission").ask))
    assert ears.up == {"descriptor"} and ears.asked == [["3", "4"]]
    assert ears.down == {f"encoder/{name}" for name in played.state.encoder}


def test_clients_with_the_same_samples_but_other_labels_get_other_models() -> None:
    federation = small_federation(sizes=(6, 6))
    first, second = (federation.roster[client].rows["train"] for client in ("0", "1"))
    federation.x[second] = federation.x[first]
    federation.y[first], federation.y[second] = 0, 1
    played = play(ALGORITHM, federation, rounds=1)
    played.settle()
    one, other = (played.deployed(client)["params"]["output.weight"] for client in ("0", "1"))
    assert not torch.equal(one, other)
