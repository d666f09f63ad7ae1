# SPDX-License-Identifier: Apache-2.0
"""Weaving models, and pulling changes back through the loom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import setup_of, small_federation
from fedloom.core.contract import Setup
from fedloom.core.errors import NeedsError
from fedloom.core.trees import PerClient
from fedloom.looms.per_tensor import PerTensorLoom
from fedloom.looms.weaving import pull_back, weave

DIFFERENT = ("mlp:hidden=4", "mlp:hidden=5")
ALIKE = ("mlp:hidden=4", "mlp:hidden=4x")
"""Two architectures whose tensors have the same names and shapes."""


class Scene:
    """A loom for a small federation, embeddings, and a change for every client."""

    def __init__(self, *models: str) -> None:
        self.setup: Setup[Any] = setup_of(small_federation(models), None)
        self.loom = PerTensorLoom(3, {str(s): m.shapes for s, m in self.setup.architectures.items()}, 6, 1)
        self.phi = self.loom.init(0, self.setup.device, torch.float64)
        generator = torch.Generator().manual_seed(0)
        self.embeddings = torch.randn(5, 3, dtype=torch.float64, generator=generator)
        self.deltas = {
            c: {n: torch.randn(s, dtype=torch.float64, generator=generator) for n, s in model.shapes.items()}
            for c, model in self.setup.models.items()
        }

    def replies(self, *clients: str) -> PerClient:
        return PerClient.of({c: {"delta": self.deltas[c], "loss": torch.zeros(())} for c in clients})

    def pull(self, *clients: str, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
        return pull_back(
            self.setup, self.loom, self.phi, self.embeddings, self.setup.clients, self.replies(*clients), **options
        )

    def by_hand(self, *clients: str) -> tuple[dict[str, Tensor], Tensor]:
        """The gradient of the mean over clients of <woven parameters, -change>, client by client."""
        phi = {name: value.clone().requires_grad_() for name, value in self.phi.items()}
        table = self.embeddings.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for c in clients:
            target = str(self.setup.models[c].spec)
            woven = self.loom.unflatten(self.loom(phi, table[int(c)][None], target), target)
            total = total - sum((woven[n][0] * d).sum() for n, d in self.deltas[c].items()) / len(clients)
        total.backward()
        return {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in phi.items()}, table.grad


@pytest.mark.parametrize("models", [DIFFERENT[:1], DIFFERENT, ALIKE])
def test_each_client_gets_what_the_loom_makes_of_its_embedding(models: tuple[str, ...]) -> None:
    scene = Scene(*models)
    clients = ("3", "0", "2")
    woven = weave(scene.setup, scene.loom, scene.phi, scene.embeddings[[3, 0, 2]], clients)
    assert set(woven) == set(clients)
    for client in clients:
        target = str(scene.setup.models[client].spec)
        alone = scene.loom(scene.phi, scene.embeddings[int(client)][None], target)
        for name, value in scene.loom.unflatten(alone, target).items():
            torch.testing.assert_close(woven[client]["params"][name], value[0], rtol=1e-12, atol=1e-12)
            assert not woven[client]["params"][name].requires_grad


@pytest.mark.parametrize("models", [DIFFERENT[:1], DIFFERENT, ALIKE])
@pytest.mark.parametrize("clients", [("0", "1", "2", "3", "4"), ("3", "1"), ("4", "1"), ("2",)])
def test_pulling_back_is_the_gradient_through_the_loom(models: tuple[str, ...], clients: tuple[str, ...]) -> None:
    scene = Scene(*models)
    (grads, table), (wanted, wanted_table) = scene.pull(*clients), scene.by_hand(*clients)
    assert list(grads) == list(scene.phi)
    for name, value in wanted.items():
        torch.testing.assert_close(grads[name], value, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(table, wanted_table, rtol=1e-10, atol=1e-12)


def test_heads_and_embeddings_that_no_reply_used_have_a_gradient_of_zero() -> None:
    scene = Scene(*DIFFERENT)
    grads, table = scene.pull("0", "2")
    assert not grads["head.mlp:hidden=5.weight"].any()
    assert grads["head.mlp:hidden=4.weight"].any()
    assert not table[[1, 3, 4]].any()
    assert table[[0, 2]].any(1).all()


def test_a_frozen_loom_has_no_gradient_and_embeddings_the_same() -> None:
    scene = Scene(*DIFFERENT)
    grads, table = scene.pull("0", "1", through_loom=False)
    assert grads == {}
    assert torch.equal(table, scene.pull("0", "1")[1])


def test_nothing_given_is_changed_or_tracked() -> None:
    scene = Scene(*DIFFERENT)
    before = {name: value.clone() for name, value in scene.phi.items()}
    scene.pull("0", "1")
    assert all(torch.equal(value, before[name]) and not value.requires_grad for name, value in scene.phi.items())
    assert not scene.embeddings.requires_grad


def test_an_architecture_without_a_head_is_refused() -> None:
    scene, other = Scene(*DIFFERENT), Scene("mlp:hidden=4", "mlp:hidden=7")
    with pytest.raises(NeedsError) as caught:
        weave(other.setup, scene.loom, scene.phi, scene.embeddings, other.setup.clients)
    assert str(caught.value) == (
        "The loom weaves mlp:hidden=4, mlp:hidden=5; client 1 has mlp:hidden=7. "
        "Admit it with an architecture that took part in training."
    )
