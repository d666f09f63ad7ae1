# SPDX-License-Identifier: Apache-2.0
"""FedSR: the divergence on paper, one step against plain torch, predictions, and FedAvg where nothing is random."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import Played, play, small_federation
from fedloom.algorithms import fedavg
from fedloom.algorithms.fedsr import ALGORITHM, divergence, gaussian, training
from fedloom.core.contract import Cohort
from fedloom.core.random import fold, normal
from fedloom.core.trees import PerClient
from tiny import Ears

SURE = -1e4
"""A width whose softplus is 0."""


def fresh(classes: int = 2, size: int = 1, scale: float = 1.0) -> dict[str, Tensor]:
    zeros = torch.zeros(classes, size, dtype=torch.float64)
    return {"prior.mean": zeros, "prior.width": zeros + 1, "prior.scale": torch.tensor(scale, dtype=torch.float64)}


def test_the_divergence_on_paper() -> None:
    """With fresh priors, all widths being s = softplus(1): 0 at mean 0, (1 / s)^2 / 2 at mean 1.

    With c = 2 and mean 0 the ratio of squares is 4: (4 - 1 - log 4) / 2.
    """
    s = math.log(1 + math.e)
    assert s == pytest.approx(1.3133, abs=1e-4)
    width, y = torch.tensor([[s], [s]], dtype=torch.float64), torch.tensor([0, 1])
    found = divergence(fresh(), torch.tensor([[0.0], [1.0]], dtype=torch.float64), width, y)
    assert found.tolist() == pytest.approx([0, 1 / s**2 / 2], abs=1e-12)
    found = divergence(fresh(scale=2.0), torch.zeros(2, 1, dtype=torch.float64), width, y)
    assert found.tolist() == pytest.approx([(3 - math.log(4)) / 2] * 2, abs=1e-12)


def sure(played: Played) -> dict[str, Tensor]:
    """The parameters before round 1, with a Gaussian of no width."""
    params = dict(played.state.params)
    half = len(params["gaussian.0.bias"]) // 2
    for name in ("gaussian.0.weight", "gaussian.0.bias"):
        params[name] = params[name].clone()
        params[name][half:] = SURE if name.endswith("bias") else 0.0
    return params


def test_without_penalties_and_width_it_is_fedavg_on_a_network_with_one_layer_more() -> None:
    sizes = {"sizes": (6, 6, 6)}  # equal weights
    ours = play(ALGORITHM, small_federation(("testnets:WithoutLayer",), **sizes), rounds=0, l2_weight=0.0,
                cmi_weight=0.0, keep_optimiser=False, weight_decay=0.0)  # fmt: skip
    avg = play(fedavg.ALGORITHM, small_federation(("testnets:WithLayer",), **sizes), rounds=0, weight_decay=0.0)
    first = sure(ours)
    theirs = {n: v for n, v in first.items() if not n.startswith("gaussian")}
    theirs |= {f"mean.{part}": first[f"gaussian.0.{part}"][:4] for part in ("weight", "bias")}
    ours.state = fedavg.State(first, {})
    avg.state = fedavg.State({name: theirs[name] for name in avg.state.params}, {})
    for played, method in ((ours, ALGORITHM), (avg, fedavg.ALGORITHM)):
        for number in (1, 2):
            session = played.session(number)
            cohort = Cohort(number, played.setup.clients)
            played.state, _ = method.round(played.setup, played.state, cohort, session.ask)
            played.memory = session.memory
    for part in ("weight", "bias"):
        found = ours.state.params[f"gaussian.0.{part}"]
        torch.testing.assert_close(found[:4], avg.state.params[f"mean.{part}"], rtol=0, atol=1e-12)
        for layer in ("dense", "out"):
            name = f"{layer}.{part}"
            torch.testing.assert_close(ours.state.params[name], avg.state.params[name], rtol=0, atol=1e-12)


def test_one_step_is_that_of_plain_torch() -> None:
    federation, ears = small_federation(("testnets:WithoutLayer",)), Ears()
    given = {"l2_weight": 0.3, "cmi_weight": 0.2, "local_epochs": 1, "batch_size": 99, "momentum": 0.0, "clip": 0.0,
             "weight_decay": 0.0}  # fmt: skip
    start = play(ALGORITHM, federation, rounds=0, **given)
    played = play(ALGORITHM, federation, rounds=1, cohorts=[["1"]], wrap=ears, **given)
    own = {n: v.clone().requires_grad_() for n, v in {**start.state.params, **start.recall("1")["own"]}.items()}
    (rows,) = ears.plans[0]["1"].rows
    x, y = federation.x[rows].flatten(1), federation.y[rows]
    features = F.linear(x, own["dense.weight"], own["dense.bias"]).relu()
    mean, width = F.linear(features, own["gaussian.0.weight"], own["gaussian.0.bias"]).split(4, dim=1)
    job = played.engine.session(1, played.memory, asks=1).job(training(played.setup.config), {}, PerClient.empty(["1"]))
    key = fold(job.keys(["1"])[0], torch.tensor(0))  # of the first step
    sigma = F.softplus(width)
    z = mean + sigma * normal(fold(key, -1), tuple(mean.shape), mean.dtype)
    loss = F.cross_entropy(F.linear(z, own["out.weight"], own["out.bias"]), y) + 0.3 * z.norm(dim=1).mean()
    prior = torch.distributions.Normal(own["prior.mean"][y], F.softplus(own["prior.width"])[y])
    ours = torch.distributions.Normal(own["prior.scale"] * mean, own["prior.scale"] * sigma)
    loss = loss + 0.2 * torch.distributions.kl_divergence(ours, prior).sum(1).mean()
    for (name, value), slope in zip(own.items(), torch.autograd.grad(loss, list(own.values()))):
        after = played.state.params.get(name, played.memory["1"]["own"].get(name))
        torch.testing.assert_close(after, (value - 0.05 * slope).detach(), rtol=0, atol=1e-10)


def test_class_priors_stay_with_the_client() -> None:
    federation, ears = small_federation(("testnets:Normed",)), Ears()
    played = play(ALGORITHM, federation, wrap=ears)
    assert not any("prior" in path for path in ears.down | ears.up)
    assert {path for path in ears.up if path.startswith("buffers/")}  # running statistics are averaged
    assert not torch.equal(played.memory["0"]["own"]["prior.mean"], played.memory["1"]["own"]["prior.mean"])
    sent = ALGORITHM.send(played.setup, played.state, ["0"])
    deployed = ALGORITHM.client_deploy(played.home("0"), sent.shared, {}, played.memory["0"])
    assert set(deployed["params"]) == set(played.state.params)


def test_clients_weigh_the_same_whatever_their_size() -> None:
    federation, ears = small_federation(("testnets:WithoutLayer",), sizes=(20, 4)), Ears()
    start, played = play(ALGORITHM, federation, rounds=0), play(ALGORITHM, federation, rounds=1, wrap=ears)
    (replies,) = ears.replies
    for name, value in start.state.params.items():
        wanted = value + (replies["0"]["delta"][name] + replies["1"]["delta"][name]) / 2
        torch.testing.assert_close(played.state.params[name], wanted, rtol=0, atol=1e-14)


def test_a_prediction_is_a_mean_of_probabilities_and_no_sample_depends_on_its_batch() -> None:
    federation = small_federation(("testnets:WithoutLayer",))
    played = play(ALGORITHM, federation, rounds=1, test_draws=3)
    home, model = played.home("0"), federation.roster["0"].model
    deployed = {"params": played.state.params, "buffers": {}}
    outputs = ALGORITHM.predict(home, deployed, federation.x[:7])
    torch.testing.assert_close(outputs.exp().sum(1), torch.ones(7, dtype=torch.float64))
    torch.testing.assert_close(ALGORITHM.predict(home, deployed, federation.x[3:5]), outputs[3:5], rtol=0, atol=1e-12)
    sure_of_it = {"params": sure(played), "buffers": {}}
    mean, width = gaussian(sure_of_it["params"], model.features(
        {n: sure_of_it["params"][n] for n in model.shapes}, {}, federation.x[:7]))  # fmt: skip
    assert not width.any()
    plain = model.classify({n: sure_of_it["params"][n] for n in model.shapes}, mean).log_softmax(1)
    torch.testing.assert_close(ALGORITHM.predict(home, sure_of_it, federation.x[:7]), plain, rtol=0, atol=1e-12)
    assert torch.equal(ALGORITHM.module(home, deployed)(federation.x[:7]), outputs)
