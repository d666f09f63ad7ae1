# SPDX-License-Identifier: Apache-2.0
"""FedALA: the mix of the old and the global head on paper; what the weights touch, and what they leave alone."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedala import ALGORITHM, client_init, client_step
from fedloom.core.contract import Batch
from fedloom.core.trees import flatten
from tiny import HAND, Ears, lines

TWO = (((1, 3),), ((1, 0), (1, 1), (1, 2)))


def same(one, other) -> bool:
    a, b = flatten(one), flatten(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_second_round_mixes_on_paper() -> None:
    """y = h b x. Round 1 is FedAvg: (b, h) = (1.4, 2.2) and (0.6, 1.8), in common (0.8, 1.9).

    Round 2, the first client, h mixed: it starts from b = 0.8, h = 1.9. Residual 1.52 - 3 = -1.48, slope of h 2 (-1.48)
    0.8 = -2.368, of its weight -2.368 (1.9 - 2.2) = 0.7104: W = 0.2896, h = 2.2 - 0.3 * 0.2896 = 2.11312. Training:
    residual 0.8 * 2.11312 - 3 = -1.309504, slopes -2.619008 * 2.11312 = -5.53427818496 of b and -2.0952064 of h.
    """
    options = {**HAND, "mixed_tensors": 1}
    federation = lines(TWO, "tiny:BodyAndHead")
    one = play(ALGORITHM, federation, rounds=1, **options)
    assert [float(one.state.params[f"{part}.weight"]) for part in ("body", "top")] == pytest.approx([0.8, 1.9])
    two = play(ALGORITHM, federation, rounds=2, cohorts=[["0", "1"], ["0"]], **options)
    assert float(two.recall("0")["weights"]["top.weight"]) == pytest.approx(0.2896, abs=1e-12)
    expected = [0.8 + 0.553427818496, 2.11312 + 0.20952064]
    used = two.deployed("0")["params"]
    assert [float(used[f"{part}.weight"]) for part in ("body", "top")] == pytest.approx(expected, abs=1e-12)
    # alone in its cohort: the global model becomes its own
    found = [float(two.state.params[f"{part}.weight"]) for part in ("body", "top")]
    assert found == pytest.approx(expected, abs=1e-12)


def test_weights_stay_between_0_and_1() -> None:
    """At a rate of 2 the first client's weight would be 1 - 1.4208."""
    options = {**HAND, "mixed_tensors": 1, "weight_lr": 2.0}
    played = play(ALGORITHM, lines(TWO, "tiny:BodyAndHead"), rounds=2, cohorts=[["0", "1"], ["0"]], **options)
    assert float(played.recall("0")["weights"]["top.weight"]) == 0.0


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_with_weights_that_stay_at_1_it_is_fedavg_with_own_models(optimiser: str) -> None:
    federation = small_federation(("testnets:Normed",))
    options = {"rounds": 3, "optimiser": optimiser, "weight_decay": 0.1}
    played = play(ALGORITHM, federation, weight_lr=0.0, weight_epochs=0, **options)
    avg = play(fedavg.ALGORITHM, federation, **options)
    assert same(played.state._asdict(), avg.state._asdict())
    assert not same(played.deployed("0")["params"], avg.state.params)


def test_a_step_is_on_the_weights_or_one_of_training() -> None:
    federation = small_federation(("testnets:Normed",))
    played = play(ALGORITHM, federation, rounds=1, weight_epochs=2, momentum=0.9, weight_decay=0.1)
    sent, home = ALGORITHM.send(played.setup, played.state, ("0",)), played.home("0")
    carry = client_init(home, sent.shared, {}, played.recall("0"))
    everything, zero = torch.ones(9, dtype=torch.bool), torch.zeros((), dtype=torch.int64)
    for epoch in range(4):
        batch = Batch(federation.x[:9], federation.y[:9], everything, zero, zero + epoch, zero)
        after = client_step(home, sent.shared, carry, batch)
        old, new = carry.training, after.training
        if epoch < 2:
            moved = {name for name, value in old.params.items() if not torch.equal(new.params[name], value)}
            assert moved == {"out.weight", "out.bias"} and not same(after.weights, carry.weights)
            assert same(new.optimiser, old.optimiser) and same(new.buffers, old.buffers) and int(new.steps) == 0
        else:
            assert same(after.weights, carry.weights) and not same(new.optimiser, old.optimiser)
            assert int(new.steps) == epoch - 1 and not same(new.buffers, old.buffers)
        carry = after


def test_the_last_tensors_have_weights_and_they_move() -> None:
    federation = small_federation(("lenet:kernels=2",))
    played = play(ALGORITHM, federation, rounds=3)
    weights = played.recall("0")["weights"]
    assert list(weights) == ["fc3.weight", "fc3.bias"]
    assert all(0 <= float(w.min()) < 1 and float(w.max()) <= 1 for w in weights.values())
    everything = play(ALGORITHM, federation, rounds=1, mixed_tensors=99).recall("0")["weights"]
    assert list(everything) == list(federation.roster["0"].model.shapes)


def test_newcomers_and_participants_that_were_never_asked_use_the_global_model() -> None:
    federation, ears = small_federation(("testnets:Normed",), unseen=1), Ears()
    played = play(ALGORITHM, federation, rounds=1, cohorts=[["0"]], wrap=ears).admit()
    assert all(same(played.deployed(client)["params"], played.state.params) for client in ("1", "4"))
    assert ears.up == {f"delta/{name}" for name in played.state.params} | {"num_samples", "loss"}


@pytest.mark.parametrize(
    ("options", "steps"),
    [({"local_epochs": 0}, 60), ({"local_epochs": 2, "weight_epochs": 1, "weight_steps": 100}, 3 * 3)],
)
def test_steps_on_weights_come_on_top_of_training(options: dict[str, int], steps: int) -> None:
    ears = Ears()
    play(ALGORITHM, small_federation(), rounds=1, cohorts=[["0"]], wrap=ears, **options)  # 9 samples, batches of 4
    assert len(ears.plans[0]["0"].rows) == steps
