# SPDX-License-Identifier: Apache-2.0
"""One ask as an engine gets it: who, on what, and where random numbers come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import small_federation
from fedloom.core.contract import Batches, Program
from fedloom.core.random import uniform
from fedloom.core.trees import PerClient
from fedloom.engines.job import Job, Moment

BATCHES = Batches(size=4, epochs=2)


def job(batches: Batches | None = BATCHES, name: str = "p", **changes: Any) -> Job:
    program = Program(name, lambda *_: {}, lambda *_: {}, lambda *_: ({}, {}), batches, lambda *_: {})
    federation = small_federation(("mlp:hidden=5", "mlp:hidden=4"))
    clients = ("0", "1", "2")
    made = Job(program, clients, {}, PerClient.empty(clients), {}, federation, "config", Moment(0, 1, 1))
    return replace(made, **changes)


def rows(of: Job, client: str = "0") -> list[list[int]]:
    return [np.asarray(batch).tolist() for batch in of.schedule(client).rows]


def test_draws_follow_from_client_and_moment_and_not_from_the_program() -> None:
    """Methods are compared on equal batches."""
    usual = job()
    assert rows(usual) == rows(job(name="another"))
    assert torch.equal(usual.keys(["0", "1"]), job(name="another").keys(["0", "1"]))
    others = [job(moment=Moment(*moment)) for moment in ((1, 1, 1), (0, 2, 1), (0, 1, 2), (0, "admission", 1))]
    for other in others:
        assert rows(other) != rows(usual)
        assert not torch.equal(other.keys(["0"]), usual.keys(["0"]))
    first, second = usual.keys(["0", "1"]).tolist()
    assert first != second


def test_asks_of_a_stage_that_name_their_batches_alike_have_the_same() -> None:
    named = Batches(size=4, epochs=2, name="pair")
    first, second = (job(named, moment=Moment(0, 1, ask)) for ask in (1, 2))
    assert rows(first) == rows(second) != rows(job(moment=Moment(0, 1, 1)))
    assert rows(job(named, moment=Moment(0, 2, 1))) != rows(first)
    assert not torch.equal(first.keys(["0"]), second.keys(["0"]))  # noise is another each time


def test_a_program_goes_through_the_split_that_it_names() -> None:
    own = job().federation.roster["0"].rows
    for split in ("train", "test"):
        met = rows(job(Batches(split, size=4, epochs=1)))
        assert sorted(row for batch in met for row in batch) == own[split].tolist()
    assert rows(job(None)) == []


def test_a_part_of_a_job_has_its_own_architecture_and_the_same_draws() -> None:
    whole = job()
    part = whole.of(["1"])
    assert (str(whole.spec), str(part.spec)) == ("mlp:hidden=5", "mlp:hidden=4")
    assert part.clients == ("1",) and rows(part, "1") == rows(whole, "1")


@pytest.mark.parametrize("secret", [False, True])
def test_what_a_client_has_of_its_own(secret: bool) -> None:
    made = job(secret_noise=secret)
    number, key = made.num_samples(["0", "1"]), made.keys(["0", "1"])
    assert number.tolist() == [9.0, 4.0] and number.dtype == torch.float64
    home = made.home("1", number[1], key[1])
    assert (str(home.model.spec), home.config, home.guest) == ("mlp:hidden=4", "config", None)
    draws = [uniform(made.home("1", number[1], key[1]).key, (8,)) for _ in range(2)]
    assert torch.equal(*draws) != secret
