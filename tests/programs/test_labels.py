# SPDX-License-Identifier: Apache-2.0
"""Clients count their labels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conftest import CLASSES, setup_of, small_federation
from fedloom.adaptation.prior import with_prior
from fedloom.algorithms.fedavg import ALGORITHM
from fedloom.core.trees import PerClient
from fedloom.engines.auto import ENGINES
from fedloom.engines.memories import Memories
from fedloom.programs.labels import ask_label_shares, have_labels_counted, label_shares
from tiny import Ears

NUMBER = {"num_samples": torch.zeros(())}


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "loopback"])
def test_shares_are_those_of_the_training_labels(engine: str) -> None:
    """Also for a client of more than one batch of 512, and for one whose batch is padded."""
    federation = small_federation(sizes=(9, 600, 7))
    setup = setup_of(federation, ALGORITHM.config())
    ran = ENGINES[engine](federation, ALGORITHM, setup.config, 0)
    replies = ask_label_shares(setup, ["2", "1"], ran.session(1, Memories()).ask)
    assert set(replies) == {"1", "2"}
    for client, reply in replies.items():
        y = federation.y[torch.as_tensor(federation.roster[client].rows["train"])]
        wanted = torch.bincount(y, minlength=CLASSES).double() / len(y)
        assert torch.equal(reply["shares"], wanted)


def test_noise_goes_on_the_shares_and_the_client_keeps_its_exact_counts() -> None:
    """400 clients with equal shares told as they are and with noise of 0.2: 1200 draws, within 5 standard errors."""
    federation = small_federation(sizes=(6,) * 400)
    prior = with_prior(ALGORITHM)
    setup = setup_of(federation, ALGORITHM.config())
    session = ENGINES["vectorised"](federation, prior, setup.config, 0).session(1, Memories())
    told = ask_label_shares(setup, setup.clients, session.ask, noise=0.2)
    rows = {client: torch.as_tensor(federation.roster[client].rows["train"]) for client in setup.clients}
    counts = torch.stack([torch.bincount(federation.y[own], minlength=CLASSES) for own in rows.values()]).double()
    noise = torch.stack([told[client]["shares"] for client in rows]) - counts / 6
    assert (
        float(noise.std()) == pytest.approx(0.2, rel=5 / 2400**0.5) and abs(float(noise.mean())) < 5 * 0.2 / 1200**0.5
    )
    assert torch.equal(torch.stack([session.memory[client]["label_counts"] for client in rows]), counts)


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "loopback"])
def test_counts_that_a_client_keeps_are_told_to_nobody(engine: str) -> None:
    federation, ears = small_federation(sizes=(9, 600, 7)), Ears()
    setup = setup_of(federation, ALGORITHM.config())
    session = ENGINES[engine](federation, ALGORITHM, setup.config, 0).session(1, Memories())
    assert have_labels_counted(setup, ["2", "1"], ears(session.ask)) == ["1", "2"]
    assert ears.up == set()
    for client in ("1", "2"):
        y = federation.y[torch.as_tensor(federation.roster[client].rows["train"])]
        assert torch.equal(session.recall(client)["label_counts"], torch.bincount(y, minlength=CLASSES).double())


def test_a_server_that_claims_a_great_many_classes_is_not_believed() -> None:
    """A client counts as many as its own network tells apart: counting a billion would fill its memory."""
    federation = small_federation()
    setup = setup_of(federation, ALGORITHM.config())
    session = ENGINES["sequential"](federation, ALGORITHM, setup.config, 0).session(1, Memories())
    program = replace(label_shares(), expects=lambda shared, mine: {"shares": torch.zeros(CLASSES), **NUMBER})
    claimed = {"classes": torch.zeros((), dtype=torch.float64).expand(10**9)}
    assert session.ask(program, claimed, PerClient.empty(["0"]))["0"]["shares"].shape == (CLASSES,)
