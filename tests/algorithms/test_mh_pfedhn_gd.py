# SPDX-License-Identifier: Apache-2.0
"""MH-pFedHNGD: the distilled loss on paper, the two asks of a round, and what it reduces to."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import play, setup_of, small_federation
from fedloom.algorithms import mh_pfedhn
from fedloom.algorithms.mh_pfedhn_gd import ALGORITHM, Config, global_model
from fedloom.core.contract import Cohort, Home, Program
from fedloom.core.errors import ConfigError, NeedsError
from fedloom.core.task import CLASSIFICATION
from fedloom.core.trees import PerClient, Tree, flatten
from fedloom.core.vectors import to_vector
from fedloom.core.wire import decode, encode
from fedloom.engines.memories import Memories
from fedloom.looms.places import deploying, global_network, global_place
from fedloom.models.load import is_one_network
from fedloom.models.model import Model
from fedloom.models.spec import parse
from fedloom.programs.distillation import answers_of, distilled, log_shares
from fedloom.programs.evaluation import evaluate
from tiny import Ears, lines

TWO = ("lenet:kernels=2", "mlp:hidden=5")
SMALL: dict[str, Any] = {"chunk": 100, "embed_dim": 4, "hidden": 6, "server_lr": 0.01}
FIRST, SECOND = "mh_pfedhn_gd.global", "mh_pfedhn_gd.train"


def test_the_distilled_loss_on_paper() -> None:
    """Teacher (ln 3, 0): shares 3/4 and 1/4; student (0, 0): 1/2 each; label 0.

    KL(teacher || student) = 3/4 ln 3/2 + 1/4 ln 1/2; the cross-entropy is ln 2.
    """
    divergence = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    answers, outputs, y = torch.tensor([[math.log(3), 0.0]]), torch.zeros(1, 2), torch.tensor([0])
    task = distilled(CLASSIFICATION, answers, 0.2, 1.0)
    assert float(task.loss(outputs, y)) == pytest.approx(0.8 * math.log(2) + 0.2 * divergence, abs=1e-6)
    assert task.metric is CLASSIFICATION.metric
    # scores twice as large at temperature 2 are the same shares, and the divergence counts T^2 = 4 times
    task = distilled(CLASSIFICATION, 2 * answers, 0.2, 2.0)
    assert float(task.loss(outputs, y)) == pytest.approx(0.8 * math.log(2) + 0.8 * divergence, abs=1e-6)


def test_the_distilled_loss_is_the_authors() -> None:
    rng = torch.Generator().manual_seed(0)
    answers, outputs = torch.randn(2, 6, 4, generator=rng, dtype=torch.float64)
    y, a, t = torch.randint(4, (6,), generator=rng), 0.3, 7.0
    loss = distilled(CLASSIFICATION, answers, a, t).loss(outputs, y).mean()
    student, teacher = (outputs / t).softmax(1), (answers / t).softmax(1)
    wanted = a * F.kl_div(student.log(), teacher, reduction="batchmean") * t**2 + (1 - a) * F.cross_entropy(outputs, y)
    torch.testing.assert_close(loss, wanted)


class Watch(Ears):
    """Ears that also note what is sent and what clients remember after each ask."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: list[Tree] = []
        self.mine: list[dict[str, Tree]] = []
        self.memory: list[dict[str, Tree]] = []

    def __call__(self, ask: Any) -> Any:
        hears, session = super().__call__(ask), ask.__self__

        def heard(program: Program, shared: Tree, mine: Any) -> PerClient:
            self.shared.append(shared)
            self.mine.append({client: mine[client] for client in mine})
            replies = hears(program, shared, mine)
            self.memory.append(dict(session.memory))
            return replies

        return heard


@pytest.mark.parametrize("step", ["per_client", "in_turn", "cohort_mean"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised", "loopback"])
def test_without_a_global_model_it_is_mh_pfedhn_bit_for_bit(step: str, engine: str) -> None:
    federation = small_federation(TWO)
    plain = play(mh_pfedhn.ALGORITHM, federation, engine, server_step=step, **SMALL)
    config = {**SMALL, "server_step": step, "global_share": 0.0, "distil_weight": 0.0}
    played = play(ALGORITHM, federation, engine, **config)
    ends = [flatten({"state": p.state._asdict(), "memory": p.memory}) for p in (plain, played)]
    extra = ends[1].keys() - ends[0].keys()
    assert all("vectors.global" in path or path == "state/mean/" for path in extra)
    assert all(torch.equal(value, ends[1][path]) for path, value in ends[0].items())
    assert plain.diagnostics == played.diagnostics


def test_a_round_asks_for_the_global_model_and_then_for_each_personal_one() -> None:
    federation, watch = small_federation(TWO), Watch()
    played = play(ALGORITHM, federation, rounds=1, wrap=watch, **SMALL)
    assert watch.programs == [FIRST, *[SECOND] * 5]
    assert watch.asked[0] == list(federation.participants) and [len(who) for who in watch.asked[1:]] == [1] * 5
    assert watch.down == {"vector"} and watch.up == {"delta", "num_samples", "loss"}
    start = ALGORITHM.init(played.setup)
    _, params = global_model(played.setup, start)
    assert torch.equal(watch.shared[0]["vector"], to_vector(params)) and watch.shared[1] == {}
    assert set(played.diagnostics[0]) == {"local_loss", "global_loss"}


def test_the_global_model_shares_the_head_of_the_smallest_clients() -> None:
    federation = small_federation(TWO)
    played = play(ALGORITHM, federation, rounds=1, cohorts=[["0"]], **SMALL)  # client 0 has the larger model
    assert global_network(played.setup) is federation.roster["1"].model
    assert {piece for piece in played.state.pieces if piece.startswith("head")} == {"head.3", "head.113"}
    counts = {piece: int(tree["count"]) for piece, tree in played.state.optimiser.items()}
    # the global step: trunk, the small head, v_g; the personal step: trunk, the large head, v_0
    assert counts == {
        "trunk": 2, "head.113": 1, "head.3": 1, "vectors.0": 1, "vectors.1": 0, "vectors.2": 0, "vectors.3": 0,
        "vectors.4": 0, "vectors.global": 1,
    }  # fmt: skip


def test_the_global_step_is_weighted_by_numbers_of_samples() -> None:
    """The step from the state before it, along the mean of the changes with weights 9, 4, 13, 7, 5 of 38."""
    federation, watch = small_federation(), Watch()
    played = play(ALGORITHM, federation, rounds=1, wrap=watch, **SMALL)
    start = ALGORITHM.init(played.setup)
    weights = {"0": 9, "1": 4, "2": 13, "3": 7, "4": 5}
    mean = sum(watch.replies[0][c]["delta"] * w / 38 for c, w in weights.items())
    place = global_place(played.setup)
    leaves = {
        piece: {n: start.pieces[piece][n].clone().requires_grad_() for n in start.pieces[piece]}
        for piece in ("trunk", place.head, place.vectors)
    }
    (-(played.setup.config.loom()(leaves, [place])[0] * mean).sum()).backward()
    flat = [value for params in leaves.values() for value in params.values()]
    torch.nn.utils.clip_grad_norm_(flat, 50.0)
    torch.optim.Adam(flat, lr=0.01).step()
    # the first personal model is woven after that step, its vectors being as they were
    first = watch.asked[1][0]
    pieces = {**start.pieces, **{p: {n: v.detach() for n, v in params.items()} for p, params in leaves.items()}}
    wanted = mh_pfedhn.send(played.setup, mh_pfedhn.State(pieces, {}), (first,)).mine[first]["vector"]
    torch.testing.assert_close(watch.mine[1][first]["vector"], wanted, rtol=0, atol=1e-12)


def test_the_teacher_is_the_global_model_as_it_was_sent_and_is_forgotten_afterwards() -> None:
    federation, watch = small_federation(TWO), Watch()
    play(ALGORITHM, federation, rounds=1, wrap=watch, **SMALL)
    for client in federation.participants:
        assert torch.equal(watch.memory[0][client]["teacher"], watch.shared[0]["vector"])
        assert "teacher" not in watch.memory[-1][client]


def test_personal_training_is_ordinary_training_on_the_distilled_loss() -> None:
    federation, watch = small_federation(TWO, sizes=(9, 8)), Watch()
    config = {**SMALL, "distil_weight": 0.3, "temperature": 4.0}
    played = play(ALGORITHM, federation, rounds=1, wrap=watch, **config)
    teacher = federation.roster["1"].model  # the smaller one
    _, params = global_model(played.setup, ALGORITHM.init(played.setup))
    ask = next(i for i, who in enumerate(watch.asked) if who == ["0"])
    model, start = federation.roster["0"].model, watch.mine[ask]["0"]["vector"]
    sizes = [v.numel() for v in model.init(0).values()]
    shaped = {n: v.reshape(model.shapes[n]) for n, v in zip(model.shapes, start.split(sizes))}
    module = model.module(shaped, {}).train()
    inner = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for rows in watch.plans[ask]["0"].rows:
        x, y = federation.x[rows], federation.y[rows]
        inner.zero_grad()
        outputs, answers = module(x), teacher(params, {}, x)
        learned, taught = (outputs / 4).log_softmax(1), (answers / 4).softmax(1)
        loss = 0.7 * F.cross_entropy(outputs, y) + 0.3 * 16 * F.kl_div(learned, taught, reduction="batchmean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        inner.step()
    after = torch.cat([p.detach().flatten() for p in module.parameters()])
    torch.testing.assert_close(watch.replies[ask]["0"]["delta"], after - start, rtol=0, atol=1e-12)


def test_without_distillation_nobody_keeps_a_teacher() -> None:
    """MH-pFedHNG of Table 4: the global step alone."""
    federation, watch = small_federation(), Watch()
    play(ALGORITHM, federation, rounds=1, wrap=watch, distil_weight=0.0, **SMALL)
    assert watch.programs[0] == FIRST
    assert not any("teacher" in tree for memory in watch.memory for tree in memory.values())


def test_distillation_pulls_a_model_towards_its_teacher() -> None:
    """With all the weight on the teacher, personal models end up nearer to its answers than without."""
    federation = small_federation()
    gaps = []
    for weight in (0.0, 1.0):
        watch = Watch()
        config = {**SMALL, "distil_weight": weight, "temperature": 1.0, "local_epochs": 20, "local_lr": 0.1}
        play(ALGORITHM, federation, rounds=1, wrap=watch, server_step="per_client", **config)
        model = federation.roster["2"].model
        x = federation.x[federation.roster["2"].rows["train"]]

        def answers(vector: Tensor, x: Tensor = x, model: Model = model) -> Tensor:
            parts = vector.split([v.numel() for v in model.init(0).values()])
            params = {n: part.reshape(model.shapes[n]) for n, part in zip(model.shapes, parts)}
            return model(params, {}, x).softmax(1)

        after = watch.mine[1]["2"]["vector"] + watch.replies[1]["2"]["delta"]
        gaps.append(float((answers(after) - answers(watch.shared[0]["vector"])).abs().mean()))
    assert gaps[1] < 0.2 * gaps[0]


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (0.01, 1), (0.2, 2), (0.5, 5), (1.0, 10)])
def test_only_a_share_of_the_clients_deploys_the_global_model(share: float, number: int) -> None:
    federation, watch = small_federation(TWO, sizes=(4,) * 10), Watch()
    played = play(ALGORITHM, federation, rounds=1, wrap=watch, global_share=share, **SMALL)
    chosen = deploying(played.setup)
    assert len(chosen) == number
    if number:
        assert watch.programs[0] == FIRST and set(watch.asked[0]) == chosen
        assert {c for c, tree in watch.memory[0].items() if "teacher" in tree} == chosen
    assert watch.programs.count(SECOND) == 10
    loud = play(ALGORITHM, federation, "vectorised", rounds=1, global_share=share, **SMALL)
    ends = [flatten(p.state._asdict()) for p in (played, loud)]
    assert all(torch.allclose(value, ends[1][path], rtol=0, atol=1e-9) for path, value in ends[0].items())


def test_a_cohort_without_any_deploying_client_has_no_global_step() -> None:
    federation, watch = small_federation(sizes=(4,) * 10), Watch()
    config = Config(local_epochs=1, global_share=0.2, **SMALL)
    idle = next(c for c in federation.participants if c not in deploying(setup_of(federation, config)))
    play(ALGORITHM, federation, rounds=1, cohorts=[[idle]], wrap=watch, global_share=0.2, **SMALL)
    assert watch.programs == [SECOND]


def test_clients_that_do_not_answer_the_first_ask_are_not_asked_again() -> None:
    federation, watch = small_federation(), Watch()
    federation.x[federation.roster["3"].rows["train"]] = float("nan")
    played = play(ALGORITHM, federation, rounds=1, wrap=watch, **SMALL)
    assert sorted(who for asked in watch.asked[1:] for who in asked) == ["0", "1", "2", "4"]
    assert [d.client for d in played.stats.dropped] == ["3"]


def test_noise_goes_on_both_updates() -> None:
    federation, quiet, loud = small_federation(), Watch(), Watch()
    play(ALGORITHM, federation, rounds=1, wrap=quiet, server_step="per_client", **SMALL)
    play(ALGORITHM, federation, rounds=1, wrap=loud, server_step="per_client", laplace_noise=0.02, **SMALL)
    noise = torch.stack([loud.replies[0][c]["delta"] - quiet.replies[0][c]["delta"] for c in quiet.replies[0]])
    assert float(noise.abs().mean()) == pytest.approx(0.02, rel=0.12)
    assert not torch.equal(loud.replies[1]["0"]["delta"], quiet.replies[1]["0"]["delta"])


def test_only_personal_updates_are_pruned() -> None:
    """App. D.11: 60 of 203 entries of the second reply, all of the first."""
    watch = Watch()
    play(ALGORITHM, small_federation(), rounds=1, wrap=watch, top_share=0.3, **SMALL)
    assert len(watch.replies[0]["0"]["delta"]) == 203
    assert all(len(next(iter(replies.values()))["values"]) == 60 for replies in watch.replies[1:])


def test_the_global_models_network_can_be_chosen() -> None:
    """App. D.6: another architecture than any client's, with a head of its own if its number of vectors is new."""
    federation = small_federation(TWO)
    played = play(ALGORITHM, federation, rounds=2, global_model="mlp:hidden=30", **SMALL)
    network, params = global_model(played.setup, played.state)
    assert str(network.spec) == "mlp:hidden=30" and network.size == 1203
    assert played.state.pieces["head.13"]["bias"].shape == (13, 100)
    assert global_network(played.setup) is network  # one object, so that recorded graphs are found again
    assert {n: tuple(v.shape) for n, v in params.items()} == dict(network.shapes)


def test_the_server_knows_no_shapes_but_those_of_a_network_of_its_own() -> None:
    class Spy:
        def __init__(self, model: Model) -> None:
            self.size, self.spec = model.size, model.spec
            self.input_shape, self.num_outputs = model.input_shape, model.num_outputs  # of the roster
            self.tokens = model.tokens  # likewise
            self.device, self.dtype = model.device, model.dtype

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the server looked at {name}")

    federation = small_federation(TWO)
    setup = setup_of(federation, Config(local_epochs=1, batch_size=4, global_model="mlp:hidden=4", **SMALL))
    blind = dataclasses.replace(setup, models={client: Spy(model) for client, model in setup.models.items()})
    played = play(ALGORITHM, federation, rounds=0, global_model="mlp:hidden=4", **SMALL)
    state = ALGORITHM.init(blind)
    state, _ = ALGORITHM.round(blind, state, Cohort(1, federation.participants), played.session(1).ask)
    global_model(blind, state)


def test_running_statistics_of_the_global_model_stay_with_the_clients() -> None:
    federation, watch = small_federation(TWO), Watch()
    play(ALGORITHM, federation, wrap=watch, global_model="testnets:Normed", **SMALL)
    memory = watch.memory[-1]["1"]
    assert memory["buffers"] == {}
    assert memory["global_buffers"].keys() == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    # two rounds of two passes over four samples: the teacher looks on and counts nothing
    assert int(memory["global_buffers"]["norm.num_batches_tracked"]) == 4
    vectorised = Watch()
    play(ALGORITHM, federation, "vectorised", wrap=vectorised, global_model="testnets:Normed", **SMALL)
    one, other = (flatten(w.memory[-1]["1"]) for w in (watch, vectorised))
    assert all(torch.allclose(value, other[path], rtol=0, atol=1e-9) for path, value in one.items())


def test_the_global_model_learns_and_can_be_evaluated_and_exported() -> None:
    federation = small_federation(sizes=(20,) * 5)
    config = {**SMALL, "chunk": 3072, "hidden": 20, "server_lr": 3e-3, "local_lr": 0.02}
    played = play(ALGORITHM, federation, rounds=25, **config)
    rows = [row for client in federation.roster.values() for row in client.rows["test"]]
    losses = []
    for state in (ALGORITHM.init(played.setup), played.state):
        network, params = global_model(played.setup, state)
        module = network.module(params, network.fresh_buffers())
        outputs = module(federation.x[rows])
        assert torch.equal(outputs, network(params, network.fresh_buffers(), federation.x[rows]))
        losses.append(float(F.cross_entropy(outputs.detach(), federation.y[rows])))
    assert losses[1] < 0.9 * losses[0]
    found = [d["global_loss"] for d in played.diagnostics]
    assert sum(found[-3:]) < sum(found[:3])


def test_the_defaults_are_those_for_cifar_100() -> None:
    config = ALGORITHM.config()
    assert (config.distil_weight, config.temperature, config.global_share) == (0.01, 15.0, 1.0)
    assert config.server_step == "in_turn" and config.global_model == "" and config.local_epochs == 2
    assert ALGORITHM.name == "MH-pFedHNGD" and config.teacher == "plain" and config.deploy == "own"


def test_a_task_without_class_scores_is_refused() -> None:
    violations = ALGORITHM.needs.violations(setup_of(lines(), Config()), ALGORITHM.name)
    assert violations == ["MH-pFedHNGD needs class labels; the task is regression. Choose another method."]


def test_a_newcomer_smaller_than_all_is_admitted_with_a_head_of_its_own() -> None:
    federation = small_federation(TWO)
    small = Model(parse("mlp:hidden=1", (1, 6, 6), 3), dtype=torch.float64)
    federation = federation.joined_by("new", small, federation.x[:5], federation.y[:5])
    played = play(ALGORITHM, federation, rounds=1, admit_rounds=2, **SMALL)
    sent = ALGORITHM.admit(played.setup, played.state, Cohort(1, ("new",)), played.session("admission").ask)
    assert sent.mine["new"]["vector"].shape == (43,)


CORRECTED: dict[str, Any] = {**SMALL, "teacher": "corrected", "distil_weight": 0.3, "temperature": 2.0}
MIXED: dict[str, Any] = {**CORRECTED, "deploy": "mixture", "global_model": "mlp:hidden=5"}


def test_the_corrected_answers_and_the_mixture_on_paper() -> None:
    """Labels met in two passes over four samples: 6 and 2, so 3 and 1; with half a sample more of each .7 and .3.

    A teacher that says 1/2 each says so too then. The client's own model says 3/4 and 1/4: on the mean .725 and .275.
    """
    offset = log_shares(torch.tensor([6.0, 2.0]), torch.tensor(4.0))
    torch.testing.assert_close(offset.exp(), torch.tensor([0.7, 0.3]))
    network = Model(parse("mlp:hidden=5", (2,), 2))
    silent = {name: torch.zeros_like(value) for name, value in network.init(0).items()}
    x = torch.ones(1, 2)
    teacher = {"params": silent, "offset": offset}
    torch.testing.assert_close(answers_of(network, teacher, x).softmax(1), torch.tensor([[0.7, 0.3]]))
    bias = next(name for name in network.head if name.endswith("bias"))
    own = {**silent, bias: torch.tensor([math.log(3), 0.0])}
    config = Config(teacher="corrected", deploy="mixture", global_model="mlp:hidden=5")
    home = Home(network, CLASSIFICATION, config, torch.tensor(4.0), torch.zeros((), dtype=torch.int64))
    outputs = ALGORITHM.predict(home, {"params": own, "buffers": {}, "global": teacher}, x)
    torch.testing.assert_close(outputs.exp(), torch.tensor([[0.725, 0.275]]))


def test_classes_that_a_client_has_not_are_improbable_and_not_impossible() -> None:
    shares = log_shares(torch.tensor([8.0, 0.0]), torch.tensor(4.0)).exp()
    torch.testing.assert_close(shares, torch.tensor([4.5 / 5, 0.5 / 5]))
    torch.testing.assert_close(log_shares(torch.zeros(4), torch.tensor(9.0)).exp(), torch.full((4,), 0.25))


def test_with_uniform_shares_and_no_average_the_corrected_teacher_is_the_plain_one() -> None:
    federation = small_federation(TWO, sizes=(6, 9, 3))
    for client in federation.roster.values():
        rows = client.rows["train"]
        federation.y[rows] = torch.arange(len(rows)) % 3
    plain, same, other = (
        play(ALGORITHM, federation, rounds=3, **{**CORRECTED, **given}).state.pieces
        for given in ({"teacher": "plain"}, {"teacher_average": 0.0}, {"teacher_average": 0.9})
    )
    one, two, three = flatten(plain), flatten(same), flatten(other)
    assert all(torch.allclose(value, two[path], rtol=0, atol=1e-9) for path, value in one.items())
    assert not all(torch.allclose(value, three[path], rtol=0, atol=1e-9) for path, value in one.items())


def test_the_teacher_is_the_mean_of_the_global_model_over_rounds() -> None:
    """The past counts 2/11 after the first round, 3/12 after the second; the clients have it and their labels."""
    federation, watch = small_federation(TWO), Watch()
    config = {**CORRECTED, "server_step": "cohort_mean"}
    states = [play(ALGORITHM, federation, rounds=rounds, **config) for rounds in range(3)]
    now = [to_vector(global_model(played.setup, played.state)[1]) for played in states]
    mean = 2 / 11 * now[0] + 9 / 11 * now[1]
    torch.testing.assert_close(states[1].state.mean["vector"], mean, rtol=0, atol=1e-12)
    mean = mean / 4 + 0.75 * now[2]
    torch.testing.assert_close(states[2].state.mean["vector"], mean, rtol=0, atol=1e-12)
    play(ALGORITHM, federation, wrap=watch, **config)
    assert [set(shared) for shared in watch.shared] == [{"vector", "teacher"}, set()] * 2
    assert torch.equal(watch.shared[2]["teacher"], states[1].state.mean["vector"])
    for client in federation.participants:
        remembered = watch.memory[2][client]
        assert torch.equal(remembered["teacher"], watch.shared[2]["teacher"])
        labels = federation.y[federation.roster[client].rows["train"]].bincount(minlength=3)
        assert torch.equal(remembered["label_counts"], 4.0 * labels)  # two rounds of two passes


def test_personal_training_learns_from_the_corrected_answers() -> None:
    federation, watch = small_federation(TWO, sizes=(9, 8)), Watch()
    config = {**CORRECTED, "distil_weight": 1.0, "temperature": 1.0, "server_step": "per_client"}
    played = play(ALGORITHM, federation, rounds=1, wrap=watch, local_epochs=1, batch_size=99, clip=0.0, **config)
    _, params = global_model(played.setup, ALGORITHM.init(played.setup))
    own, teacher = federation.roster["0"], federation.roster["1"].model
    x, y = federation.x[own.rows["train"]], federation.y[own.rows["train"]]
    shares = (y.bincount(minlength=3).double() + 1 / 3) / 10
    taught = (teacher(params, {}, x) + shares.log()).softmax(1)
    start = watch.mine[1]["0"]["vector"].clone().requires_grad_()
    shaped = dict(zip(own.model.shapes, start.split([v.numel() for v in own.model.init(0).values()])))
    outputs = own.model({n: v.reshape(own.model.shapes[n]) for n, v in shaped.items()}, {}, x)
    F.kl_div(outputs.log_softmax(1), taught, reduction="batchmean").backward()
    assert start.grad is not None
    step = -0.05 * (start.grad + 1e-4 * start.detach())
    torch.testing.assert_close(watch.replies[1]["0"]["delta"], step, rtol=0, atol=1e-12)


def test_as_the_paper_has_it_nothing_is_averaged_counted_or_sent_besides() -> None:
    federation, watch = small_federation(TWO), Watch()
    played = play(ALGORITHM, federation, wrap=watch, **SMALL)
    assert played.state.mean == {} and set(watch.shared[0]) == {"vector"}
    assert not any("label_counts" in tree for memory in watch.memory for tree in memory.values())
    sent = ALGORITHM.send(played.setup, played.state, ["0"])
    assert sent.shared == {} and set(sent.mine["0"]) == {"vector"}
    assert set(played.deployed("0")) == {"params", "buffers"}
    home, x = played.home("0"), federation.x[:2]
    module = ALGORITHM.module(home, played.deployed("0"))
    assert is_one_network(module) and torch.equal(module(x), ALGORITHM.predict(home, played.deployed("0"), x))


@pytest.mark.parametrize("config", [CORRECTED, MIXED], ids=["corrected", "mixture"])
def test_the_options_are_alike_on_every_engine_and_over_a_stop(config: dict[str, Any]) -> None:
    federation = small_federation(TWO, unseen=1)
    cohorts = [["0", "1", "2"], ["1", "3"], ["0", "2", "3"]]
    ends, scores, woven = [], [], []
    for engine in ("sequential", "vectorised", "loopback"):
        straight = play(ALGORITHM, federation, engine, rounds=3, cohorts=cohorts, admit_rounds=2, **config)
        half = play(ALGORITHM, federation, engine, rounds=1, cohorts=cohorts, admit_rounds=2, **config)
        state = ALGORITHM.state(**decode(encode(half.state._asdict())))
        memory = Memories({client: decode(encode(tree)) for client, tree in half.memory.items()})
        for number in (2, 3):
            session = half.engine.session(number, memory)
            cohort = Cohort(number, tuple(cohorts[number - 1]))
            state, _ = ALGORITHM.round(straight.setup, state, cohort, session.ask)
            memory = session.memory
        ends.append(flatten({"state": straight.state._asdict(), "memory": straight.memory}))
        resumed = flatten({"state": state._asdict(), "memory": memory})
        assert ends[-1].keys() == resumed.keys()
        assert all(torch.equal(value, resumed[path]) for path, value in ends[-1].items())
        ask = straight.session("evaluation").ask
        send = lambda clients, p=straight: ALGORITHM.send(p.setup, p.state, clients)  # noqa: E731
        scores.append(evaluate(ALGORITHM, send, federation.participants, "test", ask))
        straight.admit()
        woven.append(flatten({"shared": straight.sent.shared, "mine": dict(straight.sent.mine)}))
        woven[-1]["outputs"] = ALGORITHM.predict(straight.home("4"), straight.deployed("4"), federation.x[:3])
    for found in (ends, woven):
        first, vectorised, loopback = found
        assert all(torch.allclose(value, vectorised[path], rtol=0, atol=1e-9) for path, value in first.items())
        assert all(torch.equal(value, loopback[path]) for path, value in first.items())
    assert scores[0] == scores[2] and all(
        score.loss == pytest.approx(scores[1][client].loss, abs=1e-9) for client, score in scores[0].items()
    )


def test_a_mixture_is_deployed_by_participants_and_newcomers_and_handed_on_as_one_module() -> None:
    federation = small_federation(TWO, unseen=1)
    played = play(ALGORITHM, federation, admit_rounds=2, **MIXED).admit()
    assert torch.equal(played.sent.shared["global"], played.state.mean["vector"])
    assert set(played.sent.embeddings) == {"4"}
    for client in ("0", "4"):
        home, deployed, x = played.home(client), played.deployed(client), federation.x[:4]
        counts = federation.y[federation.roster[client].rows["train"]].bincount(minlength=3).double()
        offset = deployed["global"]["offset"]
        torch.testing.assert_close(offset.exp(), (counts + 1 / 3) / (counts.sum() + 1))
        outputs, module = ALGORITHM.predict(home, deployed, x), ALGORITHM.module(home, deployed)
        own = home.model(deployed["params"], deployed["buffers"], x).softmax(1)
        ours = (global_network(played.setup)(deployed["global"]["params"], {}, x) + offset).softmax(1)
        torch.testing.assert_close(outputs.exp(), (own + ours) / 2)
        assert not is_one_network(module) and torch.equal(module(x), outputs)


@pytest.mark.parametrize("way", ["participants", "newcomers"])
def test_what_is_handed_on_has_the_mean_where_it_is_used(way: str) -> None:
    federation = small_federation(TWO)
    for config, names in ((CORRECTED, set()), (MIXED, {"vector", "rounds"})):
        played = play(ALGORITHM, federation, rounds=1, **config)
        assert set(getattr(ALGORITHM.handover, way)(played.setup, played.state).mean) == names


def test_a_mixture_that_cannot_be_is_refused() -> None:
    for given, sentence in (
        ({"teacher": "plain"}, "got a plain one. Give --teacher corrected."),
        ({"global_model": ""}, "Give --global-model."),
        ({"global_share": 0.5}, "got --global-share 0.5. Leave one of them out."),
    ):
        with pytest.raises(ConfigError, match=sentence):
            Config(**{**MIXED, **given})
    normed = {**MIXED, "global_model": "testnets:Normed"}
    with pytest.raises(NeedsError, match=r"BatchNorm.*choose a --global-model without"):
        play(ALGORITHM, small_federation(TWO), rounds=0, **normed)


def test_a_newcomer_is_asked_to_count_its_labels_for_a_mixture_alone() -> None:
    model = small_federation().roster["0"].model
    asked = [{one.name for one in ALGORITHM.programs(Config(**given), model, True)} for given in (CORRECTED, MIXED)]
    assert asked == [{"mh_pfedhn.train"}, {"mh_pfedhn.train", "label_counts"}]
