# SPDX-License-Identifier: Apache-2.0
"""Admitting one newcomer: nobody else is asked, and nothing stays behind on the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.errors import NeedsError
from fedloom.core.trees import flatten
from fedloom.data.own import from_arrays
from fedloom.training.admission import admitted
from fedloom.training.config import parse_options
from fedloom.training.server import Server
from fedloom.training.simulation import Simulation

RNG = np.random.default_rng(0)
Y = np.arange(90) % 3
X = (RNG.standard_normal((90, 6)) + Y[:, None]).astype(np.float32)
OWN = torch.as_tensor(X[:9]), torch.as_tensor(Y[:9])


def server(method: str, **options: Any) -> Server:
    """A server after one round, without the engine and the data that it was trained by."""
    given = {"clients": 3, "rounds": 2, "local_steps": 2, "model": "mlp:hidden=4", "batch_size": 8, **options}
    built = Simulation(method, *parse_options(method, given), from_arrays(X, Y))
    built.train_round()
    built.settle()
    return built.server


def test_a_newcomer_changes_nothing_on_the_server() -> None:
    one = server("pfedhn", admit_rounds=1)
    before, setup = one.now, one.setup
    newcomer = admitted(one, *OWN)
    assert newcomer.deployed["params"]["hidden.0.weight"].shape == (4, 6) and newcomer.samples == 9
    assert one.now is before and one.setup is setup and newcomer.client not in one.now.memory
    assert one.algorithm.predict(newcomer.home, newcomer.deployed, OWN[0]).shape == (9, 3)


def test_the_newcomers_name_is_nobody_elses() -> None:
    one = server("fedavg")
    assert admitted(one, *OWN).client == "newcomer"
    one.roster = one.roster._replace(members=[one.roster.members[0]._replace(id="newcomer"), *one.roster.members[1:]])
    assert admitted(one, *OWN).client == "newcomer'"


def test_labels_are_needed_by_those_who_train_on_them() -> None:
    with pytest.raises(NeedsError, match="pFedHN admits a newcomer by training on its labelled samples; got none"):
        admitted(server("pfedhn", admit_rounds=1), OWN[0], None)
    assert admitted(server("fedavg", adapt="prior"), OWN[0], None).memory["admission"]


def test_a_newcomer_may_have_a_network_of_its_own() -> None:
    one = server("mh_pfedhn", chunk=32, admit_rounds=1)
    assert admitted(one, *OWN, "mlp:hidden=7").deployed["params"]["hidden.0.weight"].shape == (7, 6)
    with pytest.raises(NeedsError, match="FedAvg has one model for all clients, mlp:hidden=4"):
        admitted(server("fedavg"), *OWN, "mlp:hidden=7")


def test_methods_without_a_model_for_newcomers_say_so() -> None:
    with pytest.raises(NeedsError, match="Local cannot serve clients that took no part in training"):
        admitted(server("local"), *OWN)


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_noise_for_privacy_does_not_follow_from_the_seed(epsilon: float) -> None:
    one = server("it_pfl_hn", descriptor_epsilon=epsilon)
    twice = [flatten(admitted(one, OWN[0], None).deployed) for _ in range(2)]
    same = all(torch.equal(value, twice[1][path]) for path, value in twice[0].items())
    assert same == (epsilon == 0)
