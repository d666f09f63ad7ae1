# SPDX-License-Identifier: Apache-2.0
"""pFedHN: one outer step on paper, then against a hypernetwork of plain torch modules with autograd and torch.optim."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from conftest import play, setup_of, small_federation
from fedloom.algorithms.pfedhn import ALGORITHM, State, embeddings_of, loom_of
from fedloom.core.contract import Cohort
from fedloom.core.errors import NeedsError
from fedloom.looms.outer import begin_outer
from fedloom.models.model import Model
from fedloom.models.spec import parse
from tiny import HAND, Ears, lines, torch_steps

TWO = ("lenet:kernels=2", "mlp:hidden=5")
PLAIN_OUTER = {"server_lr": 0.1, "server_momentum": 0.0, "server_weight_decay": 0.0, "server_clip": 0.0}


def by_hand(setup) -> State:
    """v = 1; a loom of width 1: 2 v, then ReLU, times 1, times 0.5: theta = 1 for everybody. No biases yet."""
    values = {"trunk.0": 2.0, "trunk.1": 1.0, f"head.{next(iter(setup.architectures))}": 0.5}
    loom = {
        f"{name}.{part}": torch.full((1, 1) if part == "weight" else (1,), value if part == "weight" else 0.0).double()
        for name, value in values.items()
        for part in ("weight", "bias")
    }
    table = torch.ones(len(setup.clients), 1, dtype=torch.float64)
    optimiser = begin_outer(setup.config.outer(), loom, table)
    return State(loom, table, torch.full((len(table),), True), optimiser)


def test_one_outer_step_on_paper() -> None:
    """theta = 0.5 (1 (2 v + 0) + 0) + 0 = 1 at v = 1. The client's gradient is -4, its change 0.1 * 4 = 0.4.

    The pseudo-gradient is -0.4. Head: weight -0.4 * 2 = -0.8, bias -0.4. Before the head: -0.4 * 0.5 = -0.2, so
    trunk.1: weight -0.2 * 2 = -0.4, bias -0.2; before it -0.2 * 1, so trunk.0: weight -0.2 v = -0.2, bias -0.2; and v:
    -0.2 * 2 = -0.4. At rate 0.1 each gains a tenth of that: 0.58, 0.04, 1.04, 0.02, 2.02, 0.02 and v = 1.04.
    """
    algorithm = dataclasses.replace(ALGORITHM, init=by_hand)
    played = play(algorithm, lines(), rounds=1, cohorts=[["0"]], hidden=1, layers=1, **PLAIN_OUTER, **HAND)
    expected = {
        "trunk.0.weight": 2.02,
        "trunk.0.bias": 0.02,
        "trunk.1.weight": 1.04,
        "trunk.1.bias": 0.02,
        "head.tiny:Line.weight": 0.58,
        "head.tiny:Line.bias": 0.04,
    }
    assert {n: float(v) for n, v in played.state.loom.items()} == pytest.approx(expected, abs=1e-12)
    assert played.state.embeddings.flatten().tolist() == pytest.approx([1.04, 1.0], abs=1e-12)


class Hyper(nn.Module):
    """The authors' hypernetwork: an embedding per client, a trunk, and one linear layer per tensor of each target."""

    def __init__(self, state: State, targets: dict[str, dict[str, tuple[int, ...]]]) -> None:
        super().__init__()
        self.targets = targets
        self.embeddings = nn.Embedding.from_pretrained(state.embeddings.clone(), freeze=False)
        depth = sum(name.startswith("trunk.") for name in state.loom) // 2
        trunk: list[nn.Module] = []
        for i in range(depth):
            trunk += [nn.ReLU()] if i else []
            trunk.append(linear(state.loom[f"trunk.{i}.weight"], state.loom[f"trunk.{i}.bias"]))
        self.trunk = nn.Sequential(*trunk)
        self.heads = nn.ModuleList()
        for target, shapes in targets.items():
            sizes = [math.prod(shape) for shape in shapes.values()]
            pairs = zip(*(state.loom[f"head.{target}.{part}"].split(sizes) for part in ("weight", "bias")))
            self.heads.append(nn.ModuleList(linear(*pair) for pair in pairs))

    def forward(self, row: int, target: str) -> dict[str, Tensor]:
        features = self.trunk(self.embeddings(torch.tensor(row)))
        heads = self.heads[list(self.targets).index(target)]
        return {name: head(features).reshape(shape) for (name, shape), head in zip(self.targets[target].items(), heads)}

    def state(self) -> dict[str, Tensor]:
        """In the form of the method's own state."""
        layers = {f"trunk.{i}": layer for i, layer in enumerate(m for m in self.trunk if isinstance(m, nn.Linear))}
        found = {
            f"{name}.{part}": getattr(layer, part) for name, layer in layers.items() for part in ("weight", "bias")
        }
        for target, heads in zip(self.targets, self.heads):
            for part in ("weight", "bias"):
                found[f"head.{target}.{part}"] = torch.cat([getattr(head, part) for head in heads])
        return {"embeddings": self.embeddings.weight.detach(), **{n: v.detach() for n, v in found.items()}}

    def learn(self, optimiser: torch.optim.Optimizer, clip: float, outputs: list[Tensor], grads: list[Tensor]) -> None:
        """autograd.grad with grad_outputs = before - after, clip_grad_norm_, step."""
        wanted = [p for p in self.parameters() if p.requires_grad]
        found = torch.autograd.grad(outputs, wanted, grads, allow_unused=True, materialize_grads=True)
        for parameter, grad in zip(wanted, found):
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_(wanted, clip)
        optimiser.step()


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0]).double()
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def targets_of(federation) -> dict[str, dict[str, tuple[int, ...]]]:
    return {str(c.model.spec): dict(c.model.shapes) for c in federation.roster.values()}


def settled(played) -> State:
    """The state with every embedding brought up to date, as a dense optimiser has it."""
    return played.state._replace(embeddings=embeddings_of(played.setup, played.state, played.setup.clients))


def assert_same(state: State, hyper: Hyper, atol: float = 1e-10) -> None:
    expected = hyper.state()
    assert {"embeddings", *state.loom} == expected.keys()
    for name, value in {**state.loom, "embeddings": state.embeddings}.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("clip", [50.0, 0.1], ids=["wide", "tight"])
@pytest.mark.parametrize(
    ("sizes", "order"), [((9,), ("0", "0", "0")), ((9, 4, 7), ("1", "0", "1"))], ids=["one client", "three clients"]
)
def test_cohorts_of_one_are_the_authors_loop(sizes: tuple[int, ...], order: tuple[str, ...], clip: float) -> None:
    """Decay and momentum also move the embeddings of clients that are not asked, as with torch's dense embedding."""
    federation, ears = small_federation(("lenet:kernels=2",), sizes=sizes), Ears()
    config = {"server_lr": 0.3, "server_clip": clip, "hidden": 20, "weight_decay": 0.01}
    played = play(ALGORITHM, federation, rounds=3, cohorts=[[c] for c in order], wrap=ears, **config)
    hyper = Hyper(ALGORITHM.init(played.setup), targets_of(federation))
    outer = torch.optim.SGD(hyper.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-3)
    for number, client in enumerate(order):
        model = federation.roster[client].model
        woven = hyper(int(client), str(model.spec))
        module = model.module({name: value.detach() for name, value in woven.items()}, {}).train()
        inner = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        torch_steps(module, [inner], federation, ears.plans[number][client], clip=0.5)
        after = dict(module.named_parameters())
        pseudo_grads = [woven[name].detach() - after[name].detach() for name in woven]
        hyper.learn(outer, clip, list(woven.values()), pseudo_grads)
    assert_same(settled(played), hyper)
    moved = (settled(played).embeddings - ALGORITHM.init(played.setup).embeddings).abs().amax(1)
    assert moved[0] > 1e-3 and (len(sizes) == 1 or moved[2] > 1e-5)


def replayed(played, federation, ears: Ears, groups: list[list[str]], clip: float) -> Hyper:
    """The hypernetwork after one step per group on the mean of its members' replies, the forward pass done anew."""
    hyper = Hyper(ALGORITHM.init(played.setup), targets_of(federation))
    outer = torch.optim.SGD(hyper.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-3)
    for members in groups:
        outputs, grads = [], []
        for client in members:
            woven = hyper(int(client), str(federation.roster[client].model.spec))
            outputs += list(woven.values())
            grads += [-ears.replies[0][client]["delta"][name] / len(members) for name in woven]
        hyper.learn(outer, clip, outputs, grads)
    return hyper


def test_per_client_steps_are_taken_one_after_another_in_the_rosters_order() -> None:
    federation, ears = small_federation(TWO), Ears()  # the two architectures take turns in the roster
    config = {"server_lr": 0.3, "server_clip": 0.02, "hidden": 20}
    played = play(ALGORITHM, federation, rounds=1, wrap=ears, **config)
    assert_same(settled(played), replayed(played, federation, ears, [["0"], ["1"], ["2"], ["3"], ["4"]], 0.02))
    back = replayed(played, federation, ears, [["4"], ["3"], ["2"], ["1"], ["0"]], 0.02)
    assert float((back.state()["embeddings"] - settled(played).embeddings).abs().max()) > 1e-6


def test_cohort_mean_is_one_step_on_the_mean_of_all_replies() -> None:
    federation, ears = small_federation(TWO), Ears()
    config = {"server_lr": 0.3, "server_clip": 0.02, "hidden": 20, "server_step": "cohort_mean"}
    played = play(ALGORITHM, federation, rounds=1, wrap=ears, **config)
    assert_same(settled(played), replayed(played, federation, ears, [["0", "1", "2", "3", "4"]], 0.02))


def test_for_a_cohort_of_one_both_outer_steps_are_the_same() -> None:
    federation, order = small_federation(TWO), [["3"], ["0"], ["3"]]
    one, other = (
        play(ALGORITHM, federation, rounds=3, cohorts=order, hidden=20, server_lr=0.3, server_step=kind).state
        for kind in ("per_client", "cohort_mean")
    )
    assert torch.equal(one.embeddings, other.embeddings)
    assert all(torch.equal(value, other.loom[name]) for name, value in one.loom.items())


def test_the_woven_model_is_what_a_client_deploys() -> None:
    federation = small_federation(TWO)
    played = play(ALGORITHM, federation, rounds=1, hidden=20)
    hyper = Hyper(settled(played), targets_of(federation))
    sent = ALGORITHM.send(played.setup, played.state, ("4", "1"))
    for client in ("4", "1"):
        deployed = ALGORITHM.client_deploy(None, sent.shared, sent.mine[client], played.recall(client))
        for name, value in hyper(int(client), str(federation.roster[client].model.spec)).items():
            torch.testing.assert_close(deployed["params"][name], value.detach(), rtol=0, atol=1e-12)


def test_the_loom_never_travels() -> None:
    federation, ears = small_federation(("mlp:hidden=5",)), Ears()
    play(ALGORITHM, federation, wrap=ears)
    names = set(federation.roster["0"].model.shapes)
    assert ears.down == {f"params/{name}" for name in names}
    assert ears.up == {f"delta/{name}" for name in names} | {"num_samples", "loss"}


def test_the_defaults_are_the_authors() -> None:
    config = ALGORITHM.config()
    outer = dataclasses.asdict(config.outer())
    expected = {"name": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 1e-3, "clip": 50.0}
    assert {name: outer[name] for name in expected} == expected
    inner = dataclasses.asdict(config.local_optimiser())
    expected = {"name": "sgd", "lr": 5e-3, "momentum": 0.9, "weight_decay": 5e-5, "clip": 50.0}
    assert {name: inner[name] for name in expected} == expected
    batches = config.batches()
    assert (batches.steps, batches.epochs, batches.size) == (50, 0, 64) and not config.keep_optimiser
    assert ALGORITHM.cohort == 1 and config.server_step == "per_client" and config.descriptor == "trainable"


@pytest.mark.parametrize(("clients", "dim"), [(1, 1), (3, 1), (4, 2), (7, 2), (8, 3), (50, 13)])
def test_embeddings_have_one_plus_a_quarter_of_the_clients_numbers(clients: int, dim: int) -> None:
    hidden = ALGORITHM.config().hidden
    state = play(ALGORITHM, small_federation(sizes=(2,) * clients), rounds=0, hidden=hidden).state
    assert state.embeddings.shape == (clients, dim)
    assert state.loom["trunk.0.weight"].shape == (100, dim)
    assert [state.loom[f"trunk.{i}.weight"].shape for i in (1, 2, 3)] == [(100, 100)] * 3
    assert "trunk.4.weight" not in state.loom


def test_embeddings_are_standard_normal_and_the_dimension_can_be_given() -> None:
    table = play(ALGORITHM, small_federation(sizes=(2,) * 200), rounds=0, embed_dim=50).state.embeddings
    assert table.shape == (200, 50)
    # 10,000 numbers: the mean has a standard error of 0.01, the deviation of 0.007
    assert abs(float(table.mean())) < 0.04 and float(table.std()) == pytest.approx(1.0, abs=0.03)


@pytest.fixture
def labelled():
    """Two clients with known labels: 0, 0, 1, 2 and 2, 2, 2, 2, 1."""
    federation = small_federation(sizes=(4, 5))
    for client, labels in (("0", [0, 0, 1, 2]), ("1", [2, 2, 2, 2, 1])):
        federation.y[federation.roster[client].rows["train"]] = torch.tensor(labels)
    return federation


def test_class_shares_become_embeddings_are_asked_for_once_and_never_change(labelled) -> None:
    """Shares of 0, 0, 1, 2: a half and two quarters; of 2, 2, 2, 2, 1: none, a fifth and four fifths."""
    ears, cohorts = Ears(), [["0"], ["0", "1"], ["1", "0"]]
    first = play(ALGORITHM, labelled, rounds=1, cohorts=cohorts, descriptor="class_shares", server_lr=0.3)
    assert first.state.embeddings.flatten().tolist() == pytest.approx([0.5, 0.25, 0.25, 1 / 3, 1 / 3, 1 / 3], abs=1e-15)
    played = play(ALGORITHM, labelled, rounds=3, cohorts=cohorts, wrap=ears, descriptor="class_shares", server_lr=0.3)
    assert played.state.embeddings.flatten().tolist() == pytest.approx([0.5, 0.25, 0.25, 0.0, 0.2, 0.8], abs=1e-15)
    asked = [who for name, who in zip(ears.programs, ears.asked) if name == "label_shares"]
    assert asked == [["0"], ["1"]] and ears.programs.count("train") == 3
    assert not torch.equal(played.state.loom["trunk.0.weight"], first.state.loom["trunk.0.weight"])


def test_fixed_embeddings_have_no_part_in_the_clipped_norm(labelled) -> None:
    ears = Ears()
    config = {"descriptor": "class_shares", "server_lr": 0.3, "server_clip": 0.02, "hidden": 20}
    played = play(ALGORITHM, labelled, rounds=1, cohorts=[["0"]], wrap=ears, **config)
    start = ALGORITHM.init(played.setup)._replace(embeddings=played.state.embeddings)
    hyper = Hyper(start, targets_of(labelled))
    hyper.embeddings.weight.requires_grad_(False)
    outer = torch.optim.SGD((p for p in hyper.parameters() if p.requires_grad), 0.3, momentum=0.9, weight_decay=1e-3)
    woven = hyper(0, "mlp:hidden=5")
    hyper.learn(outer, 0.02, list(woven.values()), [-ears.replies[1]["0"]["delta"][name] for name in woven])
    assert_same(settled(played), hyper)


def test_a_newcomer_is_described_by_its_class_shares_and_not_trained(labelled) -> None:
    """Labels 1, 1, 0, 1: (1/4, 3/4, 0)."""
    x = labelled.x[:4].clone()
    joined = labelled.joined_by("new", labelled.roster["0"].model, x, torch.tensor([1, 1, 0, 1]))
    played, ears = play(ALGORITHM, joined, rounds=1, descriptor="class_shares", hidden=20), Ears()
    session = played.session("admission")
    sent = ALGORITHM.admit(played.setup, played.state, Cohort(1, ("new",)), ears(session.ask))
    assert ears.programs == ["label_shares"]
    table = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    expected = Hyper(played.state._replace(embeddings=table), targets_of(joined))(0, "mlp:hidden=5")
    for name, value in expected.items():
        torch.testing.assert_close(sent.mine["new"]["params"][name], value.detach(), rtol=0, atol=1e-12)


def test_spectral_norm_divides_every_layer_by_its_largest_singular_value() -> None:
    """The loom equals one without it whose weights are W / ||W||_2, head by head; so their scale does not matter."""
    federation = small_federation(TWO)
    played = play(ALGORITHM, federation, rounds=2, hidden=20, spectral_norm=True, server_lr=0.3)
    start, state = ALGORITHM.init(played.setup), played.state
    assert not torch.equal(start.loom["trunk.1.weight"], state.loom["trunk.1.weight"])
    targets = targets_of(federation)
    divided = dict(state.loom)
    for name, weight in state.loom.items():
        if not name.endswith(".weight"):
            continue
        shapes = targets.get(name.removeprefix("head.").removesuffix(".weight"))
        sizes = [math.prod(shape) for shape in shapes.values()] if shapes else [len(weight)]
        blocks = [block / torch.linalg.matrix_norm(block, 2) for block in weight.split(sizes)]
        assert all(float(torch.linalg.matrix_norm(b, 2)) == pytest.approx(1.0, abs=1e-9) for b in blocks)
        divided[name] = torch.cat(blocks)
    hyper = Hyper(settled(played)._replace(loom=divided), targets)
    scaled = state._replace(loom={n: v * 7 if n.endswith("weight") else v for n, v in state.loom.items()})
    for which in (state, scaled):
        sent = ALGORITHM.send(played.setup, which, ("0", "1"))
        for client in ("0", "1"):
            for name, value in hyper(int(client), str(federation.roster[client].model.spec)).items():
                torch.testing.assert_close(sent.mine[client]["params"][name], value.detach(), rtol=0, atol=1e-10)


def test_one_loom_weaves_three_budgets_and_each_client_gets_its_own_shapes() -> None:
    """Sec. 5.2, with 2, 4 and 8 kernels. conv1 has k x 1 x 5 x 5 weights, conv2 2k x k x 5 x 5."""
    federation, ears = (
        small_federation(tuple(f"lenet:kernels={k}" for k in (2, 4, 8)), sizes=(4, 5, 6, 4, 5, 6)),
        Ears(),
    )
    played = play(ALGORITHM, federation, rounds=1, hidden=20, wrap=ears, server_lr=0.3)
    start = ALGORITHM.init(played.setup)
    sent = ALGORITHM.send(played.setup, played.state, federation.participants)
    for client, kernels in zip(federation.participants, (2, 4, 8, 2, 4, 8)):
        params = sent.mine[client]["params"]
        assert params["conv1.weight"].shape == (kernels, 1, 5, 5)
        assert params["conv2.weight"].shape == (2 * kernels, kernels, 5, 5)
        assert {n: tuple(v.shape) for n, v in params.items()} == dict(federation.roster[client].model.shapes)
        assert float(ears.replies[0][client]["delta"]["conv1.weight"].abs().max()) > 0
    outputs = sum(value.shape[0] for name, value in start.loom.items() if name.endswith(".bias") and "head" in name)
    assert outputs == sum(federation.roster[client].model.size for client in ("0", "1", "2"))
    for name, value in played.state.loom.items():
        assert not torch.equal(value, start.loom[name]), name


def test_a_budget_teaches_the_trunk_and_its_own_heads_only() -> None:
    federation = small_federation(("lenet:kernels=2", "lenet:kernels=4"), sizes=(4, 5))
    config = {"hidden": 20, "server_weight_decay": 0.0, "server_lr": 0.3}
    played = play(ALGORITHM, federation, rounds=1, cohorts=[["0"]], **config)
    start = ALGORITHM.init(played.setup)
    same = {name for name, value in played.state.loom.items() if torch.equal(value, start.loom[name])}
    assert same == {"head.lenet:kernels=4.weight", "head.lenet:kernels=4.bias"}


def newcomers_after(rounds: int, **config):
    """Five clients of one loom, the last two of them held out."""
    federation = small_federation(TWO, unseen=2)
    played = play(ALGORITHM, federation, rounds=rounds, hidden=20, server_lr=0.3, **config)
    return federation, played


def test_admission_is_sgd_on_the_embedding_alone_from_the_participants_mean() -> None:
    federation, played = newcomers_after(2, admit_rounds=3, admit_lr=0.2)
    ears = Ears()
    sent = ALGORITHM.admit(
        played.setup, played.state, Cohort(1, federation.unseen), ears(played.session("admission").ask)
    )
    for client in federation.unseen:
        spec = str(federation.roster[client].model.spec)
        mean = settled(played).embeddings.mean(0, keepdim=True)
        hyper = Hyper(played.state._replace(embeddings=mean), targets_of(federation))
        optimiser = torch.optim.SGD([hyper.embeddings.weight], lr=0.2, momentum=0.9)
        for number in range(3):
            woven = hyper(0, spec)
            grads = [-ears.replies[number][client]["delta"][name] for name in woven]
            (hyper.embeddings.weight.grad,) = torch.autograd.grad(
                list(woven.values()), [hyper.embeddings.weight], grads
            )
            optimiser.step()
        assert float((hyper.embeddings.weight.detach() - mean).abs().max()) > 1e-4
        for name, value in hyper(0, spec).items():
            torch.testing.assert_close(sent.mine[client]["params"][name], value.detach(), rtol=0, atol=1e-10)


def test_admission_lowers_the_newcomers_training_loss_and_leaves_the_loom() -> None:
    """Lines whose slopes are the clients' own: the loom learns a curve of slopes, a newcomer finds its place on it."""
    slopes = (2.0, -2.0, 1.0, -1.0, 1.8, -1.5)
    federation = lines([[(x, slope * x) for x in (-1, 0.5, 1)] for slope in slopes], unseen=2)
    config = {**HAND, "server_lr": 0.05, "hidden": 30, "admit_rounds": 40}
    played = play(ALGORITHM, federation, rounds=150, **config)
    frozen = {name: value.clone() for name, value in played.state.loom.items()}
    session = played.session("admission")
    sent = ALGORITHM.admit(played.setup, played.state, Cohort(1, federation.unseen), session.ask)
    assert all(torch.equal(value, frozen[name]) for name, value in played.state.loom.items())
    mean = played.state._replace(embeddings=settled(played).embeddings.mean(0, keepdim=True))
    unadapted = float(Hyper(mean, targets_of(federation))(0, "tiny:Line")["line.weight"].detach())
    for client, slope in zip(federation.unseen, slopes[4:]):
        found = float(sent.mine[client]["params"]["line.weight"])
        # the loss is the mean of x^2, 0.75, times the squared difference of the slopes
        assert (found - slope) ** 2 < 0.01 * (unadapted - slope) ** 2


def test_a_newcomers_embedding_does_not_depend_on_who_else_comes() -> None:
    _, played = newcomers_after(1, admit_rounds=3)
    ends = []
    for newcomers in (("3", "4"), ("4",)):
        session = played.session("admission")
        sent = ALGORITHM.admit(played.setup, played.state, Cohort(1, newcomers), session.ask)
        ends.append(sent.mine["4"]["params"])
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=0, atol=1e-12)


def test_a_newcomer_with_an_architecture_that_the_loom_does_not_know_is_refused() -> None:
    federation = small_federation()
    other = Model(parse("mlp:hidden=7", (1, 6, 6), 3), dtype=torch.float64)
    federation = federation.joined_by("new", other, federation.x[:4], federation.y[:4])
    played = play(ALGORITHM, federation, rounds=0)
    with pytest.raises(NeedsError) as caught:
        setup = setup_of(federation, played.setup.config)
        ALGORITHM.admit(setup, played.state, Cohort(1, ("new",)), played.session("admission").ask)
    assert str(caught.value) == (
        "The loom weaves mlp:hidden=5; client new has mlp:hidden=7. "
        "Admit it with an architecture that took part in training."
    )


def test_the_loom_for_a_roster_does_not_count_newcomers() -> None:
    federation = small_federation(TWO, sizes=(4,) * 8, unseen=5)
    setup = setup_of(federation, ALGORITHM.config())
    loom = loom_of(setup)
    assert loom.embed_dim == 1 and list(loom.targets) == list(TWO)
