# SPDX-License-Identifier: Apache-2.0
"""pFedLHN: one outer step on paper, then the authors' loop with torch.optim, and newcomers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms.pfedlhn import ALGORITHM, State, init, loom_of
from fedloom.core.errors import NeedsError
from tiny import HAND, Ears, lines, torch_steps

TWO = ("lenet:kernels=2", "mlp:hidden=5")
SMALL = {"basis": 1, "embed_dim": 1, "hidden": 1}
PLAIN = {"server_optimiser": "sgd", "server_lr": 0.1, "server_momentum": 0.0, "server_weight_decay": 0.0}


def by_hand(setup) -> State:
    """c = 1, E = 2, a trunk of 1 and a head of 0.5, no biases: theta = 0.5 (1 (1 * 2)) = 1 for everybody."""
    state = init(setup)
    values = {"basis": 2.0, "trunk.weight": 1.0, "head.tiny:Line.weight": 0.5}
    loom = {name: torch.full_like(value, values.get(name, 0.0)) for name, value in state.loom.items()}
    return state._replace(loom=loom, coefficients=torch.ones_like(state.coefficients))


def test_one_outer_step_on_paper() -> None:
    """The client's gradient is -4, its change 0.4, the pseudo-gradient -0.4. Head: weight -0.4 * 2, bias -0.4.

    Before the head: -0.4 * 0.5 = -0.2. Trunk: weight -0.2 * 2, bias -0.2; before it -0.2: c -0.2 * 2, E -0.2 * 1. At
    rate 0.1 each gains a tenth of it. The other client's coefficient rests.
    """
    algorithm = dataclasses.replace(ALGORITHM, init=by_hand)
    played = play(algorithm, lines(), rounds=1, cohorts=[["0"]], **SMALL, **PLAIN, **HAND)
    expected = {
        "basis": 2.02,
        "trunk.weight": 1.04,
        "trunk.bias": 0.02,
        "head.tiny:Line.weight": 0.58,
        "head.tiny:Line.bias": 0.04,
    }
    assert {name: float(value) for name, value in played.state.loom.items()} == pytest.approx(expected, abs=1e-12)
    assert played.state.coefficients.flatten().tolist() == pytest.approx([1.04, 1.0], abs=1e-12)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", [30.0, 0.05], ids=["wide", "tight"])
def test_cohorts_of_one_are_the_authors_loop(kind: str, clip: float) -> None:
    """Each client's coefficients are a parameter of their own, which the optimiser skips where it has no gradient."""
    federation, ears, order = small_federation(("lenet:kernels=2",), sizes=(9, 4)), Ears(), "1011"
    config = {"server_optimiser": kind, "server_lr": 0.01, "server_clip": clip, "server_weight_decay": 0.1}
    played = play(ALGORITHM, federation, rounds=4, cohorts=[[c] for c in order], wrap=ears, hidden=12, **config)
    start, model = ALGORITHM.init(played.setup), federation.roster["0"].model
    phi = {name: value.clone().requires_grad_() for name, value in start.loom.items()}
    rows = [row.clone().requires_grad_() for row in start.coefficients]
    wanted = [*phi.values(), *rows]
    options = {"lr": 0.01, "weight_decay": 0.1}
    adamw = kind == "adamw"
    outer = torch.optim.AdamW(wanted, **options) if adamw else torch.optim.SGD(wanted, momentum=0.9, **options)
    sizes = [value.numel() for value in model.init(0).values()]
    for number, client in enumerate(order):
        head = [phi[f"head.{model.spec}.{part}"].split(sizes) for part in ("weight", "bias")]
        mixed = rows[int(client)].reshape(len(model.shapes), 5) @ phi["basis"]
        hidden = mixed @ phi["trunk.weight"].T + phi["trunk.bias"]
        woven = {
            name: (weight @ hidden[i] + bias).reshape(shape)
            for i, ((name, shape), weight, bias) in enumerate(zip(model.shapes.items(), *head))
        }
        module = model.module({name: value.detach() for name, value in woven.items()}, {}).train()
        inner = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-5)
        torch_steps(module, [inner], federation, ears.plans[number][client], clip=0.5)
        after = dict(module.named_parameters())
        changes = [woven[name].detach() - after[name].detach() for name in woven]
        used = [*phi.values(), rows[int(client)]]
        outer.zero_grad(set_to_none=True)
        for parameter, grad in zip(used, torch.autograd.grad(list(woven.values()), used, changes)):
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_(wanted, clip)
        outer.step()
    for name, value in phi.items():
        torch.testing.assert_close(played.state.loom[name], value.detach(), rtol=0, atol=1e-9)
    torch.testing.assert_close(played.state.coefficients, torch.stack(rows).detach(), rtol=0, atol=1e-9)
    assert (played.state.coefficients - start.coefficients).abs().amax(1).min() > 1e-5


def test_architectures_share_all_but_the_heads() -> None:
    federation = small_federation(TWO)
    played = play(ALGORITHM, federation, rounds=1)
    specs = {str(client.model.spec) for client in federation.roster.values()}
    heads = {f"head.{spec}.{part}" for spec in specs for part in ("weight", "bias")}
    assert played.state.loom.keys() == {"basis", "trunk.weight", "trunk.bias", *heads}
    assert loom_of(played.setup).embed_dim == 5 * 10 == played.state.coefficients.shape[1]
    sent = ALGORITHM.send(played.setup, played.state, federation.participants)
    for client in federation.participants:
        assert {n: tuple(v.shape) for n, v in sent.mine[client]["params"].items()} == dict(
            federation.roster[client].model.shapes
        )


def test_newcomers_step_on_their_coefficients_and_the_loom_is_frozen() -> None:
    """Each on its own change: a newcomer that is admitted beside another gets what it gets alone."""
    federation, lone = (small_federation(("lenet:kernels=2",), unseen=unseen) for unseen in (2, 2))
    del lone.roster["4"]
    options = {"rounds": 1, "admit_rounds": 3, "server_lr": 0.01, "server_clip": 0.1}
    both, one = (play(ALGORITHM, data, **options) for data in (federation, lone))
    before = {name: value.clone() for name, value in both.state.loom.items()}
    both.admit()
    one.admit()
    assert all(torch.equal(both.state.loom[name], value) for name, value in before.items())
    for name, value in one.deployed("3")["params"].items():
        torch.testing.assert_close(both.deployed("3")["params"][name], value, rtol=0, atol=1e-12)
    still = play(ALGORITHM, federation, **{**options, "admit_rounds": 1}).admit()
    assert not torch.equal(both.deployed("3")["params"]["fc3.bias"], still.deployed("3")["params"]["fc3.bias"])


def test_a_newcomer_needs_an_architecture_that_took_part() -> None:
    federation = small_federation(("mlp:hidden=5",), unseen=1)
    played = play(ALGORITHM, federation, rounds=1, admit_rounds=1)
    other = small_federation(("mlp:hidden=6",)).roster["4"].model
    federation.roster["4"] = dataclasses.replace(federation.roster["4"], model=other)
    with pytest.raises(NeedsError, match="took part"):
        played.admit()
