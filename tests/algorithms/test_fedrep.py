# SPDX-License-Identifier: Apache-2.0
"""FedRep: head, then body on paper; whoever is not in turn stays exactly as it was."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedrep import ALGORITHM, client_init, client_step
from fedloom.core.contract import Batch
from fedloom.core.trees import flatten
from tiny import HAND, Ears, headless, lines

TWO = (((1, 3),), ((1, 0), (1, 1), (1, 2)))
DRIVEN = {"momentum": 0.9, "weight_decay": 0.1, "keep_optimiser": True}


def test_one_round_on_paper() -> None:
    """y = h b x from b = 1, h = 2, a step each. First client: residual -1, head slope 2 (-1) 1 = -2, h = 2.2; then
    residual 2.2 - 3 = -0.8, body slope 2 (-0.8) 2.2 = -3.52, b = 1.352.

    Second: mean residual 1, head slope 2, h = 1.8; mean residual 0.8, body slope 2 * 0.8 * 1.8 = 2.88, b = 0.712. The
    common body is 1 + 0.352 / 4 - 0.288 * 3 / 4 = 0.872. A newcomer with the first client's sample and h = 2: residual
    1.744 - 3 = -1.256, head slope 2 (-1.256) 0.872 = -2.190464, h = 2.2190464.
    """
    played = play(ALGORITHM, lines((*TWO, TWO[0]), "tiny:BodyAndHead", unseen=1), rounds=1, head_epochs=1, **HAND)
    assert float(played.state.body["body.weight"]) == pytest.approx(0.872, abs=1e-12)
    played.admit()
    models = [played.deployed(client)["params"] for client in ("0", "1", "2")]
    assert [float(model["top.weight"]) for model in models] == pytest.approx([2.2, 1.8, 2.2190464], abs=1e-12)
    assert all(float(model["body.weight"]) == pytest.approx(0.872, abs=1e-12) for model in models)


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_whoever_is_not_in_turn_stays_as_it_was(optimiser: str) -> None:
    federation = small_federation(("lenet:kernels=2",))
    played = play(ALGORITHM, federation, rounds=0, head_epochs=3, optimiser=optimiser, **DRIVEN)
    sent, home = ALGORITHM.send(played.setup, played.state, ("0",)), played.home("0")
    carry = client_init(home, sent.shared, {}, played.recall("0"))
    everything, zero = torch.ones(9, dtype=torch.bool), torch.zeros((), dtype=torch.int64)
    for epoch in range(6):
        batch = Batch(federation.x[:9], federation.y[:9], everything, zero, zero + epoch, zero)
        after = client_step(home, sent.shared, carry, batch)
        for name, value in carry.params.items():
            assert torch.equal(after.params[name], value) == ((name in home.model.head) == (epoch >= 3)), name
        still = "head" if epoch >= 3 else "body"
        old, new = flatten(carry.optimiser[still]), flatten(after.optimiser[still])
        assert all(torch.equal(new[name], value) for name, value in old.items())
        carry = after


@pytest.mark.parametrize("model", ["lenet:kernels=2", "testnets:Normed"])
def test_with_an_empty_head_that_gets_no_steps_it_is_fedavg(model: str) -> None:
    federation = headless(small_federation((model,)))
    rep = play(ALGORITHM, federation, rounds=3, head_epochs=0, **DRIVEN)
    avg = play(fedavg.ALGORITHM, federation, rounds=3, **DRIVEN)
    assert rep.state.body.keys() == avg.state.params.keys()
    assert all(torch.equal(rep.state.body[name], value) for name, value in avg.state.params.items())


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"local_epochs": 0}, 50),
        ({"local_epochs": 0, "local_steps": 2, "head_steps": 3, "head_epochs": 7}, 5),
        ({"local_epochs": 2, "head_epochs": 4, "head_steps": 100}, 6 * 3),
    ],
)
def test_steps_and_passes_are_the_heads_and_the_bodys_together(options: dict[str, int], steps: int) -> None:
    ears = Ears()
    play(ALGORITHM, small_federation(), rounds=1, cohorts=[["0"]], wrap=ears, **options)  # 9 samples, batches of 4
    assert len(ears.plans[0]["0"].rows) == steps


def test_the_head_is_in_nothing_that_is_sent_and_one_ask_is_a_round() -> None:
    federation, ears = small_federation(("lenet:kernels=2",)), Ears()
    play(ALGORITHM, federation, rounds=2, wrap=ears)
    model = federation.roster["0"].model
    body = {name for name in model.shapes if name not in model.head}
    assert ears.down == {f"params/{name}" for name in body}
    assert ears.up == {f"delta/{name}" for name in body} | {"num_samples", "loss"}
    assert ears.programs == ["fedrep.train"] * 2


def test_a_newcomers_body_is_the_common_one_to_the_bit() -> None:
    federation = small_federation(("testnets:Normed",), unseen=1)
    played = play(ALGORITHM, federation, rounds=1, **DRIVEN)
    fresh = played.recall("4")["own"]
    played.admit()
    deployed = played.deployed("4")
    assert all(torch.equal(deployed["params"][name], value) for name, value in played.state.body.items())
    assert all(not torch.equal(deployed["params"][name], value) for name, value in fresh.items())
    assert int(deployed["buffers"]["norm.num_batches_tracked"]) > 0
