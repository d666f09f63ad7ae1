# SPDX-License-Identifier: Apache-2.0
"""HyperFedZero: eq. 3 and 4 on paper, then a step and a prediction against plain torch modules, sample by sample."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import Played, play, setup_of, small_federation
from fedloom.algorithms.hyperfedzero import ALGORITHM, Config, client_step, embed, loom_of, penalty
from fedloom.core.contract import Batch, Cohort, Home
from fedloom.core.errors import ConfigError, NeedsError
from fedloom.core.random import fold, key, normal
from fedloom.core.task import CLASSIFICATION
from fedloom.core.trees import tree_map
from fedloom.core.vectors import from_vector
from fedloom.data.own import from_arrays
from fedloom.models.model import Model
from fedloom.models.per_sample import net
from fedloom.models.spec import parse
from fedloom.programs.evaluation import evaluate
from fedloom.programs.local import client_init
from fedloom.runs.options import RunOptions
from fedloom.training.simulation import Simulation
from tiny import Ears

SMALL = {"hidden": (7, 6), "chunk_size": 20, "chunk_dim": 3, "embed_dim": 4}
"""A loom that is quick to run: 203 parameters of mlp:hidden=5 in 11 chunks."""


def batch_of(x: Tensor, y: Tensor, mask: Tensor | None = None) -> Batch:
    mask = torch.full((len(x),), True) if mask is None else mask
    return Batch(x, y, mask, torch.tensor(0), torch.tensor(0), key(7))


def at_home(**config) -> tuple[Home, dict[str, Tensor]]:
    """A client with mlp:hidden=5 on 6x6 images, and what it is sent at first."""
    federation = small_federation()
    setup = setup_of(federation, ALGORITHM.config(**{**SMALL, **config}))
    model = federation.roster["0"].model
    home = Home(model, CLASSIFICATION, setup.config, torch.tensor(9.0, dtype=torch.float64), key(3))
    return home, dict(ALGORITHM.init(setup).params)


def samples(count: int) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(1)
    return torch.as_tensor(rng.standard_normal((count, 1, 6, 6))), torch.as_tensor(rng.integers(0, 3, count))


def stepped(home: Home, params: dict[str, Tensor], batch: Batch):
    return client_step(home, {}, client_init(home, {"params": params}, {}, {"buffers": {}}), batch)


def two_by_three() -> Tensor:
    """Two samples, three dimensions: (1/2, 1/4, 1/4) and (1/2, 1/2, next to nothing), in logs."""
    return torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 1e-60]], dtype=torch.float64).log()


def test_the_balancing_penalty_on_paper() -> None:
    """The batch uses the dimensions 1, 3/4 and 1/4 times, 2/3 on average.

    Deviations 4/12, 1/12, -5/12: the variance is (16 + 1 + 25) / 144 / 2 = 7/48, and 7/48 / (2/3) = 7/32.
    """
    config = Config(embed_dim=3, balance=2.0, entropy=0.0)
    found = penalty(config, two_by_three(), batch_of(*samples(2)))
    assert float(found) == pytest.approx(2 * 7 / 32, abs=1e-12)


def test_the_entropy_penalty_on_paper() -> None:
    """-e log e sums to 1.5 log 2 and to log 2; the mean over 2 x 3 numbers is 2.5 log 2 / 6."""
    config = Config(embed_dim=3, balance=0.0, entropy=3.0)
    found = penalty(config, two_by_three(), batch_of(*samples(2)))
    assert float(found) == pytest.approx(3 * 2.5 * math.log(2) / 6, abs=1e-12)


def test_the_penalties_leave_padding_out() -> None:
    """With the second sample masked: 1/2, 1/4, 1/4; mean 1/3, variance (4 + 1 + 1) / 144 / 2 = 1/48; their ratio 1/16.

    The entropy term is 1.5 log 2 / 3.
    """
    batch = batch_of(*samples(2), torch.tensor([True, False]))
    found = penalty(Config(embed_dim=3), two_by_three(), batch)
    assert float(found) == pytest.approx(1 / 16 + 0.5 * math.log(2), abs=1e-12)


def test_noisy_embedding_on_paper() -> None:
    """One input x = 2, P = 2. f: (x, 0) = (2, 0). noisy: (0, x) = (0, 2), so softplus gives log 2 and log(1 + e^2)."""
    params = {
        "extractor.0.weight": torch.tensor([[1.0], [0.0]]), "extractor.0.bias": torch.zeros(2),
        "noise.0.weight": torch.tensor([[0.0], [1.0]]), "noise.0.bias": torch.zeros(2),
    }  # fmt: skip
    x = torch.tensor([[2.0]])
    quiet = embed(params, x).exp()
    assert quiet[0].tolist() == pytest.approx([math.e**2 / (math.e**2 + 1), 1 / (math.e**2 + 1)])
    noisy = embed(params, x, torch.tensor([[-1.0, 0.5]])).exp()
    scores = [2 - math.log(2), 0.5 * math.log(1 + math.e**2)]
    total = sum(math.exp(score) for score in scores)
    assert noisy[0].tolist() == pytest.approx([math.exp(score) / total for score in scores])


def by_modules(home: Home, params: dict[str, Tensor], e: Tensor, x: Tensor) -> Tensor:
    """A module for each sample, filled with what the loom gives for its embedding."""
    outputs = []
    for i in range(len(x)):
        vector = loom_of(home.config, home.model)(net(params, "loom"), e[i : i + 1])[0]
        module = home.model.module(from_vector(vector.detach(), home.model.shapes), {})
        outputs.append(module(x[i : i + 1])[0].detach())
    return torch.stack(outputs)


def quiet_embeddings(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.softmax(F.linear(x.flatten(1), params["extractor.0.weight"], params["extractor.0.bias"]), 1)


def test_a_prediction_is_that_of_the_modules_made_without_noise() -> None:
    home, params = at_home()
    x, _ = samples(5)
    outputs = ALGORITHM.predict(home, {"params": params, "buffers": {}}, x)
    expected = by_modules(home, params, quiet_embeddings(params, x), x)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-10)
    # the noise network has no part in it, as z is 0
    loud = {name: value + 9 if name.startswith("noise") else value for name, value in params.items()}
    assert torch.equal(ALGORITHM.predict(home, {"params": loud, "buffers": {}}, x), outputs)


def test_a_step_is_a_gradient_step_on_equation_4() -> None:
    """Written out for the dense target, with autograd and torch.optim."""
    home, params = at_home(balance=0.5, entropy=2.0, local_lr=0.3, weight_decay=0.01, momentum=0.9)
    x, y = samples(6)
    batch = batch_of(x, y)
    carry = stepped(home, params, batch)
    own = {name: value.clone().requires_grad_() for name, value in params.items()}
    optimiser = torch.optim.SGD(own.values(), lr=0.3, momentum=0.9, weight_decay=0.01)

    def linear(layer: str, inputs: Tensor) -> Tensor:
        return F.linear(inputs, own[f"{layer}.weight"], own[f"{layer}.bias"])

    z, flat = normal(fold(batch.key, 1), (6, 4), torch.float64), x.flatten(1)
    e = torch.softmax(linear("extractor.0", flat) + z * F.softplus(linear("noise.0", flat)), 1)
    losses = []
    for i in range(6):
        chunks = [linear("loom.0", torch.cat([e[i], chunk])) for chunk in own["loom.chunks"]]
        chunks = [linear("loom.2", linear("loom.1", chunk.relu()).relu()) for chunk in chunks]
        w1, b1, w2, b2 = torch.cat(chunks)[:203].split([180, 5, 15, 3])
        outputs = w2.reshape(3, 5) @ (w1.reshape(5, 36) @ flat[i] + b1).relu() + b2
        losses.append(F.cross_entropy(outputs, y[i]))
    use = e.sum(0)
    loss = torch.stack(losses).mean()
    (loss + 0.5 * use.var() / use.mean() + 2.0 * (-e * e.log()).mean()).backward()
    optimiser.step()
    assert float(carry.loss) == pytest.approx(float(loss.detach()), abs=1e-12)
    for name, value in carry.params.items():
        torch.testing.assert_close(value, own[name].detach(), rtol=0, atol=1e-12)
        assert not torch.equal(value, params[name]), name


@pytest.mark.parametrize("control", ["none", "mean"])
@pytest.mark.parametrize("at_once", [2, 64])
def test_padding_does_not_change_a_step(control: str, at_once: int) -> None:
    home, params = at_home(control=control, samples_at_once=at_once, local_lr=0.3)
    x, y = samples(8)
    padded = batch_of(x, y, torch.arange(8) < 5)
    one, other = stepped(home, params, batch_of(x[:5], y[:5])), stepped(home, params, padded)
    torch.testing.assert_close(other.loss, one.loss, rtol=0, atol=1e-12)
    for name, value in one.params.items():
        torch.testing.assert_close(other.params[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("model", ["mlp:hidden=5", "testnets:Dropping"])
def test_how_many_samples_at_once_does_not_matter(engine: str, model: str) -> None:
    federation = small_federation((model,))
    whole, parts = (
        play(ALGORITHM, federation, engine, **SMALL, samples_at_once=count, clip=0.0).state.params for count in (64, 3)
    )
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=1e-11)
    home, params = at_home(samples_at_once=3)
    x, _ = samples(7)
    wide = dataclasses.replace(home, config=dataclasses.replace(home.config, samples_at_once=64))
    one, other = (ALGORITHM.predict(h, {"params": params, "buffers": {}}, x) for h in (home, wide))
    assert one.shape == (7, 3)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_noise_differs_between_steps_and_between_samples() -> None:
    home, params = at_home(local_lr=0.3)
    x, y = samples(1)
    same = batch_of(x.expand(3, 1, 6, 6), y.expand(3))
    z = normal(fold(same.key, 1), (3, 4), torch.float64)
    e = embed(params, same.x, z).exp()
    assert len({tuple(row) for row in e.tolist()}) == 3
    one, other = (stepped(home, params, same._replace(key=key(n))) for n in (1, 2))
    assert not torch.equal(one.params["extractor.0.weight"], other.params["extractor.0.weight"])


def scores(played: Played, federation, split: str = "test") -> dict:
    session = played.session("evaluation")
    sent = ALGORITHM.send(played.setup, played.state, federation.participants)
    return evaluate(ALGORITHM, lambda _: sent, federation.participants, split, session.ask)


@pytest.mark.parametrize("control", ["constant", "mean"])
@pytest.mark.parametrize("condition", ["parameters", "input"])
def test_controls_and_opt_1_run_alike_on_both_engines(control: str, condition: str) -> None:
    """Clients with 2, 5 and 11 samples: evaluation pads the first two, which must not move their mean embedding."""
    federation = small_federation(sizes=(2, 5, 11))
    config = {**SMALL, "control": control, "condition": condition}
    one, other = (play(ALGORITHM, federation, engine, **config) for engine in ("sequential", "vectorised"))
    for name, value in one.state.params.items():
        torch.testing.assert_close(other.state.params[name], value, rtol=0, atol=1e-9)
    found = [scores(played, federation, "train") for played in (one, other)]
    for client, score in found[0].items():
        assert found[1][client].loss == pytest.approx(score.loss, abs=1e-9)


@pytest.mark.parametrize("control", ["constant", "mean"])
def test_a_control_gives_all_samples_one_classifier(control: str) -> None:
    home, params = at_home(control=control)
    x, _ = samples(6)
    e = quiet_embeddings(params, x).mean(0) if control == "mean" else torch.full((4,), 0.25, dtype=torch.float64)
    expected = by_modules(home, params, e.expand(6, 4), x)
    outputs = ALGORITHM.predict(home, {"params": params, "buffers": {}}, x)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-10)


def test_opt_1_is_one_classifier_that_sees_the_embedding() -> None:
    home, params = at_home(condition="input")
    assert {name.split(".")[0] for name in params} == {"extractor", "noise", "classifier", "append"}
    x, _ = samples(4)
    seen = torch.cat([x.flatten(1), quiet_embeddings(params, x)], 1)
    weight = torch.cat([params["classifier.hidden.0.weight"], params["append.weight"]], 1)
    units = F.relu(seen @ weight.T + params["classifier.hidden.0.bias"])
    expected = units @ params["classifier.output.weight"].T + params["classifier.output.bias"]
    outputs = ALGORITHM.predict(home, {"params": params, "buffers": {}}, x)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "shape", "extractor_hidden"),
    [
        ("mlp:hidden=200x", (1, 28, 28), 0),
        ("lenet_s", (1, 28, 28), 4),
        ("lenet_s:channels=20x50:hidden=500", (1, 28, 28), 0),
        ("zenkenet", (3, 32, 32), 0),
    ],
)
def test_what_travels_can_be_made_as_large_as_the_classifier(name: str, shape: tuple, extractor_hidden: int) -> None:
    """The paper's networks without BatchNorm, within 5%; without size_match the loom is that of Table 3."""
    model = Model(parse(name, shape, 10))
    config = Config(size_match=True, extractor_hidden=extractor_hidden)
    setup = dataclasses.replace(setup_of(small_federation(), config), clients=("a",), models={"a": model})
    sent = sum(value.numel() for value in ALGORITHM.init(setup).params.values())
    assert abs(sent / model.size - 1) <= 0.05
    assert loom_of(Config(), model).hidden == (300, 300)


def test_a_model_with_batchnorm_is_refused_before_round_one() -> None:
    arrays = from_arrays(torch.randn(60, 1, 6, 6).numpy(), (torch.arange(60) % 3).numpy())
    options = RunOptions(dataset="x", partition="iid", clients=4, model="testnets:Normed")
    with pytest.raises(NeedsError) as caught:
        Simulation("hyperfedzero", options, Config(), arrays)
    assert str(caught.value) == (
        "HyperFedZero cannot train BatchNorm; testnets:Normed has it. Choose a --model without it."
    )


def test_the_server_averages_by_numbers_of_samples() -> None:
    federation, ears = small_federation(sizes=(9, 3)), Ears()
    played = play(ALGORITHM, federation, rounds=1, wrap=ears, **SMALL)
    start = ALGORITHM.init(played.setup).params
    one, other = (ears.replies[0][client]["delta"] for client in ("0", "1"))
    expected = tree_map(lambda s, a, b: s + 0.75 * a + 0.25 * b, start, one, other)
    for name, value in played.state.params.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


def test_extractor_and_loom_travel_and_classifiers_never_do() -> None:
    federation, ears = small_federation(), Ears()
    played = play(ALGORITHM, federation, wrap=ears, **SMALL)
    assert {name.split(".")[0] for name in played.state.params} == {"extractor", "noise", "loom"}
    assert ears.down == {f"params/{name}" for name in played.state.params}
    assert ears.up == {f"delta/{name}" for name in played.state.params} | {"num_samples", "loss"}


def test_a_newcomer_gets_what_everybody_has_and_is_asked_nothing() -> None:
    federation, ears = small_federation(unseen=2), Ears()
    played = play(ALGORITHM, federation, rounds=1, **SMALL)
    session = played.session("admission")
    sent = ALGORITHM.admit(played.setup, played.state, Cohort(1, federation.unseen), ears(session.ask))
    assert ears.programs == [] and not ALGORITHM.admit_labels
    assert sent.shared == {"params": played.state.params} and dict(sent.mine) == {"3": {}, "4": {}}


def test_the_defaults_are_the_papers() -> None:
    config = Config()
    batches = config.batches()
    assert (batches.steps, batches.epochs, batches.size) == (5, 0, 16)
    inner = dataclasses.asdict(config.local_optimiser())
    expected = {"name": "sgd", "lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0}
    assert {name: inner[name] for name in expected} == expected
    assert (config.embed_dim, config.balance, config.entropy) == (16, 1.0, 1.0)
    assert (config.hidden, config.chunk_size) == ((300, 300), 576)
    assert (config.condition, config.control, config.size_match) == ("parameters", "none", False)


def test_a_size_is_not_matched_where_there_is_no_loom() -> None:
    with pytest.raises(ConfigError, match="--size-match is for the loom, which --condition input has none of"):
        Config(size_match=True, condition="input")
