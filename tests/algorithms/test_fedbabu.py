# SPDX-License-Identifier: Apache-2.0
"""FedBABU: a body below a head that never moves, on paper; tuning, of which training does not know."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg_ft
from fedloom.algorithms.fedbabu import ALGORITHM
from fedloom.core.config import build
from fedloom.core.trees import flatten
from tiny import HAND, Ears, headless, lines

TWO = (((1, 3),), ((1, 0), (1, 1), (1, 2)))


def same(one, other) -> bool:
    a, b = flatten(one), flatten(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_one_round_and_one_step_of_tuning_on_paper() -> None:
    """y = h b x from b = 1, h = 2. First client: residual -1, body slope 2 (-1) 2 = -4, b = 1.4. Second: mean residual
    1, slope 4, b = 0.6. The common body is 1 + 0.4 / 4 - 0.4 * 3 / 4 = 0.8.

    Tuning from b = 0.8, h = 2. First: residual -1.4, slopes -5.6 for b and 2 (-1.4) 0.8 = -2.24 for h: 1.36 and 2.224.
    Second: mean residual 0.6, slopes 2.4 and 0.96: 0.56 and 1.904. A newcomer like the first ends where the first does.
    """
    federation = lines((*TWO, TWO[0]), "tiny:BodyAndHead", unseen=1)
    played = play(ALGORITHM, federation, rounds=1, tune_epochs=1, **HAND)
    played.settle()
    played.admit()
    assert float(played.state.body["body.weight"]) == pytest.approx(0.8, abs=1e-12)
    models = [played.deployed(client)["params"] for client in ("0", "1", "2")]
    assert [float(model["body.weight"]) for model in models] == pytest.approx([1.36, 0.56, 1.36], abs=1e-12)
    assert [float(model["top.weight"]) for model in models] == pytest.approx([2.224, 1.904, 2.224], abs=1e-12)


def test_the_head_is_one_for_all_and_never_moves_in_training() -> None:
    """Neither weight decay nor momentum acts on it, and what is tuned is not trained on."""
    federation = small_federation(("lenet:kernels=2",))
    options = {"momentum": 0.9, "weight_decay": 0.1, "keep_optimiser": True}
    played = play(ALGORITHM, federation, rounds=3, **options)
    first = federation.roster["0"].model.init(played.setup.common_seed)
    for client in federation.participants:
        head = played.recall(client)["own"]
        assert head and all(torch.equal(value, first[name]) for name, value in head.items())
    played.settle()
    tuned = played.recall("0")
    assert all(torch.equal(value, first[name]) for name, value in tuned["own"].items())
    assert all(not torch.equal(tuned["personal"]["params"][name], value) for name, value in tuned["own"].items())


def test_the_head_does_not_travel() -> None:
    federation, ears = small_federation(("lenet:kernels=2",)), Ears()
    played = play(ALGORITHM, federation, wrap=ears, momentum=0.9)
    ALGORITHM.settle(played.setup, played.state, ears(played.session("settling").ask))
    model = federation.roster["0"].model
    body = {name for name in model.shapes if name not in model.head}
    assert ears.down == {f"params/{name}" for name in body}
    assert ears.up == {f"delta/{name}" for name in body} | {"num_samples", "loss"}
    assert set(ears.replies[-1]["0"]) == {"num_samples", "loss"}


@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed"])
def test_with_an_empty_head_it_is_fedavg_ft(model: str) -> None:
    federation = headless(small_federation((model,)))
    options = {"rounds": 2, "tune_epochs": 2, "weight_decay": 0.1}
    babu, tuned = (play(method, federation, **options) for method in (ALGORITHM, fedavg_ft.ALGORITHM))
    for played in (babu, tuned):
        played.settle()
    assert same(babu.state.body, tuned.state.params)
    assert all(same(babu.deployed(client), tuned.deployed(client)) for client in federation.participants)


def test_a_newcomer_without_labels_gets_the_body_below_the_random_head() -> None:
    federation = small_federation(("testnets:Normed",), unseen=1)
    played = play(ALGORITHM, federation, rounds=1, tune_newcomers=False).admit()
    first = federation.roster["4"].model.init(played.setup.common_seed)
    deployed = played.deployed("4")
    head = {name: first[name] for name in federation.roster["4"].model.head}
    assert same(deployed["params"], {**played.state.body, **head})
    assert int(deployed["buffers"]["norm.num_batches_tracked"]) > 0
    assert not ALGORITHM.needs_labels(played.setup.config) and ALGORITHM.needs_labels(ALGORITHM.config())


def test_steps_of_tuning_that_are_given_take_the_place_of_passes() -> None:
    assert build(ALGORITHM.config, {"tune_steps": 3}).tune_epochs == 0
    assert build(ALGORITHM.config, {"local_steps": 3}).tune_epochs == 5
