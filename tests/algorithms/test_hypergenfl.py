# SPDX-License-Identifier: Apache-2.0
"""HyperGenFL: a round on paper, its direction on quadratics, and the whole against torch's attention and AdamW."""

from __future__ import annotations

import dataclasses
import logging
import math

import pytest
import torch
from torch import Tensor, nn

from conftest import play, setup_of, small_federation
from fedloom.algorithms import fedavg, hypergenfl
from fedloom.algorithms.hypergenfl import ALGORITHM, Config, State, gradient, loom_of
from fedloom.core.contract import Cohort
from fedloom.core.errors import ConfigError
from fedloom.core.trees import PerClient
from tiny import HAND, Ears, lines

SMALL = {"embed_dim": 16, "attention_heads": 2}


def by_hand(setup) -> State:
    """Silent attention, embeddings (0, ln 3) and (0, 0), one head that is 4 times the first feature, floor 1/2.

    Features (1/4, 3/4) and (1/2, 1/2), scores 1.5 and 2.5, weights 3/8 and 5/8.
    """
    state = hypergenfl.init(setup)
    loom = {name: torch.zeros_like(value) for name, value in state.loom.items()}
    loom["head.weight"] = torch.tensor([[4.0, 0.0]], dtype=torch.float64)
    table = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]], dtype=torch.float64)
    return state._replace(loom=loom, embeddings=table)


PAPER = {**HAND, "embed_dim": 2, "attention_heads": 1, "score_floor": 0.5}


def test_one_round_on_paper() -> None:
    """Changes 0.4 and -0.2 (tiny.POINTS): w = 1 + 3/8 * 0.4 - 5/8 * 0.2 = 1.025; 1 / (9/64 + 25/64) = 32/17 clients."""
    algorithm = dataclasses.replace(ALGORITHM, init=by_hand)
    played = play(algorithm, lines(), rounds=1, server_lr=0.0, **PAPER)
    assert float(played.state.params["line.weight"]) == pytest.approx(1.025, abs=1e-12)
    clients, layers, weights = played.diagnostics[0]["weights"]
    assert (clients, layers) == (("0", "1"), ("line",))
    assert weights.flatten().tolist() == pytest.approx([0.375, 0.625], abs=1e-12)
    assert played.diagnostics[0]["effective_clients.line"] == pytest.approx(32 / 17, abs=1e-12)
    assert played.diagnostics[0]["alive_heads"] == 1.0


def test_the_looms_gradient_on_paper() -> None:
    """The mean change is 0.1, so dL / d theta_g = -0.1 and the slopes of the weights are -0.04 and 0.02.

    Their weighted mean is -0.0025; the scores sum to 4: slopes of the scores (-0.0375, 0.0225) / 4 = (-0.009375,
    0.005625). Bias: the sum, -0.00375. Head weight: -0.009375 (1/4, 3/4) + 0.005625 (1/2, 1/2) = (0.00046875,
    -0.00421875). Embeddings: 4 times the slope times z_0 (1 - z_0, -z_1): -0.0375 * 3/16 (1, -1) = -0.00703125 and
    0.0225 / 4 (1, -1) = 0.005625; the mean of the cohort, which attention would add, has a weight of 0.
    """
    setup = setup_of(lines(), Config(**PAPER))
    deltas = {"line.weight": torch.tensor([[[0.4]], [[-0.2]]], dtype=torch.float64)}
    grads = gradient(setup.config, loom_of(setup), by_hand(setup), [0, 1], deltas)
    assert grads["head.bias"].tolist() == pytest.approx([-0.00375], abs=1e-14)
    assert grads["head.weight"].flatten().tolist() == pytest.approx([0.00046875, -0.00421875], abs=1e-14)
    expected = [-0.00703125, 0.00703125, 0.005625, -0.005625]
    assert grads["embeddings"].flatten().tolist() == pytest.approx(expected, abs=1e-14)
    literal = dataclasses.replace(setup.config, direction="literal")
    other = gradient(literal, loom_of(setup), by_hand(setup), [0, 1], deltas)
    assert all(torch.equal(other[name], -grad) for name, grad in grads.items())


def test_the_loom_steps_before_its_weights_are_used() -> None:
    """AdamW's first step is the rate against the sign of the gradient: 0.01 on bias, head weight and embeddings."""
    algorithm = dataclasses.replace(ALGORITHM, init=by_hand)
    played = play(algorithm, lines(), rounds=1, server_weight_decay=0.0, **PAPER)
    state = played.state
    assert state.loom["head.bias"].tolist() == pytest.approx([0.01], abs=1e-6)
    assert state.loom["head.weight"].flatten().tolist() == pytest.approx([3.99, 0.01], abs=1e-6)
    expected = [0.01, math.log(3) - 0.01, -0.01, 0.01]
    assert state.embeddings.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    loom = loom_of(played.setup)
    alpha = loom.weights(loom.activations(state.loom, state.embeddings))
    torch.testing.assert_close(state.last_weights, alpha)
    moved = 1 + float(alpha[0]) * 0.4 - float(alpha[1]) * 0.2
    assert float(alpha[0]) > 0.376 and float(state.params["line.weight"]) == pytest.approx(moved, abs=1e-12)


@pytest.mark.parametrize("sizes", [(6, 6, 6, 6), (9, 4, 13, 7)], ids=["equal", "ragged"])
def test_a_frozen_loom_of_ones_is_uniform_averaging(sizes: tuple[int, ...]) -> None:
    federation, ears = small_federation(("testnets:Normed",), sizes=sizes), Ears()
    one = play(ALGORITHM, federation, rounds=3, server_lr=0.0, wrap=ears, batchnorm="averaged")
    params = hypergenfl.init(one.setup).params
    for replies in ears.replies:
        params = {
            name: value + torch.stack([reply["delta"][name] for reply in replies.values()]).mean(0)
            for name, value in params.items()
        }
    for name, value in params.items():
        torch.testing.assert_close(one.state.params[name], value, rtol=0, atol=1e-12)
    avg = play(fedavg.ALGORITHM, federation, rounds=3, weight_decay=one.setup.config.weight_decay, batchnorm="averaged")
    apart = max(float((one.state.params[n] - v).abs().max()) for n, v in avg.state.params.items())
    # FedAvg weighs by the number of samples: the same thing where these are equal
    assert apart < 1e-12 if len(set(sizes)) == 1 else apart > 1e-4


def test_running_statistics_are_averaged_by_data_size() -> None:
    federation = small_federation(("testnets:Normed",))
    same = {"rounds": 1, "weight_decay": 0.0, "batchnorm": "averaged"}
    one = play(ALGORITHM, federation, embed_init="random", **same)
    avg = play(fedavg.ALGORITHM, federation, **same)
    assert one.state.buffers.keys() == avg.state.buffers.keys()
    assert all(torch.equal(one.state.buffers[name], value) for name, value in avg.state.buffers.items())


class Quadratics:
    """Clients with L_c(theta) = sum_k a_ck (theta_k - t_ck)^2 / 2, trained by plain gradient descent."""

    def __init__(self, rate: float, steps: int, **config) -> None:
        federation = small_federation(sizes=(3,) * 6)
        self.setup = setup_of(federation, Config(**SMALL, **{"embed_init": "random", **config}))
        self.state = hypergenfl.init(self.setup)
        draw = torch.Generator().manual_seed(1)
        self.start = self.state.params
        self.targets, self.curves = (
            {n: make(6, *v.shape, generator=draw, dtype=torch.float64) for n, v in self.start.items()}
            for make in (torch.randn, torch.rand)
        )
        self.deltas = {}
        for name, value in self.start.items():
            theta = value.expand_as(self.targets[name])
            for _ in range(steps):
                theta = theta - rate * self.curves[name] * (theta - self.targets[name])
            self.deltas[name] = theta - value

    def loss(self, values: dict[str, Tensor]) -> Tensor:
        """Eq. 1 for equal data: the clients' mean loss at theta_g = sum_c alpha_c theta_c, by loom and embeddings."""
        loom = loom_of(self.setup)
        alpha = loom.weights(loom.activations(values, values["embeddings"]))
        total = torch.zeros((), dtype=torch.float64)
        for weights, names in zip(alpha.T, loom.layers.values()):
            for name in names:
                theta = torch.tensordot(weights, self.start[name] + self.deltas[name], dims=1)
                total = total + (self.curves[name] * (theta - self.targets[name]).square() / 2).sum() / 6
        return total

    def found(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The method's gradient, and the true one."""
        values = {**self.state.loom, "embeddings": self.state.embeddings}
        ours = gradient(self.setup.config, loom_of(self.setup), self.state, list(range(6)), self.deltas)
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        true = torch.autograd.grad(self.loss(leaves), list(leaves.values()))
        return ours, dict(zip(leaves, true))

    def after(self, step: float) -> float:
        """The loss after a step of plain gradient descent on loom and embeddings, as line 16 and 17 write it."""
        ours, _ = self.found()
        norm = math.sqrt(sum(float(g.square().sum()) for g in ours.values()))
        values = {**self.state.loom, "embeddings": self.state.embeddings}
        return float(self.loss({name: value - step / norm * ours[name] for name, value in values.items()}))


def cosine(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    a, b = (torch.cat([tree[name].flatten() for name in one]) for tree in (one, other))
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("start", ["paper", "alive"])
@pytest.mark.parametrize(
    ("rate", "steps", "least"), [(1e-4, 1, 0.9999), (0.01, 5, 0.9)], ids=["one small step", "five larger steps"]
)
def test_the_step_descends_the_clients_loss(start: str, rate: float, steps: int, least: float) -> None:
    """Eq. 12 to 14 hold to first order in the way the clients have gone."""
    clients = Quadratics(rate, steps, start=start)
    ours, true = clients.found()
    assert all(float(true[name].abs().max()) > 0 for name in true if "in" not in name)
    assert cosine(ours, true) > least
    assert clients.after(1e-3) < clients.after(0.0)


@pytest.mark.parametrize("start", ["paper", "alive"])
def test_the_algorithm_as_printed_climbs_it(start: str) -> None:
    clients = Quadratics(1e-4, 1, start=start, direction="literal")
    assert cosine(*clients.found()) < -0.9999
    assert clients.after(1e-3) > clients.after(0.0)


@pytest.mark.parametrize(
    ("name", "loss"),
    [("mse", lambda apart: apart.square()), ("log_cosh", lambda apart: torch.log(torch.cosh(apart)))],
)
def test_the_losses_of_the_ablation(name: str, loss) -> None:
    clients = Quadratics(0.5, 5, server_loss=name)

    def written_out(values: dict[str, Tensor]) -> Tensor:
        loom = loom_of(clients.setup)
        alpha = loom.weights(loom.activations(values, values["embeddings"]))
        parts = []
        for weights, names in zip(alpha.T, loom.layers.values()):
            for n in names:
                theta = clients.start[n] + clients.deltas[n]
                parts.append(loss(torch.tensordot(weights, theta, dims=1) - theta).sum() / 6)
        return torch.stack(parts).sum()

    clients.loss = written_out
    ours, true = clients.found()
    for key, value in true.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-9, atol=1e-9 * float(value.abs().max()))


def test_the_squared_loss_wants_equal_weights() -> None:
    """The model nearest to all clients' is their mean: with equal weights its gradient is zero."""
    clients = Quadratics(0.5, 5, server_loss="mse", embed_init="ones", start="alive")
    ours, _ = clients.found()
    assert max(float(grad.abs().max()) for grad in ours.values()) < 1e-15


class Theirs(nn.Module):
    """Sec. 3.1 in torch's modules."""

    def __init__(self, state: State, layers: int, heads: int, depth: int, floor: float) -> None:
        super().__init__()
        dim, self.floor = state.embeddings.shape[1], floor
        self.embeddings = nn.Parameter(state.embeddings.clone())
        self.attention = nn.ModuleList(nn.MultiheadAttention(dim, heads, dtype=torch.float64) for _ in range(depth))
        self.head = nn.Linear(dim, layers, dtype=torch.float64)
        self.load_state_dict({"embeddings": state.embeddings, **{theirs(n): v for n, v in state.loom.items()}})

    def forward(self, rows: list[int]) -> Tensor:
        x = self.embeddings[rows]
        for layer in self.attention:
            x = layer(x, x, x, need_weights=False)[0] + x
        scores = self.head(x.softmax(1)).relu() + self.floor
        return scores / scores.sum(0, keepdim=True)


def theirs(name: str) -> str:
    for ours, other in ((".in.", ".in_proj_"), (".out.", ".out_proj.")):
        name = name.replace(ours, other)
    return name


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("start", ["paper", "alive"])
def test_rounds_are_those_of_torchs_attention_and_adamw(depth: int, start: str) -> None:
    federation, ears = small_federation(("lenet:kernels=2",)), Ears()
    config = {**SMALL, "embed_init": "random", "start": start, "attention_layers": depth, "server_weight_decay": 0.1}
    played = play(ALGORITHM, federation, rounds=4, wrap=ears, **config)
    first, groups = hypergenfl.init(played.setup), list(loom_of(played.setup).layers.values())
    module = Theirs(first, len(groups), 2, depth, 0.01)
    outer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    theta = dict(first.params)
    for replies in ears.replies:
        own = {name: torch.stack([theta[name] + reply["delta"][name] for reply in replies.values()]) for name in theta}
        mean_difference = {name: (own[name] - theta[name]).mean(0) for name in theta}
        alpha = module(list(range(5)))
        made = {n: torch.tensordot(alpha[:, i], own[n], dims=1) for i, names in enumerate(groups) for n in names}
        outer.zero_grad()
        sum((made[n] * -mean_difference[n]).sum() for n in theta).backward()
        outer.step()
        alpha = module(list(range(5))).detach()
        theta = {n: torch.tensordot(alpha[:, i], own[n], dims=1) for i, names in enumerate(groups) for n in names}
    for name, value in played.state.params.items():
        torch.testing.assert_close(value, theta[name], rtol=0, atol=1e-8)
    torch.testing.assert_close(played.state.last_weights, alpha, rtol=0, atol=1e-8)
    wanted = module.state_dict()
    for name, value in {**played.state.loom, "embeddings": played.state.embeddings}.items():
        torch.testing.assert_close(value, wanted[theirs(name)], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        {"embed_init": "random"},
        {"embed_init": "one_hot"},
        {"attention_layers": 2},
        {"attention_layers": 3, "embed_init": "random"},
        {"server_loss": "mse", "embed_init": "random"},
        {"server_loss": "log_cosh", "embed_init": "random"},
        {"direction": "literal", "embed_init": "random"},
        {"start": "alive"},
        {"start": "alive", "embed_init": "one_hot"},
    ],
    ids=lambda config: " ".join(map(str, config.values())),
)
def test_ablations_run_and_their_weights_sum_to_one(config: dict) -> None:
    played = play(ALGORITHM, small_federation(("lenet:kernels=2",)), rounds=3, cohorts=[["0", "2", "4"]] * 3, **config)
    weights = played.state.last_weights
    assert weights.shape == (5, 5)
    torch.testing.assert_close(weights.sum(0), torch.ones(5).double())
    assert not weights[[1, 3]].any() and (weights[[0, 2, 4]] > 0).all()
    for key, value in played.diagnostics[-1].items():
        assert not key.startswith("effective") or 1 <= value <= 3 + 1e-9


def test_one_hot_embeddings_are_as_many_as_clients_and_fixed() -> None:
    played = play(ALGORITHM, small_federation(), rounds=3, embed_init="one_hot", start="alive")
    assert torch.equal(played.state.embeddings, torch.eye(5).double())
    assert played.state.loom["head.weight"].shape == (2, 5)
    assert not torch.equal(played.state.loom["head.weight"], hypergenfl.init(played.setup).loom["head.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embeddings_of_ones_give_the_loom_no_gradient_in_the_first_round(dtype: torch.dtype) -> None:
    """All weights are 1 / 5 whatever phi is. In float32, AdamW would make whole steps of what rounding leaves."""
    federation = small_federation(dtype=dtype)
    played = play(ALGORITHM, federation, rounds=1, server_weight_decay=0.0, start="alive")
    first = hypergenfl.init(played.setup)
    assert all(torch.equal(value, first.loom[name]) for name, value in played.state.loom.items())
    assert ((played.state.embeddings - 1).abs().amax(1) > 0.009).all()


def test_who_does_not_reply_has_no_weight_and_keeps_its_embedding() -> None:
    federation = small_federation()
    config = {"embed_init": "random", "start": "alive", "server_weight_decay": 0.1}

    def deaf(ask):
        def some(program, shared, mine):
            replies = ask(program, shared, mine)
            return PerClient.of({c: replies[c] for c in replies if c != "2"})

        return some

    played = play(ALGORITHM, federation, rounds=2, cohorts=[["0", "2", "3", "4"]] * 2, wrap=deaf, **config)
    first, state = hypergenfl.init(played.setup), played.state
    assert not state.last_weights[[1, 2]].any()
    torch.testing.assert_close(state.last_weights.sum(0), torch.ones(2).double())
    assert torch.equal(state.embeddings[[1, 2]], first.embeddings[[1, 2]])
    assert (state.embeddings - first.embeddings)[[0, 3, 4]].abs().amax(1).min() > 0.01
    for moment in ("mean", "square"):
        assert not state.optimiser[moment]["embeddings"][[1, 2]].any()
        assert state.optimiser[moment]["embeddings"][[0, 3, 4]].any(1).all()
    told = played.diagnostics[-1]["weights"]
    assert (told.clients, told.columns) == (("0", "3", "4"), ("hidden.0", "output"))


def test_the_loom_as_written_dies_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    federation = small_federation(("testnets:Normed",))
    with caplog.at_level(logging.WARNING):
        played = play(ALGORITHM, federation, rounds=6)
    alive = [found["alive_heads"] for found in played.diagnostics]
    assert alive[0] > 0 and alive[-3:] == [0.0, 0.0, 0.0]
    torch.testing.assert_close(played.state.last_weights, torch.full((5, 3), 0.2).double())
    assert [record.message for record in caplog.records if "dead" in record.message] == [
        "HyperGenFL's loom is dead: no head has a positive score, so that all clients weigh the same and nothing more "
        "is learned. Use --start alive --embed-init random."
    ]


def test_a_loom_that_begins_dead_says_so_in_round_1_and_not_whenever_it_is_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    played = play(ALGORITHM, small_federation(), rounds=0)
    setups = (dataclasses.replace(played.setup, seed=seed) for seed in range(99))
    setup = next(setup for setup in setups if not hypergenfl.init(setup).alive.any())
    state = hypergenfl.init(setup)
    assert not caplog.records
    for number in (1, 2, 3):
        session = played.session(number)
        state, _ = hypergenfl.round(setup, state, Cohort(number, setup.clients), session.ask)
        assert len(caplog.records) == 1 and "loom is dead" in caplog.records[0].message


def test_a_cohort_without_a_living_head_is_no_dead_loom(caplog: pytest.LogCaptureFixture) -> None:
    """Heads that are on for client 4 alone."""

    def for_one(setup):
        state = hypergenfl.init(setup)
        table = torch.zeros_like(state.embeddings)
        table[4, 0] = 50.0
        loom = {name: torch.zeros_like(value) for name, value in state.loom.items()}
        loom["head.weight"][:, 0], loom["head.bias"][:] = 1.0, -0.5
        return state._replace(loom=loom, embeddings=table)

    with caplog.at_level(logging.WARNING):
        cohorts = [["0", "1"], ["3", "4"], ["0", "1"], ["2", "3"]]
        played = play(
            dataclasses.replace(ALGORITHM, init=for_one), small_federation(), rounds=4, cohorts=cohorts, server_lr=1e-6
        )
    assert [found["alive_heads"] for found in played.diagnostics] == [0.0, 2.0, 0.0, 0.0]
    assert not caplog.records


def test_the_living_start_stays_alive_and_tells_clients_apart(caplog: pytest.LogCaptureFixture) -> None:
    federation = small_federation(("testnets:Normed",))
    played = play(ALGORITHM, federation, rounds=40, start="alive", embed_init="random", local_lr=0.01)
    assert [found["alive_heads"] for found in played.diagnostics] == [3.0] * 40
    assert not caplog.records
    spread = played.state.last_weights.amax(0) / played.state.last_weights.amin(0)
    assert (spread > 1.05).all()
    first = hypergenfl.init(played.setup).last_weights
    assert (spread > 3 * (first.amax(0) / first.amin(0) - 1) + 1).all()  # learned, not drawn


def test_only_what_fedavg_sends_is_sent() -> None:
    federation, ears = small_federation(), Ears()
    play(ALGORITHM, federation, wrap=ears)
    names = set(federation.roster["0"].model.shapes)
    assert ears.down == {f"params/{name}" for name in names}
    assert ears.up == {f"delta/{name}" for name in names} | {"num_samples", "loss"}
    assert set(ears.programs) == {"train"}


def test_everybody_and_every_newcomer_gets_the_global_model() -> None:
    federation = small_federation(("testnets:Normed",), unseen=2)
    played = play(ALGORITHM, federation, rounds=2, batchnorm="averaged", embed_init="random")
    newcomers = ALGORITHM.admit(
        played.setup, played.state, Cohort(3, federation.unseen), played.session("admission").ask
    )
    for sent in (ALGORITHM.send(played.setup, played.state, ("1",)), newcomers):
        assert all(torch.equal(sent.shared["params"][name], value) for name, value in played.state.params.items())
        assert all(torch.equal(sent.shared["buffers"][name], value) for name, value in played.state.buffers.items())
    assert set(newcomers.mine) == set(federation.unseen)


def test_the_defaults_are_the_papers() -> None:
    config = ALGORITHM.config()
    outer = dataclasses.asdict(config.outer())
    assert {n: outer[n] for n in ("name", "lr", "weight_decay", "clip")} == {
        "name": "adamw", "lr": 0.01, "weight_decay": 1e-5, "clip": 0.0,
    }  # fmt: skip
    batches = config.batches()
    assert (batches.epochs, batches.size) == (10, 32)
    assert (config.optimiser, config.local_lr, config.weight_decay) == ("sgd", 0.01, 1e-5)
    state = hypergenfl.init(setup_of(small_federation(), config))
    assert torch.equal(state.embeddings, torch.ones(5, 128).double())


def test_random_embeddings_are_standard_normal() -> None:
    setup = setup_of(small_federation(sizes=(1,) * 100), Config(embed_init="random"))
    table = hypergenfl.init(setup).embeddings
    assert abs(float(table.mean())) < 0.04 and float(table.std()) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"embed_dim": 10, "attention_heads": 4}, "--embed-dim is 10 and --attention-heads 4"),
        ({"direction": "literal", "server_loss": "mse"}, "got --server-loss mse"),
        ({"score_floor": 0.0}, "--score-floor is 0.0; it must be more than 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(config: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**config)
