# SPDX-License-Identifier: Apache-2.0
"""FedBN: a line after a normalisation on paper; what belongs to normalisation layers stays with the client."""

from __future__ import annotations

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedbn import ALGORITHM
from fedloom.core.contract import Cohort, Seeds
from fedloom.models.model import Model
from fedloom.models.spec import parse
from tiny import HAND, Ears, lines

NORM = {"norm.weight", "norm.bias"}


def test_one_round_on_paper() -> None:
    """y = w (g x' + s) + c, x' the normalised x, from g = 1, s = 0, and w = 0.5, c = 0, to which we set the state.

    The samples of a client are x = 0 and 2, so that x' is -1 and 1 (up to eps = 1e-5). First client, y = 0 and 2: the
    outputs are -0.5 and 0.5, residuals -0.5 and -1.5. Slopes: w 2 mean(r x') = -1, c 2 mean(r) = -2, g w * (-1) = -0.5,
    s w * (-2) = -1. Second, y = -2 and 0: residuals 1.5 and 0.5; w -1, c 2, g -0.5, s 1. At rate 0.1: w = 0.6 and c = 0
    in common, g = 1.05 for both, s = 0.1 and -0.1.
    """
    federation = lines((((0, 0), (2, 2)), ((0, -2), (2, 0))), "tiny:NormedLine")
    start = play(ALGORITHM, federation, rounds=0, **HAND)
    half, zero = torch.full((1, 1), 0.5, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    state = start.state._replace(params={"line.weight": half, "line.bias": zero})
    session = start.session(1)
    state, _ = ALGORITHM.round(start.setup, state, Cohort(1, ("0", "1")), session.ask)
    found = [float(state.params[name]) for name in ("line.weight", "line.bias")]
    own = [session.memory[client]["own"] for client in ("0", "1")]
    found += [float(one[name]) for one in own for name in ("norm.weight", "norm.bias")]
    assert found == pytest.approx([0.6, 0.0, 1.05, 0.1, 1.05, -0.1], abs=1e-4)


def test_normalisation_layers_do_not_travel_in_rounds() -> None:
    federation, ears = small_federation(("testnets:Normed",)), Ears()
    play(ALGORITHM, federation, rounds=2, wrap=ears)
    model = federation.roster["0"].model
    assert model.norm == NORM
    common = set(model.shapes) - NORM
    assert ears.down == {f"params/{name}" for name in common}
    assert ears.up == {f"delta/{name}" for name in common} | {"num_samples", "loss"}


def test_all_layers_that_have_running_statistics_are_the_clients_own() -> None:
    model = Model(parse("resnet10", (1, 8, 8), 3))
    own = ALGORITHM.first_memory(model, ALGORITHM.config(), Seeds(1, 0))["own"]
    layers = {name.rpartition(".")[0] for name in model.fresh_buffers()}
    assert own.keys() == {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}


def test_clients_come_to_differ_in_their_normalisation_layers_and_in_nothing_else() -> None:
    federation = small_federation(("testnets:Normed",))
    played = play(ALGORITHM, federation, rounds=2)
    one, other = (played.deployed(client) for client in ("0", "1"))
    apart = {name for name, value in one["params"].items() if not torch.equal(value, other["params"][name])}
    assert apart == NORM
    assert not torch.equal(one["buffers"]["norm.running_mean"], other["buffers"]["norm.running_mean"])


def test_without_normalisation_layers_it_is_fedavg() -> None:
    federation, ears = small_federation(("lenet:kernels=2",), unseen=1), Ears()
    bn, avg = (play(method, federation, rounds=2) for method in (ALGORITHM, fedavg.ALGORITHM))
    assert all(torch.equal(bn.state.params[name], value) for name, value in avg.state.params.items())
    ALGORITHM.settle(bn.setup, bn.state, ears(bn.session("settling").ask))
    assert not ears.asked
    assert torch.equal(bn.admit().deployed("4")["params"]["fc3.bias"], avg.state.params["fc3.bias"])
    assert ALGORITHM.notes(bn.setup) == ["this is FedAvg: lenet:kernels=2 has no normalisation layers"]
    assert not ALGORITHM.notes(play(ALGORITHM, small_federation(("testnets:Normed",)), rounds=0).setup)


def test_a_newcomer_gets_the_plain_mean_of_the_participants_layers_and_statistics_of_its_own() -> None:
    federation = small_federation(("testnets:Normed",), unseen=1)
    played = play(ALGORITHM, federation, rounds=2, cohorts=[["0", "1"], ["0"]])
    played.settle()
    deployed = played.admit().deployed("4")
    for name in NORM:
        own = [played.recall(client)["own"][name] for client in federation.participants]
        torch.testing.assert_close(deployed["params"][name], torch.stack(own).mean(0), rtol=0, atol=1e-12)
    assert int(deployed["buffers"]["norm.num_batches_tracked"]) == 10  # passes, each of one batch
    assert torch.equal(deployed["params"]["out.weight"], played.state.params["out.weight"])


def test_settling_changes_nothing_for_participants() -> None:
    federation = small_federation(("testnets:Normed",))
    played = play(ALGORITHM, federation, rounds=1)
    before = [played.deployed(client)["params"] for client in federation.participants]
    played.settle()
    for client, old in zip(federation.participants, before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in played.deployed(client)["params"].items())
