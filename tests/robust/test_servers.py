# SPDX-License-Identifier: Apache-2.0
"""Runs with liars: the mean falls to them, rules do not; who was left out is recorded; the same seed, the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from conftest import play, small_federation
from fedloom import algorithms
from fedloom.core.errors import ConfigError, NeedsError
from fedloom.core.trees import PerClient, leaves, tree_map
from fedloom.robust.attacks import ATTACKS, alie, liars
from fedloom.robust.servers import with_bounded_weights, with_rule

CLIENTS = tuple(map(str, range(10)))


def train(out: Path, method: str = "fedavg", **more: Any) -> fedloom.Run:
    options = {"dataset": "digits", "partition": "iid", "clients": 10, "cohort": 10, "rounds": 8, "local_steps": 10,
               "local_lr": 0.05, "model": "mlp:hidden=16", "eval_every": 8, "progress": "quiet"}  # fmt: skip
    return fedloom.run(method, out=out, **{**options, **more})


def accuracy(run: fedloom.Run) -> float:
    return run.summary["last"]["deployed/participants/test/accuracy"]


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    """The accuracy without liars, and of the mean with them."""
    folder = tmp_path_factory.mktemp("controls")
    fallen = train(folder / "mean", malicious=0.2, attack="scale")
    return accuracy(train(folder / "honest")), accuracy(fallen)


def test_liars_are_drawn_by_the_seed() -> None:
    drawn = liars(CLIENTS, 0.3, 0)
    assert len(drawn) == 3 and drawn == liars(CLIENTS, 0.3, 0) != liars(CLIENTS, 0.3, 1)
    assert liars(CLIENTS, 0.0, 0) == frozenset()


def test_a_little_is_enough_by_hand() -> None:
    """Of 1 and 3 the mean is 2 and the deviation 1: both say 1."""
    assert alie(torch.tensor([[1.0], [3.0]])).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("rule", ["median", "trimmed:2", "krum:2", "geomedian", "dnc:2"])
def test_rules_hold_where_the_mean_falls(rule: str, controls: tuple[float, float], tmp_path: Path) -> None:
    """Two of ten send ten times the opposite; the controls are a run without them, and the mean."""
    honest, fallen = controls
    held = accuracy(train(tmp_path / "rule", malicious=0.2, attack="scale", aggregate=rule))
    assert fallen < 0.4 < 0.75 < honest and held > honest - 0.15


def test_who_was_left_out_is_recorded(tmp_path: Path) -> None:
    run = train(tmp_path / "run", malicious=0.2, attack="scale", aggregate="dnc:2", rounds=2)
    record = run.directory.records()[-1]
    table, lying = record["tables"]["kept"], liars(CLIENTS, 0.2, 0)
    assert table["columns"] == ["kept", "lies"]
    rows = dict(zip(table["client"], table["values"]))
    left_out = {client for client, (kept, _) in rows.items() if not kept}
    assert lying < left_out and len(left_out) == 3
    assert {client for client, (_, lies) in rows.items() if lies} == lying
    told = record["diagnostics"]
    assert told["left_out"] == pytest.approx(3 / 10) and told["liars_left_out"] == 1
    assert told["honest_left_out"] == pytest.approx(1 / 8)


def test_the_plain_mean_counts_each_client_once(tmp_path: Path) -> None:
    """Without liars and with equal numbers of samples, `mean` gives FedAvg's model but for rounding."""
    options = {"partition": "iid", "rounds": 2, "dtype": "float64"}
    one, other = (train(tmp_path / name, aggregate=name, **options).model("0") for name in ("", "mean"))
    for a, b in zip(one.parameters(), other.parameters()):
        assert torch.allclose(a, b, atol=2e-3)


@pytest.mark.parametrize("kind", [*ATTACKS, "label_flip", "backdoor"])
def test_every_attack_runs_and_repeats_bit_for_bit(kind: str, tmp_path: Path) -> None:
    one, other = (train(tmp_path / str(i), malicious=0.3, attack=kind, rounds=2).model("1") for i in range(2))
    plain = train(tmp_path / "plain", rounds=2).model("1")
    states = [model.state_dict() for model in (one, other, plain)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_only_liars_train_on_wrong_labels(tmp_path: Path) -> None:
    run = train(tmp_path / "run", malicious=0.2, attack="label_flip", rounds=0)
    simulation, lying = run.simulation, liars(CLIENTS, 0.2, 0)
    y, right = simulation.federation.y.numpy(), simulation.arrays.y
    for client, own in simulation.federation.roster.items():
        expected = 9 - right[own.rows["train"]] if client in lying else right[own.rows["train"]]
        assert np.array_equal(y[own.rows["train"]], expected)
        assert np.array_equal(y[own.rows["test"]], right[own.rows["test"]])


LOOM = {"server_step": "cohort_mean", "server_lr": 0.02}


@pytest.mark.slow
def test_a_loom_falls_to_lies_and_its_rule_holds(tmp_path: Path) -> None:
    lies = {"malicious": 0.2, "attack": "scale", "rounds": 30, "eval_every": 30}
    held = accuracy(train(tmp_path / "rule", "pfedhn", aggregate="trimmed:2", **lies, **LOOM))
    fallen = accuracy(train(tmp_path / "mean", "pfedhn", aggregate="mean", **lies, **LOOM))
    assert fallen < 0.3 < 0.6 < held


@pytest.mark.parametrize("descriptor", ["trainable", "class_shares"])
def test_the_mean_of_a_looms_gradients_is_the_step_of_the_cohort(descriptor: str, tmp_path: Path) -> None:
    options = {**LOOM, "rounds": 3, "dtype": "float64", "descriptor": descriptor, "cohort": 4, "server_clip": 0.0}
    one, other = (train(tmp_path / name, "pfedhn", aggregate=name, **options) for name in ("", "mean"))
    for name in ("loom", "embeddings"):
        a, b = (getattr(run.server.plain(run.server.state), name) for run in (one, other))
        for path, leaf in leaves({"all": a}):
            assert torch.allclose(leaf, dict(leaves({"all": b}))[path], atol=1e-12)


def test_a_lie_does_not_shorten_the_steps_of_others(tmp_path: Path) -> None:
    """Plain clipping is by the norm of everything together; a huge reply leaves nothing of the others."""
    options = {**LOOM, "server_clip": 1.0, "rounds": 1, "malicious": 0.1, "attack": "scale", "aggregate": "median"}
    run, before = (train(tmp_path / str(rounds), "pfedhn", **{**options, "rounds": rounds}) for rounds in (1, 0))
    moved = (run.server.state.embeddings - before.server.state.embeddings).norm(dim=1)
    assert moved.min() > 0.05 * moved.max() > 0


@pytest.mark.parametrize(
    ("method", "options", "why"),
    [
        ("pfedhn", {}, "--server-step cohort_mean"),
        ("pfedhn", {**LOOM, "model": "mlp:hidden=4,mlp:hidden=5"}, "Give one --model"),
        ("mh_pfedhn", {"server_step": "cohort_mean"}, "only means"),
        ("hypergenfl", {}, "only means"),
        ("it_pfl_hn", LOOM, "only means"),
        ("pfedlhn", {"server_step": "cohort_mean"}, "only means"),
        ("pfedme", {"everybody_trains": True, "cohort": 5}, "besides one mean a round"),
    ],
)
def test_methods_without_one_step_have_no_rule(method: str, options: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(NeedsError, match=why):
        train(tmp_path / "rule", method, **{**options, "aggregate": "median", "rounds": 1})


def test_what_is_told_between_rounds_is_combined_by_the_rule_too() -> None:
    """FedBN's newcomers get the mean of the participants' normalisation layers."""

    def largest(rule: str) -> float:
        algorithm = with_rule(algorithms.get("fedbn"), rule)
        played = play(algorithm, small_federation(("testnets:Normed",)), rounds=1)

        def lying(program: Any, shared: Any, mine: Any) -> PerClient:
            ((clients, tree),) = played.session("settling").ask(program, shared, mine).groups
            spoilt = tree_map(lambda leaf: leaf.index_fill(0, torch.tensor([1]), 1e6), tree["norm"])
            return PerClient([(clients, {**tree, "norm": spoilt})])

        state = algorithm.settle(played.setup, played.state, lying)
        return max(float(leaf.abs().max()) for _, leaf in leaves({"norm": state.norm}))

    assert largest("median") < 10 < 1e5 < largest("mean")


def test_a_claimed_number_of_samples_counts_within_its_bound(tmp_path: Path) -> None:
    """One of ten claims a thousand times its samples: the mean is its own, unless that is bounded."""
    lies = {"malicious": 0.1, "attack": "overclaim"}
    fallen = accuracy(train(tmp_path / "fallen", **lies))
    held = accuracy(train(tmp_path / "held", max_weight=2.0, **lies))
    assert fallen < 0.3 < 0.6 < held


def test_the_bound_on_weights_by_hand(tmp_path: Path) -> None:
    """Of 10, 20, 30 and 4000 samples the lower median is 20: twice that is the most that counts."""
    seen: list[list[float]] = []

    def round(setup: Any, state: Any, cohort: Any, ask: Any) -> Any:
        ((_, tree),) = ask(None, {}, {}).groups
        seen.append(tree["num_samples"].tolist())
        return state, {}

    replies = PerClient([(("a", "b", "c", "d"), {"num_samples": torch.tensor([10.0, 20.0, 30.0, 4000.0])})])
    bounded = with_bounded_weights(replace(algorithms.get("fedavg"), round=round), 2.0)
    bounded.round(None, None, None, lambda *_: replies)
    assert seen == [[10.0, 20.0, 30.0, 40.0]]


def test_methods_without_changes_cannot_be_lied_to_by_changing_them(tmp_path: Path) -> None:
    with pytest.raises(NeedsError, match="Choose another method, or --attack label_flip"):
        train(tmp_path / "run", "fedproto", malicious=0.5)


def test_privacy_and_rules_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not go together"):
        train(tmp_path / "run", aggregate="median", dp_noise=1.0, dp_clip=1.0)


def test_a_share_that_is_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of 10 participants is nobody"):
        train(tmp_path / "run", malicious=0.04)
