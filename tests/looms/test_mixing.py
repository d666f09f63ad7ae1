# SPDX-License-Identifier: Apache-2.0
"""pFedLA's looms: one client's against plain torch modules; shares, and what happens where there are none."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fedloom.looms.mixing import MixingLooms, mix

DEVICE, DTYPE = torch.device("cpu"), torch.float64


def test_each_client_has_a_loom_of_its_own() -> None:
    looms = MixingLooms(clients=4, targets=3, embed_dim=5, hidden=6, layers=2)
    params = looms.init(0, DEVICE, DTYPE)
    own = torch.tensor([2, 0])
    alpha = looms({name: rows[own] for name, rows in params.items()}, own)
    assert alpha.shape == (2, 3, 4)
    for row, client in zip(alpha, own.tolist()):
        x = params["embedding"][client]
        for i in range(2):
            x = F.relu(F.linear(x, params[f"trunk.{i}.weight"][client], params[f"trunk.{i}.bias"][client]))
        scores = F.relu(F.linear(x, params["head.weight"][client], params["head.bias"][client])).reshape(3, 4)
        torch.testing.assert_close(row, scores / scores.sum(1, keepdim=True), rtol=0, atol=1e-14)


def test_at_first_everybody_has_a_share_of_everybody() -> None:
    looms = MixingLooms(clients=7, targets=5)
    alpha = looms(looms.init(3, DEVICE, DTYPE), torch.arange(7))
    assert alpha.min() > 0
    torch.testing.assert_close(alpha.sum(2), torch.ones(7, 5, dtype=DTYPE), rtol=0, atol=1e-14)


def test_a_layer_without_scores_is_the_clients_own_and_has_no_gradient() -> None:
    looms = MixingLooms(clients=3, targets=2, embed_dim=4, hidden=4, layers=1)
    params = looms.init(0, DEVICE, DTYPE)
    dead = params["head.weight"].clone()
    dead[1, :3] = -1.0  # of the second client, the first layer
    rows = {name: value.clone().requires_grad_() for name, value in {**params, "head.weight": dead}.items()}
    alpha = looms(rows, torch.arange(3))
    assert alpha[1, 0].tolist() == [0.0, 1.0, 0.0] and alpha[1, 1].min() > 0
    slope = torch.arange(3, dtype=DTYPE)
    found = torch.autograd.grad((alpha[1, 0] * slope).sum(), list(rows.values()))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in found)


def test_a_mix_is_taken_layer_by_layer() -> None:
    """0.25 * 4 + 0.75 * 8 = 7 in the first layer, 0.5 * 2 + 0.5 * 6 = 4 in the second."""
    alpha = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    models = {
        "a.weight": torch.tensor([[4.0], [8.0]]),
        "a.bias": torch.tensor([4.0, 8.0]),
        "b": torch.tensor([2.0, 6.0]),
    }
    mixed = mix(alpha, models, [("a.weight", "a.bias"), ("b",)])
    assert {name: value.flatten().tolist() for name, value in mixed.items()} == {
        "a.weight": [7.0],
        "a.bias": [7.0],
        "b": [4.0],
    }
