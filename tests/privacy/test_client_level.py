# SPDX-License-Identifier: Apache-2.0
"""Client-level privacy: what a method declares is so, what one client changes is bounded, the noise is what is said."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import few, models_for, play, setup_of, small_federation
from fedloom import algorithms
from fedloom.core.contract import Cohort, Program
from fedloom.core.errors import NeedsError
from fedloom.core.trees import PerClient, Tree, flatten, leaves, tree_map
from fedloom.privacy.client_level import ClientPrivacy, with_client_privacy

METHODS = [name for name in algorithms.names() if algorithms.get(name).means]
OPEN = ClientPrivacy(clip=1e3, noise=1e-12)


def equal(replies: PerClient) -> PerClient:
    """The replies, each of the same weight."""
    return PerClient([(c, {**tree, "num_samples": torch.ones_like(tree["loss"])}) for c, tree in replies.groups])


def one_reply(replies: PerClient, names: tuple[str, ...]) -> PerClient:
    """The mean of the replies, as if one client had given it."""
    ((clients, tree),) = replies.groups
    rest = {name: torch.ones(1, dtype=tree["loss"].dtype) for name in ("num_samples", "loss")}
    mean = {name: tree_map(lambda rows: rows.mean(0, keepdim=True), tree[name]) for name in names}
    return PerClient([(clients[:1], {**mean, **rest})])


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_declares_means_uses_nothing_else(name: str) -> None:
    """One client that replies with the mean leaves the server with the same state, whoever was asked."""
    algorithm = algorithms.get(name)
    federation = small_federation(models_for(algorithm, "lenet:kernels=2"))
    played = play(algorithm, federation, rounds=1)
    kept: list[PerClient] = []

    def mean(program: Program, shared: Tree, mine: Any) -> PerClient:
        kept.append(one_reply(played.session(2).ask(program, shared, mine), algorithm.means))
        return kept[-1]

    def again(program: Program, shared: Tree, mine: Any) -> PerClient:
        return kept[0]

    everybody = Cohort(2, played.setup.clients)
    plain, _ = algorithm.round(played.setup, played.state, everybody, lambda *a: equal(played.session(2).ask(*a)))
    averaged, _ = algorithm.round(played.setup, played.state, everybody, mean)
    others, _ = algorithm.round(played.setup, played.state, Cohort(2, played.setup.clients[:2]), again)
    assert len(kept) == 1, "it asks once"
    one, two, three = (flatten(state._asdict()) for state in (plain, averaged, others))
    assert all(torch.allclose(one[path], two[path], atol=1e-12) for path in one)
    assert all(torch.equal(two[path], three[path]) for path in two)


class Answers:
    """An ask that gives these vectors, one for each client, whatever is asked."""

    def __init__(self, vectors: torch.Tensor) -> None:
        self.vectors = vectors

    def __call__(self, program: Program, shared: Tree, mine: Any) -> PerClient:
        number = torch.ones(len(self.vectors), dtype=self.vectors.dtype)
        like = program.expects(shared, {})["delta"]
        sizes = [leaf.numel() for leaf in like.values()]
        parts = self.vectors.split(sizes, dim=1)
        delta = {n: part.reshape(-1, *leaf.shape) for (n, leaf), part in zip(like.items(), parts)}
        clients = tuple(map(str, range(len(self.vectors))))
        return PerClient([(clients, {"delta": delta, "num_samples": number * 7, "loss": number})])


class Federated:
    """FedAvg with private clients on a small federation, before any round."""

    def __init__(self, how: ClientPrivacy, name: str = "fedavg") -> None:
        self.algorithm = with_client_privacy(algorithms.get(name), how)
        federation = small_federation(models_for(self.algorithm, "mlp:hidden=5"))
        self.setup = setup_of(federation, self.algorithm.config(**few(self.algorithm)))
        self.state = self.algorithm.init(self.setup)
        self.size = federation.models["0"].size

    def moved(self, answers: torch.Tensor, *, round: int = 1, size: float = 0) -> torch.Tensor:
        """What a round adds to the parameters, as one vector."""
        clients = self.setup.clients[: len(answers)]
        after, _ = self.algorithm.round(self.setup, self.state, Cohort(round, clients, size), Answers(answers))
        change = tree_map(torch.sub, after.params, self.state.params)
        return torch.cat([leaf.reshape(-1) for _, leaf in leaves(change)])


def vectors(number: int, size: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(number, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_without_bound_and_noise_it_is_the_plain_mean() -> None:
    run = Federated(OPEN)
    answers = vectors(3, run.size)
    assert torch.allclose(run.moved(answers), answers.mean(0), atol=1e-7)


def test_no_client_moves_the_sum_by_more_than_the_bound() -> None:
    """Brute force: with one client more, whatever it replies, the noised sum differs by the bound at most."""
    run, clip, largest = Federated(ClientPrivacy(clip=0.5, noise=1.0)), 0.5, 0.0
    for seed in range(300):
        scale = 10.0 ** (seed % 12 - 3)
        answers = vectors(3, run.size, scale, seed)
        # the same noise in both, and both divided by the same number
        gap = run.moved(answers, size=3) - run.moved(answers[:2], size=3)
        largest = max(largest, 3 * float(gap.norm()))
        assert 3 * float(gap.norm()) <= clip * (1 + 1e-9)
    assert largest > 0.99 * clip, "the bound is reached, so a build without clipping fails"


def test_an_absurd_reply_moves_nothing_beyond_the_bound_in_single_precision() -> None:
    run = Federated(ClientPrivacy(clip=0.5, noise=1.0))
    answers = vectors(3, run.size).float()
    answers[2] = 1e30
    gap = run.moved(answers, size=3) - run.moved(answers[:2], size=3)
    assert 3 * float(gap.norm()) <= 0.5 * (1 + 1e-5)


def test_the_noise_has_the_deviation_that_is_said_and_is_new_in_every_round() -> None:
    clip, z, expected = 0.25, 1.5, 4.0
    run = Federated(ClientPrivacy(clip, z))
    nothing = torch.zeros(2, run.size, dtype=torch.float64)
    draws = torch.stack([run.moved(nothing, round=r, size=expected) for r in range(1, 200)])
    assert draws.std() == pytest.approx(z * clip / expected, rel=4 / math.sqrt(2 * draws.numel()))
    assert draws.mean().abs() < 4 * z * clip / expected / math.sqrt(draws.numel())
    # between rounds and between entries
    for pairs in ((draws[:-1], draws[1:]), (draws[:, :-1], draws[:, 1:])):
        together = torch.corrcoef(torch.stack([one.reshape(-1) for one in pairs]))[0, 1]
        assert abs(float(together)) < 5 / math.sqrt(pairs[0].numel())
    assert torch.equal(run.moved(nothing, round=3, size=expected), draws[2])


def test_secret_noise_does_not_follow_from_the_seed() -> None:
    run = Federated(ClientPrivacy(0.5, 1.0, secret=True))
    nothing = torch.zeros(2, run.size, dtype=torch.float64)
    assert not torch.equal(run.moved(nothing), run.moved(nothing))


def test_a_round_that_nobody_was_drawn_for_has_noise_alone() -> None:
    run = Federated(ClientPrivacy(0.5, 1.0))
    moved = run.moved(torch.zeros(0, run.size, dtype=torch.float64), size=2)
    assert moved.std() == pytest.approx(0.5 / 2, rel=0.5)
    nothing = torch.zeros(2, run.size, dtype=torch.float64)
    assert torch.equal(moved, run.moved(nothing, size=2))


def test_neither_numbers_of_samples_nor_losses_nor_how_many_answered_reach_the_state() -> None:
    run, seen = Federated(ClientPrivacy(0.5, 1.0)), []
    original = algorithms.get("fedavg").round

    def spying(setup: Any, state: Any, cohort: Cohort, ask: Any) -> Any:
        def heard(*asked: Any) -> PerClient:
            seen.append(ask(*asked))
            return seen[-1]

        return original(setup, state, cohort, heard)

    from dataclasses import replace

    private = with_client_privacy(replace(algorithms.get("fedavg"), round=spying), ClientPrivacy(0.5, 1.0))
    private.round(run.setup, run.state, Cohort(1, run.setup.clients[:3]), Answers(vectors(3, run.size)))
    ((clients, tree),) = seen[0].groups
    assert clients == ("0",) and set(tree) == {"delta", "num_samples", "loss"}
    assert (float(tree["num_samples"]), float(tree["loss"])) == (1.0, 0.0)


def test_the_bound_follows_its_quantile() -> None:
    """Replies of norm 1: from 8 downwards and from 0.1 upwards the bound comes to about 1."""
    for first in (8.0, 0.1):
        run = Federated(ClientPrivacy(first, 0.01, quantile=0.5))
        answers = torch.nn.functional.normalize(vectors(5, run.size), dim=1)
        answers *= torch.linspace(0.8, 1.2, 5, dtype=torch.float64)[:, None]
        for round in range(1, 100):
            cohort = Cohort(round, run.setup.clients[:5], 5)
            run.state, told = run.algorithm.round(run.setup, run.state, cohort, Answers(answers))
        assert float(told["clip"]) == pytest.approx(1.0, abs=0.25)


def test_the_noise_on_the_quantile_is_paid_for() -> None:
    """z^-2 = z_delta^-2 + (2 sigma_b)^-2 (Andrew et al., theorem 1): with 100 clients sigma_b is 5."""
    from fedloom.privacy.client_level import noise_on_replies

    more = noise_on_replies(ClientPrivacy(1.0, 1.0, quantile=0.5), 100)
    assert more**-2 + 10.0**-2 == pytest.approx(1.0) and more > 1
    with pytest.raises(NeedsError, match="needs more than 10 clients in a round"):
        noise_on_replies(ClientPrivacy(1.0, 1.0, quantile=0.5), 10)


@pytest.mark.parametrize("name", ["hypergenfl", "scaffold", "local", "fednova", "pfedlhn"])
def test_methods_that_need_single_replies_are_refused(name: str) -> None:
    with pytest.raises(NeedsError, match="--dp-noise hides that"):
        with_client_privacy(algorithms.get(name), OPEN)


def test_replies_with_more_than_the_mean_are_refused() -> None:
    algorithm = with_client_privacy(algorithms.get("fedavg"), OPEN)
    federation = small_federation(("testnets:Normed",))
    setup = setup_of(federation, algorithm.config(batchnorm="averaged"))
    with pytest.raises(NeedsError, match="reply with buffers here, which has no bound"):
        algorithm.round(setup, algorithm.init(setup), Cohort(1, setup.clients), Answers(vectors(2, 10)))


def test_those_who_train_besides_the_cohort_are_refused() -> None:
    """They would enter the mean in every round, and the ledger counts one in so many."""
    algorithm = with_client_privacy(algorithms.get("pfedme"), OPEN)
    federation = small_federation(("mlp:hidden=5",))
    with pytest.raises(NeedsError, match="besides one mean a round"):
        play(algorithm, federation, rounds=1, cohorts=[["0", "1"]], everybody_trains=True)


def test_what_clients_tell_between_rounds_is_hidden_or_refused() -> None:
    """FedBN's newcomers get the mean of the participants' normalisation layers, without noise."""
    algorithm = with_client_privacy(algorithms.get("fedbn"), OPEN)
    with pytest.raises(NeedsError, match="tell norm between rounds"):
        play(algorithm, small_federation(("testnets:Normed",)), rounds=1).settle()
    play(algorithm, small_federation(("mlp:hidden=5",)), rounds=1).settle()
    tuned = with_client_privacy(algorithms.get("fedavg_ft"), OPEN)
    play(tuned, small_federation(("testnets:Normed",)), rounds=1).settle()


ONE_STEP = [name for name in algorithms.names() if algorithms.get(name).one_step]


@pytest.mark.parametrize("name", ONE_STEP)
def test_a_method_that_declares_one_step_has_it_combined(name: str) -> None:
    """Its loom steps along what ``Setup.combine`` gives, and on nothing else."""
    algorithm, combined = algorithms.get(name), list[int]()
    federation = small_federation(models_for(algorithm, "mlp:hidden=5"))
    played = play(algorithm, federation, rounds=1, server_step="cohort_mean")

    def combine(clients: Any, gradients: torch.Tensor) -> torch.Tensor:
        combined.append(len(clients))
        return torch.zeros_like(gradients[0])

    cohort = Cohort(2, played.setup.clients)
    session = played.session(2)
    algorithm.round(replace(played.setup, combine=combine), played.state, cohort, session.ask)
    assert combined == [len(cohort.clients)] and session.asks == 1


class Woven:
    """pFedHN with private clients, one step of its loom a round, on a small federation before any round."""

    def __init__(self, how: ClientPrivacy, seed: int = 0, **config: Any) -> None:
        self.algorithm = with_client_privacy(algorithms.get("pfedhn"), how)
        federation = small_federation(("mlp:hidden=2",))
        made = {"hidden": 4, "layers": 1, "server_step": "cohort_mean", "server_clip": 0.0, "server_momentum": 0.0,
                "server_weight_decay": 0.0, "server_lr": 1.0, **config}  # fmt: skip
        self.setup = setup_of(federation, self.algorithm.config(**made), seed)
        self.state = self.algorithm.init(self.setup)

    def after(self, answers: torch.Tensor, *, round: int = 1, size: float = 0) -> Any:
        """The state after a round in which the first clients reply with these changes."""

        def ask(program: Program, shared: Tree, mine: Any) -> PerClient:
            like = program.expects(shared, mine["0"])["delta"]
            parts = answers.split([leaf.numel() for leaf in like.values()], dim=1)
            delta = {n: part.reshape(-1, *leaf.shape) for (n, leaf), part in zip(like.items(), parts)}
            number = torch.ones(len(answers), dtype=answers.dtype)
            return PerClient([(tuple(mine), {"delta": delta, "num_samples": number, "loss": number})])

        clients = self.setup.clients[: len(answers)]
        return self.algorithm.round(self.setup, self.state, Cohort(round, clients, size), ask)[0]

    def moved(self, *arguments: Any, **more: Any) -> torch.Tensor:
        """What a round adds to the loom, as one vector."""
        change = tree_map(torch.sub, self.after(*arguments, **more).loom, self.state.loom)
        return torch.cat([leaf.reshape(-1) for leaf in change.values()])

    @property
    def size(self) -> int:
        """Numbers of a client's model."""
        return self.setup.models["0"].size


def test_without_bound_and_noise_a_loom_takes_the_plain_step() -> None:
    run = Woven(OPEN)
    answers = vectors(3, run.size)
    private = run.after(answers)
    run.algorithm = algorithms.get("pfedhn")
    run.state = run.algorithm.init(run.setup)
    plain = run.after(answers)
    for one, other in zip((*private.loom.values(), private.embeddings), (*plain.loom.values(), plain.embeddings)):
        assert torch.allclose(one, other, atol=1e-7)


def test_no_client_moves_a_loom_by_more_than_the_bound() -> None:
    """Brute force: with one client more, the loom's summed gradient differs by the bound at most; and nothing of
    another client's embedding tells of it."""
    clip, largest = 0.5, 0.0
    run = Woven(ClientPrivacy(clip, noise=1.0))
    for seed in range(60):
        answers = vectors(3, run.size, 10.0 ** (seed % 8 - 3), seed)
        with_it, without = (run.after(some, size=3) for some in (answers, answers[:2]))
        gap = torch.cat([(with_it.loom[name] - without.loom[name]).reshape(-1) for name in with_it.loom])
        assert 3 * float(gap.norm()) <= clip * (1 + 1e-9)
        assert torch.allclose(with_it.embeddings[:2], without.embeddings[:2], rtol=1e-12, atol=1e-12)
        assert not torch.equal(with_it.embeddings[2], without.embeddings[2]), "its own is exact"
        largest = max(largest, 3 * float(gap.norm()))
    assert largest > 0.99 * clip


def test_the_noise_on_a_loom_has_the_deviation_that_is_said() -> None:
    clip, z, expected = 0.25, 1.5, 4.0
    run = Woven(ClientPrivacy(clip, z))
    nothing = torch.zeros(2, run.size, dtype=torch.float64)
    draws = torch.stack([run.moved(nothing, round=r, size=expected) for r in range(1, 12)])
    assert draws.std() == pytest.approx(z * clip / expected, rel=4 / math.sqrt(2 * draws.numel()))
    assert torch.equal(draws[2], run.moved(torch.zeros(0, run.size, dtype=torch.float64), round=3, size=expected))


def test_a_loom_that_steps_on_single_replies_is_refused() -> None:
    with pytest.raises(NeedsError, match="Give --server-step cohort_mean"):
        Woven(OPEN, server_step="per_client")
    with pytest.raises(NeedsError, match="asks label_shares besides one change a round"):
        Woven(OPEN, descriptor="class_shares").after(vectors(2, 5))
