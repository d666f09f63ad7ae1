# SPDX-License-Identifier: Apache-2.0
"""FedTGP: margin and contrastive loss on paper, the server's steps against plain torch, and what it reduces to."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import play, small_federation
from fedloom.algorithms import fedproto, local
from fedloom.algorithms.fedtgp import ALGORITHM, contrastive, learn, margin_of, of_classes
from fedloom.clients.batching import schedule
from fedloom.core.contract import Batch, Batches
from fedloom.core.random import stream
from fedloom.core.trees import leaves

ZERO = torch.tensor(0)


def test_the_margin_on_paper() -> None:
    """Class means 0, 3 and 4 (of 2 and 6); the nearest others are 3, 1 and 1 away: 3, and at most tau.

    The fourth class has nobody. With one class alone there is nothing to be apart from: 0.
    """
    told = torch.tensor([[[0.0], [3.0], [2.0], [0.0]], [[0.0], [0.0], [6.0], [0.0]]])
    counts = torch.tensor([[1.0, 5.0, 2.0, 0.0], [4.0, 0.0, 1.0, 0.0]])
    assert float(margin_of(told, counts, 100.0)) == 3.0
    assert float(margin_of(told, counts, 2.0)) == 2.0
    assert float(margin_of(told[:, :1], counts[:, :1], 100.0)) == 0.0


def test_the_loss_on_paper() -> None:
    """T is the identity for positive numbers: P = (1, 4). A prototype at 1 of class 0 is 0 and 3 away.

    With margin 1 its scores are -1 and -3, and the loss is log(1 + e^-2).
    """
    one, none = torch.eye(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    net = {"net.0.weight": one, "net.0.bias": none, "net.1.weight": one, "net.1.bias": none}
    params = {**net, "embeddings": torch.tensor([[1.0], [4.0]], dtype=torch.float64)}
    assert of_classes(params).tolist() == [[1.0], [4.0]]
    batch = Batch(one, torch.tensor([0]), torch.tensor([True]), ZERO, ZERO, ZERO)
    loss, _ = contrastive(params, {}, {"margin": torch.tensor(1.0)}, batch)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-2)), abs=1e-5)  # the root is of a little more


def test_the_servers_steps_are_those_of_plain_torch() -> None:
    federation = small_federation()
    played = play(ALGORITHM, federation, rounds=0, server_epochs=3, server_batch_size=4, server_lr=0.1)
    state, setup = played.state, played.setup
    told = torch.randn(5, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([[1.0, 0, 2], [0, 0, 3], [1, 1, 1], [4, 0, 0], [1, 2, 3]]).double()
    margin = torch.tensor(0.7, dtype=torch.float64)
    after = learn(setup, state, told, counts, margin, 1)

    names = [("net", name) for name in state.net] + [("embeddings", "")]
    own = [(state.net[name] if part == "net" else state.embeddings).clone().requires_grad_() for part, name in names]
    optimiser, has = torch.optim.SGD(own, lr=0.1), counts > 0
    x, y = told[has], has.nonzero()[:, 1]
    plan = schedule(np.arange(len(x)), Batches(size=4, epochs=3), stream(0, 1, "fedtgp", "server batches"))
    assert len(plan.rows) == 9  # ten prototypes: batches of 4, 4 and 2
    for rows in plan.rows:
        w0, b0, w1, b1, e = own
        classes = F.linear(F.linear(e, w0, b0).relu(), w1, b1)
        scores = -torch.sqrt((x[rows][:, None] - classes).square().sum(2) + 1e-12)
        scores = scores - margin * F.one_hot(y[rows], 3)
        optimiser.zero_grad()
        F.cross_entropy(scores, y[rows]).backward()
        optimiser.step()
    for value, wanted in zip([*after.net.values(), after.embeddings], own):
        torch.testing.assert_close(value, wanted.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(after.prototypes, of_classes({**{f"net.{n}": v for n, v in after.net.items()},
                                                             "embeddings": after.embeddings}))  # fmt: skip
    assert after.known.tolist() == [1.0, 1.0, 1.0]


def test_without_steps_the_prototypes_are_those_of_the_untrained_network() -> None:
    start, played = (play(ALGORITHM, small_federation(), rounds=n, server_epochs=0) for n in (0, 1))
    assert torch.equal(played.state.prototypes, start.state.prototypes)
    assert start.state.known.tolist() == [0.0] * 3 and played.state.known.tolist() == [1.0] * 3


def test_prototypes_move_away_from_each_other() -> None:
    def spread(rounds: int) -> float:
        prototypes = play(ALGORITHM, small_federation(), rounds=rounds, server_lr=0.1).state.prototypes
        return float(torch.cdist(prototypes, prototypes)[~torch.eye(3, dtype=torch.bool)].min())

    assert spread(30) > spread(1)


def test_without_the_pull_it_is_local() -> None:
    federation = small_federation(("testnets:Normed",))
    ours = play(ALGORITHM, federation, proto_weight=0.0)
    alone = play(local.ALGORITHM, federation, keep_optimiser=False)
    for client in federation.participants:
        for (path, one), (_, other) in zip(leaves(ours.memory[client]), leaves(alone.memory[client]), strict=True):
            assert float((one - other).abs().max()) < 1e-12, path


def test_clients_are_fedprotos() -> None:
    same = ("client_deploy", "predict", "programs", "admit", "send", "first_memory", "needs")
    theirs = {field.name: getattr(fedproto.ALGORITHM, field.name) for field in dataclasses.fields(fedproto.ALGORITHM)}
    assert all(getattr(ALGORITHM, name) == theirs[name] for name in same)
