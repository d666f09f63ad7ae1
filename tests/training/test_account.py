# SPDX-License-Identifier: Apache-2.0
"""A private run: what it made public is written down, survives being killed, and ends it in time."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import fedloom
from fedloom.adaptation.prior import NOISED_ASKS
from fedloom.core.errors import ConfigError, NeedsError, RoundError, RunError
from fedloom.core.trees import PerClient
from fedloom.engines.engine import Session
from fedloom.engines.memories import Memories
from fedloom.privacy.ledger import Release, epsilon, releases_of, worst
from fedloom.reports.privacy import statement
from fedloom.runs.directory import PRIVACY
from fedloom.serving.bundle import Bundle, make_bundle
from fedloom.training.account import Account

pytest.importorskip("dp_accounting", reason="needs the extra privacy")
OPTIONS = {
    "dataset": "digits", "partition": "iid", "clients": 20, "cohort": 4, "local_steps": 1, "model": "mlp:hidden=4",
    "eval_every": 2, "progress": "quiet", "sampling": "poisson", "dp_clip": 0.5, "dp_noise": 1.0,
}  # fmt: skip


def train(out, **more):
    return fedloom.run("fedavg", out=out, **{**OPTIONS, "rounds": 4, **more})


def released(run):
    return run.directory.lines(PRIVACY)


def test_every_round_is_a_release(tmp_path) -> None:
    run = train(tmp_path / "run")
    assert [(line["round"], line["size"], line["clients"]) for line in released(run)] == [
        (r, 4, 20) for r in (1, 2, 3, 4)
    ]
    found = statement(run.directory.config, released(run))
    assert found.epsilon == epsilon(releases_of(released(run)), 1e-5)
    assert any("simulation" in sentence for sentence in found.not_covered)
    raw = statement(run.directory.config, released(run), prepared=True)
    assert any("How raw samples are prepared" in sentence for sentence in raw.not_covered)


def test_a_resumed_run_has_the_ledger_and_the_bits_of_one_that_was_never_stopped(tmp_path) -> None:
    straight = train(tmp_path / "straight", rounds=4)
    train(tmp_path / "halves", rounds=2)
    resumed = fedloom.resume(tmp_path / "halves", rounds=4)
    assert released(resumed) == released(straight)
    one, other = (run.model("0").state_dict() for run in (straight, resumed))
    assert all((one[name] == other[name]).all() for name in one)


def test_rounds_of_a_killed_run_count_though_it_goes_on_from_before_them(tmp_path) -> None:
    run = train(tmp_path / "run", rounds=2)
    # as if two more rounds had been made public, and the process had died before their checkpoint
    for line in ({**released(run)[-1], "round": 3, "draw": "a"}, {**released(run)[-1], "round": 4, "draw": "a"}):
        run.directory.append_to(PRIVACY, line)
    resumed = fedloom.resume(run.path, rounds=4)
    assert len(releases_of(released(resumed))) == 6


def test_a_ledger_that_lost_lines_is_refused(tmp_path) -> None:
    run = train(tmp_path / "run", rounds=2)
    (run.path / PRIVACY).write_text("")
    with pytest.raises(RunError, match=r"has 0 releases where round 2 counted 2"):
        fedloom.resume(run.path, rounds=4)


def test_training_stops_before_the_round_that_would_exceed_epsilon(tmp_path) -> None:
    whole = train(tmp_path / "whole", rounds=6)
    limit = epsilon(releases_of(released(whole))[:3], 1e-5)
    run = train(tmp_path / "run", rounds=6, max_epsilon=limit * 1.0001)
    assert run.summary["rounds"] == 3 and run.summary["finished"] and "--max-epsilon" in run.summary["stopped"]
    assert "metrics" in run.directory.records()[-1], "the last round is evaluated"
    # going on spends nothing
    again = fedloom.resume(run.path)
    assert again.summary["rounds"] == 3 and len(released(again)) == 3


def test_a_limit_below_one_round_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="one round would have"):
        train(tmp_path / "run", max_epsilon=0.001)


def test_clients_are_drawn_one_by_one(tmp_path) -> None:
    """Cohorts vary in size as a binomial does; a fixed size, or another rate, would not."""
    run = train(tmp_path / "run", rounds=0)
    trainer = run.simulation
    cohorts = [trainer.cohort(number) for number in range(1, 801)]
    sizes = np.array([len(cohort) for cohort in cohorts])
    # 20 clients at 0.2: mean 4, variance 3.2
    assert sizes.mean() == pytest.approx(4, abs=4 * np.sqrt(3.2 / 800))
    assert sizes.var() == pytest.approx(3.2, rel=0.25)
    counts = np.array([sum(client in cohort for cohort in cohorts) for client in trainer.present])
    assert np.abs(counts - 160).max() < 4.5 * np.sqrt(800 * 0.2 * 0.8)
    together = sum("0" in cohort and "1" in cohort for cohort in cohorts)
    assert together == pytest.approx(800 * 0.04, abs=4.5 * np.sqrt(800 * 0.04))


def test_calibration_with_noise_is_released_too(tmp_path) -> None:
    run = train(tmp_path / "run", rounds=2, adapt="prior", adapt_clip=1.0, adapt_noise=4.0)
    settled = [one for one in releases_of(released(run)) if one.what == "settling"]
    assert 3 < len(settled) <= NOISED_ASKS and {(one.size, one.times) for one in settled} == {(20, 1)}
    plain = epsilon([one for one in releases_of(released(run)) if one.what == "training"], 1e-5)
    assert epsilon(releases_of(released(run)), 1e-5) > plain


@pytest.mark.slow
def test_calibration_is_kept_within_epsilon_too(tmp_path) -> None:
    """As often as it may be asked, with every evaluation to come: its noise counts as much as that of rounds."""
    settling = {"adapt": "prior", "adapt_clip": 1.0, "adapt_noise": 12.0, "eval_every": 2}
    whole = train(tmp_path / "whole", rounds=8, **settling)
    limit = 0.8 * epsilon(releases_of(released(whole)), 1e-5)
    run = train(tmp_path / "run", rounds=8, max_epsilon=limit, **settling)
    assert 0 < run.summary["rounds"] < 8 and epsilon(releases_of(released(run)), 1e-5) <= limit
    with pytest.raises(ConfigError, match="one round would have"):
        train(tmp_path / "none", max_epsilon=limit / 20, **settling)


def test_calibration_is_written_down_of_a_run_of_no_rounds_and_before_it_is_used(tmp_path) -> None:
    run = train(tmp_path / "run", rounds=0, adapt="prior", adapt_clip=1.0, adapt_noise=4.0)
    assert {line["what"] for line in released(run)} == {"settling"}


def test_how_many_samples_a_client_has_is_not_in_what_calibration_with_noise_finds(tmp_path) -> None:
    options = {"adapt": "prior", "adapt_clip": 1.0, "adapt_noise": 4.0, "rounds": 0}
    simulation = train(tmp_path / "run", **options).simulation
    session, setup = simulation.session("settling after round 0", Memories()), simulation.server.setup

    def settled(times: int):
        def ask(program, shared, mine):
            replies = Session.ask(session, program, shared, mine)
            return PerClient((clients, {**tree, **{name: tree[name] * times for name in tree if name == "num_samples"}})
                             for clients, tree in replies.groups)  # fmt: skip

        session.asks = 0
        return simulation.server.algorithm.settle(setup, simulation.server.state, ask)

    assert torch.equal(settled(1).alpha, settled(50).alpha)


def test_the_ledger_has_rounds_as_large_as_they_are_where_clients_come_and_go(tmp_path) -> None:
    run = train(tmp_path / "run", rounds=1)
    trainer = run.simulation
    account, size = Account(trainer, run.directory), lambda: releases_of(released(run))[-1].size
    trainer.server.options = dataclasses.replace(trainer.server.options, cohort=7)
    trainer.train_round()
    account.trained()
    assert size() == 7


def test_a_round_is_not_begun_that_would_exceed_epsilon_because_clients_have_gone(tmp_path, monkeypatch) -> None:
    limit = epsilon([Release(1, "training", 1.0, "poisson", 20, 4, times=3)], 1e-5) * 1.01
    run = train(tmp_path / "run", rounds=1, max_epsilon=limit)
    trainer = run.simulation
    account = Account(trainer, run.directory)
    trainer.server.options = dataclasses.replace(trainer.server.options, rounds=10)
    assert account.last_round() == 3
    monkeypatch.setattr(type(trainer), "present", property(lambda self: self.server.setup.clients[:5]))
    with pytest.raises(RoundError, match=r"Round 2 of 5 clients would have epsilon .* Nobody was asked"):
        trainer.train_round()
    assert len(released(run)) == 1 and account.last_round() == 1


HIDDEN = {
    "sampling": "fixed", "dp_clip": 0.0, "dp_noise": 0.0, "sample_dp_clip": 0.5, "sample_dp_noise": 2.0,
    "local_steps": 3, "batch_size": 8,
}  # fmt: skip


def test_noised_steps_are_written_down_for_each_client_that_was_asked(tmp_path) -> None:
    run = train(tmp_path / "run", **HIDDEN)
    records, found = run.directory.records(), releases_of(released(run))
    for record in records:
        asked = sorted(client for one in found if one.round == record["round"] for client in one.who)
        assert asked == sorted(record["cohort"]["client"]) and "local_loss" not in record["diagnostics"]
    assert {(one.times, one.size, one.unit) for one in found} == {(3, 8, "sample")}
    sizes = {member.id: member.samples["train"] for member in run.directory.roster().members}
    assert all(one.clients == sizes[client] for one in found for client in one.who)
    told = statement(run.directory.config, released(run))
    assert told.epsilon is None and told.sample_epsilon == worst(found, 1e-5).epsilon
    assert "each sample" in told.covered[0] and "Validation and test samples" in told.not_covered[0]
    assert "each sample" in run.report(tmp_path / "report.html").read_text()


def test_a_resumed_run_has_the_ledger_of_samples_of_one_that_was_never_stopped(tmp_path) -> None:
    straight = train(tmp_path / "straight", **HIDDEN)
    train(tmp_path / "halves", rounds=2, **HIDDEN)
    resumed = fedloom.resume(tmp_path / "halves", rounds=4)
    assert released(resumed) == released(straight)


def test_training_stops_before_anybodys_samples_exceed_epsilon(tmp_path) -> None:
    whole = train(tmp_path / "whole", rounds=8, **HIDDEN)
    found = releases_of(released(whole))
    limit = worst([one for one in found if one.round <= 5], 1e-5).epsilon
    last = max(r for r in range(1, 9) if worst([one for one in found if one.round <= r], 1e-5).epsilon <= limit)
    run = train(tmp_path / "run", rounds=8, max_epsilon=limit * 1.0001, **HIDDEN)
    assert run.summary["rounds"] == last < 8 and "--max-epsilon" in run.summary["stopped"]
    assert worst(releases_of(released(run)), 1e-5).epsilon <= limit * 1.0001
    with pytest.raises(ConfigError, match="one round would have more already"):
        train(tmp_path / "none", max_epsilon=0.001, **HIDDEN)


def test_tuning_and_newcomers_are_written_down_and_kept_within_epsilon(tmp_path) -> None:
    options = {**OPTIONS, **HIDDEN, "rounds": 6, "tune_steps": 2, "unseen": 2}
    run = fedloom.run("fedavg_ft", out=tmp_path / "run", **options)
    found = releases_of(released(run))
    tuned = [one for one in found if one.what.startswith("settling")]
    assert {client for one in tuned for client in one.who} == set(run.simulation.present) and tuned[0].times == 2
    assert {client for one in found if one.what.startswith("admission") for client in one.who} == set(
        run.simulation.server.unseen
    )
    told = [one for one in found if not one.what.startswith("admission")]
    limit = worst(told, 1e-5).epsilon * 0.8
    less = fedloom.run("fedavg_ft", out=tmp_path / "less", **options, max_epsilon=limit)
    participants = [one for one in releases_of(released(less)) if not one.what.startswith("admission")]
    assert 0 < less.summary["rounds"] < 6 and worst(participants, 1e-5).epsilon <= limit


def test_both_units_are_accounted_for_side_by_side(tmp_path) -> None:
    run = train(tmp_path / "run", **{**HIDDEN, "sampling": "poisson", "dp_clip": 0.5, "dp_noise": 1.0})
    told = statement(run.directory.config, released(run))
    alone = statement({"dp_noise": 1.0}, [line for line in released(run) if line["unit"] == "client"])
    assert told.epsilon == alone.epsilon and told.sample_epsilon


def test_a_loom_hides_clients_and_its_bundle_says_what_it_does_not_hide(tmp_path) -> None:
    options = {**OPTIONS, "rounds": 2, "hidden": 4, "layers": 1, "server_step": "cohort_mean"}
    run = fedloom.run("pfedhn", out=tmp_path / "run", **options)
    assert [(line["round"], line["noise"], line["size"]) for line in released(run)] == [(1, 1.0, 4), (2, 1.0, 4)]
    assert all("local_loss" not in record["diagnostics"] for record in run.directory.records())
    told = statement(run.directory.config, released(run))
    assert told.covered[0].startswith("The loom of this run, with the models woven for all other clients: epsilon")
    assert any("Embeddings are exact" in sentence for sentence in told.not_covered)
    card = Bundle(make_bundle(run, tmp_path / "made.zip")).card
    assert any("Embeddings are exact" in sentence for sentence in card["privacy"])
    with pytest.raises(NeedsError, match="--server-step cohort_mean"):
        fedloom.run("pfedhn", out=tmp_path / "none", **{**options, "server_step": "per_client"})


def test_laplace_noise_is_written_down_without_an_epsilon(tmp_path) -> None:
    run = fedloom.run("mh_pfedhn", out=tmp_path / "run", dataset="digits", clients=4, rounds=2, cohort=2,
                      local_epochs=1, model="mlp:hidden=4", progress="quiet", laplace_noise=0.02)  # fmt: skip
    found = releases_of(released(run))
    assert [(one.round, one.mechanism, one.noise, one.clients) for one in found] == [
        (r, "laplace", 0.02, 2) for r in (1, 2)
    ]
    told = statement(run.directory.config, released(run))
    assert told.epsilon is None and told.covered == [] and "no epsilon can be named" in " ".join(told.not_covered)


def test_noise_is_written_down_of_programs_that_have_some_and_of_no_others(tmp_path) -> None:
    """A newcomer to a mixture trains with noise, and counts its labels for itself: that tells nobody anything."""
    run = fedloom.run("mh_pfedhn_gd", out=tmp_path / "run", dataset="digits", partition="iid", clients=4, rounds=1,
                      unseen=1, cohort=2, local_epochs=1, model="mlp:hidden=4", progress="quiet", laplace_noise=0.02,
                      global_model="mlp:hidden=3", teacher="corrected", deploy="mixture",
                      admit_rounds=1)  # fmt: skip
    assert [line["what"] for line in released(run)] == ["training", "training", "training", "admission"]


def test_private_descriptors_are_written_down_with_the_epsilon_they_are_made_for(tmp_path) -> None:
    run = fedloom.run("it_pfl_hn", out=tmp_path / "run", dataset="digits", partition="iid", clients=4, rounds=1,
                      unseen=2, local_steps=1, model="mlp:hidden=4", progress="quiet", descriptor_epsilon=0.7,
                      descriptor_delta=0.001)  # fmt: skip
    found = releases_of(released(run))
    assert {client for one in found for client in one.who} == set(run.simulation.server.unseen)
    assert epsilon(found[:1], 0.001) == pytest.approx(0.7, rel=1e-3)
    assert "epsilon 0.7 at delta 0.001" in statement(run.directory.config, released(run)).covered[0]


def test_options_that_protect_nothing_are_refused(tmp_path) -> None:
    for wrong, sentence in (
        ({"dp_noise": 0.0}, "go together"),
        ({"dp_noise": 0.0, "dp_clip": 0.0}, "--sampling poisson is for --dp-noise"),
        ({"dp_noise": 0.0, "dp_clip": 0.0, "sampling": "fixed", "max_epsilon": 1.0}, "neither is given"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            train(tmp_path / "run", **wrong)
    with pytest.raises(NeedsError, match="more than 10 clients in a round"):
        train(tmp_path / "run", dp_quantile=0.5)
    with pytest.raises(ConfigError, match="--sample-dp-noise does not hide them there"):
        train(tmp_path / "run", adapt="prior", **HIDDEN)
    assert not (tmp_path / "run").exists()


def test_an_average_and_own_layers_go_with_it(tmp_path) -> None:
    run = train(tmp_path / "run", average=0.9)
    assert len(released(run)) == 4 and run.model("0") is not None
    own = fedloom.run("fedper", out=tmp_path / "own", **{**OPTIONS, "rounds": 2, "model": "mlp:hidden=4"})
    assert len(released(own)) == 2


def test_a_run_without_noise_says_so(tmp_path) -> None:
    run = fedloom.run("fedavg", out=tmp_path / "run", dataset="digits", clients=4, rounds=1, local_steps=1,
                      model="mlp:hidden=4", progress="quiet")  # fmt: skip
    found = statement(run.directory.config, released(run))
    assert found.epsilon is None and "not differentially private" in found.not_covered[0]
