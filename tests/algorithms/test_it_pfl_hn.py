# SPDX-License-Identifier: Apache-2.0
"""IT-PFL-HN: both stages against pFedHN and plain torch, admission by descriptor alone, and its privacy."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from conftest import play, small_federation
from fedloom.algorithms import pfedhn
from fedloom.algorithms.it_pfl_hn import ALGORITHM, Config, tune_program
from fedloom.core.contract import Cohort
from fedloom.core.errors import ConfigError
from fedloom.core.trees import PerClient, flatten
from fedloom.core.wire import decode, encode
from fedloom.engines.auto import ENGINES
from fedloom.looms.encoder import describe, describe_program, fit_program
from fedloom.looms.weaving import pull_back, weave
from fedloom.privacy.gaussian import analytic_sigma, classical_sigma, delta_of
from tiny import Ears

TWO = ("lenet:kernels=2", "mlp:hidden=5")
SMALL = {"hidden": 20, "server_lr": 0.3}


def gap(one, other) -> float:
    a, b = flatten(one), flatten(other)
    assert a.keys() == b.keys()
    return max([float((a[k].double() - b[k].double()).abs().max()) for k in a if a[k].numel()], default=0.0)


def admitted(played, newcomers=("3", "4"), ears=None):
    session = played.session("admission")
    ask = ears(session.ask) if ears else session.ask
    return ALGORITHM.admit(played.setup, played.state, Cohort(1, newcomers), ask)


def whole_batch(federation, played, client, private=False):
    """The descriptor of a client all of whose samples are one batch."""
    x = federation.x[torch.as_tensor(federation.roster[client].rows["train"])]
    return describe(played.state.encoder, x, torch.full((len(x),), True), private)


def test_for_participants_it_is_pfedhn() -> None:
    """Both take the first ask of a round for training, and so have the same batches."""
    federation = small_federation(TWO)
    mine, theirs = (play(a, federation, rounds=3, **SMALL) for a in (ALGORITHM, pfedhn.ALGORITHM))
    for part in ("loom", "embeddings", "optimiser"):
        assert gap({"x": getattr(mine.state, part)}, {"x": getattr(theirs.state, part)}) == 0.0


def torch_fit(played, federation, plan, state, embedding, lr):
    """The encoder's training the ordinary way: torch.optim on copies of its parameters."""
    params = {name: value.clone().requires_grad_() for name, value in state.encoder.items()}
    optimiser = torch.optim.SGD(params.values(), lr=lr, momentum=0.9, weight_decay=5e-5)
    for rows in plan.rows:
        x = federation.x[torch.as_tensor(rows)]
        optimiser.zero_grad()
        found = describe(params, x, torch.full((len(x),), True), False)
        torch.nn.functional.mse_loss(found, embedding).backward()
        torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
        optimiser.step()
    return params


@pytest.mark.parametrize(("preset", "lr", "steps"), [("paper", 0.05, None), ("standardised", 0.3, 1)])
def test_a_round_of_the_encoder_is_the_mean_of_torch_runs_towards_the_embeddings(preset, lr, steps) -> None:
    federation, ears = small_federation(sizes=(9, 4, 7)), Ears()
    played = play(ALGORITHM, federation, rounds=1, wrap=ears, preset=preset, **SMALL)
    assert ears.programs == ["train", "encoder.fit"]
    start = ALGORITHM.init(played.setup)
    ends = []
    for client in federation.participants:
        plan = ears.plans[1][client]
        # 2 passes in batches of 4, as for the target; or a single step
        assert len(plan.rows) == (steps or 2 * -(-len(federation.roster[client].rows["train"]) // 4))
        embedding = start.embeddings[int(client)]
        ends.append(torch_fit(played, federation, plan, start, embedding, lr))
    for name, value in played.state.encoder.items():
        expected = torch.stack([end[name].detach() for end in ends]).mean(0)
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
        assert not torch.equal(value, start.encoder[name])


def test_a_client_gets_its_embedding_and_the_encoder_and_nothing_of_others() -> None:
    federation, ears = small_federation(), Ears()
    play(ALGORITHM, federation, wrap=ears, rounds=2, finetune_after=1)
    names, shapes = (
        set(federation.roster["0"].model.shapes),
        set(ALGORITHM.init(play(ALGORITHM, federation, rounds=0).setup).encoder),
    )
    assert ears.down == {f"params/{n}" for n in names} | {f"encoder/{n}" for n in shapes} | {"embedding"}
    assert ears.up == {
        *(f"delta/{n}" for n in names | shapes), "num_samples", "loss", "descriptor"
    }  # fmt: skip


def test_the_encoder_learns_to_tell_clients_apart() -> None:
    """Two clients with different data: in the end each descriptor is its client's embedding."""
    federation = small_federation(sizes=(12, 12))
    federation.x[torch.as_tensor(federation.roster["0"].rows["train"])] += 2
    config = {"server_lr": 0.0, "server_weight_decay": 0.0, "embed_dim": 3, "batch_size": 12, "clip": 50.0}
    played = play(ALGORITHM, federation, rounds=60, preset="standardised", **config)
    table = torch.stack([whole_batch(federation, played, c) for c in ("0", "1")])
    torch.testing.assert_close(table, played.state.embeddings, rtol=0, atol=0.05)


@pytest.mark.parametrize("step", ["per_client", "cohort_mean"])
def test_a_round_of_fine_tuning_steps_on_the_loom_alone(step: str) -> None:
    """Each reply pulled back through the loom at the client's descriptor; from a fresh optimiser."""
    federation, ears = small_federation(TWO, sizes=(9, 4, 7)), Ears()
    config = {**SMALL, "batch_size": 99, "finetune_after": 1, "server_step": step, "server_clip": 0.02}
    played = play(ALGORITHM, federation, rounds=2, wrap=ears, **config)
    assert ears.programs[2:] == ["encoder.describe", "it_pfl_hn.finetune"]
    before = play(ALGORITHM, federation, rounds=1, **config).state
    loom, clients = pfedhn.loom_of(played.setup), list(federation.participants)
    table = torch.stack([whole_batch(federation, played, c) for c in clients])
    tuned = {name: value.clone().requires_grad_() for name, value in before.loom.items()}
    optimiser = torch.optim.SGD(tuned.values(), lr=0.3, momentum=0.9, weight_decay=1e-3)
    for part in [[c] for c in clients] if step == "per_client" else [clients]:
        replies = PerClient.of({c: ears.replies[3][c] for c in part})
        grads, _ = pull_back(played.setup, loom, tuned, table, clients, replies)
        for name, value in tuned.items():
            value.grad = grads[name]
        torch.nn.utils.clip_grad_norm_(tuned.values(), 0.02)
        optimiser.step()
    for name, value in played.state.tuned.items():
        torch.testing.assert_close(value, tuned[name].detach(), rtol=0, atol=1e-10)
        assert not torch.equal(value, before.loom[name])


def test_fine_tuning_leaves_encoder_embeddings_and_the_participants_loom_alone() -> None:
    federation = small_federation(("testnets:Normed",), unseen=2)
    before, after = (play(ALGORITHM, federation, rounds=r, finetune_after=2, **SMALL) for r in (2, 5))
    assert (int(before.state.stage), int(after.state.stage)) == (0, 1)
    for part in ("loom", "embeddings", "optimiser", "encoder"):
        assert gap({"x": getattr(before.state, part)}, {"x": getattr(after.state, part)}) == 0.0
    assert gap(before.state.tuned, before.state.loom) == 0.0 and gap(after.state.tuned, after.state.loom) > 1e-3
    # running statistics too belong to the loom from before
    assert gap(before.memory, {c: after.memory[c] for c in before.memory}) == 0.0
    old, new = (ALGORITHM.send(p.setup, p.state, ("0", "2")).mine for p in (before, after))
    assert gap(dict(old), dict(new)) == 0.0
    assert gap(dict(admitted(before).mine), dict(admitted(after).mine)) > 1e-3


def test_a_loom_that_was_not_fine_tuned_says_so(caplog: pytest.LogCaptureFixture) -> None:
    for rounds, told in ((2, True), (3, False)):
        caplog.clear()
        admitted(play(ALGORITHM, small_federation(unseen=1), rounds=rounds, finetune_after=2, **SMALL))
        assert ("has not been fine-tuned" in caplog.text) is told
        assert ("more than 2 rounds" in caplog.text) is told


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("preset", ["paper", "standardised"])
def test_a_newcomer_sends_its_descriptor_and_nothing_else(engine: str, preset: str) -> None:
    federation, ears = small_federation(TWO, unseen=2), Ears()
    config = {**SMALL, "batch_size": 99, "finetune_after": 1, "preset": preset}
    played = play(ALGORITHM, federation, engine, rounds=3, **config)
    sent = admitted(played, ears=ears)
    assert ears.programs == ["encoder.describe"] and ears.asked == [["3", "4"]]
    assert ears.up == {"descriptor"} and ears.down == {f"encoder/{name}" for name in played.state.encoder}
    table = torch.stack([whole_batch(federation, played, c) for c in ("3", "4")])
    table = (table - played.state.centre) / played.state.scale
    expected = weave(played.setup, pfedhn.loom_of(played.setup), played.state.tuned, table, ("3", "4"))
    assert gap(dict(sent.mine), dict(expected)) < 1e-10 and sent.shared == {}


def test_labels_play_no_part_in_admission() -> None:
    federation = small_federation(unseen=2)
    played = play(ALGORITHM, federation, rounds=2, finetune_after=1, **SMALL)
    first = admitted(played)
    federation.y[:] = (federation.y + 1) % 3
    assert gap(dict(first.mine), dict(admitted(played).mine)) == 0.0 and not ALGORITHM.admit_labels


def test_a_newcomer_settles_running_statistics_of_its_own() -> None:
    federation, ears = small_federation(("testnets:Normed",), unseen=2), Ears()
    played = play(ALGORITHM, federation, rounds=2, finetune_after=1, **SMALL)
    admitted(played, ears=ears)
    assert ears.programs == ["encoder.describe", "statistics"] and ears.up == {"descriptor"}


def test_standardised_descriptors_have_mean_zero_and_deviation_one_over_participants() -> None:
    federation, ears = small_federation(sizes=(9, 4, 13, 7)), Ears()
    config = {**SMALL, "batch_size": 99, "finetune_after": 1, "preset": "standardised", "embed_dim": 3}
    played = play(ALGORITHM, federation, rounds=3, wrap=ears, cohorts=[["0", "1"]] * 3, **config)
    # all are asked once, when fine-tuning begins; then the cohort
    assert ears.programs[2:] == ["encoder.describe"] * 2 + ["it_pfl_hn.finetune"] + [
        "encoder.describe",
        "it_pfl_hn.finetune",
    ]
    assert [len(who) for who in ears.asked[2:]] == [4, 2, 2, 2, 2]
    table = torch.stack([whole_batch(federation, played, c) for c in federation.participants])
    inputs = (table - played.state.centre) / played.state.scale
    assert inputs.mean(0).tolist() == pytest.approx([0.0] * 3, abs=1e-9)
    assert inputs.std(0, correction=0).tolist() == pytest.approx([1.0] * 3, abs=1e-9)
    assert {n for n in played.state.encoder if n.startswith("psi")} == {"psi.0.weight", "psi.0.bias"}


def test_as_written_nothing_is_standardised_and_psi_is_the_targets_own_layers() -> None:
    played = play(ALGORITHM, small_federation(), rounds=2, finetune_after=1, **SMALL)
    assert not played.state.centre.any() and (played.state.scale == 1).all()
    assert [len(played.state.encoder[f"psi.{i}.bias"]) for i in range(3)] == [120, 84, 2]


def test_one_participant_is_not_divided_by_zero() -> None:
    federation = small_federation(sizes=(9, 4), unseen=1)
    played = play(ALGORITHM, federation, rounds=2, finetune_after=1, preset="standardised", **SMALL)
    assert (played.state.scale == 1).all()
    assert all(leaf.isfinite().all() for leaf in flatten(admitted(played, ("1",)).mine["1"]).values())


@pytest.mark.parametrize("config", [{"preset": "paper"}, {"preset": "standardised"}, {"descriptor_epsilon": 2.0}])
@pytest.mark.parametrize("engine", ["vectorised", "loopback"])
def test_both_stages_are_alike_on_every_engine_and_resume_to_the_same_bits(engine: str, config) -> None:
    """The conformance suite sees the first stage only: fine-tuning starts after 80 rounds."""
    federation, config = small_federation(TWO), {**SMALL, "finetune_after": 2, **config}
    straight = play(ALGORITHM, federation, engine, rounds=4, **config)
    assert gap(straight.state._asdict(), play(ALGORITHM, federation, rounds=4, **config).state._asdict()) < 1e-9
    for stop in (2, 3):
        half = play(ALGORITHM, federation, engine, rounds=stop, **config)
        state = ALGORITHM.state(**decode(encode(half.state._asdict())))
        for number in range(stop + 1, 5):
            session = half.session(number)
            state, _ = ALGORITHM.round(half.setup, state, Cohort(number, federation.participants), session.ask)
            half.memory = session.memory
        assert gap(straight.state._asdict(), state._asdict()) == 0.0


def test_a_client_that_fails_in_fine_tuning_is_left_out_and_the_round_goes_on() -> None:
    federation = small_federation()
    federation.x[federation.roster["1"].rows["train"]] = float("nan")
    played = play(ALGORITHM, federation, rounds=3, finetune_after=1, preset="standardised", **SMALL)
    assert {d.client for d in played.stats.dropped} == {"1"}
    assert all(leaf.isfinite().all() for leaf in flatten(played.state._asdict()).values())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_private_descriptor_is_the_clean_one_plus_noise_of_the_right_size(engine: str) -> None:
    """400 newcomers with 5 samples: sigma = 2/5 times that of a unit sensitivity, within 5 standard errors."""
    federation = small_federation(sizes=(9, 4, *(5,) * 400), unseen=400)
    config = {**SMALL, "batch_size": 2, "descriptor_epsilon": 3.0, "descriptor_delta": 1e-3, "embed_dim": 4}
    played = play(ALGORITHM, federation, engine, rounds=1, **config)
    noisy = Ears()
    admitted(played, federation.unseen, noisy)
    assert noisy.programs == ["encoder.describe_privately"] and noisy.up == {"descriptor"}
    clean = torch.stack([whole_batch(federation, played, c, private=True) for c in federation.unseen])
    assert float(clean.norm(dim=1).max()) <= 1
    noise = torch.stack([noisy.replies[0][c]["descriptor"] for c in federation.unseen]) - clean
    sigma = analytic_sigma(3.0, 1e-3) * 2 / 5
    assert float(noise.std()) == pytest.approx(sigma, rel=5 / (2 * 1600) ** 0.5)
    assert abs(float(noise.mean())) < 5 * sigma / 40
    # no two clients have the same noise
    assert len({round(float(row[0]), 9) for row in noise}) == 400


def test_the_papers_privacy_by_hand() -> None:
    """n = 3000, epsilon = 0.3, delta = 0.01: the classical sigma is sqrt(2 ln 125) / 0.3 * 2/3000 = 3.10747 / 450.

    That is 0.0069055; the exact one, the root of Balle and Wang's equation (found apart, with scipy), is 0.0030383.
    """
    assert classical_sigma(0.3, 0.01, 2 / 3000) == pytest.approx(0.0069055, abs=1e-6)
    exact = analytic_sigma(0.3, 0.01, 2 / 3000)
    assert exact == pytest.approx(0.0030383, abs=1e-7) and delta_of(0.3, exact, 2 / 3000) == pytest.approx(
        0.01, rel=1e-6
    )


def test_participants_add_no_noise() -> None:
    federation, ears = small_federation(), Ears()
    played = play(ALGORITHM, federation, rounds=2, finetune_after=1, wrap=ears, descriptor_epsilon=1.0, **SMALL)
    assert "encoder.describe_privately" not in ears.programs
    for client in federation.participants:
        expected = whole_batch(federation, played, client, private=True)
        torch.testing.assert_close(ears.replies[2][client]["descriptor"], expected, rtol=0, atol=1e-12)


def test_programs_are_equal_from_round_to_round() -> None:
    """An engine keeps the recorded steps of a program, and finds them by it."""
    config, noise = ALGORITHM.config(), ALGORITHM.config(descriptor_epsilon=1.0).descriptor_noise()
    for make in (
        lambda: config.train(),
        lambda: fit_program(config.encoder_batches()),
        lambda: describe_program(64),
        lambda: describe_program(64, noise),
        lambda: tune_program(config),
    ):
        assert make() is not make() and make() == make() and hash(make()) == hash(make())
    assert describe_program(64) != describe_program(64, noise)


def test_the_defaults_are_the_papers() -> None:
    config = ALGORITHM.config()
    assert (config.preset, config.descriptor_epsilon, config.descriptor_delta) == ("paper", 0.0, 0.01)
    assert (config.hidden, config.layers, ALGORITHM.cohort) == (100, 3, 9)
    assert config.encoder_batches() == config.batches() and config.encoder_optimiser() == config.local_optimiser()
    ours = ALGORITHM.config(preset="standardised")
    assert ours.encoder_batches().steps == 1 and ours.encoder_optimiser().lr == 0.3
    given = ALGORITHM.config(preset="standardised", encoder_steps=5, encoder_lr=0.1)
    assert given.encoder_batches().steps == 5 and given.encoder_optimiser().lr == 0.1
    # what is not repeated here is pFedHN's
    theirs = dataclasses.asdict(pfedhn.ALGORITHM.config(server_lr=0.003))  # but the rate, which the paper does not give
    assert {n: v for n, v in theirs.items() if n.startswith(("server_", "local_"))} == {
        n: v for n, v in dataclasses.asdict(config).items() if n.startswith(("server_", "local_"))
    }


@pytest.mark.parametrize("delta", [0.0, 0.6])
def test_a_delta_that_means_nothing_is_refused(delta: float) -> None:
    with pytest.raises(ConfigError, match="--descriptor-delta is"):
        ALGORITHM.config(descriptor_delta=delta)


def test_an_impossible_guarantee_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match=r"gives epsilon 1e\+15 with delta 0.01 exactly"):
        Config(descriptor_epsilon=1e15)
