# SPDX-License-Identifier: Apache-2.0
"""The wrapper: what it asks, what it learns, whom it refuses; and calibration through it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize

from conftest import CLASSES, play, setup_of, small_federation
from fedloom import algorithms
from fedloom.adaptation.calibration import Fitted, Privacy, fit, protect
from fedloom.adaptation.checks import Reference, judge, log_ratio, statistics
from fedloom.adaptation.dirichlet import estimate, shares
from fedloom.adaptation.prior import with_prior
from fedloom.core.contract import Cohort, Sent
from fedloom.core.errors import NeedsError
from fedloom.engines.auto import ENGINES
from fedloom.programs.evaluation import evaluate

FEDAVG = algorithms.get("fedavg")
PRIOR = with_prior(FEDAVG)


def settled(engine: str = "sequential", unseen: int = 0, rounds: int = 3, algorithm=PRIOR):
    federation = small_federation(unseen=unseen, sizes=(9, 4, 13, 7, 5, 8))
    played = play(algorithm, federation, engine, rounds=rounds)
    settle(algorithm, played)
    return federation, played


def settle(algorithm, played) -> list[tuple[str, set[str]]]:
    """Bring the state into its final form; the programs that were asked, with what was replied."""
    heard, session = [], played.session("settling")
    played.state = algorithm.settle(played.setup, played.state, listening(session.ask, heard))
    played.memory = session.memory
    return heard


def admit(played, *newcomers: str) -> list[tuple[str, set[str]]]:
    """Admit newcomers; the programs that were asked, with what was replied."""
    heard, session = [], played.session("admission")
    PRIOR.admit(played.setup, played.state, Cohort(3, newcomers), listening(session.ask, heard))
    played.memory = session.memory
    return heard


def listening(ask, heard: list[tuple[str, set[str]]]):
    """``ask``, which writes down its programs and the branches of the replies."""

    def listened(program, shared, mine):
        replies = ask(program, shared, mine)
        heard.append((program.name, {name for client in replies for name in replies[client]}))
        return replies

    return listened


@pytest.mark.parametrize("engine", ENGINES)
def test_settling_gives_the_pooled_fit(engine: str) -> None:
    """Slope and biases minimise the loss on all validation data together, each client's log shares as an offset."""
    federation, played = settled(engine)
    rows = [client.rows["val"] for client in federation.roster.values()]
    model = federation.roster["0"].model
    scores = [model(played.state.base["params"], {}, federation.x[torch.as_tensor(r)]) for r in rows]
    offsets = [
        torch.log(shares(played.memory[c]["label_counts"], played.state.alpha)).expand(len(r), -1)
        for c, r in zip(federation.roster, rows)
    ]
    s, o = torch.cat(scores), torch.cat(offsets)
    y = federation.y[torch.as_tensor(np.concatenate(rows))]

    def pooled(point: np.ndarray) -> tuple[float, np.ndarray]:
        p = torch.tensor(point, requires_grad=True)
        loss = F.cross_entropy(p[0] * s + p[1:] + o, y, reduction="sum") + 0.5 * p[1:].square().sum()
        loss.backward()
        return float(loss.detach()), p.grad.numpy()

    best = minimize(pooled, np.array([1.0] + [0.0] * CLASSES), jac=True, method="BFGS", options={"gtol": 1e-10})
    assert abs(best.x[0] - float(played.state.slope)) < 1e-4
    fitted = refitted(played)
    np.testing.assert_allclose(fitted.point[1:].numpy(), best.x[1:], atol=1e-4)
    shrunk = fitted.agreement * torch.as_tensor(best.x[1:] - best.x[1:].mean())
    np.testing.assert_allclose(played.state.bias.numpy(), shrunk.numpy(), atol=1e-4)


def refitted(played, *without: str):
    """The calibration of those who are left, fitted again."""
    clients = [client for client in played.setup.clients if client not in without]
    sent = FEDAVG.send(played.setup, FEDAVG.state(**played.state.base), clients)
    shared = Sent({"base": sent.shared, "alpha": played.state.alpha}, sent.mine)
    return fit(played.setup, FEDAVG, shared, clients, played.session("again").ask, Privacy())


def test_the_line_without_a_client_is_nearly_the_one_that_the_others_fit() -> None:
    """One Newton step from the fit of all goes most of the way."""
    _, played = settled()
    everybody, others = refitted(played), refitted(played, "2")
    step = everybody.left_out(noisy=False)["2"]
    agreed = everybody.agreement
    expected = agreed * (others.point[1:] - others.point[1:].mean())
    start = agreed * (everybody.point[1:] - everybody.point[1:].mean())
    assert (step["bias"] - expected).norm() < 0.5 * (start - expected).norm()
    assert abs(step["slope"] - others.point[0]) < 0.5 * abs(everybody.point[0] - others.point[0])
    assert torch.equal(everybody.left_out(noisy=True)["2"]["slope"], everybody.point[0])


def test_a_bias_that_clients_do_not_agree_on_is_shrunk() -> None:
    """Curvature 4 each: single fits of 0.9 and 1.1 agree on a bias of 1, those of -1 and 3 on none.

    The point moves by gradient / curvature sum: (4 d) / 8 = d / 2 for both clients, d = 0.1 or 2 from the mean. The
    variance of the fit is 2 (d / 2)^2 * 2 / 1 = d^2: 1 - 0.01 is left of the one, and nothing (1 - 4) of the other.
    """

    def left(d: float) -> float:
        gradients = torch.tensor([[0.0, 4 * d, -4 * d], [0.0, -4 * d, 4 * d]], dtype=torch.float64)
        curves = 4 * torch.eye(3, dtype=torch.float64).expand(2, 3, 3)
        fitted = Fitted(
            torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64), curves.sum(0), ("a", "b"), gradients, curves
        )
        return float(fitted.agreement[0])

    assert abs(left(0.1) - 0.99) < 1e-12 and left(2.0) == 0.0


def test_a_class_that_nobody_has_keeps_its_bias_near_that_of_the_others() -> None:
    federation = small_federation()
    federation.y[federation.y == 2] = 0
    played = play(PRIOR, federation, rounds=3)
    asked = [name for name, _ in settle(PRIOR, played)]
    assert abs(float(played.state.bias[2])) < 3 and 0 < asked.count("calibrate") < 15


def test_scores_that_say_the_opposite_leave_no_bias_to_vote_for_one_class() -> None:
    federation, played = settled(unseen=1)
    assert float(played.state.slope) > 0.01
    params = played.state.base["params"]
    last = list(params)[-2:]
    turned = {**params, **{name: -params[name] for name in last}}
    played.state = played.state._replace(base={**played.state.base, "params": turned})
    settle(PRIOR, played)
    assert float(played.state.slope) < 0.01 and not played.state.bias.any()
    federation.y[torch.as_tensor(federation.roster["5"].rows["train"])] = -1
    admit(played, "5")
    alpha = played.state.alpha
    found = shares(played.memory["5"]["label_counts"], alpha)
    torch.testing.assert_close(found, alpha / alpha.sum(), atol=0.05, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree(engine: str) -> None:
    one, other = settled("sequential", unseen=2)[1], settled(engine, unseen=2)[1]
    torch.testing.assert_close(one.state.bias, other.state.bias, atol=1e-8, rtol=0)
    for played in (one, other):
        admit(played, "4", "5")
    for client in ("4", "5"):
        found, expected = (p.memory[client]["label_counts"] for p in (one, other))
        torch.testing.assert_close(found, expected, atol=1e-8, rtol=0)


def test_participants_count_their_labels_and_tell_only_shares() -> None:
    federation = small_federation()
    played = play(PRIOR, federation, rounds=1)
    told = dict(settle(PRIOR, played))
    assert told["label_shares"] == {"shares", "num_samples"}
    assert told["calibrate"] == {"value", "gradient", "curvature", "samples"}
    for client in federation.roster.values():
        counts = torch.bincount(federation.y[torch.as_tensor(client.rows["train"])], minlength=CLASSES)
        assert torch.equal(played.memory[client.id]["label_counts"], counts.double())


def test_a_newcomer_answers_nothing_and_its_labels_are_not_needed() -> None:
    federation, played = settled(unseen=2)
    federation.y[torch.as_tensor(np.concatenate([federation.roster[c].rows["train"] for c in ("4", "5")]))] = -1
    assert admit(played, "4", "5") == [("estimate_prior", set())]
    for client in ("4", "5"):
        counts = played.memory[client]["label_counts"]
        assert float(counts.sum()) == pytest.approx(1.0)  # participants have three each, and could try it with one


def test_labels_of_a_newcomer_that_are_there_are_counted() -> None:
    federation, played = settled(unseen=1)
    admit(played, "5")
    truth = torch.bincount(federation.y[torch.as_tensor(federation.roster["5"].rows["train"])], minlength=CLASSES)
    torch.testing.assert_close(played.memory["5"]["label_counts"], truth.double())


def test_it_predicts_the_line_through_the_scores_plus_the_log_shares() -> None:
    federation, played = settled()
    home = played.home("1")
    shared, mine = PRIOR.send(played.setup, played.state, ["1"])
    deployed = PRIOR.client_deploy(home, shared, mine["1"], played.memory["1"])
    x = federation.x[:4]
    raw = home.model(played.state.base["params"], {}, x)
    prior = shares(played.memory["1"]["label_counts"], played.state.alpha)
    expected = played.state.slope * raw + played.state.bias + prior.log()
    torch.testing.assert_close(PRIOR.predict(home, deployed, x), expected)


def test_before_it_has_settled_it_predicts_what_the_wrapped_method_predicts() -> None:
    federation = small_federation()
    scores = []
    for algorithm in (FEDAVG, PRIOR):
        played = play(algorithm, federation, rounds=2)
        sent = lambda clients, p=played, a=algorithm: a.send(p.setup, p.state, clients)  # noqa: E731
        scores.append(evaluate(algorithm, sent, federation.participants, "test", played.session("evaluation").ask))
    assert [s.metric for s in scores[0].values()] == [s.metric for s in scores[1].values()]


def test_training_is_that_of_the_wrapped_method() -> None:
    federation = small_federation()
    plain, wrapped = (play(a, federation, rounds=3) for a in (FEDAVG, PRIOR))
    assert all(torch.equal(plain.state.params[n], wrapped.state.base["params"][n]) for n in plain.state.params)


@pytest.mark.parametrize("method", ["pfedhn", "pfedhn_pc", "fedper", "local"])
def test_methods_whose_models_know_the_prior_are_refused(method: str) -> None:
    with pytest.raises(NeedsError, match="know its prior already; --adapt prior would count it twice"):
        with_prior(algorithms.get(method))


def test_a_task_without_class_scores_is_refused() -> None:
    from dataclasses import replace

    from fedloom.core.task import REGRESSION

    setup = replace(setup_of(small_federation(), FEDAVG.config()), task=REGRESSION)
    assert "needs class labels" in PRIOR.needs.violations(setup, PRIOR.name)[0]


def test_answers_are_clipped_and_noised_and_the_fit_stays_sane() -> None:
    private = with_prior(FEDAVG, Privacy(clip=5.0, noise=0.01))
    largest = []

    federation = small_federation()
    played = play(private, federation, rounds=2)

    def measured(program, shared, mine):
        replies = session.ask(program, shared, mine)
        if program.name == "calibrate":
            for c in replies:
                largest.append(float(torch.cat([v.reshape(-1) for v in replies[c].values()]).norm()))
        return replies

    session = played.session("settling")
    state = private.settle(played.setup, played.state, measured)
    assert max(largest) < 5.0 + 10 * 0.05
    assert state.bias.isfinite().all() and float(state.slope) > 0
    other = private.settle(played.setup, played.state, session.ask)
    assert not torch.equal(other.bias, state.bias)  # the noise is another one in another ask


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e200])
def test_an_answer_that_is_not_finite_shows_through_no_noise(value: float) -> None:
    home: Any = SimpleNamespace(key=torch.tensor(3))
    reply = {"value": torch.tensor(value).double(), "gradient": torch.ones(3).double()}
    told = protect(Privacy(clip=2.0, noise=0.5), home, reply)
    assert all(bool((leaf.abs() < 2 + 6 * 2 * 0.5).all()) for leaf in told.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_participants_tell_the_pooled_reference(engine: str) -> None:
    federation, played = settled(engine)
    rows = {c: torch.as_tensor(client.rows["val"]) for c, client in federation.roster.items()}
    model = federation.roster["0"].model
    state = played.state
    found = {
        c: statistics(state.slope * model(state.base["params"], {}, federation.x[r]) + state.bias)
        for c, r in rows.items()
    }
    pooled, labels = torch.cat(list(found.values())), federation.y[torch.cat(list(rows.values()))]
    for k in range(len(state.bias)):
        mine = pooled[labels == k]
        mean = (mine.sum(0) + pooled.mean(0)) / (len(mine) + 1)
        torch.testing.assert_close(state.reference["mean"][k], mean, atol=1e-8, rtol=0)
    assert float(state.reference["samples"]) == len(labels)


def test_the_admission_is_what_estimating_and_judging_give() -> None:
    federation, played = settled(unseen=2)
    state = played.state
    unseen = ("4", "5")
    federation.y[torch.as_tensor(np.concatenate([federation.roster[c].rows["train"] for c in unseen]))] = -1
    admit(played, *unseen)
    for client in unseen:
        x = federation.x[torch.as_tensor(federation.roster[client].rows["train"])]
        scores = state.slope * federation.roster[client].model(state.base["params"], {}, x) + state.bias
        counts = estimate(scores, state.alpha).counts
        number = torch.tensor(float(len(x))).double()
        reference = Reference(**state.reference)
        verdict = judge(0 * counts, counts, statistics(scores).mean(0), number, state.alpha, reference)
        kept = played.memory[client]
        torch.testing.assert_close(kept["label_counts"], verdict.counts / number, atol=1e-8, rtol=0)  # one was tried
        torch.testing.assert_close(kept["admission"]["misfit"], verdict.misfit, atol=1e-8, rtol=0)
        ratio = 2 * log_ratio(scores, shares(counts, state.alpha), state.alpha / state.alpha.sum()).sum()
        torch.testing.assert_close(kept["admission"]["ratio"], ratio, atol=1e-8, rtol=0)
